"""Words that stand between spaces, numbered in one pass over the bytes of texts: for text that is already cut.

A word is looked up by a hash of its bytes (FNV-1a), and its bytes are compared. That gives what cutting at `\\s+` and a
dictionary give, without making a string of each word.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]
END = b"\xff"  # stands after each text: UTF-8 has no such byte


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a loop, once for all processes; where nothing can be written, for this one."""
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # there is no folder for it
        return njit(nogil=True, error_model="numpy")(function)


class Spaces:
    """Words by number; all others are `unknown`."""

    def __init__(self, words: Mapping[str, int], unknown: int) -> None:
        spelt = [word.encode() for word in words]
        ends = np.cumsum([0, *map(len, spelt)])
        slots = np.full(1 << (2 * len(spelt) + 1).bit_length(), -1, np.int32)
        ids = np.fromiter(words.values(), np.int64, len(spelt))
        self._words = np.frombuffer(b"".join(spelt) + END, np.uint8), ends.astype(np.uint64), ids, slots
        self._unknown = unknown
        _enter(*self._words[:2], slots)

    def flat(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """Number the words of texts: the numbers end to end, (N,), and how many each text has, (B,)."""
        data = np.frombuffer(END.join([*(text.encode() for text in texts), b""]), np.uint8)
        numbers, sizes = np.empty(len(data) // 2 + 1, np.int64), np.zeros(len(texts), np.int64)
        size = _number(data, *self._words, self._unknown, numbers, sizes)
        return numbers[:size], sizes

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Number the words of each text."""
        numbers, sizes = self.flat(texts)
        ends, every = np.cumsum(sizes).tolist(), numbers.tolist()
        return [every[a:b] for a, b in zip([0, *ends], ends, strict=False)]


# Places are unsigned, for else each is asked whether it counts from the end; the mixed sum of both kinds is a float.
_ONE, _BASIS, _PRIME, _HIGH = np.uint64(1), np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3), np.uint64(32)


@compiled
def _enter(pool: Array, ends: Array, slots: Array) -> None:
    """Put words into the table of their hashes."""
    mask = np.uint64(len(slots) - 1)
    for word in range(len(ends) - 1):
        found = _BASIS
        for place in range(ends[word], ends[word + 1]):
            found = (found ^ np.uint64(pool[place])) * _PRIME
        slot = (found ^ (found >> _HIGH)) & mask
        while slots[slot] >= 0:
            slot = (slot + _ONE) & mask
        slots[slot] = word


@compiled
def _white(data: Array, place: int) -> int:
    """Say how many bytes of white space, as Unicode has it, begin here: 0 if none does."""
    byte = data[place]
    if byte < 0x80:
        return 1 if byte == 0x20 or 0x09 <= byte <= 0x0D else 0
    if byte == 0xC2:
        return 2 if data[place + 1] == 0x85 or data[place + 1] == 0xA0 else 0
    if byte < 0xE1 or byte > 0xE3:
        return 0
    code = (np.int64(data[place + 1]) << 8) | np.int64(data[place + 2])
    if byte == 0xE1:
        return 3 if code == 0x9A80 else 0
    if byte == 0xE3:
        return 3 if code == 0x8080 else 0
    return 3 if 0x8080 <= code <= 0x808A or code in (0x80A8, 0x80A9, 0x80AF, 0x819F) else 0


@compiled
def _same(pool: Array, begin: np.uint64, data: Array, start: np.uint64, size: np.uint64) -> bool:
    place = np.uint64(0)
    while place < size and pool[begin + place] == data[start + place]:
        place += _ONE
    return bool(place == size)


@compiled
def _number(
    data: Array, pool: Array, ends: Array, ids: Array, slots: Array, unknown: int, numbers: Array, sizes: Array
) -> int:
    mask, place, stop, text, size, begun = np.uint64(len(slots) - 1), np.uint64(0), np.uint64(len(data)), 0, 0, 0
    while place < stop:
        byte = data[place]
        if byte == 0x20:
            place += _ONE
            continue
        if byte == 0xFF:
            sizes[text] = size - begun
            place, text, begun = place + _ONE, text + 1, size
            continue
        if byte <= 0x20 or byte >= 0xC2:  # all others are in words, and most are
            white = _white(data, np.int64(place))
            if white:
                place += np.uint64(white)
                continue
        start, found = place, _BASIS
        while byte != 0xFF:
            if (byte <= 0x20 or byte >= 0xC2) and _white(data, np.int64(place)):
                break
            found = (found ^ np.uint64(byte)) * _PRIME
            place += _ONE
            byte = data[place]
        slot = (found ^ (found >> _HIGH)) & mask
        numbers[size] = unknown
        while slots[slot] >= 0:
            word = slots[slot]
            begin = ends[word]
            if ends[word + 1] - begin == place - start and _same(pool, begin, data, start, place - start):
                numbers[size] = ids[word]
                break
            slot = (slot + _ONE) & mask
        size += 1
    return size
