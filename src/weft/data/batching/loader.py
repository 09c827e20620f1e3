"""Batches by token budget: bucketed by length, shuffled by seed and epoch, sharded by rank, resumable to the batch.

An epoch's order is a function of (seed, epoch) alone. A position is (epoch, batch), so resuming draws the order
of one epoch and reads nothing that came before: its cost does not depend on the steps done.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch.utils.data import DataLoader, Dataset

from weft.data.batching.lm_stream import Reading
from weft.data.batching.packed import PackedItems
from weft.data.batching.static_shape import StaticShape, cut

B = TypeVar("B")
Collate = Callable[[Sequence[tuple[np.ndarray, ...]], np.random.Generator], B]

BUCKET = 64  # batches whose items are sorted by length together: wide enough to match lengths, narrow enough to shuffle


class Position(NamedTuple):
    """Which batch comes next, counted over all ranks."""

    epoch: Annotated[int, Field(ge=0)] = 0
    batch: Annotated[int, Field(ge=0)] = 0


class BatchIndex(NamedTuple):
    """The items of one batch, where it stands, and where the batches that all ranks draw with it end."""

    position: Position
    after: Position
    items: np.ndarray  # (n,) by number; of a stream, spans (n, 2)


class LoadedBatch(NamedTuple, Generic[B]):
    """A batch and the draw that it was made from."""

    draw: BatchIndex
    batch: B


def plan_framed(lengths: np.ndarray, frame: StaticShape, seed: int, epoch: int) -> list[np.ndarray]:
    """Cut the items, as they are drawn, into batches that fit a frame: with no padding, like need not go with like.

    Drawn at random, sides of a batch have the shares that they have in the data, so that little is left to fill up.
    """
    return cut(np.random.default_rng((seed, epoch)).permutation(lengths.shape[1]), lengths, frame.room)


def plan(data: PackedItems, budget: int, seed: int | None, epoch: int = 0) -> list[np.ndarray]:
    """Cut the items into batches of at most `budget` tokens, of like lengths.

    Without a seed batches come in sorted order, and items of one length by their content: the same batches, whatever
    order the items were given in.
    """
    rng = np.random.default_rng((seed, epoch)) if seed is not None else None
    order = rng.permutation(len(data)) if rng else np.arange(len(data))
    width = max(1, int(BUCKET * budget / max(1.0, float(data.sizes.mean())))) if rng and len(data) else len(data)
    batches: list[np.ndarray] = []
    for start in range(0, len(order), max(width, 1)):
        bucket = order[start : start + width]
        keys = data.shapes[:, bucket] if rng else (data.keys, *data.shapes)
        bucket = bucket[np.lexsort(keys)]
        batches += _cut(bucket, data.sizes[bucket], budget)
    if rng:
        return [batches[index] for index in rng.permutation(len(batches))]
    return batches


def _cut(items: np.ndarray, sizes: np.ndarray, budget: int) -> list[np.ndarray]:
    ends, batches, start = np.cumsum(sizes), [], 0
    while start < len(items):
        used = int(ends[start - 1]) if start else 0
        # An item beyond the budget has a batch to itself.
        stop = max(start + 1, int(np.searchsorted(ends, used + budget, side="right")))
        batches.append(items[start:stop])
        start = stop
    return batches


@dataclass
class _Collated(Dataset[Any], Generic[B]):
    """What a worker process does: items by number to a batch."""

    data: PackedItems
    collate: Collate[B]
    seed: int
    reading: Reading | None = None

    def __getitem__(self, draw: BatchIndex) -> LoadedBatch[B]:
        rng = np.random.default_rng((self.seed, *draw.position))
        return LoadedBatch(draw, self.collate(self._items(draw.items.tolist()), rng))

    def _items(self, drawn: list[Any]) -> list[tuple[np.ndarray, ...]]:
        if self.reading is None:
            return [self.data[index] for index in drawn]
        return [self.reading.stream.pair(*span) for span in drawn]


@dataclass
class Loader(Generic[B]):
    """An endless stream of batches for one rank, from any position on."""

    data: PackedItems
    collate: Collate[B]
    budget: int
    seed: int
    rank: int = 0
    world: int = 1
    workers: int = 0
    pin: bool = False
    lengths: np.ndarray | None = None  # (sides, items) for batches that are to fit a frame
    frame: StaticShape | None = None
    reading: Reading | None = None  # where the data is one long stream: what is drawn are spans of it

    def draws(self, start: Position) -> Iterator[BatchIndex]:
        """Yield this rank's share of the one order that all ranks see: of every `world` batches, one."""
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
        """Cut the items into the batches of one epoch, those of all ranks."""
        if self.reading is not None:
            return list(self.reading.epoch(self.seed, number, self.world))
        if self.frame is None or self.lengths is None:
            return plan(self.data, self.budget, self.seed, number)
        return plan_framed(self.lengths, self.frame, self.seed, number)

    def stream(self, start: Position = Position()) -> Iterator[LoadedBatch[B]]:  # noqa: B008
        """Yield batches; worker processes, where there are any, collate ahead and hand over shared memory."""
        source = _Collated(self.data, self.collate, self.seed, self.reading)
        if self.workers == 0:
            return map(source.__getitem__, self.draws(start))
        return iter(self._ahead(source, start))

    def _ahead(self, source: "_Collated[B]", start: Position) -> "DataLoader[LoadedBatch[B]]":
        return DataLoader(
            source,
            sampler=_Endless(self.draws(start)),
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=4,
            worker_init_fn=_heed_no_signal,
            generator=torch.Generator(),  # or it would draw from the one that dropout draws from
            pin_memory=self.pin,
        )


def _heed_no_signal(_: int) -> None:
    """A terminal sends Ctrl-C to the workers too; when to stop is for the trainer to say, who saves first."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class _Endless:
    """A sampler that goes on as long as it is asked."""

    def __init__(self, draws: Iterator[BatchIndex]) -> None:
        self._draws = draws

    def __iter__(self) -> Iterator[BatchIndex]:
        return self._draws
