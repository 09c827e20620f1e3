"""Whitespace tokenizer in one compiled pass over UTF-8 bytes, for text that is already tokenized.

A word is looked up in a hash table (FNV-1a, linear probing) and its bytes are compared. The ids are those of splitting
at `\\s+` and a dictionary lookup, without creating a string for each word.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from weft.jit import Array, jit_compile

_TEXT_END = b"\xff"  # terminates each text: 0xFF does not occur in UTF-8


class WordTable:
    """A word vocabulary as a hash table; words outside it get the id `unknown`."""

    def __init__(self, words: Mapping[str, int], unknown: int) -> None:
        encoded = [word.encode() for word in words]
        ends = np.cumsum([0, *map(len, encoded)])
        slots = np.full(1 << (2 * len(encoded) + 1).bit_length(), -1, np.int32)
        ids = np.fromiter(words.values(), np.int64, len(encoded))
        self._table = np.frombuffer(b"".join(encoded) + _TEXT_END, np.uint8), ends.astype(np.uint64), ids, slots
        self._unknown = unknown
        _insert_words(*self._table[:2], slots)

    def flat(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """Return the ids of the words of all texts, concatenated, (N,), and the number of words of each text, (B,)."""
        data = np.frombuffer(_TEXT_END.join([*(text.encode() for text in texts), b""]), np.uint8)
        ids, lengths = np.empty(len(data) // 2 + 1, np.int64), np.zeros(len(texts), np.int64)
        total = _lookup_words(data, *self._table, self._unknown, ids, lengths)
        return ids[:total], lengths

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of the words of each text."""
        ids, lengths = self.flat(texts)
        ends, flat_ids = np.cumsum(lengths).tolist(), ids.tolist()
        return [flat_ids[a:b] for a, b in zip([0, *ends], ends, strict=False)]


# Positions are unsigned: numba checks signed indices for negative values, and int64 + uint64 is a float.
_ONE, _BASIS, _PRIME, _HIGH = np.uint64(1), np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3), np.uint64(32)


@jit_compile
def _insert_words(pool: Array, ends: Array, slots: Array) -> None:
    """Insert words into the hash table."""
    mask = np.uint64(len(slots) - 1)
    for word in range(len(ends) - 1):
        hashed = _BASIS
        for position in range(ends[word], ends[word + 1]):
            hashed = (hashed ^ np.uint64(pool[position])) * _PRIME
        slot = (hashed ^ (hashed >> _HIGH)) & mask
        while slots[slot] >= 0:
            slot = (slot + _ONE) & mask
        slots[slot] = word


@jit_compile
def _whitespace_length(data: Array, position: int) -> int:
    """Return the length in bytes of the Unicode whitespace character at a position; 0 if there is none."""
    byte = data[position]
    if byte < 0x80:
        return 1 if byte == 0x20 or 0x09 <= byte <= 0x0D else 0
    if byte == 0xC2:
        return 2 if data[position + 1] == 0x85 or data[position + 1] == 0xA0 else 0
    if byte < 0xE1 or byte > 0xE3:
        return 0
    code = (np.int64(data[position + 1]) << 8) | np.int64(data[position + 2])
    if byte == 0xE1:
        return 3 if code == 0x9A80 else 0
    if byte == 0xE3:
        return 3 if code == 0x8080 else 0
    return 3 if 0x8080 <= code <= 0x808A or code in (0x80A8, 0x80A9, 0x80AF, 0x819F) else 0


@jit_compile
def _equal_bytes(pool: Array, begin: np.uint64, data: Array, start: np.uint64, size: np.uint64) -> bool:
    offset = np.uint64(0)
    while offset < size and pool[begin + offset] == data[start + offset]:
        offset += _ONE
    return bool(offset == size)


@jit_compile
def _lookup_words(
    data: Array, pool: Array, ends: Array, ids: Array, slots: Array, unknown: int, output: Array, lengths: Array
) -> int:
    mask, position, stop = np.uint64(len(slots) - 1), np.uint64(0), np.uint64(len(data))
    text, count, text_start = 0, 0, 0
    while position < stop:
        byte = data[position]
        if byte == 0x20:
            position += _ONE
            continue
        if byte == 0xFF:
            lengths[text] = count - text_start
            position, text, text_start = position + _ONE, text + 1, count
            continue
        if byte <= 0x20 or byte >= 0xC2:  # other bytes are never whitespace, and most are such
            skip = _whitespace_length(data, np.int64(position))
            if skip:
                position += np.uint64(skip)
                continue
        start, hashed = position, _BASIS
        while byte != 0xFF:
            if (byte <= 0x20 or byte >= 0xC2) and _whitespace_length(data, np.int64(position)):
                break
            hashed = (hashed ^ np.uint64(byte)) * _PRIME
            position += _ONE
            byte = data[position]
        slot = (hashed ^ (hashed >> _HIGH)) & mask
        output[count] = unknown
        while slots[slot] >= 0:
            word = slots[slot]
            begin = ends[word]
            if ends[word + 1] - begin == position - start and _equal_bytes(pool, begin, data, start, position - start):
                output[count] = ids[word]
                break
            slot = (slot + _ONE) & mask
        count += 1
    return count
