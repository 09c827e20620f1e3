"""Static batch shape: every item fits, none is lost, and there is little filler."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.batching.loader import Loader, Position, plan_static_shape
from weft.data.batching.packed_items import pack
from weft.data.batching.static_shape import StaticShape, split_by_room


def drawn(items=3000, sides=2, longest=60, seed=0):
    rng = np.random.default_rng(seed)
    first = rng.integers(1, longest, items)
    return np.stack([first] + [np.clip(first + rng.integers(-5, 6, items), 1, longest) for _ in range(sides - 1)])


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60),
    st.integers(1, 400),
)
@settings(max_examples=30, deadline=None)
def test_every_item_is_in_one_batch_and_every_batch_fits(pairs, budget):
    lengths = np.array(pairs).T
    frame = StaticShape.of(lengths, budget)
    batches = split_by_room(np.arange(lengths.shape[1]), lengths, frame.room)
    assert np.concatenate(batches).tolist() == list(range(lengths.shape[1]))
    for batch in batches:
        spare = np.array(frame.sizes) - lengths[:, batch].sum(1)
        assert len(batch) <= frame.rows
        # each filler has a token at least, and none is longer than the longest
        assert (spare >= frame.fillers).all()
        assert (spare <= frame.fillers * np.array(frame.longest)).all()


def test_a_room_that_is_not_kept_to_is_noticed():
    lengths = drawn(200)
    frame = StaticShape.of(lengths, 500)
    batches = split_by_room(np.arange(200), lengths, frame.room * 2)
    assert any((lengths[:, batch].sum(1) > frame.room[:2]).any() for batch in batches)


@pytest.mark.parametrize("sides", [1, 2])
def test_little_is_left_to_fill_up(sides):
    lengths = drawn(sides=sides)
    frame = StaticShape.of(lengths, 8192)
    full = [lengths[:, batch].sum() / sum(frame.sizes) for batch in plan_static_shape(lengths, frame, 1, 0)[:-1]]
    assert np.mean(full) > 0.95


def test_the_order_follows_from_seed_and_epoch():
    lengths, plans = drawn(300), []
    frame = StaticShape.of(lengths, 1000)
    for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0)):
        plans.append([batch.tolist() for batch in plan_static_shape(lengths, frame, seed, epoch)])
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]
    assert plans[0] != plans[3]


def test_a_loader_goes_on_from_any_batch_of_frames():
    lengths = drawn(200, longest=9)
    data = pack([(np.zeros(a, int), np.ones(b, int)) for a, b in lengths.T])
    loader = Loader(
        data, lambda items, rng: len(items), 300, 1, lengths=lengths, static_shape=StaticShape.of(lengths, 300)
    )
    whole = [next_one.batch_index for next_one, _ in zip(loader.stream(), range(12), strict=False)]
    later = [
        next_one.batch_index for next_one, _ in zip(loader.stream(Position(*whole[5].position)), range(7), strict=False)
    ]
    for expected, actual in zip(whole[5:], later, strict=True):
        assert expected.position == actual.position
        assert expected.items.tolist() == actual.items.tolist()
