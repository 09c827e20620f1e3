"""The LSTM with a projection equals its equations, in kernels and eagerly, from zeros and from a state."""

import pytest
import torch
from tests.equations import agree, scatter
from torch import nn

from weft.nn.kernels import dispatch
from weft.nn.rnn import projected_lstm
from weft.nn.rnn.projected_lstm import ProjectedLSTM, ProjectedScan

CLIPS = [None, 0.25]


def make_layer(clip, seed=0):
    layer = ProjectedLSTM(5, 3, 4, clip).double()
    scatter(layer, seed)
    return layer


def draw_inputs(steps=6, rows=2):
    torch.manual_seed(1)
    return torch.randn(steps, rows, 5).double().requires_grad_(), tuple(
        torch.randn(rows, width).double().requires_grad_() for width in (3, 4)
    )


def reference(layer, inputs, h, c):
    """One row and one step at a time."""
    bound = torch.inf if layer.clip is None else layer.clip
    hs, cs = [], []
    for x in inputs:
        i, f, g, o = (layer.input_weight @ x + layer.bias + layer.state_weight @ h).chunk(4)
        c = torch.clamp(f.sigmoid() * c + i.sigmoid() * g.tanh(), -bound, bound)
        h = torch.clamp(layer.project @ (o.sigmoid() * c.tanh()), -bound, bound)
        hs.append(h)
        cs.append(c)
    return torch.stack(hs), torch.stack(cs)


def check(layer):
    inputs, state = draw_inputs()
    named = dict(layer.named_parameters()) | {"inputs": inputs, "h": state[0], "c": state[1]}
    for some in ([0, 1, 2], [0], [2]):  # no gradient of c, or none of the outputs
        single = [reference(layer, inputs[:, row], *(part[row] for part in state)) for row in range(2)]
        outputs, (h, c) = layer(inputs, state)
        ends = [torch.stack([parts[n][-1] for parts in single]) for n in (0, 1)]
        actual, expected = [outputs, h, c], [torch.stack([parts[0] for parts in single], 1), *ends]
        agree([actual[n] for n in some], [expected[n] for n in some], named)


@pytest.mark.parametrize("clip", CLIPS)
def test_it_is_its_equations_and_their_gradient(clip):
    check(make_layer(clip))


@pytest.mark.parametrize("clip", CLIPS)
def test_it_is_so_in_kernels(clip, monkeypatch):
    monkeypatch.setattr(dispatch, "SCAN_DTYPE", torch.float64)
    monkeypatch.setattr(ProjectedLSTM, "_scan_eager", None)  # must not be called
    check(make_layer(clip))


@pytest.mark.parametrize("clip", CLIPS)
def test_the_gradient_of_the_walk_is_right(clip):
    layer, (_, state) = make_layer(clip), draw_inputs()
    input_proj = torch.randn(4, 2, 16).double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *parts: ProjectedScan.apply(clip, *parts), (input_proj, *state, layer.state_weight, layer.project)
    )


def test_a_bound_that_is_left_out_is_noticed(monkeypatch):
    unbound = projected_lstm.gate_function(None)
    monkeypatch.setattr(projected_lstm, "gate_function", lambda clip: unbound)
    with pytest.raises(AssertionError):
        check(make_layer(0.25))


def test_the_bounds_hold():
    layer, (inputs, _) = make_layer(0.25), draw_inputs(20)
    with torch.no_grad():
        outputs, (_, c) = layer(inputs * 10)
    assert outputs.abs().max() == 0.25
    assert c.abs().max() == 0.25
    assert make_layer(None)(inputs * 10)[0].abs().max() > 0.25


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_without_bounds_it_is_the_librarys():
    layer, (inputs, state) = make_layer(None), draw_inputs()
    theirs = nn.LSTM(5, 4, proj_size=3).double()
    with torch.no_grad():
        parts = theirs.weight_ih_l0, theirs.weight_hh_l0, theirs.bias_ih_l0, theirs.weight_hr_l0
        mine = layer.input_weight, layer.state_weight, layer.bias, layer.project
        for tensor, reference in zip(parts, mine, strict=True):
            tensor.copy_(reference)
        theirs.bias_hh_l0.zero_()
    expected, (h, c) = theirs(inputs, tuple(part[None] for part in state))
    actual, after = layer(inputs, state)
    torch.testing.assert_close([actual, *after], [expected, h[0], c[0]])


def test_rows_that_end_apart_keep_their_own_last_state():
    layer, (inputs, state) = make_layer(0.5), draw_inputs()
    real = torch.tensor([[True, True]] * 2 + [[True, False]] * 4)
    _, (h, c) = layer(inputs, state, real)
    for row, steps in enumerate((6, 2)):
        rows = slice(row, row + 1)
        _, single = layer(inputs[:steps, rows], tuple(part[rows] for part in state))
        torch.testing.assert_close((h[rows], c[rows]), single)
    none = torch.zeros(6, 2, dtype=torch.bool)
    assert all(torch.equal(*pair) for pair in zip(layer(inputs, state, none)[1], state, strict=True))


def test_no_step_leaves_the_state():
    layer, (inputs, state) = make_layer(0.5), draw_inputs()
    outputs, after = layer(inputs[:0], state)
    assert outputs.shape == (0, 2, 3)
    assert all(torch.equal(*pair) for pair in zip(after, state, strict=True))
