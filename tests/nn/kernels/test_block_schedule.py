"""Work lists: every block of every sequence is there once, the longest sequences first."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.nn.kernels.block_schedule import KEY_BLOCK, QUERY_BLOCK, TILE_LENGTHS, BlockSchedule


def blocks_of(listed, size, lengths):
    """The tokens in the blocks, as (sequence, position), in order."""
    named = [(row, first) for row, first in listed.tolist() if row >= 0]
    return sorted((row, at) for row, first in named for at in range(first, min(first + size, lengths[row])))


@given(st.lists(st.integers(0, 600), min_size=1, max_size=12))
def test_every_token_is_in_one_block(lengths):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    work = BlockSchedule.of(starts, sum(lengths))
    every = [(row, at) for row, length in enumerate(lengths) for at in range(length)]
    assert blocks_of(work.queries, QUERY_BLOCK, lengths) == every
    assert blocks_of(work.keys, KEY_BLOCK, lengths) == every
    assert every == [] or blocks_of(work.queries[1:], QUERY_BLOCK, lengths) != every  # the negative control


@given(st.lists(st.integers(0, 200), min_size=1, max_size=12))
def test_the_longest_come_first_and_rooms_part_them(lengths):
    work = BlockSchedule.of(torch.tensor([0, *lengths]).cumsum(0).int(), sum(lengths))
    ordered = [lengths[row] for row in work.order.tolist()]
    assert ordered == sorted(lengths, reverse=True)
    for (first, last), least, most in zip(work.spans.tolist(), (-1, TILE_LENGTHS[0]), TILE_LENGTHS, strict=True):
        assert ordered[first:last] == [length for length in ordered if least < length <= most]
