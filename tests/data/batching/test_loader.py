"""Batches: every item once an epoch, within budget, by seed, by rank, from any position, by any number of workers."""

from contextlib import closing
from itertools import islice
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.batching.loader import Loader, Position, plan_batches, plan_grouped_batches
from weft.data.batching.packed_items import GroupedItems, pack
from weft.tokens import Tokens


def packed(lengths):
    return pack((np.full(length, index, np.int32),) for index, length in enumerate(lengths))


def collate(items, rng):
    return Tokens.pack([item[0] for item in items]), torch.from_numpy(rng.random(2))


def loader(data, rank=0, world=1, workers=0, seed=7):
    return Loader(data, collate, 40, seed, rank, world, workers)


def taken(stream, count):
    return [
        (loaded.batch_index.position, loaded.batch[0].ids.tolist(), loaded.batch[1].tolist())
        for loaded in islice(stream, count)
    ]


LENGTHS = np.random.default_rng(3).integers(1, 30, 200).tolist()
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=80)


@given(lengths, st.integers(1, 100), st.none() | st.integers(0, 9), st.integers(0, 5))
def test_an_epoch_has_every_item_once_within_the_budget(sizes, budget, seed, epoch):
    batches = plan_batches(packed(sizes), budget, seed, epoch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(sizes)))
    for batch in batches:
        assert sum(sizes[index] for index in batch) <= budget or len(batch) == 1


def test_batches_are_filled_and_of_like_lengths():
    data = packed(np.random.default_rng(0).integers(1, 100, 5000).tolist())
    batches = plan_batches(data, 1000, 1)
    fill = data.sizes.sum() / (1000 * len(batches))
    assert fill > 0.9
    padding = sum(len(b) * data.sizes[b].max() for b in batches) / data.sizes.sum()
    assert padding < 1.05
    unsorted = np.array_split(np.random.default_rng(0).permutation(5000), len(batches))
    assert sum(len(b) * data.sizes[b].max() for b in unsorted) / data.sizes.sum() > 1.5  # what bucketing saves


def test_the_order_is_a_function_of_seed_and_epoch():
    data = packed(LENGTHS)

    def order(seed, epoch):
        return [batch.tolist() for batch in plan_batches(data, 40, seed, epoch)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


@given(st.permutations(range(40)))
def test_without_a_seed_batches_do_not_depend_on_the_order_of_the_items(order):
    rows = [np.array([index, index % 7][: 1 + index % 2], np.int32) for index in range(40)]

    def batches(order):
        return [
            [rows[order[at]].tolist() for at in batch]
            for batch in plan_batches(pack((rows[i],) for i in order), 9, None)
        ]

    assert batches(order) == batches(range(40))


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 150))
def test_resuming_gives_the_same_batches(done):
    data = packed(LENGTHS)
    stream = loader(data).stream()
    drawn = list(islice(stream, done))
    after = drawn[-1].batch_index.after if drawn else Position()
    assert taken(loader(data).stream(after), 5) == taken(stream, 5)


def test_resuming_reads_nothing_that_came_before():
    data, read = packed(LENGTHS), []
    counting = Loader(data, lambda items, rng: read.append(1), 40, 7)
    next(counting.stream(Position(epoch=1000, batch=50)))
    assert len(read) == 1


@given(st.integers(1, 5), st.integers(0, 3))
def test_the_ranks_share_one_order(world, groups):
    data = packed(LENGTHS)
    alone = taken(loader(data).stream(), world * (groups + 1))
    shares = [taken(loader(data, rank, world).stream(), groups + 1) for rank in range(world)]
    assert [shares[index % world][index // world] for index in range(len(alone))] == alone


def test_the_ranks_agree_on_where_they_are():
    data = packed(LENGTHS)
    after = {next(islice(loader(data, rank, 3).stream(), 30, None)).batch_index.after for rank in range(3)}
    assert len(after) == 1
    resumed = [taken(loader(data, rank, 3).stream(*after), 2) for rank in range(3)]
    assert resumed == [taken(islice(loader(data, rank, 3).stream(), 31, None), 2) for rank in range(3)]


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_change_nothing(workers):
    data = packed(LENGTHS)
    with closing(loader(data, workers=workers).stream()) as batches:
        assert taken(batches, 30) == taken(loader(data).stream(), 30)
        assert isinstance(next(batches).batch_index.items, np.ndarray)


def test_closing_the_stream_ends_the_workers_whoever_holds_it():
    batches = loader(packed(LENGTHS), workers=1).stream()
    next(batches)
    assert len(active_children()) == 1  # only closing ends it
    batches.close()
    assert not active_children()


def test_the_randomness_of_a_batch_hangs_on_its_place_alone():
    data = packed(LENGTHS)
    whole = taken(loader(data).stream(), 20)
    assert taken(loader(data).stream(Position(0, 13)), 1)[0] == whole[13]
    assert len({tuple(drawn) for _, _, drawn in whole}) == 20


def grouped(*sizes):
    return GroupedItems([packed(own) for own in sizes])


def tasks_of(batches, data):
    """Return the task of each batch; a batch of two tasks is an error."""
    numbers = [{int(data[index][-1][0]) for index in batch} for batch in batches]
    assert all(len(number) == 1 for number in numbers)
    return [number for (number,) in numbers]


@settings(max_examples=30)
@given(lengths, lengths, st.integers(20, 100), st.integers(0, 9), st.integers(0, 3))
def test_an_epoch_of_several_tasks_has_every_item_once_in_batches_of_one_task(first, second, budget, seed, epoch):
    data = grouped(first, second)
    batches = plan_grouped_batches(data, budget, seed, epoch, "tokens", temperature=1.0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(first) + len(second)))
    tasks_of(batches, data)
    again = plan_grouped_batches(data, budget, seed, epoch, "tokens", temperature=1.0)
    assert all(map(np.array_equal, batches, again))


def test_a_temperature_moves_shares_to_small_tasks():
    data = grouped([10] * 1600, [10] * 100)
    for temperature, share in ((1, 1 / 17), (2, 1 / 5), (1e6, 1 / 2)):
        batches = plan_grouped_batches(data, 100, 1, 0, "tokens", temperature)
        tasks = tasks_of(batches, data)
        assert len(tasks) == pytest.approx(170, abs=1)
        assert sum(tasks) / len(tasks) == pytest.approx(share, abs=0.01)
        times = np.bincount(np.concatenate(batches), minlength=1700)
        assert set(times[1600:]) <= ({1} if temperature == 1 else {times[1600], times[1600] + 1, times[1600] - 1})
    first, second = (plan_grouped_batches(data, 100, 1, epoch, "tokens", 2) for epoch in (0, 1))
    left_out = [set(range(1600)) - set(np.concatenate(batches).tolist()) for batches in (first, second)]
    assert left_out[0]
    assert left_out[0] != left_out[1], "each epoch leaves out others"


def test_all_ranks_have_the_same_task_in_a_step():
    data = grouped([10] * 90, [10] * 30)
    tasks = np.array(tasks_of(plan_grouped_batches(data, 20, 1, 0, "tokens", 1.0, world=3), data)).reshape(-1, 3)
    assert (tasks == tasks[:, :1]).all()
    alone = np.array(tasks_of(plan_grouped_batches(data, 20, 1, 0, "tokens", 1.0), data))
    assert not (alone.reshape(-1, 3) == alone.reshape(-1, 3)[:, :1]).all()


def test_several_tasks_resume_from_any_position():
    data, ones = grouped(LENGTHS, LENGTHS[:50]), lambda items, rng: [item[0] for item in items]
    whole = Loader(data, ones, 40, 7, temperature=2.0)
    batches = [loaded.batch_index for loaded in islice(whole.stream(), 200)]
    assert batches[-1].position.epoch == 1
    resumed = Loader(data, ones, 40, 7, temperature=2.0).stream(batches[59].after)
    for index, loaded in zip(batches[60:], resumed, strict=False):
        assert index.position == loaded.batch_index.position
        assert np.array_equal(index.items, loaded.batch_index.items)
