from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.batching.lm_stream import BPTTSegments, LMWindows, TokenStream

BOS, EOS = 0, 1
documents = st.lists(st.lists(st.integers(2, 9), max_size=9), min_size=1, max_size=12)


def stream_of(docs):
    return TokenStream(np.array([id for doc in docs for id in (BOS, *doc)], np.int32), BOS, EOS)


@given(documents, st.data())
def test_a_span_is_followed_by_what_follows_in_the_documents(docs, data):
    stream = stream_of(docs)
    must = [id for doc in docs for id in (*doc, EOS)]
    start = data.draw(st.integers(0, len(stream) - 1))
    stop = data.draw(st.integers(start + 1, len(stream)))
    read, follows = stream.item(start, stop)
    assert read.tolist() == stream.ids[start:stop].tolist()
    assert follows.tolist() == must[start:stop]
    assert BOS not in follows


def test_a_span_is_read_where_it_lies():
    stream = stream_of([[2, 3, 4]] * 5)
    assert stream.item(3, 9)[0].base is not None
    assert np.shares_memory(stream.item(3, 9)[0], stream.ids)


@settings(max_examples=25)
@given(st.integers(1, 200), st.integers(1, 17), st.integers(1, 90), st.integers(0, 3))
def test_packs_are_of_one_shape_and_read_nothing_twice(size, longest, tokens, epoch):
    packs = LMWindows.of(TokenStream(np.arange(size, dtype=np.int32), -1, -2), longest, tokens)
    batches = packs.epoch(1, epoch, 1)
    assert batches
    assert {batch.shape for batch in batches} == {(packs.rows, 2)}
    read = [place for batch in batches for a, b in batch for place in range(a, b)]
    assert len(read) == len(set(read)) >= size - packs.rows * packs.width
    assert max(read) < size
    assert packs.static_shape.sizes == (packs.rows * packs.width,)
    assert packs.rows * packs.width <= max(tokens, packs.width)


def test_packs_differ_from_epoch_to_epoch_and_hang_on_the_seed():
    packs = LMWindows.of(TokenStream(np.arange(1000, dtype=np.int32), -1, -2), 10, 40)
    first, again, other, seeded = (np.stack(packs.epoch(*which, 1)) for which in ((1, 0), (1, 0), (1, 1), (2, 0)))
    assert (first == again).all()
    assert other.shape != first.shape or (other != first).any()
    assert (seeded != first).any()


@settings(max_examples=25)
@given(st.integers(8, 300), st.integers(1, 9), st.integers(1, 60), st.integers(1, 3), st.integers(0, 3))
def test_rows_of_streams_go_on_where_they_ended(size, bptt, tokens, world, epoch):
    streams = BPTTSegments.of(TokenStream(np.arange(size, dtype=np.int32), -1, -2), bptt, tokens, world)
    batches = streams.epoch(1, epoch, world)
    assert len(batches) % world == 0
    for rank in range(world):
        own = batches[rank::world]
        for before, after in pairwise(own):
            assert (before[:, 1] == after[:, 0]).all()
        assert all((batch[:, 1] - batch[:, 0] <= bptt).all() for batch in own)
    read = [place for batch in batches for a, b in batch for place in range(a, b)]
    assert len(read) == len(set(read)) > size - streams.rows * world


def test_the_first_cut_falls_elsewhere_in_each_epoch():
    streams = BPTTSegments.of(TokenStream(np.arange(1000, dtype=np.int32), -1, -2), 10, 40, 1)
    assert len({int(streams.epoch(1, epoch, 1)[0][0, 1]) for epoch in range(8)}) > 2


@pytest.mark.parametrize("kind", [LMWindows.of, lambda *args: BPTTSegments.of(*args, 1)])
def test_a_stream_shorter_than_a_batch_is_read_all_the_same(kind):
    sampler = kind(TokenStream(np.arange(5, dtype=np.int32), -1, -2), 16, 4096)
    assert sum(b - a for batch in sampler.epoch(1, 0, 1) for a, b in batch) >= 4
