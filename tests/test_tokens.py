"""Batches without padding: round trips for any mixture of lengths, empty sequences included."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.tokens import Specials, Tokens

quick = settings(deadline=None, derandomize=True)
sequences = st.lists(st.lists(st.integers(0, 2**40), max_size=5), max_size=6)


@quick
@given(sequences, st.sampled_from([list, tuple, np.array, lambda row: np.array(row, np.int32 if not row else None)]))
def test_split_undoes_pack(rows, form):
    tokens = Tokens.pack([form(row) for row in rows])
    assert [part.tolist() for part in tokens.split()] == rows
    assert len(tokens) == len(rows)
    assert tokens.longest == max(map(len, rows), default=0)
    assert [tokens.ids.dtype, tokens.starts.dtype, tokens.lengths.dtype] == [torch.int64, torch.int32, torch.int64]


@quick
@given(sequences)
def test_starts_say_where_each_sequence_lies(rows):
    tokens = Tokens.pack(rows)
    assert tokens.starts[0] == 0
    assert tokens.starts[-1] == len(tokens.ids)
    assert tokens.starts.shape == (len(rows) + 1,)
    for number, row in enumerate(rows):
        assert tokens.ids[tokens.starts[number] : tokens.starts[number + 1]].tolist() == row


@quick
@given(sequences)
def test_flat_takes_what_lies_end_to_end_already(rows):
    packed = Tokens.pack(rows)
    flat = Tokens.flat(packed.ids, packed.lengths.to(torch.float32))
    assert torch.equal(flat.starts, packed.starts)
    assert torch.equal(flat.lengths, packed.lengths)
    assert flat.lengths.dtype == torch.int64
    assert flat.longest == packed.longest
    assert flat.ids is packed.ids


def test_other_flat_tensors_are_split_alike():
    tokens = Tokens.pack([[1, 2], [], [3]])
    values = torch.arange(6).view(3, 2)
    assert [part.tolist() for part in tokens.split(values)] == [[[0, 1], [2, 3]], [], [[4, 5]]]


def test_a_batch_of_no_sequences_is_a_batch():
    tokens = Tokens.pack([])
    assert len(tokens) == tokens.longest == len(tokens.ids) == 0
    assert tokens.starts.tolist() == [0]
    assert tokens.split() == []
    assert len(tokens.to("cpu")) == 0


def test_moving_takes_all_parts_but_the_lengths():
    plain = Tokens.pack([[1, 2], [3]])
    tokens = Tokens(plain.ids, plain.starts, plain.lengths, 2, torch.zeros(3), torch.zeros(3, 4), torch.zeros(3, 5)).to(
        "meta"
    )
    moved = [tokens.ids, tokens.starts, tokens.segments, tokens.chars, tokens.features]
    assert {part.device.type for part in moved} == {tokens.device.type} == {"meta"}
    assert tokens.lengths.device.type == "cpu"  # packing an RNN costs no device sync
    assert tokens.longest == 2
    assert plain.to("meta").segments is None


def test_tokens_and_specials_are_frozen():
    with pytest.raises(FrozenInstanceError):
        Tokens.pack([[1]]).longest = 2
    with pytest.raises(FrozenInstanceError):
        Specials(bos=1, eos=2).bos = 3
    assert Specials(bos=1, eos=2) == Specials(1, 2, None, None, None)
