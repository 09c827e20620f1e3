"""Products with packed weights against torch's in float64, and integer products against exact ones."""

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weft.nn.kernels.numba import matmul, microkernel
from weft.nn.kernels.numba.matmul import INT16, UINT8, Integers, PackedWeights, is_exact, quantize_weight
from weft.nn.kernels.numba.microkernel import tile

pytestmark = pytest.mark.isa
quick = settings(deadline=None, derandomize=True, max_examples=15)
shapes = st.tuples(st.integers(0, 40), st.integers(1, 70), st.integers(1, 90))  # M, N, K
FORMS = [UINT8, INT16] if "ssse3" in microkernel.cpu_features() else [INT16]


def drawn(M, N, K, seed=0):
    torch.manual_seed(seed)
    return torch.randn(M, K), torch.randn(N, K), torch.randn(N)


@quick
@given(shapes)
@example((25, 64, 4097))
@example((600, 33, 300))  # more rows than fit into a block
def test_a_product_is_torchs(shape):
    x, weight, bias = drawn(*shape)
    y = PackedWeights.floats(weight).multiply(x, bias)
    expected = x.double() @ weight.double().t() + bias
    bound = 2e-7 * (shape[2] + 1) ** 0.5 * (x.double().abs() @ weight.double().abs().t() + bias.abs())
    assert ((y - expected).abs() <= bound).all()
    assert torch.equal(
        PackedWeights.floats(weight).multiply(x), PackedWeights.floats(weight).multiply(x, torch.zeros(shape[1]))
    )
    if shape[0] and shape[2] > 1:
        cut = x[:, :-1].double() @ weight[:, :-1].double().t() + bias
        assert not ((y - cut).abs() <= bound).all()  # one step of K less is seen


def test_a_row_does_not_depend_on_the_others():
    x, weight, bias = drawn(100, 50, 70)
    packed = PackedWeights.floats(weight)
    together = packed.multiply(x, bias)
    for first, last in [(0, 1), (3, 7), (5, 18), (90, 100)]:
        assert torch.equal(packed.multiply(x[first:last].contiguous(), bias), together[first:last])


def test_nothing_is_written_beyond_what_was_asked_for():
    x, weight, _ = drawn(7, 33, 8)
    memory = torch.full((9, 60), 5.0)
    PackedWeights.floats(weight).multiply(x, out=memory[1:8, 4:37])
    torch.testing.assert_close(memory[1:8, 4:37], x @ weight.t())
    memory[1:8, 4:37] = 5.0
    assert (memory == 5).all()


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads, monkeypatch):
    x, weight, bias = drawn(40, 130, 50)
    packed = PackedWeights.floats(weight)
    alone = packed.multiply(x, bias)
    monkeypatch.setattr(matmul, "_MIN_PARALLEL", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(packed.multiply(x, bias), alone)


def integer_product(q, zero, weight):
    return (q.long() - zero.long()[:, None]) @ weight.long().t()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.dtype))
@quick
@given(shapes)
@example((25, 64, 1000))
def test_sums_of_integers_are_exact(form, shape):
    M, N, K = shape
    torch.manual_seed(K)
    q = torch.randint(form.steps + 1, (M, -(-K // form.group) * form.group)).to(form.dtype)
    zero = torch.randint(form.steps + 1, (M,), dtype=torch.int32)
    weight, _ = quantize_weight(torch.randn(N, K) * torch.randint(2, (N, K)))
    product = PackedWeights.integers(weight, torch.ones(N), form).multiply(Integers(q, torch.ones(M), zero))
    exact = integer_product(q[:, :K], zero, weight)
    assert torch.equal(product, exact.float())
    row_scale, scale, bias = torch.rand(M), torch.rand(N), torch.randn(N)
    scaled = PackedWeights.integers(weight, scale, form).multiply(Integers(q, row_scale, zero), bias)
    expected = exact.double() * row_scale[:, None] * scale + bias
    bound = 3e-7 * ((exact.double() * row_scale[:, None] * scale).abs() + bias.abs())
    assert ((scaled - expected).abs() <= bound).all()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.dtype))
def test_the_self_test_passes_and_fails(form, monkeypatch):
    assert is_exact(form)
    if form is UINT8 and not microkernel.has_vnni():  # weights that saturate 16 bits
        full = lambda weight: (torch.round(weight * 127).to(torch.int8), torch.ones(len(weight)))  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(matmul, "quantize_weight", full)
            assert not is_exact(form)
    pack = PackedWeights.integers
    monkeypatch.setattr(PackedWeights, "integers", lambda *given: replace(pack(*given), sums=pack(*given).sums + 1))
    assert not is_exact(form)


def test_weights_are_rounded_by_a_half_at_most():
    torch.manual_seed(0)
    weight = torch.randn(9, 31)
    weight[4] = 0
    rounded, scale = quantize_weight(weight)
    assert rounded.dtype is torch.int8
    assert ((rounded * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all()
    assert (scale <= 2 * weight.abs().amax(1) / 126 + 1e-12).all()  # no coarser than a pair of equals needs
    if not microkernel.has_vnni():
        pairs = torch.nn.functional.pad(rounded.int().abs(), (0, 1)).view(9, -1, 2).sum(2)
        assert pairs.max() * 255 < 2**15


def test_instruction_sets_that_are_held_down_are_not_used():
    held = os.environ.get("NUMBA_CPU_FEATURES", ",".join(f"+{name}" for name in microkernel.cpu_features()))
    lanes = 16 if "+avx512f" in held else 8 if "+avx" in held else 4
    assert tile().lanes == lanes
    assert microkernel.has_vnni() == ("vnni" in held)
    assert matmul.integer_format() is (UINT8 if "+ssse3" in held else INT16)


def test_a_tile_fits_the_registers():
    assert tile().rows * tile().vectors <= 24
    assert tile().columns == tile().vectors * tile().lanes
