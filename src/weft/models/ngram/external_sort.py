"""External merge sort of n-gram windows: sorted runs with counts, and their k-way merge.

A window is the n words from one position on, cut at its document's end. A run, the distinct windows of a part of the
corpus with their counts, is sorted one word at a time: with r_k(t) the rank of the k words from position t on, the keys

    r_{k-1}(t) · w(t + k - 1) · t        concatenated in one 64-bit integer, the position last

give, sorted as integers, the next ranks. Threads divide the windows by their first words, so that their parts of a run
need no merging.
"""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from weft.jit import Array, jit_compile

_T = TypeVar("_T")


def word_type(vocab: int) -> type[np.unsignedinteger[Any]]:
    """Return the smallest unsigned type that holds ids 0 to `vocab`: a word's id and 1."""
    return np.uint16 if vocab < 2**16 else np.uint32


def run_threads(parts: int, work: Callable[[int], _T]) -> list[_T]:
    """Return work(0) to work(parts - 1), each computed in a thread."""
    if parts == 1:
        return [work(0)]
    with ThreadPoolExecutor(parts) as pool:
        return list(pool.map(work, range(parts)))


@dataclass(frozen=True)
class Allocator:
    """Allocates arrays in memory, or, where `mapped`, as memory-mapped unnamed files in a folder."""

    mapped: bool = False
    folder: Path | None = None

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """Return an uninitialised array."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if not self.mapped or not size:
            return np.empty(shape, dtype)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            if hasattr(os, "posix_fallocate"):  # a full disk raises now, not as SIGBUS later
                os.posix_fallocate(file.fileno(), 0, size)
            return np.memmap(file, dtype, "w+", shape=shape).view(np.ndarray)


class SortedWindows(NamedTuple):
    """Distinct windows in lexicographic order with their counts; a word is stored as id + 1, and 0 is padding."""

    words: Array  # (M, n)
    counts: Array  # (M,)


@dataclass(frozen=True)
class NGramCorpus:
    """Concatenated documents, each starting with bos; the eos that ends each is not in the ids."""

    ids: Array  # (N,)
    starts: Array  # (documents + 1,)
    eos: int
    vocab: int

    def sorted_run(self, start: int, stop: int, order: int, threads: int) -> SortedWindows:
        """Return the sorted windows, with counts, that begin at ids[start:stop]."""
        text, size = self._padded_text(start, stop, order)
        lengths, firsts = _window_lengths(text, order), text[:size]
        cumulative = np.bincount(firsts, minlength=self.vocab + 2)[1:].cumsum()  # windows up to each first word
        cuts = [1 + int(np.searchsorted(cumulative, cumulative[-1] * part // threads)) for part in range(threads)]
        cuts = [1, *cuts[1:], self.vocab + 2]

        def sort(part: int) -> SortedWindows:
            positions = np.flatnonzero((cuts[part] <= firsts) & (firsts < cuts[part + 1]))
            return sorted_windows(text, lengths, positions, order, self.vocab)

        parts = run_threads(threads, sort)
        return SortedWindows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _padded_text(self, start: int, stop: int, order: int) -> tuple[Array, int]:
        """Return the words of all windows as id + 1, with eos and 0 after each document, and where the next run begins.

        The text goes past `stop` by the words that the last windows need.
        """
        last = min(stop + order - 1, len(self.ids))
        ends = self.starts[1:]
        ends = np.unique(ends[np.searchsorted(ends, start, "right") : np.searchsorted(ends, last, "right")])
        eos_positions = ends - start + 2 * np.arange(len(ends))
        text = np.zeros(last - start + 2 * len(ends) + 1, np.uint32)
        inside = np.ones(len(text), bool)
        inside[eos_positions] = inside[eos_positions + 1] = inside[-1] = False
        text[inside] = self.ids[start:last]
        text[inside] += 1
        text[eos_positions] = self.eos + 1
        return text, stop - start + 2 * int((ends <= stop).sum())

    def run_bounds(self, at_once: int) -> list[tuple[int, int]]:
        """Return the bounds of runs of `at_once` words, or fewer where a key's bits would not hold their positions."""
        size = min(at_once, 1 << ((61 - self.vocab.bit_length()) // 2))
        return [(start, min(start + size, len(self.ids))) for start in range(0, len(self.ids), size)]


def sorted_windows(text: Array, lengths: Array, positions: Array, order: int, vocab: int) -> SortedWindows:
    """Return the distinct windows that begin at `positions`, sorted, with their counts."""
    word_bits, index_bits = (vocab + 1).bit_length(), len(positions).bit_length()
    ranks = text[positions].astype(np.uint64) if order > 1 else np.zeros(len(positions), np.uint64)
    keys = np.empty(len(positions), np.uint64)
    for length in range(min(2, order), order + 1):
        _make_keys(positions, ranks, text, lengths, length, word_bits, index_bits, keys)
        keys.sort()
        if length < order:
            _rank(keys, index_bits, ranks)
    words, counts = np.empty((len(positions), order), word_type(vocab)), np.empty(len(positions), np.uint32)
    size = _collect(keys, index_bits, positions, text, lengths, words, counts)
    return SortedWindows(words[:size], counts[:size])


def merge_runs(words: Array, counts: Array, offsets: list[int], allocator: Allocator) -> SortedWindows:
    """Return the merge of concatenated runs, each from one of the offsets to the next."""
    merged = SortedWindows(allocator.empty(words.shape, words.dtype), allocator.empty(len(counts), np.int64))
    size = _merge(words, counts, np.array(offsets), *merged)
    return SortedWindows(merged.words[:size], merged.counts[:size])


@jit_compile
def _window_lengths(text: Array, order: int) -> Array:
    """Return the number of words of the window at each position: n, or fewer at a document's end."""
    lengths = np.zeros(len(text), np.uint8)
    for position in range(len(text) - 2, -1, -1):
        if text[position]:
            lengths[position] = min(order, lengths[position + 1] + 1)
    return lengths


@jit_compile
def _make_keys(
    positions: Array,
    ranks: Array,
    text: Array,
    lengths: Array,
    length: int,
    word_bits: int,
    index_bits: int,
    keys: Array,
) -> None:
    for index in range(len(positions)):
        position = positions[index]
        word = np.uint64(text[position + length - 1]) if length <= lengths[position] else np.uint64(0)
        keys[index] = (((ranks[index] << np.uint64(word_bits)) | word) << np.uint64(index_bits)) | np.uint64(index)


@jit_compile
def _rank(keys: Array, index_bits: int, ranks: Array) -> None:
    """Write the rank of each window, equal ones alike; the last bits of a key are the window's index."""
    rank, shift, mask = np.uint64(0), np.uint64(index_bits), (np.uint64(1) << np.uint64(index_bits)) - np.uint64(1)
    for number in range(len(keys)):
        if number and keys[number] >> shift != keys[number - 1] >> shift:
            rank += np.uint64(1)
        ranks[keys[number] & mask] = rank


@jit_compile
def _collect(
    keys: Array, index_bits: int, positions: Array, text: Array, lengths: Array, words: Array, counts: Array
) -> int:
    """Write the distinct windows and their counts; return how many there are."""
    shift, mask = np.uint64(index_bits), (np.uint64(1) << np.uint64(index_bits)) - np.uint64(1)
    size = 0
    for number in range(len(keys)):
        if number and keys[number] >> shift == keys[number - 1] >> shift:
            counts[size - 1] += 1
            continue
        position = positions[keys[number] & mask]
        for word in range(words.shape[1]):
            words[size, word] = text[position + word] if word < lengths[position] else 0
        counts[size] = 1
        size += 1
    return size


@jit_compile
def common_prefix(words: Array, a: int, b: int) -> int:
    """Return the number of words in the common prefix of two windows."""
    same = 0
    while same < words.shape[1] and words[a, same] == words[b, same]:
        same += 1
    return same


@jit_compile
def _less(words: Array, a: int, b: int) -> bool:
    same = common_prefix(words, a, b)
    return bool(same < words.shape[1] and words[a, same] < words[b, same])


@jit_compile
def _merge(words: Array, counts: Array, offsets: Array, merged: Array, sums: Array) -> int:
    """Merge runs with a binary heap; `rows` is the next window of each run. Return the number of distinct windows."""
    rows = offsets[:-1].copy()
    heap = np.flatnonzero(offsets[1:] > offsets[:-1])
    size, active = 0, len(heap)
    for parent in range(active // 2 - 1, -1, -1):
        _sift_down(heap, active, parent, words, rows)
    while active:
        run = heap[0]
        if size and (merged[size - 1] == words[rows[run]]).all():
            sums[size - 1] += counts[rows[run]]
        else:
            merged[size], sums[size] = words[rows[run]], counts[rows[run]]
            size += 1
        rows[run] += 1
        if rows[run] == offsets[run + 1]:
            active -= 1
            heap[0] = heap[active]
        _sift_down(heap, active, 0, words, rows)
    return size


@jit_compile
def _sift_down(heap: Array, size: int, parent: int, words: Array, rows: Array) -> None:
    while 2 * parent + 1 < size:
        child = 2 * parent + 1
        if child + 1 < size and _less(words, rows[heap[child + 1]], rows[heap[child]]):
            child += 1
        if not _less(words, rows[heap[child]], rows[heap[parent]]):
            return
        heap[parent], heap[child] = heap[child], heap[parent]
        parent = child
