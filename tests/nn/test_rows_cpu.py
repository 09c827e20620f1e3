"""What compiled loops do with a row, against torch's own operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from weft.nn.kernels import keeper
from weft.nn.rows_cpu import Rows, activate, add_norm, round_rows
from weft.nn.transformer import ACTIVATIONS

quick = settings(deadline=None, derandomize=True, max_examples=25)
sizes = st.tuples(st.integers(1, 5), st.integers(1, 70))


def rows(x):
    return Rows.over(x, False)


def scaled(x):
    """Rows whose products are yet to be scaled, each by a number of its own."""
    return Rows(x, torch.zeros(len(x), 1, dtype=torch.uint8), torch.rand(len(x), 1) + 0.5)


@pytest.mark.parametrize("name", ACTIVATIONS)
@quick
@given(sizes)
def test_an_activation_is_torch_s(name, size):
    torch.manual_seed(size[1])
    found, bias, act = torch.randn(size) * 3, torch.randn(size[1]), ACTIVATIONS[name]
    must = act(found + bias)
    got = activate(act, found.clone(), rows(found), bias)
    torch.testing.assert_close(got.values, must, rtol=1e-6, atol=2e-6)
    assert not got.rounded
    if size[1] > 8:
        others = [other(found + bias) for other in ACTIVATIONS.values() if other is not act]
        assert all((must - other).abs().max() > 1e-4 for other in others)  # so one would be caught for another


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_far_numbers_are_neither_lost_nor_made_up(name):
    x = torch.tensor([[-1e30, -1e4, -30.0, -9.0, -0.0, 0.0, 9.0, 30.0, 1e4]])
    must = ACTIVATIONS[name](x.double()).float()
    got = activate(ACTIVATIONS[name], x.clone(), rows(x), torch.zeros(9)).values
    assert ((got - must).abs() <= 1e-6 * x.abs()).all()


@quick
@given(sizes)
def test_a_sum_is_normed_and_kept(size):
    torch.manual_seed(size[1])
    x, found, bias, norm = torch.randn(size), torch.randn(size), torch.randn(size[1]), nn.LayerNorm(size[1], eps=1e-3)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    of = scaled(x)
    total = x + found * of.scale + bias
    got = add_norm(x, found, of, bias, norm)
    torch.testing.assert_close(found, total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.values, norm(total).detach(), rtol=1e-4, atol=1e-4)


@quick
@given(sizes, st.floats(-20, 20))
def test_bytes_and_scale_give_the_row_back(size, power):
    torch.manual_seed(size[1])
    x = torch.randn(size) * 2.0**power
    got = round_rows(x)
    near = (got.bytes_.float() - 128) * got.scale
    most = x.abs().amax(1, keepdim=True)
    assert ((near - x).abs() <= most / 127 * 0.501).all()
    torch.testing.assert_close(got.scale, most / 127)
    coarse = (got.bytes_.float() // 2 * 2 - 128) * got.scale  # with a bit less
    assert size[1] < 20 or not ((coarse - x).abs() <= most / 127 * 0.501).all()


def test_nought_is_nought_and_a_row_has_its_own_scale():
    x = torch.stack([torch.zeros(9), torch.linspace(-1, 1, 9), torch.linspace(-1, 1, 9) * 1000])
    got = round_rows(x)
    assert (got.bytes_[0] == 128).all()
    assert torch.equal(got.bytes_[1], got.bytes_[2])
    assert got.bytes_[1].tolist()[::4] == [1, 128, 255]


def test_a_loop_rounds_what_it_made():
    torch.manual_seed(0)
    found, bias, norm, of = torch.randn(4, 40), torch.randn(40), nn.LayerNorm(40), scaled(torch.randn(4, 40))
    made = [activate(F.gelu, found.clone(), of, bias), add_norm(torch.randn(4, 40), found.clone(), of, bias, norm)]
    for one in made:
        again = round_rows(one.values)
        assert torch.equal(one.bytes_, again.bytes_)
        assert torch.equal(one.scale, again.scale)


def test_what_cannot_be_kept_is_compiled_all_the_same():
    space = {}
    exec("def twice(x):\n    return 2 * x", space)  # of no file, beside which it could be kept
    assert keeper()(space["twice"])(21) == 42
    assert activate.__globals__["_activate"].stats.cache_path  # those of a module are
