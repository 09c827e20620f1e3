"""What compiled loops do with a row, against torch's own operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from weft.nn.kernels.numba.matmul import FLOAT32, INT16, UINT8
from weft.nn.kernels.numba.rowwise import activate, add_norm_rows, quantize_rows
from weft.nn.layers.activations import ACTIVATIONS
from weft.nn.rnn.fused.codegen_numba import cached_njit

pytestmark = pytest.mark.isa
quick = settings(deadline=None, derandomize=True, max_examples=12)
sizes = st.tuples(st.integers(1, 5), st.integers(1, 70))
forms = pytest.mark.parametrize("form", [UINT8, INT16], ids=["uint8", "int16"])


@pytest.mark.parametrize("name", ACTIVATIONS)
@quick
@given(sizes)
def test_an_activation_is_torch_s(name, size):
    torch.manual_seed(size[1])
    x, activation = torch.randn(size) * 3, ACTIVATIONS[name]
    expected = activation(x)
    rows = activate(activation, x.clone(), FLOAT32)
    torch.testing.assert_close(rows.values, expected, rtol=1e-6, atol=2e-6)
    assert rows.integers is None
    if size[1] > 8:
        others = [other(x) for other in ACTIVATIONS.values() if other is not activation]
        assert all((expected - other).abs().max() > 1e-4 for other in others)  # so one would be caught for another


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_far_numbers_are_neither_lost_nor_made_up(name):
    x = torch.tensor([[-1e30, -1e4, -30.0, -9.0, -0.0, 0.0, 9.0, 30.0, 1e4]])
    expected = ACTIVATIONS[name](x.double()).float()
    values = activate(ACTIVATIONS[name], x.clone(), FLOAT32).values
    assert ((values - expected).abs() <= 1e-6 * x.abs()).all()


@quick
@given(sizes)
def test_a_sum_is_normed_and_kept(size):
    torch.manual_seed(size[1])
    x, y, norm = torch.randn(size), torch.randn(size), nn.LayerNorm(size[1], eps=1e-3)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    total = x + y
    rows = add_norm_rows(x, y, norm, FLOAT32)
    torch.testing.assert_close(y, total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rows.values, norm(total).detach(), rtol=1e-4, atol=1e-4)


@forms
@quick
@given(sizes, st.floats(-20, 20), st.sampled_from([-1e9, -1.0, 0.0, 1.0, 1e9]))
def test_integers_scale_and_zero_give_the_row_back(form, size, power, least):
    torch.manual_seed(size[1])
    x = (torch.randn(size) * 2.0**power).clamp(min=least)
    rows = quantize_rows(x, form).integers
    integers = rows.values[:, : size[1]].int()
    near = (integers - rows.zero[:, None]) * rows.scale[:, None]
    width = x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)
    torch.testing.assert_close(rows.scale, (width / form.steps).clamp(min=1e-30))
    bound = rows.scale[:, None] * 1.001  # half a step of the value, and half of one of the zero
    assert ((near - x).abs() <= bound).all()
    assert ((integers >= 0) & (integers <= form.steps)).all()
    coarse = (integers // 4 * 4 - rows.zero[:, None]) * rows.scale[:, None]  # with two bits less
    assert size[1] < 20 or width.min() == 0 or not ((coarse - x).abs() <= bound).all()


@forms
def test_nought_is_exact_and_a_row_has_its_own_scale(form):
    x = torch.stack([torch.zeros(9), torch.linspace(-1, 1, 9), torch.linspace(-1, 1, 9) * 1024, torch.arange(9.0)])
    rows = quantize_rows(x, form).integers
    noughts = rows.values.int()[:, :9] == rows.zero[:, None]
    assert torch.equal(noughts, x == 0)
    assert torch.equal(rows.values[1, :9], rows.values[2, :9])
    assert rows.values[3, [0, 8]].tolist() == [0, form.steps]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_spreads_over_its_row_alone(bad):
    x = torch.randn(3, 20)
    x[1, 7] = bad
    rows = quantize_rows(x, UINT8).integers
    assert rows.scale.isfinite().tolist() == [True, False, True]


@forms
def test_a_loop_rounds_what_it_made(form):
    torch.manual_seed(0)
    x, norm = torch.randn(4, 41), nn.LayerNorm(41)
    for rows in [activate(F.gelu, x.clone(), form), add_norm_rows(torch.randn(4, 41), x.clone(), norm, form)]:
        again = quantize_rows(rows.values, form).integers
        assert all(torch.equal(a[..., :41], b[..., :41]) for a, b in zip(rows.integers, again, strict=True))


def test_what_cannot_be_kept_is_compiled_all_the_same():
    space = {}
    exec("def twice(x):\n    return 2 * x", space)  # of no file, beside which it could be kept
    assert cached_njit()(space["twice"])(21) == 42
    assert activate.__globals__["activate_values"].stats.cache_path  # those of a module are
