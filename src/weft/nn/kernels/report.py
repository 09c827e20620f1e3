"""What `weft.nn.kernels.dispatch` answers on this machine: for each operation its implementation, and why.

Every row asks the dispatch itself, with an example on the device and in the dtype, so that it cannot say otherwise.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.nn.kernels import dispatch
from weft.nn.kernels.numba import microkernel
from weft.nn.kernels.self_test import try_kernels
from weft.nn.rnn.cells import has_half_kernel
from weft.nn.transformer.blocks import BlockConfig, Blocks

_HALF, _SINGLE = torch.bfloat16, torch.float32
_NONE = "weft has no kernel of its own"
_STEPS = f"{dispatch.MIN_SCAN_STEPS} steps or more"


class KernelChoice(NamedTuple):
    """The implementation of an operation on a device."""

    operation: str
    device: str
    dtype: str
    implementation: str
    reason: str


class _Operation(NamedTuple):
    name: str
    device: str
    dtype: torch.dtype
    learning: bool
    ask: Callable[[Tensor], object]  # a kernel or True where weft's implementation serves, None or False where not
    limits: str = ""
    otherwise: str = _NONE
    tested: bool = False  # by `weft.nn.kernels.self_test`


def _on_cpu(
    name: str, learning: bool, ask: Callable[[Tensor], object], limits: str = "", otherwise: str = _NONE
) -> _Operation:
    return _Operation(name, "cpu", _SINGLE, learning, ask, limits, otherwise)


def _half(name: str, ask: Callable[[Tensor], object], limits: str = "") -> _Operation:
    return _Operation(name, "cuda", _HALF, True, ask, limits, tested=True)


_OPERATIONS = (
    _on_cpu(
        "encoder",
        False,
        lambda x: dispatch.encoder_kernel(_stack(x), x),
        f"{dispatch.MIN_ENCODER_TOKENS} tokens or more",
    ),
    _on_cpu("transformer block", True, dispatch.residual_norm_kernel),
    _on_cpu("linear layer", False, lambda x: dispatch.packed_matmul(x, x), f"{dispatch.MIN_PACKED_ROWS} rows or more"),
    _on_cpu("cached attention", False, dispatch.cached_attention_kernel),
    _on_cpu("decoding step", False, lambda x: dispatch.decode_step_kernel(_stack(x), x), "", "layer by layer"),
    _on_cpu("cross-entropy", True, dispatch.cross_entropy_kernel),
    _on_cpu("elman, lstm, gru", True, lambda x: not dispatch.library_rnn(x[:, None], False), "", "oneDNN"),
    _on_cpu("other recurrent cells", True, lambda x: dispatch.fused_scan(x[:, None]), _STEPS),
    _on_cpu("other recurrent cells", False, lambda x: dispatch.fused_scan(x[:, None]), "", "to compile takes longer"),
    _on_cpu("additive attention in a scan", True, dispatch.additive_step_class, _STEPS),
    _on_cpu("word2vec", True, lambda x: not dispatch.word2vec_on_triton(x), "in threads"),
    _half(
        "self-attention",
        lambda x: dispatch.schedules_self_attention(x, 64, dispatch.MAX_RAGGED, False),
        f"up to {dispatch.MAX_RAGGED} tokens, heads of {', '.join(map(str, dispatch.HEAD_SIZES))}",
    ),
    _half(
        "attention of short sequences",
        lambda x: dispatch.short_attention_kernel(x, dispatch.MAX_HEAD_SIZE, dispatch.MAX_SHORT),
        f"up to {dispatch.MAX_SHORT} tokens, heads of up to {dispatch.MAX_HEAD_SIZE}",
    ),
    _half("linear layer and activation", lambda x: dispatch.linear_activation_kernel(x, F.gelu)),
    _half("residual sum and norm (post-norm)", dispatch.add_norm_kernel),
    _half("residual sum and norm (pre-norm)", dispatch.residual_norm_kernel),
    _half("cross-entropy", dispatch.cross_entropy_kernel),
    _Operation("decoding step", "cuda", _HALF, False, lambda x: dispatch.decode_step_kernel(_stack(x), x)),
    _Operation("cached attention", "cuda", _HALF, False, dispatch.cached_attention_kernel),
    _Operation("cached attention", "cuda", _SINGLE, False, dispatch.cached_attention_kernel),
    _Operation("elman, lstm, gru", "cuda", _HALF, True, lambda x: not dispatch.library_rnn(x[:, None], False)),
    _Operation(
        *("elman, lstm, gru", "cuda", _SINGLE, True),
        lambda x: not dispatch.library_rnn(x[:, None], False),
        otherwise="cuDNN",
    ),
    _Operation("other recurrent cells", "cuda", _HALF, True, lambda x: dispatch.fused_scan(x[:, None])),
    _Operation(
        *("recurrent cells, all steps in one launch", "cuda", _HALF, True),
        lambda x: dispatch.fused_scan(x[:, None]) and dispatch.persistent_scan(x[:, None], x.shape[1]),
        "as many rows and units as fit on the GPU at once",
    ),
    _Operation("additive attention in a scan", "cuda", _HALF, True, lambda x: dispatch.fused_scan(x[:, None])),
    _Operation("word2vec", "cuda", _SINGLE, True, dispatch.word2vec_on_triton),
)


def choices() -> list[KernelChoice]:
    """Return the implementation of each operation on each device that there is; kernels are tested for it."""
    rows = [*(_choice(operation, "") for operation in _OPERATIONS if operation.device == "cpu"), *_tested_choices()]
    if torch.cuda.is_available():
        failure = try_kernels(torch.device("cuda"))
        rows += [_choice(operation, failure) for operation in _OPERATIONS if operation.device == "cuda"]
    return rows


def _choice(operation: _Operation, failure: str) -> KernelChoice:
    """Ask the dispatch; `failure` is what the self-test of the half-precision kernels found."""
    with torch.set_grad_enabled(operation.learning):
        serves = bool(operation.ask(_example(operation)))
    name = f"{operation.name}, {'training' if operation.learning else 'inference'}"
    ours = "numba" if operation.device == "cpu" else "Triton"
    why = _why(operation) if serves else _why_not(operation, failure)
    return KernelChoice(name, operation.device, _name(operation.dtype), ours if serves else "PyTorch", why)


def _why(operation: _Operation) -> str:
    on_cuda = "self-test passed" if operation.tested else "Triton is installed"
    reason = _instructions() if operation.device == "cpu" else on_cuda
    return f"{reason}; {operation.limits}" if operation.limits else reason


def _why_not(operation: _Operation, failure: str) -> str:
    if operation.device == "cpu" or operation.otherwise == "cuDNN":
        return operation.otherwise
    if not dispatch.has_triton():
        return "Triton is not installed"
    if operation.dtype is _HALF and not dispatch.is_ampere(torch.device("cuda")):
        return "the GPU is older than Ampere"
    return f"self-test of the Triton kernels: {failure}" if operation.tested and failure else "it does not fit"


def _tested_choices() -> list[KernelChoice]:
    """Return the choices that a self-test on this CPU has made."""
    int8, half = "linear layer, inference", "lstm under autocast, training"
    exact = f"{_instructions()}; int8 products exact (self-test)"
    return [
        KernelChoice(int8, "cpu", "int8", "numba", exact)
        if dispatch.matmul_module().integer_format()
        else KernelChoice(int8, "cpu", "int8", "none", "int8 products are not exact (self-test)"),
        KernelChoice(half, "cpu", "bfloat16", "PyTorch", "oneDNN in bfloat16 (self-test)")
        if has_half_kernel("LSTM", _HALF)
        else KernelChoice(half, "cpu", "float32", "PyTorch", "no bfloat16 kernel for this CPU (self-test)"),
    ]


def _instructions() -> str:
    """Return the vector instructions that numba's kernels are compiled for."""
    names = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "neon": "NEON", "sse2": "SSE2"}
    instructions = next(
        (name for feature, name in names.items() if feature in microkernel.cpu_features()), "no vector instructions"
    )
    return f"{instructions} with VNNI" if microkernel.has_vnni() else instructions


def _example(operation: _Operation) -> Tensor:
    return torch.zeros(dispatch.MIN_ENCODER_TOKENS, 64, device=operation.device, dtype=operation.dtype)


def _stack(like: Tensor) -> Blocks:
    return Blocks(BlockConfig(64, 1, 64, norm="pre"), 1, "decoder", causal=True).eval().to(like)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
