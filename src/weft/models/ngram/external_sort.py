"""Sorted runs: the windows of a piece of a corpus, each once, in order, with its count; and many runs merged to one.

A window is the n words from one place on, cut at its document's end. A run is sorted word by word: with r_k(t) the rank
of the k words from place t on among all such, the keys

    r_{k-1}(t) · w(t + k - 1) · t        in one 64-bit number, the place last

give, sorted as plain numbers, the next ranks. Threads share the first words of windows among them, so that their parts
of a run need no merging.
"""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]
T = TypeVar("T")


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a loop, once for all processes; where nothing can be written, for this one."""
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # there is no folder for it
        return njit(nogil=True, error_model="numpy")(function)


def word_type(vocab: int) -> type[np.unsignedinteger[Any]]:
    """Return the smallest type that holds a word, and one more."""
    return np.uint16 if vocab < 2**16 else np.uint32


def share(parts: int, work: Callable[[int], T]) -> list[T]:
    """Do the parts of some work side by side."""
    if parts == 1:
        return [work(0)]
    with ThreadPoolExecutor(parts) as pool:
        return list(pool.map(work, range(parts)))


@dataclass(frozen=True)
class Room:
    """Where arrays lie: in memory, or in unnamed files of a folder, mapped."""

    mapped: bool = False
    folder: Path | None = None

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Array:
        """Make an array."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if not self.mapped or not size:
            return np.empty(shape, dtype)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            if hasattr(os, "posix_fallocate"):  # a disk that is full says so now, and not by a fault later
                os.posix_fallocate(file.fileno(), 0, size)
            return np.memmap(file, dtype, "w+", shape=shape).view(np.ndarray)


class Windows(NamedTuple):
    """Distinct windows in order, and how often each is there; a word is its id and 1, and 0 is past the end."""

    words: Array  # (M, n)
    counts: Array  # (M,)


@dataclass(frozen=True)
class Corpus:
    """Documents end to end, each after bos; the eos that ends each is not in the ids."""

    ids: Array  # (N,)
    starts: Array  # (documents + 1,)
    eos: int
    vocab: int

    def run(self, start: int, stop: int, order: int, threads: int) -> Windows:
        """Sort and count the windows that begin from one place to another."""
        text, own = self._lay(start, stop, order)
        reach = _reach(text, order)
        passed = np.bincount(text[:own], minlength=self.vocab + 2)[1:].cumsum()  # places with a word up to each
        cuts = [1 + int(np.searchsorted(passed, passed[-1] * part // threads)) for part in range(threads)]
        cuts = [1, *cuts[1:], self.vocab + 2]

        def sort(part: int) -> Windows:
            firsts = text[:own]
            places = np.flatnonzero((cuts[part] <= firsts) & (firsts < cuts[part + 1]))
            return sorted_windows(text, reach, places, order, self.vocab)

        parts = share(threads, sort)
        return Windows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _lay(self, start: int, stop: int, order: int) -> tuple[Array, int]:
        """Lay out the words that windows reach, as w + 1, with 0 after each end; say where the next run's begin."""
        ahead = min(stop + order - 1, len(self.ids))
        ends = self.starts[1:]
        ends = np.unique(ends[np.searchsorted(ends, start, "right") : np.searchsorted(ends, ahead, "right")])
        closing = ends - start + 2 * np.arange(len(ends))
        text = np.zeros(ahead - start + 2 * len(ends) + 1, np.uint32)
        inside = np.ones(len(text), bool)
        inside[closing] = inside[closing + 1] = inside[-1] = False
        text[inside] = self.ids[start:ahead]
        text[inside] += 1
        text[closing] = self.eos + 1
        return text, stop - start + 2 * int((ends <= stop).sum())

    def pieces(self, at_once: int) -> list[tuple[int, int]]:
        """Cut into runs: of so many words, or fewer where a key would not hold their places."""
        size = min(at_once, 1 << ((61 - self.vocab.bit_length()) // 2))
        return [(start, min(start + size, len(self.ids))) for start in range(0, len(self.ids), size)]


def sorted_windows(text: Array, reach: Array, places: Array, order: int, vocab: int) -> Windows:
    """Sort the windows that begin at `places`, and count equal ones."""
    bits, low = (vocab + 1).bit_length(), len(places).bit_length()
    ranks = text[places].astype(np.uint64) if order > 1 else np.zeros(len(places), np.uint64)
    keys = np.empty(len(places), np.uint64)
    for length in range(min(2, order), order + 1):
        _make_keys(places, ranks, text, reach, length, bits, low, keys)
        keys.sort()
        if length < order:
            _rank(keys, low, ranks)
    words, counts = np.empty((len(places), order), word_type(vocab)), np.empty(len(places), np.uint32)
    size = _collect(keys, low, places, text, reach, words, counts)
    return Windows(words[:size], counts[:size])


def merge(words: Array, counts: Array, bounds: list[int], room: Room) -> Windows:
    """Merge runs that lie end to end, from one of the bounds to the next."""
    merged = Windows(room.empty(words.shape, words.dtype), room.empty(len(counts), np.int64))
    size = _merge(words, counts, np.array(bounds), *merged)
    return Windows(merged.words[:size], merged.counts[:size])


@compiled
def _reach(text: Array, order: int) -> Array:
    """Say how many words a window has from each place on."""
    reach = np.zeros(len(text), np.uint8)
    for place in range(len(text) - 2, -1, -1):
        if text[place]:
            reach[place] = min(order, reach[place + 1] + 1)
    return reach


@compiled
def _make_keys(
    places: Array, ranks: Array, text: Array, reach: Array, length: int, bits: int, low: int, keys: Array
) -> None:
    for number in range(len(places)):
        place = places[number]
        word = np.uint64(text[place + length - 1]) if length <= reach[place] else np.uint64(0)
        keys[number] = (((ranks[number] << np.uint64(bits)) | word) << np.uint64(low)) | np.uint64(number)


@compiled
def _rank(keys: Array, low: int, ranks: Array) -> None:
    """Number the keys in order, equal ones alike, their last bits aside, which say whose they are."""
    rank, shift, mask = np.uint64(0), np.uint64(low), (np.uint64(1) << np.uint64(low)) - np.uint64(1)
    for number in range(len(keys)):
        if number and keys[number] >> shift != keys[number - 1] >> shift:
            rank += np.uint64(1)
        ranks[keys[number] & mask] = rank


@compiled
def _collect(keys: Array, low: int, places: Array, text: Array, reach: Array, words: Array, counts: Array) -> int:
    shift, mask = np.uint64(low), (np.uint64(1) << np.uint64(low)) - np.uint64(1)
    size = 0
    for number in range(len(keys)):
        if number and keys[number] >> shift == keys[number - 1] >> shift:
            counts[size - 1] += 1
            continue
        place = places[keys[number] & mask]
        for word in range(words.shape[1]):
            words[size, word] = text[place + word] if word < reach[place] else 0
        counts[size] = 1
        size += 1
    return size


@compiled
def shared(words: Array, a: int, b: int) -> int:
    """Count the words that two windows begin with alike."""
    same = 0
    while same < words.shape[1] and words[a, same] == words[b, same]:
        same += 1
    return same


@compiled
def _before(words: Array, a: int, b: int) -> bool:
    same = shared(words, a, b)
    return bool(same < words.shape[1] and words[a, same] < words[b, same])


@compiled
def _merge(words: Array, counts: Array, bounds: Array, merged: Array, sums: Array) -> int:
    """Take the least window of all runs again and again; the heap holds where each run stands."""
    at = bounds[:-1].copy()
    heap = np.flatnonzero(bounds[1:] > bounds[:-1])
    size, left = 0, len(heap)
    for top in range(left // 2 - 1, -1, -1):
        _sink(heap, left, top, words, at)
    while left:
        run = heap[0]
        if size and (merged[size - 1] == words[at[run]]).all():
            sums[size - 1] += counts[at[run]]
        else:
            merged[size], sums[size] = words[at[run]], counts[at[run]]
            size += 1
        at[run] += 1
        if at[run] == bounds[run + 1]:
            left -= 1
            heap[0] = heap[left]
        _sink(heap, left, 0, words, at)
    return size


@compiled
def _sink(heap: Array, left: int, top: int, words: Array, at: Array) -> None:
    while 2 * top + 1 < left:
        low = 2 * top + 1
        if low + 1 < left and _before(words, at[heap[low + 1]], at[heap[low]]):
            low += 1
        if not _before(words, at[heap[low]], at[heap[top]]):
            return
        heap[top], heap[low] = heap[low], heap[top]
        top = low
