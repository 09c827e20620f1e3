"""Language-model batches from a corpus as one token stream: shuffled windows, or truncated BPTT.

The documents are concatenated, each after its bos: bos a b c bos d e. The target of a token is the next token, or eos
where that is a bos. So a span of the stream needs no copy and no padding, and no token is spent on a separator:

    inputs     bos a b c   bos d e
    targets    a   b c eos d   e eos

`LMWindows` cuts the stream into windows, which are independent sequences, with another order and another offset in each
epoch. `BPTTSegments` is for truncated back-propagation through time: the stream is cut into as many long segments as a
batch has rows, and row s of a batch continues row s of the previous batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from weft.data.batching.static_shape import StaticShape

Spans = np.ndarray  # (rows, 2): start and stop of each sequence of a batch in the stream; (rows, 5) for pairs


@dataclass(frozen=True)
class TokenStream:
    """All documents, concatenated."""

    ids: np.ndarray  # (N,) memory-mapped
    bos: int
    eos: int

    def __len__(self) -> int:
        return len(self.ids)

    def item(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs (n,) of a span, and the target of each (n,)."""
        targets = self.ids[start + 1 : stop + 1]
        if stop == len(self):
            targets = np.append(targets, np.array([self.bos], self.ids.dtype))
        return self.ids[start:stop], np.where(targets == self.bos, self.eos, targets)


class SpanSource(Protocol):
    """A source of items, indexed by spans."""

    @property
    def item(self) -> Callable[..., tuple[np.ndarray, ...]]:
        """Return the item of a span, given by its positions."""
        ...


class SpanSampler(Protocol):
    """A sampler of spans of a stream, batch by batch."""

    @property
    def stream(self) -> SpanSource:
        """The source of the items."""
        ...

    @property
    def static_shape(self) -> StaticShape | None:
        """The static shape of all batches, if they have one."""
        ...

    def epoch(self, seed: int, number: int, streams: int) -> Sequence[Spans]:
        """Return the spans of the batches of one epoch; an update takes `streams` of them."""
        ...


@dataclass(frozen=True)
class LMWindows:
    """Windows of `width` tokens, `rows` per batch: all batches have the same shape."""

    stream: TokenStream
    width: int
    rows: int

    @classmethod
    def of(cls, stream: TokenStream, longest: int, tokens: int) -> "LMWindows":
        """Return windows of `longest` tokens, or of a whole short stream, in batches of `tokens` tokens."""
        width = min(longest, len(stream))
        return cls(stream, width, max(1, min(tokens // width, len(stream) // width)))

    @property
    def static_shape(self) -> StaticShape | None:
        """The shape of all batches, without filler."""
        return StaticShape((self.rows * self.width,), (self.width,), self.rows, 0)

    def epoch(self, seed: int, number: int, streams: int) -> Sequence[Spans]:
        """Return windows from a random offset on, shuffled. The tokens left out at both ends differ between epochs."""
        rng = np.random.default_rng((seed, number))
        used = len(self.stream) // self.width // self.rows * self.rows * self.width  # tokens of all full batches
        offset = int(rng.integers(len(self.stream) - used + 1))
        starts = rng.permutation(np.arange(offset, offset + used, self.width))
        return list(np.stack([starts, starts + self.width], -1).reshape(-1, self.rows, 2))


@dataclass(frozen=True)
class BPTTSegments:
    """Segments of up to `bptt` tokens, which continue from batch to batch in `rows` rows."""

    stream: TokenStream
    bptt: int
    rows: int

    @classmethod
    def of(cls, stream: TokenStream, bptt: int, tokens: int, streams: int) -> "BPTTSegments":
        """Return a sampler with batches of `tokens` tokens, `streams` for an update; fewer if the corpus is short."""
        rows = max(1, min(tokens // bptt, len(stream) // (2 * streams)))
        return cls(stream, bptt, rows)

    @property
    def static_shape(self) -> StaticShape | None:
        """None: the first segment of an epoch has a random length, so that the cuts differ between epochs."""
        return None

    def epoch(self, seed: int, number: int, streams: int) -> Sequence[Spans]:
        """Return the spans of one epoch; every `streams`-th batch continues the same rows."""
        row_size = len(self.stream) // (self.rows * streams)  # tokens per row
        row_starts = np.arange(self.rows * streams) * row_size
        first_size = int(np.random.default_rng((seed, number)).integers(1, self.bptt + 1))
        cuts = [0, *range(min(first_size, row_size), row_size, self.bptt), row_size]
        spans = [np.stack([row_starts + a, row_starts + b], -1) for a, b in pairwise(cuts) if a < b]
        return [part for batch in spans for part in np.split(batch, streams)]
