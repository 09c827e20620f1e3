"""PackedItems: round trip without a copy, in an unnamed memory-mapped file."""

import tracemalloc
from itertools import accumulate, chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.data.batching.packed_items import content_keys, pack

sequence = st.lists(st.integers(0, 2**31 - 1), max_size=9)
items = st.lists(st.lists(sequence, min_size=1, max_size=4), max_size=12)


def arrays(raw):
    return [tuple(np.array(part, np.int32) for part in item) for item in raw]


@given(items, st.integers(1, 9))
def test_what_goes_in_comes_out(raw, at_once):
    packed = pack(arrays(raw), at_once=at_once)
    assert len(packed) == len(raw)
    assert [[part.tolist() for part in packed[index]] for index in range(len(packed))] == raw
    assert packed.sizes.tolist() == [sum(map(len, item)) for item in raw]


@given(items, items)
def test_the_digest_is_the_contents(first, second):
    assert (pack(arrays(first)).digest == pack(arrays(second)).digest) == (first == second)


@given(st.lists(sequence, max_size=20))
def test_a_key_is_the_contents_alone(raw):
    starts = np.array([0, *accumulate(map(len, raw))])
    keys = content_keys(np.array(list(chain.from_iterable(raw)), np.int32), starts)
    for key, ids in zip(keys, raw, strict=True):
        assert key == content_keys(np.array([*ids, 7]), np.array([0, len(ids), len(ids) + 1]))[0]
    assert len(set(keys.tolist())) == len(set(map(tuple, raw)))


def test_a_key_sees_the_order():
    keys = content_keys(np.array([1, 2, 3, 3, 2, 1, 2, 2, 2]), np.array([0, 3, 6, 9]))
    assert len(set(keys.tolist())) == 3


def test_the_digest_sees_where_items_begin():
    whole, cut = [[[1, 2], [3]]], [[[1, 2]], [[3]]]
    assert pack(arrays(whole)).digest != pack(arrays(cut)).digest
    assert pack(arrays([[[1, 2, 3]]])).digest != pack(arrays([[[1, 2], [3]]])).digest


def test_items_are_views_and_cannot_be_written():
    packed = pack(arrays([[[1, 2, 3]]]))
    assert np.shares_memory(packed[0][0], packed.ids)
    assert not packed[0][0].flags.writeable


def test_nothing_is_left_on_the_disk(tmp_path):
    packed = pack(arrays([[[1, 2, 3]]]), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert packed[0][0].tolist() == [1, 2, 3]


def test_memory_holds_lengths_not_ids():
    tracemalloc.start()
    packed = pack((np.arange(1000, dtype=np.int32),) for _ in range(5000))  # 20 MB of ids
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert packed.starts[-1] == 5_000_000
    assert peak < 5_000_000


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=6), st.integers(1, 5))
def test_an_item_is_as_large_as_the_sequences_that_count(shapes, counted):
    items = [tuple(np.zeros(length, np.int32) for length in shape) for shape in shapes]
    assert pack(items, num_token_arrays=counted).sizes.tolist() == [sum(shape[:counted]) for shape in shapes]
    assert pack(items).sizes.tolist() == [sum(shape) for shape in shapes]
    assert pack(items, num_token_arrays=counted).digest == pack(items).digest
