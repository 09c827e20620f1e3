"""A corpus as one long text, and how a language model reads it.

The documents of a corpus lie end to end, each after its sign of beginning: bos a b c bos d e. What follows a token is
the next one, and where that is a bos, the end of the document: eos. So a span of the stream is read with no copy and
no padding, and no token is lost to a separator:

    read       bos a b c   bos d e
    follows    a   b c eos d   e eos

`Packs` cuts the stream into windows, each a sequence of its own, drawn in another order and from another place on in
each epoch. `Streams` lets the model read on: the stream is cut into as many long pieces as a batch has rows, and row s
of a batch goes on where row s of the batch before it ended (truncated back-propagation through time).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from weft.data.batching.static_shape import StaticShape

Spans = np.ndarray  # (rows, 2): where each sequence of a batch begins in the stream and ends; of pairs, (rows, 5)
Pair = tuple[np.ndarray, np.ndarray]  # what is read, and what follows each token of it


@dataclass(frozen=True)
class Stream:
    """All documents, end to end."""

    ids: np.ndarray  # (N,) memory-mapped
    bos: int
    eos: int

    def __len__(self) -> int:
        return len(self.ids)

    def pair(self, start: int, stop: int) -> Pair:
        """Read a span."""
        follows = self.ids[start + 1 : stop + 1]
        if stop == len(self):
            follows = np.append(follows, np.array([self.bos], self.ids.dtype))
        return self.ids[start:stop], np.where(follows == self.bos, self.eos, follows)


class Readable(Protocol):
    """What gives the item of a span."""

    @property
    def pair(self) -> Callable[..., tuple[np.ndarray, ...]]:
        """Read a span, given by its numbers."""
        ...


class Reading(Protocol):
    """A way to read a stream, batch by batch."""

    @property
    def stream(self) -> Readable:
        """What is read."""
        ...

    @property
    def frame(self) -> StaticShape | None:
        """The shape of all batches, if they have one."""
        ...

    def epoch(self, seed: int, number: int, world: int) -> Sequence[Spans]:
        """Say what the batches of one epoch read; of every `world` of them each process has one."""
        ...


@dataclass(frozen=True)
class Packs:
    """Windows of `width` tokens, `rows` to a batch: all batches have one shape."""

    stream: Stream
    width: int
    rows: int

    @classmethod
    def of(cls, stream: Stream, longest: int, tokens: int) -> "Packs":
        """Fill batches of so many tokens, with windows of `longest` or, of a short stream, of all that there is."""
        width = min(longest, len(stream))
        return cls(stream, width, max(1, min(tokens // width, len(stream) // width)))

    @property
    def frame(self) -> StaticShape | None:
        """What all batches have: no filler."""
        return StaticShape((self.rows * self.width,), (self.width,), self.rows, 0)

    def epoch(self, seed: int, number: int, world: int) -> Sequence[Spans]:
        """Cut from a random place on, and shuffle. What is left over at the ends has its turn in another epoch."""
        rng = np.random.default_rng((seed, number))
        whole = len(self.stream) // self.width // self.rows * self.rows * self.width  # of as many batches as there are
        first = int(rng.integers(len(self.stream) - whole + 1))
        starts = rng.permutation(np.arange(first, first + whole, self.width))
        return list(np.stack([starts, starts + self.width], -1).reshape(-1, self.rows, 2))


@dataclass(frozen=True)
class Streams:
    """Pieces of up to `bptt` tokens, which go on from batch to batch in `rows` rows."""

    stream: Stream
    bptt: int
    rows: int

    @classmethod
    def of(cls, stream: Stream, bptt: int, tokens: int, world: int) -> "Streams":
        """Let a batch be of so many tokens in each process, or fewer where the stream is short."""
        rows = max(1, min(tokens // bptt, len(stream) // (2 * world)))
        return cls(stream, bptt, rows)

    @property
    def frame(self) -> StaticShape | None:
        """None: the first piece of an epoch is of another length, so that cuts fall elsewhere each time."""
        return None

    def epoch(self, seed: int, number: int, world: int) -> Sequence[Spans]:
        """Let each process read on in rows of its own: it has every `world`-th batch."""
        each = len(self.stream) // (self.rows * world)  # tokens of a row
        firsts = np.arange(self.rows * world) * each
        phase = int(np.random.default_rng((seed, number)).integers(1, self.bptt + 1))
        cuts = [0, *range(min(phase, each), each, self.bptt), each]
        spans = [np.stack([firsts + a, firsts + b], -1) for a, b in pairwise(cuts) if a < b]
        return [part for whole in spans for part in np.split(whole, world)]
