"""Which implementation serves what; the CUDA choices are asked with stand-ins for tensors and for kernels."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from weft.nn.kernels import dispatch, report
from weft.nn.layers.activations import gelu_tanh
from weft.nn.layers.quantization import Int8Linear
from weft.nn.rnn.fused.additive_numba import NumbaAdditiveStep
from weft.nn.rnn.fused.codegen_numba import numba_step_kernels
from weft.nn.transformer.blocks import BlockConfig, Blocks

TRITON = {
    "varlen_self_attention": ["varlen_self_attention"],
    "short_attention": ["short_attention"],
    "linear_activation": ["linear_relu", "linear_exact_gelu", "linear_tanh_gelu"],
    "add_norm": ["add_norm"],
    "residual_norm": ["residual_norm"],
    "cross_entropy": ["cross_entropy"],
    "decode_step": ["decode_step", "embed_next", "linear_large_vocab"],
    "decode_step_small_batch": ["small_batch_step"],
    "decode_attention": ["attend_cached_triton", "advance"],
}


class OnCuda:
    """As much of a tensor on a GPU as the dispatch reads."""

    is_cuda, device = True, torch.device("cuda")

    def __init__(self, dtype=torch.bfloat16, rows=8):
        self.dtype, self.shape, self.ndim = dtype, (rows, 64), 2

    def __len__(self):
        return self.shape[0]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with Triton whose kernels have passed their self-test; a kernel is its own name."""
    for module, names in TRITON.items():
        kernels = SimpleNamespace(MAX_ROWS=256, **{name: name for name in names})
        monkeypatch.setitem(sys.modules, f"weft.nn.kernels.triton.{module}", kernels)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    dispatch.trust(True)
    yield monkeypatch
    dispatch.trust(False)


HALF = {
    "short_attention": lambda x: dispatch.short_attention_kernel(x, 64, 100),
    "linear_relu": lambda x: dispatch.linear_activation_kernel(x, F.relu),
    "linear_exact_gelu": lambda x: dispatch.linear_activation_kernel(x, F.gelu),
    "linear_tanh_gelu": lambda x: dispatch.linear_activation_kernel(x, gelu_tanh),
    "add_norm": dispatch.add_norm_kernel,
    "residual_norm": dispatch.residual_norm_kernel,
    "cross_entropy": dispatch.cross_entropy_kernel,
    True: lambda x: dispatch.schedules_self_attention(x, 64, 512, False),
}


@pytest.mark.parametrize("kernel", HALF)
class TestHalfPrecision:
    def test_serves_after_the_self_test(self, gpu, kernel):
        assert HALF[kernel](OnCuda()) == kernel
        assert HALF[kernel](OnCuda(torch.float16)) == kernel

    def test_neither_in_float32_nor_on_the_cpu(self, gpu, kernel):
        assert not HALF[kernel](OnCuda(torch.float32))
        assert not HALF[kernel](torch.zeros(8, 64, dtype=torch.bfloat16))

    def test_not_untested(self, gpu, kernel):
        dispatch.trust(False)
        assert not HALF[kernel](OnCuda())

    def test_tested_on_inference_alone_it_does_not_train(self, gpu, kernel):
        dispatch.trust(False)
        dispatch.trust(True, learning=False)
        assert not HALF[kernel](OnCuda())
        with torch.no_grad():
            assert HALF[kernel](OnCuda()) == kernel

    def test_not_without_triton(self, gpu, kernel):
        gpu.setattr(dispatch, "has_triton", lambda: False)
        assert not HALF[kernel](OnCuda())

    def test_not_on_an_old_gpu(self, gpu, kernel):
        gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert not HALF[kernel](OnCuda())


def test_self_attention_by_shape(gpu):
    serves = dispatch.schedules_self_attention
    assert serves(OnCuda(), 16, 512, False)
    assert not serves(OnCuda(), 16, 513, False)
    assert serves(OnCuda(), 16, 256, True)
    assert not serves(OnCuda(), 16, 257, True)
    assert not serves(OnCuda(), 24, 100, False)
    assert dispatch.varlen_self_attention_kernel() == "varlen_self_attention"


def test_short_attention_by_shape(gpu):
    assert dispatch.short_attention_kernel(OnCuda(), 64, 256) == "short_attention"
    assert dispatch.short_attention_kernel(OnCuda(), 64, 257) is None
    assert dispatch.short_attention_kernel(OnCuda(), 65, 100) is None
    with torch.no_grad():
        assert dispatch.short_attention_kernel(OnCuda(), 64, 128) == "short_attention"
        assert dispatch.short_attention_kernel(OnCuda(), 64, 129) is None


def test_an_activation_without_a_kernel(gpu):
    assert dispatch.linear_activation_kernel(OnCuda(), F.silu) is None


def test_which_attention_of_the_library(gpu):
    assert dispatch.library_attention(OnCuda(), True) == "dense"
    assert dispatch.library_attention(OnCuda(), False) == "varlen"
    assert dispatch.library_attention(OnCuda(torch.float32), True) == "padded"
    assert dispatch.library_attention(torch.zeros(1, dtype=torch.bfloat16), False) == "padded"
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert dispatch.library_attention(OnCuda(), False) == "padded"


def stack(norm="pre", cross=False, **config):
    return Blocks(BlockConfig(64, 1, 64, norm=norm, **config), 1, "decoder", True, cross).eval()


DECODING = {
    "advance": dispatch.cache_advance_kernel,
    "attend_cached_triton": dispatch.cached_attention_kernel,
    "embed_next": lambda x: dispatch.next_embedding_kernel(x, False),
    "linear_large_vocab": dispatch.large_vocab_kernel,
    "decode_step": lambda x: dispatch.decode_step_kernel(stack("post"), x),
}


@pytest.mark.parametrize("kernel", DECODING)
class TestDecoding:
    def test_serves_without_gradient(self, gpu, kernel):
        dispatch.trust(False)  # they do not wait for the self-test
        assert DECODING[kernel](OnCuda()) != kernel
        with torch.no_grad():
            assert DECODING[kernel](OnCuda()) == kernel

    @torch.no_grad()
    def test_not_in_float64_or_on_the_cpu(self, gpu, kernel):
        assert DECODING[kernel](OnCuda(torch.float64)) is None
        assert DECODING[kernel](torch.zeros(8, 64)) != kernel

    @torch.no_grad()
    def test_not_without_triton(self, gpu, kernel):
        gpu.setattr(dispatch, "has_triton", lambda: False)
        assert DECODING[kernel](OnCuda()) is None

    @torch.no_grad()
    def test_on_an_old_gpu_in_float32_alone(self, gpu, kernel):
        gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert DECODING[kernel](OnCuda()) is None
        assert DECODING[kernel](OnCuda(torch.float32)) == (None if kernel == "decode_step" else kernel)


@torch.no_grad()
def test_a_step_of_very_few(gpu):
    step = dispatch.decode_step_kernel
    assert step(stack(), OnCuda(rows=4)) == "small_batch_step"
    assert step(stack(), OnCuda(rows=5)) == "decode_step"
    assert step(stack("post"), OnCuda(rows=4)) == "decode_step"
    assert step(stack(cross=True), OnCuda(rows=4)) == "decode_step"
    gpu.setattr(dispatch, "MAX_SMALL_DEPTH", 63)
    assert step(stack(), OnCuda(rows=4)) == "decode_step"
    assert step(stack().train(), OnCuda(rows=4)) is None
    assert dispatch.next_embedding_kernel(OnCuda(), True) is None
    assert dispatch.large_vocab_kernel(OnCuda(rows=257)) is None


@torch.no_grad()
def test_attention_to_the_cache_on_the_cpu():
    assert dispatch.cached_attention_kernel(torch.zeros(2, 3)).__module__ == "weft.nn.kernels.numba.decode_attention"
    assert dispatch.cached_attention_kernel(torch.zeros(2, 3, dtype=torch.bfloat16)) is None
    with torch.enable_grad():
        assert dispatch.cached_attention_kernel(torch.zeros(2, 3)) is None


@torch.no_grad()
def test_the_encoder_on_the_cpu():
    x, blocks = torch.zeros(dispatch.MIN_ENCODER_TOKENS, 64), stack()
    assert dispatch.encoder_kernel(blocks, x).__module__ == "weft.nn.kernels.numba.encoder"
    assert dispatch.encoder_kernel(blocks, x[1:]) is None
    assert dispatch.encoder_kernel(blocks, x.double()) is None
    assert dispatch.encoder_kernel(blocks, OnCuda(torch.float32, len(x))) is None
    assert dispatch.encoder_kernel(stack().train(), x) is None
    with torch.enable_grad():
        assert dispatch.encoder_kernel(blocks, x) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert dispatch.encoder_kernel(blocks, x) is None
    blocks.blocks[0].feed_forward.fc1 = Int8Linear(nn.Linear(64, 64))
    assert dispatch.encoder_kernel(blocks, x[:1]) is not None
    assert dispatch.encoder_kernel(blocks, x[:0]) is None


@torch.no_grad()
def test_packed_products():
    x, weight = torch.zeros(50, 8), nn.Linear(8, 8).weight
    assert dispatch.packed_matmul(x, weight)
    assert not dispatch.packed_matmul(x[None], weight)
    assert not dispatch.packed_matmul(x.double(), weight)
    with torch.inference_mode():
        assert not dispatch.packed_matmul(x, torch.zeros(8, 8))
    with torch.enable_grad():
        assert not dispatch.packed_matmul(x, weight)


def test_the_output_projection(gpu):
    assert dispatch.pads_vocab(OnCuda(), 131)
    assert not dispatch.pads_vocab(OnCuda(), 136)
    assert not dispatch.pads_vocab(OnCuda(torch.float32), 131)
    assert not dispatch.chunks_vocab(torch.zeros(1, 8), 4096)
    with torch.no_grad():
        assert dispatch.chunks_vocab(torch.zeros(1, 8), 4096)
        assert not dispatch.chunks_vocab(torch.zeros(1, 8), 4095)
        assert not dispatch.chunks_vocab(OnCuda(), 4096)


def test_recurrent_scans():
    gates = torch.zeros(4, 2, 8)
    assert dispatch.fused_scan(gates)
    assert dispatch.numba_scan(gates)
    assert not dispatch.fused_scan(gates[1:])
    assert not dispatch.fused_scan(gates[:, :0])
    assert not dispatch.fused_scan(gates.double())
    assert not dispatch.persistent_scan(gates, 8)
    assert dispatch.step_kernel_generator(gates) is numba_step_kernels
    assert dispatch.additive_step_class(gates) is NumbaAdditiveStep
    with torch.no_grad():
        assert not dispatch.fused_scan(gates)
    with torch.autocast("cpu", torch.bfloat16):
        assert not dispatch.fused_scan(gates)


def test_recurrent_scans_on_cuda(gpu):
    processors = SimpleNamespace(multi_processor_count=16)
    gpu.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    assert dispatch.fused_scan(OnCuda())
    assert not dispatch.numba_scan(OnCuda())
    assert dispatch.persistent_scan(OnCuda(), 64)
    processors.multi_processor_count = 1
    assert not dispatch.persistent_scan(OnCuda(), 64)
    assert dispatch.step_kernel_generator(OnCuda()).__module__ == "weft.nn.rnn.fused.codegen_triton"
    gpu.setattr(dispatch, "has_triton", lambda: False)
    assert not dispatch.fused_scan(OnCuda())


def test_the_librarys_recurrent_networks(gpu):
    assert dispatch.library_rnn(torch.zeros(8, 2), True)
    assert dispatch.library_rnn(OnCuda(torch.float32), False)
    assert not dispatch.library_rnn(OnCuda(torch.float32), True)
    assert not dispatch.library_rnn(OnCuda(), False)
    assert dispatch.library_rnn(OnCuda(rows=3), False)


def test_word2vec_and_compilation(gpu):
    assert dispatch.word2vec_on_triton(OnCuda(torch.float32))
    assert not dispatch.word2vec_on_triton(torch.zeros(1))
    assert dispatch.can_compile(OnCuda.device)
    gpu.setattr(dispatch, "has_triton", lambda: False)
    assert not dispatch.word2vec_on_triton(OnCuda(torch.float32))
    assert not dispatch.can_compile(OnCuda.device)


def test_torch_compile_traces_the_dispatch():
    """Without a break of the graph, and as in eager mode."""

    def ask(x):
        kernels = (
            dispatch.add_norm_kernel(x),
            dispatch.cross_entropy_kernel(x),
            dispatch.linear_activation_kernel(x, F.relu),
        )
        return x + sum(kernel is None for kernel in kernels) + (dispatch.short_attention_kernel(x, 64, 9) is None)

    assert torch.compile(ask, backend="eager", fullgraph=True)(torch.zeros(1)) == 4


class TestReport:
    def rows(self, monkeypatch, failure=""):
        """Return the rows as on a GPU, by operation, device and dtype."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
        monkeypatch.setattr(report, "try_kernels", lambda device: failure)
        monkeypatch.setattr(report, "_example", lambda one: OnCuda3(one.dtype) if one.device == "cuda" else EXAMPLE)
        monkeypatch.setattr(report, "_stack", lambda like: stack())
        return {row[:3]: row[3:] for row in report.choices()}

    def test_a_gpu_with_triton(self, gpu):
        rows = self.rows(gpu)
        assert rows["cross-entropy, training", "cuda", "bfloat16"] == ("Triton", "self-test passed")
        assert rows["decoding step, inference", "cuda", "bfloat16"] == ("Triton", "Triton is installed")
        assert rows["elman, lstm, gru, training", "cuda", "float32"] == ("PyTorch", "cuDNN")
        assert all(row[0] == "Triton" for (_, *where), row in rows.items() if where == ["cuda", "bfloat16"])

    def test_a_gpu_without(self, gpu):
        gpu.setattr(dispatch, "has_triton", lambda: False)
        rows = self.rows(gpu)
        assert rows["cross-entropy, training", "cuda", "bfloat16"] == ("PyTorch", "Triton is not installed")
        assert rows["decoding step, inference", "cuda", "bfloat16"] == ("PyTorch", "Triton is not installed")

    def test_a_self_test_that_failed(self, gpu):
        dispatch.trust(False)
        rows = self.rows(gpu, "they fail here")
        found = rows["cross-entropy, training", "cuda", "bfloat16"]
        assert found == ("PyTorch", "self-test of the Triton kernels: they fail here")
        assert rows["decoding step, inference", "cuda", "bfloat16"] == ("Triton", "Triton is installed")

    def test_an_old_gpu(self, gpu):
        gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        found = self.rows(gpu)["cross-entropy, training", "cuda", "bfloat16"]
        assert found == ("PyTorch", "the GPU is older than Ampere")

    @pytest.mark.parametrize("exact", [True, False])
    def test_int8_goes_by_its_self_test(self, exact, monkeypatch):
        monkeypatch.setattr(dispatch.matmul_module(), "integer_format", lambda: exact or None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        (row,) = [row for row in report.choices() if row.dtype == "int8"]
        assert row.implementation == ("numba" if exact else "none")
        assert ("not exact" in row.reason) is not exact

    @pytest.mark.parametrize(
        ("features", "told"),
        [({"avx512f", "avx512vnni", "avx2"}, "AVX-512 with VNNI"), ({"avx2", "avx"}, "AVX2"), ({"neon"}, "NEON")],
    )
    def test_instructions(self, features, told, monkeypatch):
        from weft.nn.kernels.numba import microkernel

        monkeypatch.setattr(microkernel, "cpu_features", lambda: frozenset(features))
        assert report._instructions() == told


EXAMPLE = torch.zeros(512, 64)


class OnCuda3(OnCuda):
    """The same, where an operation of three dimensions is asked for with x[:, None]."""

    def __getitem__(self, _):
        return self
