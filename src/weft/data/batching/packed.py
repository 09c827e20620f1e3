"""Encoded items as one long memory-mapped array: read with no copy, shared by worker processes, never padded.

An item is a tuple of integer sequences. All sequences of all items lie end to end in `ids`; `starts` says where each
begins, `items` which sequence each item begins with.

Ids are int32, or uint16 where they were prepared before (`weft.data.corpus.format`) and fit.
"""

import hashlib
import tempfile
from array import array
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np


def content_keys(ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return a hash (n,) of each sequence, which begins at starts[i] and ends before starts[i + 1].

    Sequences of one length that are sorted by it stand in the same order however they were given: so they make the same
    batches, and batches the same numbers to the last bit.
    """
    position = np.arange(len(ids)) - np.repeat(starts[:-1], np.diff(starts))
    mixed = ids.astype(np.uint64) + (position + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed * np.uint64(0x94D049BB133111EB))])
    keys: np.ndarray = sums[starts[1:]] - sums[starts[:-1]]
    return keys


class PackedItems:
    """Items by number."""

    def __init__(
        self, ids: np.ndarray, starts: np.ndarray, items: np.ndarray, digest: str, num_token_arrays: int | None = None
    ) -> None:
        self.ids, self.starts, self.items = ids, starts, items
        self.digest = digest  # of the content: two data sets with the same digest train alike
        self.num_token_arrays = num_token_arrays

    @cached_property
    def sizes(self) -> np.ndarray:
        """The tokens (n,) of each item, all its sequences that count together."""
        first, ends = self.items[:-1], self.items[1:]
        counted = ends if self.num_token_arrays is None else np.minimum(first + self.num_token_arrays, ends)
        found: np.ndarray = self.starts[counted] - self.starts[first]
        return found

    @cached_property
    def shapes(self) -> np.ndarray:
        """The lengths (2, n) by which like goes with like in a batch: of the first sequence, then of the last."""
        if not len(self):
            return np.zeros((2, 0), int)
        first, last = self.items[:-1], self.items[1:] - 1
        return np.stack([self.starts[one + 1] - self.starts[one] for one in (last, first)])

    @cached_property
    def keys(self) -> np.ndarray:
        """A hash (n,) of what each item holds."""
        return content_keys(self.ids, self.starts[self.items])

    def __len__(self) -> int:
        return len(self.items) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        first, last = int(self.items[index]), int(self.items[index + 1])
        cuts = self.starts[first : last + 1].tolist()
        return tuple(self.ids[a:b] for a, b in pairwise(cuts))


def pack(
    items: Iterable[tuple[np.ndarray, ...]],
    folder: Path | None = None,
    at_once: int = 1 << 18,
    num_token_arrays: int | None = None,
) -> PackedItems:
    """Write a stream of items to an unnamed file in `folder`, and map it; memory holds lengths and `at_once` tokens.

    The first `counted` sequences of an item make its size (None: all); what follows them, such as labels, is no token.
    """
    starts, bounds, digest = array("q", [0]), array("q", [0]), hashlib.sha256()
    with tempfile.TemporaryFile(dir=folder) as file:
        chunk: list[np.ndarray] = []
        held = 0
        for item in items:
            chunk.extend(item)
            bounds.append(bounds[-1] + len(item))
            held += sum(map(len, item))
            if held >= at_once:
                _flush(chunk, starts, file, digest)
                held = 0
        _flush(chunk, starts, file, digest)
        file.flush()
        # The mapping outlives the name and the handle: the space is freed when the last process lets go.
        ids = np.memmap(file, np.int32, "r", shape=(starts[-1],)) if starts[-1] else np.zeros(0, np.int32)
    for lengths in (starts, bounds):
        digest.update(lengths.tobytes())
    return PackedItems(
        ids.view(np.ndarray), np.asarray(starts), np.asarray(bounds), digest.hexdigest(), num_token_arrays
    )


def _flush(chunk: list[np.ndarray], starts: "array[int]", file: IO[bytes], digest: "hashlib._Hash") -> None:
    if not chunk:
        return
    flat = np.concatenate(chunk).astype(np.int32, copy=False)
    ends = starts[-1] + np.cumsum(np.fromiter(map(len, chunk), np.int64, len(chunk)))
    starts.frombytes(ends.tobytes())
    digest.update(flat.data)
    file.write(flat.data)
    chunk.clear()
