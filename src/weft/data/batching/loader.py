"""Batches by token budget or item count: bucketed by length, shuffled by seed and epoch, sharded by rank, resumable.

The order of an epoch depends on (seed, epoch) alone. A position is (epoch, batch), so resuming draws the order of one
epoch and reads none of the earlier data: its cost does not depend on the number of steps done.
"""

import signal
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch.utils.data import DataLoader, Dataset

from weft.data.batching.lm_stream import SpanSampler
from weft.data.batching.packed_items import GroupedItems, PackedItems
from weft.data.batching.shared_batch import SharedBatch
from weft.data.batching.static_shape import StaticShape, split_by_room

B = TypeVar("B")
Unit = Literal["tokens", "items"]
CollateFn = Callable[[Sequence[tuple[np.ndarray, ...]], np.random.Generator], B]

# Batches whose items are sorted by length together: enough to match lengths, few enough to shuffle.
BUCKET_BATCHES = 64


class Position(NamedTuple):
    """The next batch, counted over all ranks."""

    epoch: Annotated[int, Field(ge=0)] = 0
    batch: Annotated[int, Field(ge=0)] = 0


class BatchIndex(NamedTuple):
    """The item indices of one batch, its position, and the position after the batches of all ranks in this step."""

    position: Position
    after: Position
    items: np.ndarray  # (n,) item indices; of a stream, spans (n, 2)


class LoadedBatch(NamedTuple, Generic[B]):
    """A collated batch and its index."""

    batch_index: BatchIndex
    batch: B


def plan_static_shape(lengths: np.ndarray, shape: StaticShape, seed: int, epoch: int) -> list[np.ndarray]:
    """Return batches that fit a static shape, from a random order: without padding, bucketing by length is not needed.

    In random batches the sides have about the same shares of tokens as in the data, so that little filler is needed.
    """
    return split_by_room(np.random.default_rng((seed, epoch)).permutation(lengths.shape[1]), lengths, shape.room)


def plan_batches(
    data: PackedItems, budget: int, seed: int | None, epoch: int = 0, unit: Unit = "tokens"
) -> list[np.ndarray]:
    """Return batches of at most `budget` tokens, or items, bucketed by length.

    Without a seed, batches are sorted by length, and items of equal length by a hash of their content: the batches do
    not depend on the order of the items.
    """
    return _plan(data, budget, np.random.default_rng((seed, epoch)) if seed is not None else None, unit)


def plan_grouped_batches(
    data: GroupedItems, budget: int, seed: int, epoch: int, unit: Unit, temperature: float, world: int = 1
) -> list[np.ndarray]:
    """Return an epoch of batches of one task each, in a random order: as many as all the tasks have together.

    A task with n batches has a share in proportion to n^(1/temperature). It begins anew where its share is more than
    n, and where it is less, other batches are left out in each epoch. All the ranks have the same task in a step.
    """
    passes = [_passes(part, budget, (seed, epoch, number), unit) for number, part in enumerate(data.parts)]
    firsts = [next(batches) for batches in passes]
    sizes = np.array([len(batches) for batches in firsts])
    shares = sizes ** (1 / temperature)
    counts = np.maximum(1, np.rint(sizes.sum() * shares / shares.sum() / world)).astype(int)  # of steps
    streams = [chain(first, chain.from_iterable(rest)) for first, rest in zip(firsts, passes, strict=True)]
    order = np.random.default_rng((seed, epoch)).permutation(np.repeat(np.arange(len(counts)), counts))
    return [next(streams[number]) + data.firsts[number] for number in order for _ in range(world)]


def _passes(data: PackedItems, budget: int, seed: tuple[int, ...], unit: Unit) -> Iterator[list[np.ndarray]]:
    """Yield the batches of one pass over the data after the other, each in an order of its own."""
    return (_plan(data, budget, np.random.default_rng((*seed, number)), unit) for number in count())


def _plan(data: PackedItems, budget: int, rng: np.random.Generator | None, unit: Unit) -> list[np.ndarray]:
    order = rng.permutation(len(data)) if rng else np.arange(len(data))
    sizes = data.sizes if unit == "tokens" else np.ones(len(data), np.int64)
    bucket_size = len(data)
    if rng and len(data):
        bucket_size = max(1, int(BUCKET_BATCHES * budget / max(1.0, float(sizes.mean()))))
    batches: list[np.ndarray] = []
    for start in range(0, len(order), max(bucket_size, 1)):
        bucket = order[start : start + bucket_size]
        keys = data.shapes[:, bucket] if rng else (data.keys, *data.shapes)
        bucket = bucket[np.lexsort(keys)]
        batches += _split_by_budget(bucket, sizes[bucket], budget)
    if rng:
        return [batches[index] for index in rng.permutation(len(batches))]
    return batches


def _split_by_budget(items: np.ndarray, sizes: np.ndarray, budget: int) -> list[np.ndarray]:
    ends, batches, start = np.cumsum(sizes), [], 0
    while start < len(items):
        used = int(ends[start - 1]) if start else 0
        # An item larger than the budget is a batch of its own.
        stop = max(start + 1, int(np.searchsorted(ends, used + budget, side="right")))
        batches.append(items[start:stop])
        start = stop
    return batches


@dataclass
class _CollatedDataset(Dataset[Any], Generic[B]):
    """Data set of a worker process: collates the items of a batch index, into one block of memory."""

    data: PackedItems
    collate: CollateFn[B]
    seed: int
    sampler: SpanSampler | None = None

    def load(self, batch_index: BatchIndex) -> LoadedBatch[B]:
        rng = np.random.default_rng((self.seed, *batch_index.position))
        return LoadedBatch(batch_index, self.collate(self._load_items(batch_index.items.tolist()), rng))

    def __getitem__(self, batch_index: BatchIndex) -> LoadedBatch[SharedBatch[B]]:
        return LoadedBatch(batch_index, SharedBatch.of(self.load(batch_index).batch))

    def _load_items(self, indices: list[Any]) -> list[tuple[np.ndarray, ...]]:
        if self.sampler is None:
            return [self.data[index] for index in indices]
        return [self.sampler.stream.item(*span) for span in indices]


@dataclass
class Loader(Generic[B]):
    """An infinite stream of batches for one rank, from any position on."""

    data: PackedItems
    collate: CollateFn[B]
    budget: int
    seed: int
    rank: int = 0
    world: int = 1
    workers: int = 0
    pin: bool = False
    lengths: np.ndarray | None = None  # (sides, items), for batches of a static shape
    static_shape: StaticShape | None = None
    sampler: SpanSampler | None = None  # where the data is one token stream: samples spans of it
    unit: Unit = "tokens"  # of `budget`
    streams: int = 1  # batches of an update, over all ranks: where the corpus is read on, each goes on from an earlier
    temperature: float = 1.0  # of several tasks: how their batches are drawn
    _num_batches: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def batch_indices(self, start: Position) -> Iterator[BatchIndex]:
        """Yield this rank's batches: one of every `world` batches, in an order common to all ranks."""
        batches = self._batches(start)
        while True:
            group = [next(batches) for _ in range(self.world)]
            position, items = group[self.rank]
            last = group[-1][0]
            yield BatchIndex(position, Position(last.epoch, last.batch + 1), items)

    def _batches(self, start: Position) -> Iterator[tuple[Position, np.ndarray]]:
        epoch, first = start
        while True:
            batches = self.epoch(epoch)
            for index in range(first, len(batches)):
                yield Position(epoch, index), batches[index]
            epoch, first = epoch + 1, 0

    def epoch(self, number: int) -> list[np.ndarray]:
        """Return the batches of one epoch, for all ranks."""
        if self.sampler is not None:
            return list(self.sampler.epoch(self.seed, number, self.streams))
        if isinstance(self.data, GroupedItems):
            return plan_grouped_batches(
                self.data, self.budget, self.seed, number, self.unit, self.temperature, self.streams
            )
        if self.static_shape is None or self.lengths is None:
            return plan_batches(self.data, self.budget, self.seed, number, self.unit)
        return plan_static_shape(self.lengths, self.static_shape, self.seed, number)

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches in one epoch, for all ranks; it may differ a little between epochs."""
        if epoch not in self._num_batches:
            self._num_batches[epoch] = len(self.epoch(epoch))
        return self._num_batches[epoch]

    def ends_epoch(self, position: Position, count: int) -> bool:
        """Return whether one of the last `count` batches before a position was the last of its epoch."""
        return position.batch == self.num_batches(position.epoch) or (position.epoch > 0 and position.batch < count)

    def stream(self, start: Position = Position()) -> Generator[LoadedBatch[B], None, None]:  # noqa: B008
        """Yield batches, without end; worker processes, if any, prefetch them until the generator is closed."""
        dataset = _CollatedDataset(self.data, self.collate, self.seed, self.sampler)
        if self.workers == 0:
            yield from map(dataset.load, self.batch_indices(start))
        for batch_index, shared in self._prefetch(dataset, start):
            yield LoadedBatch(batch_index, shared.unpack())

    def _prefetch(self, dataset: _CollatedDataset[B], start: Position) -> Iterator[LoadedBatch[SharedBatch[B]]]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
            loader = DataLoader(
                dataset,
                sampler=_InfiniteSampler(self.batch_indices(start)),
                batch_size=None,
                num_workers=self.workers,
                collate_fn=_unchanged,  # by default arrays become tensors
                prefetch_factor=4,
                worker_init_fn=_ignore_signals,
                generator=torch.Generator(),  # its own, or it would advance the generator of dropout
                pin_memory=self.pin,
            )
            return iter(loader)


def _unchanged(loaded: Any) -> Any:
    return loaded


def _ignore_signals(_: int) -> None:
    """Ignore SIGINT and SIGTERM: Ctrl-C reaches the workers too, but the trainer stops them after saving."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class _InfiniteSampler:
    """An infinite sampler."""

    def __init__(self, batch_indices: Iterator[BatchIndex]) -> None:
        self._batch_indices = batch_indices

    def __iter__(self) -> Iterator[BatchIndex]:
        return self._batch_indices
