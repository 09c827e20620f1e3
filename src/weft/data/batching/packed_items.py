"""Encoded items packed in one memory-mapped array: zero-copy, shared by worker processes, never padded.

An item is a tuple of integer sequences. `ids` holds all sequences of all items, concatenated; `starts` is the start of
each sequence in `ids`, and `items` the index of the first sequence of each item.

Ids are int32, or uint16 in a prepared corpus (`weft.data.corpus.format`) where they fit.
"""

import hashlib
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np


def content_keys(ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return a hash (n,) of each sequence ids[starts[i] : starts[i + 1]].

    As a sort key it orders sequences of equal length independently of their input order: so the batches are the same,
    and results are equal to the last bit.
    """
    position = np.arange(len(ids)) - np.repeat(starts[:-1], np.diff(starts))
    hashed = ids.astype(np.uint64) + (position + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    hashed *= np.uint64(0xBF58476D1CE4E5B9)
    hashed ^= hashed >> np.uint64(31)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashed * np.uint64(0x94D049BB133111EB))])
    keys: np.ndarray = sums[starts[1:]] - sums[starts[:-1]]
    return keys


class PackedItems:
    """A sequence of items in packed arrays."""

    def __init__(
        self, ids: np.ndarray, starts: np.ndarray, items: np.ndarray, digest: str, num_token_arrays: int | None = None
    ) -> None:
        self.ids, self.starts, self.items = ids, starts, items
        self.digest = digest  # of the content: data sets with equal digests give the same training run
        self.num_token_arrays = num_token_arrays

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of tokens (n,) of each item, over its first `num_token_arrays` sequences."""
        firsts, ends = self.items[:-1], self.items[1:]
        stops = ends if self.num_token_arrays is None else np.minimum(firsts + self.num_token_arrays, ends)
        sizes: np.ndarray = self.starts[stops] - self.starts[firsts]
        return sizes

    @cached_property
    def shapes(self) -> np.ndarray:
        """The lengths (2, n) for bucketing, keys of np.lexsort: of the last sequence, then of the first (primary)."""
        if not len(self):
            return np.zeros((2, 0), int)
        first, last = self.items[:-1], self.items[1:] - 1
        return np.stack([self.starts[index + 1] - self.starts[index] for index in (last, first)])

    @cached_property
    def keys(self) -> np.ndarray:
        """A hash (n,) of the content of each item."""
        return content_keys(self.ids, self.starts[self.items])

    def __len__(self) -> int:
        return len(self.items) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        first, last = int(self.items[index]), int(self.items[index + 1])
        cuts = self.starts[first : last + 1].tolist()
        return tuple(self.ids[a:b] for a, b in pairwise(cuts))


class GroupedItems(PackedItems):
    """The items of several tasks, one task after the other; an item ends with the number of its task.

    There are no arrays of all items: `parts` has those of each task.
    """

    def __init__(self, parts: Sequence[PackedItems]) -> None:
        self.parts = parts
        self.digest = hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest()
        self.firsts = np.cumsum([0, *map(len, parts)])  # the index of each task's first item, and the end

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of tokens (n,) of each item."""
        return np.concatenate([part.sizes for part in self.parts])

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        number = int(np.searchsorted(self.firsts, index, side="right")) - 1
        return (*self.parts[number][index - int(self.firsts[number])], np.array([number]))


def pack(
    items: Iterable[tuple[np.ndarray, ...]],
    folder: Path | None = None,
    at_once: int = 1 << 18,
    num_token_arrays: int | None = None,
) -> PackedItems:
    """Write a stream of items to an unnamed file in `folder` and map it; memory holds lengths and `at_once` tokens.

    The first `num_token_arrays` sequences of an item make up its size (None: all); the others, such as labels, are not
    tokens.
    """
    starts, bounds, digest = array("q", [0]), array("q", [0]), hashlib.sha256()
    with tempfile.TemporaryFile(dir=folder) as file:
        chunk: list[np.ndarray] = []
        buffered = 0
        for item in items:
            chunk.extend(item)
            bounds.append(bounds[-1] + len(item))
            buffered += sum(map(len, item))
            if buffered >= at_once:
                _flush(chunk, starts, file, digest)
                buffered = 0
        _flush(chunk, starts, file, digest)
        file.flush()
        # The mapping outlives the file name and handle: the space is freed when the last process unmaps it.
        ids = np.memmap(file, np.int32, "r", shape=(starts[-1],)) if starts[-1] else np.zeros(0, np.int32)
    for lengths in (starts, bounds):
        digest.update(lengths.tobytes())
    return PackedItems(
        ids.view(np.ndarray), np.asarray(starts), np.asarray(bounds), digest.hexdigest(), num_token_arrays
    )


def pack_in_memory(items: Sequence[tuple[np.ndarray, ...]], num_token_arrays: int | None = None) -> PackedItems:
    """Return items packed in memory, without a digest: for a few items that are read once."""
    sequences = [sequence for item in items for sequence in item]
    ids = np.concatenate(sequences).astype(np.int32, copy=False) if sequences else np.zeros(0, np.int32)
    starts, bounds = (np.cumsum([0, *map(len, parts)], dtype=np.int64) for parts in (sequences, items))
    return PackedItems(ids, starts, bounds, "", num_token_arrays)


def _flush(chunk: list[np.ndarray], starts: "array[int]", file: IO[bytes], digest: "hashlib._Hash") -> None:
    if not chunk:
        return
    flat = np.concatenate(chunk).astype(np.int32, copy=False)
    ends = starts[-1] + np.cumsum(np.fromiter(map(len, chunk), np.int64, len(chunk)))
    starts.frombytes(ends.tobytes())
    digest.update(flat.data)
    file.write(flat.data)
    chunk.clear()
