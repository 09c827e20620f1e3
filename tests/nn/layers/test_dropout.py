"""Dropout masks that last for a sequence, a batch, a pass; the mean is unchanged, and evaluation has no dropout."""

from itertools import pairwise

import pytest
import torch
from tests.equations import CELLS, agree, scatter
from torch import nn

from weft.nn.kernels import dispatch
from weft.nn.layers.dropout import SequenceDropout, WordDropout, draw_mask
from weft.nn.rnn import cells
from weft.nn.rnn.cells import make_cell
from weft.nn.rnn.self_attentive import LSTMN
from weft.nn.rnn.time_major import TimeMajor
from weft.tokens import Tokens

LENGTHS = [4, 0, 1, 6]
WIDE = 50


def grid_of(lengths):
    return TimeMajor(Tokens.flat(torch.zeros(sum(lengths), dtype=torch.long), torch.tensor(lengths)))


def test_a_mask_keeps_a_share_and_the_mean():
    torch.manual_seed(0)
    mask = draw_mask(0.3, (400, 500), torch.zeros(1, dtype=torch.float64))
    assert set(mask.unique().tolist()) == {0.0, 1 / 0.7}
    assert (mask == 0).double().mean().item() == pytest.approx(0.3, abs=0.005)
    assert mask.mean().item() == pytest.approx(1, abs=0.01)
    assert mask.dtype is torch.float64


def test_a_kept_mask_is_the_same_at_every_step_and_another_for_every_sequence():
    torch.manual_seed(1)
    drop, grid = SequenceDropout(0.5, kept=True), grid_of(LENGTHS)
    parts = drop(torch.ones(sum(LENGTHS), WIDE), grid).split(LENGTHS)
    assert all(torch.equal(part, part[:1].expand_as(part)) for part in parts if len(part))
    firsts = [part[0] for part in parts if len(part)]
    assert all(not torch.equal(one, other) for one, other in pairwise(firsts))
    laid = drop(torch.ones(6, 3, WIDE))
    assert torch.equal(laid, laid[:1].expand_as(laid))
    assert not torch.equal(laid[0, 0], laid[0, 1])
    assert not torch.equal(laid, drop(torch.ones(6, 3, WIDE))), "each call draws anew"


def test_one_that_is_not_kept_differs_from_step_to_step():
    """The negative control."""
    torch.manual_seed(1)
    laid = SequenceDropout(0.5)(torch.ones(6, 3, WIDE))
    assert not torch.equal(laid[0], laid[1])


def test_flat_and_laid_out_tokens_get_the_same_masks():
    torch.manual_seed(2)
    drop, grid, flat = SequenceDropout(0.4, kept=True), grid_of([3, 5, 2]), torch.randn(10, WIDE)
    torch.manual_seed(3)
    one = drop(flat, grid)
    torch.manual_seed(3)
    assert torch.equal(grid.unpad(drop(grid.pad(flat))), one)


def test_a_word_is_dropped_wherever_it_stands():
    torch.manual_seed(4)
    drop, ids = WordDropout(0.5, 9), torch.randint(9, (40,))
    dropped = drop(torch.ones(40, 3), ids)
    assert {tuple(row) for row in dropped.tolist()} == {(0.0,) * 3, (2.0,) * 3}
    for word in ids.unique():
        assert len(dropped[ids == word].unique()) == 1
    assert drop(torch.ones(5, 8, 3), ids.view(5, 8)).shape == (5, 8, 3)


@pytest.mark.parametrize("kept", [True, False])
def test_without_training_or_with_nothing_to_drop_nothing_changes(kept):
    values, ids = torch.randn(5, 3, WIDE), torch.randint(7, (5, 3))
    for p, training in ((0.5, False), (0.0, True)):
        assert SequenceDropout(p, kept).train(training)(values) is values
        assert WordDropout(p, 7).train(training)(values, ids) is values


# DropConnect.


def thinned(layer, mask):
    """Multiply the matrix from state to state by hand."""
    cell = layer.cell if isinstance(layer, LSTMN) else layer
    with torch.no_grad():
        cell.stages()[0].weight.mul_(mask)
    cell.drop = 0.0
    return layer


def make_layer(name, attention, seed=5):
    cell = make_cell(name, 5, 4)
    layer = (cell if attention == "none" else LSTMN(cell, attention)).double()
    scatter(layer, seed)
    cell.drop = 0.5
    return layer


@pytest.mark.parametrize(
    ("name", "attention", "kernels"),
    [
        *((name, attention, False) for name in CELLS for attention in ("none", "dot", "additive")),
        ("peephole", "none", True),  # to compile more of them takes long: tests/nn/test_scan.py has all
        ("peephole", "dot", True),
    ],
)
def test_dropped_weights_are_the_same_for_a_whole_walk(name, attention, kernels, monkeypatch):
    monkeypatch.setattr(dispatch, "SCAN_DTYPE", torch.float64 if kernels else None)
    masks, inputs = [], torch.randn(7, 3, 5, dtype=torch.float64, requires_grad=True)

    def drawn(p, shape, like):
        masks.append(draw_mask(p, shape, like))
        return masks[-1]

    monkeypatch.setattr(cells, "draw_mask", drawn)
    layer = make_layer(name, attention)
    for real in (None, torch.arange(7)[:, None] < torch.tensor([7, 4, 2])):
        masks.clear()
        actual, state = layer(inputs, None, real)
        (mask,) = masks
        assert set(mask.unique().tolist()) == {0.0, 2.0}
        expected, other = thinned(make_layer(name, attention), mask)(inputs, None, real)
        parts = [(one, two) for one, two in zip(state, other, strict=True) if one.is_floating_point()]
        agree([actual, *(one for one, _ in parts)], [expected, *(two for _, two in parts)], {"inputs": inputs})


@pytest.mark.parametrize("name", CELLS)
def test_a_dropped_weight_gets_no_gradient_and_others_theirs(name, monkeypatch):
    layer, inputs = make_layer(name, "none"), torch.randn(7, 3, 5, dtype=torch.float64)
    weight = layer.stages()[0].weight
    mask = draw_mask(0.5, weight.shape, weight)
    monkeypatch.setattr(cells, "draw_mask", lambda *_: mask)
    (actual,) = torch.autograd.grad(layer(inputs)[0].square().sum(), weight)
    plain = thinned(make_layer(name, "none"), mask)
    (expected,) = torch.autograd.grad(plain(inputs)[0].square().sum(), plain.stages()[0].weight)
    torch.testing.assert_close(actual, expected * mask)
    assert not actual[mask == 0].any()


@pytest.mark.parametrize("name", CELLS)
def test_it_is_for_training_alone_and_drawn_for_each_walk(name):
    layer, inputs = make_layer(name, "none"), torch.randn(7, 3, 5, dtype=torch.float64)
    assert not torch.equal(layer(inputs)[0], layer(inputs)[0])
    still = thinned(make_layer(name, "none"), 1.0)
    assert torch.equal(layer.eval()(inputs)[0], still.eval()(inputs)[0])
    torch.testing.assert_close(still.train()(inputs)[0], layer.eval()(inputs)[0])


def test_the_library_walks_by_the_weights_that_are_left():
    """A witness of its own: torch.nn.LSTM with thinned weights."""
    torch.manual_seed(6)
    layer, theirs = make_cell("lstm", 5, 4), nn.LSTM(5, 4)
    layer.drop, inputs = 0.5, torch.randn(7, 3, 5)
    theirs.load_state_dict(layer.kernel.state_dict())
    torch.manual_seed(7)
    mask = draw_mask(0.5, theirs.weight_hh_l0.shape, inputs)
    with torch.no_grad():
        theirs.weight_hh_l0.mul_(mask)
    torch.manual_seed(7)
    outputs, (h, c) = layer(inputs)
    expected, (their_h, their_c) = theirs(inputs)
    torch.testing.assert_close([outputs, h, c], [expected, their_h[0], their_c[0]])


@pytest.mark.skipif(not (torch.cuda.is_available() and dispatch.has_triton()), reason="needs CUDA and Triton")
@pytest.mark.parametrize(("half", "tolerance"), [(False, 1e-4), (True, 3e-2)])
@pytest.mark.parametrize("name", CELLS)
def test_a_gpu_walks_by_the_weights_that_are_left(name, half, tolerance, monkeypatch):
    torch.manual_seed(8)
    layer, inputs = make_cell(name, 32, 64), torch.randn(9, 20, 32)
    layer.drop, weight = 0.5, layer.stages()[0].weight
    mask = draw_mask(0.5, weight.shape, weight)
    monkeypatch.setattr(cells, "draw_mask", lambda p, shape, like: mask.to(like))
    expected, _ = layer.double()(inputs.double())
    grads = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
    there = layer.to("cuda", torch.float32)
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        actual, _ = there(inputs.cuda())
    found = torch.autograd.grad(actual.float().square().sum(), list(there.parameters()))
    for one, other in zip((actual, *found), (expected, *grads), strict=True):
        assert (one.double().cpu() - other.cpu()).norm() <= tolerance * (other.norm().cpu() + 1)
