"""Flat to grid and back is lossless, and padding never reaches a result."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weft.nn.rnn.time_major import TimeMajor
from weft.tokens import Tokens

quick = settings(deadline=None, derandomize=True, max_examples=25)

ragged = st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any)


def tokens_of(lengths: list[int]) -> Tokens:
    return Tokens.flat(torch.arange(sum(lengths)), torch.tensor(lengths))


def poisoned(grid: TimeMajor, padded: torch.Tensor) -> torch.Tensor:
    return torch.where(grid.mask[..., None], padded, float("nan"))


@quick
@given(ragged, st.integers(0, 3))
def test_a_place_holds_its_token(lengths, spare):
    tokens = tokens_of(lengths)
    grid = TimeMajor(replace(tokens, longest=tokens.longest + spare))  # longest is an upper bound
    padded, back = grid.pad(tokens.ids), grid.pad(tokens.ids, reverse=True)
    assert padded.shape == back.shape == grid.mask.shape == (max(lengths) + spare, len(lengths))
    for row, ids in enumerate(tokens.split()):
        assert padded[: len(ids), row].tolist() == ids.tolist()
        assert back[: len(ids), row].tolist() == ids.flip(0).tolist()
        assert grid.mask[:, row].tolist() == [True] * len(ids) + [False] * (grid.steps - len(ids))


@quick
@given(ragged, st.booleans())
def test_gather_undoes_lay(lengths, reverse):
    tokens = tokens_of(lengths)
    grid, flat = TimeMajor(tokens), torch.randn(sum(lengths), 2, 3)
    assert torch.equal(grid.unpad(grid.pad(flat, reverse), reverse), flat)


@quick
@given(ragged)
def test_gather_and_last_read_no_empty_place(lengths):
    tokens = tokens_of(lengths)
    grid, flat = TimeMajor(tokens), torch.randn(sum(lengths), 2)
    padded = poisoned(grid, grid.pad(flat))
    assert torch.equal(grid.unpad(padded), flat)
    ends = [part[-1] if len(part) else torch.zeros(2) for part in tokens.split(flat)]
    assert torch.equal(grid.last(padded), torch.stack(ends))


@quick
@given(ragged)
def test_empty_places_get_no_gradient_and_real_ones_get_one(lengths):
    tokens = tokens_of(lengths)
    grid, flat = TimeMajor(tokens), torch.randn(sum(lengths), 2, requires_grad=True)
    padded = grid.pad(flat)
    padded.retain_grad()
    (grid.unpad(padded).sum() + grid.unpad(grid.pad(flat, True), True).sum()).backward()
    assert torch.equal(padded.grad, grid.mask[..., None].expand_as(padded).float())
    assert torch.equal(flat.grad, torch.full_like(flat, 2.0))


@quick
@given(ragged, st.booleans())
def test_a_walk_over_poisoned_places_carries_none_of_it_back(lengths, reverse):
    torch.manual_seed(sum(lengths))
    tokens, lstm = tokens_of(lengths), nn.LSTM(3, 4)
    grid, flat = TimeMajor(tokens), torch.randn(sum(lengths), 3)
    with torch.no_grad():
        clean, _ = lstm(grid.pad(flat, reverse))
        dirty, _ = lstm(poisoned(grid, grid.pad(flat, reverse)))
    torch.testing.assert_close(grid.unpad(dirty, reverse), grid.unpad(clean, reverse))
    torch.testing.assert_close(grid.last(dirty), grid.last(clean))


def test_the_poison_works():
    """The negative control: a backward pass over the whole grid starts in the padding."""
    tokens, lstm = tokens_of([1, 3]), nn.LSTM(3, 4)
    grid = TimeMajor(tokens)
    dirty, _ = lstm(poisoned(grid, grid.pad(torch.randn(4, 3))).flip(0))
    assert grid.unpad(dirty.flip(0)).isnan().any()


@pytest.mark.parametrize(
    ("lengths", "full"),
    [([3], True), ([2, 2, 2], True), ([2, 1], False), ([2, 0, 2], False), ([0, 0], True), ([], True)],
)
def test_full_says_whether_there_is_an_empty_place(lengths, full):
    grid = TimeMajor(tokens_of(lengths))
    assert grid.full is full
    assert bool(grid.mask.all()) is full


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_a_batch_with_no_token_has_a_grid_with_no_step(lengths):
    grid, flat = TimeMajor(tokens_of(lengths)), torch.randn(0, 2)
    assert grid.pad(flat).shape == (0, len(lengths), 2)
    assert grid.unpad(grid.pad(flat, reverse=True), reverse=True).shape == (0, 2)
