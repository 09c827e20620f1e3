"""SentencePiece's text normalization and a trie of its pieces, in compiled loops over UTF-8 bytes.

At each position the longest matching rule applies, from the double-array trie (Darts; Aoe 1989) in the model file.
Spaces become "▁". Pieces are matched by a byte trie, stored as a hash table from (node, byte) to the next node.
"""

from typing import Any

import numpy as np

from weft.jit import Array, jit_compile
from weft.tokenization.sentencepiece.model_file import USER

_SPACE, _METASPACE = 0x20, (0xE2, 0x96, 0x81)  # a space, and the UTF-8 bytes of "▁"


def build_piece_trie(pieces: dict[str, int]) -> tuple[Array, Array, Array]:
    """Return a byte trie: keys and values of a hash table from (node, byte) to node, and the piece id of each node."""
    encoded = [name.encode() for name in pieces]
    data, ends = np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([0, *map(len, encoded)])
    keys = np.full(1 << (2 * len(data) + 1).bit_length(), -1, np.int64)
    nodes, piece_ids = np.zeros(len(keys), np.int32), np.full(len(data) + 1, -1, np.int32)
    _insert_pieces(data, ends, np.fromiter(pieces.values(), np.int32, len(pieces)), keys, nodes, piece_ids)
    return keys, nodes, piece_ids


@jit_compile
def _slot(keys: Array, node: int, byte: int) -> Any:
    """Return the slot of (node, byte) in the hash table, or the free slot where it belongs."""
    key = np.int64(node) * 256 + byte
    hashed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    slot = np.int64(hashed >> np.uint64(32)) & (len(keys) - 1)
    while keys[slot] >= 0 and keys[slot] != key:
        slot = (slot + 1) & (len(keys) - 1)
    return slot


@jit_compile
def _insert_pieces(data: Array, ends: Array, ids: Array, keys: Array, nodes: Array, piece_ids: Array) -> None:
    num_nodes = 1
    for piece in range(len(ids)):
        node = 0
        for position in range(ends[piece], ends[piece + 1]):
            slot = _slot(keys, node, data[position])
            if keys[slot] < 0:
                keys[slot] = np.int64(node) * 256 + data[position]
                nodes[slot] = num_nodes
                num_nodes += 1
            node = nodes[slot]
        piece_ids[node] = ids[piece]


@jit_compile
def next_node(keys: Array, nodes: Array, node: int, byte: int) -> int:
    """Return the child of a node for a byte; -1 if there is none."""
    slot = _slot(keys, node, byte)
    return nodes[slot] if keys[slot] >= 0 else -1


@jit_compile
def match_user_defined(data: Array, position: int, keys: Array, nodes: Array, piece_ids: Array, types: Array) -> int:
    """Return the length of the longest user-defined piece here, which is never normalized or split; 0 if none."""
    node, length = 0, 0
    for index in range(position, len(data)):
        node = next_node(keys, nodes, node, data[index])
        if node < 0:
            break
        if piece_ids[node] >= 0 and types[piece_ids[node]] == USER:
            length = index + 1 - position
    return length


@jit_compile
def _match_rule(data: Array, position: int, units: Array) -> tuple[int, int]:
    """Return the length of the longest rule that matches here, and the offset of its replacement; 0 if none."""
    length: Any = 0
    offset: Any = 0
    if not len(units):
        return length, offset
    node = np.int64(units[0] >> 10) << np.int64((units[0] & 512) >> 6)
    for index in range(position, len(data)):
        node ^= np.int64(data[index])
        if node >= len(units) or units[node] & 0x800000FF != data[index]:
            break
        unit = units[node]
        node ^= np.int64(unit >> 10) << np.int64((unit & 512) >> 6)
        if (unit >> 8) & 1 and node < len(units):
            length, offset = index + 1 - position, np.int64(units[node] & 0x7FFFFFFF)
    return length, offset


@jit_compile
def _replace_at(data: Array, position: int, units: Array, replacements: Array) -> tuple[int, bool, int, int]:
    """Return the bytes consumed, whether a rule matched, and start and stop of the output, in replacements or data."""
    consumed, start = _match_rule(data, position, units)
    if not consumed:
        consumed = min(utf8_length(data[position]), len(data) - position)
        return consumed, False, position, position + consumed
    stop = start
    while stop < len(replacements) and replacements[stop]:
        stop += 1
    return consumed, True, start, stop


@jit_compile
def utf8_length(byte: int) -> int:
    """Return the length in bytes of the UTF-8 character with this first byte."""
    return 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4


@jit_compile
def normalize_utf8(
    data: Array,
    units: Array,
    replacements: Array,
    keys: Array,
    nodes: Array,
    piece_ids: Array,
    types: Array,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
    escape_whitespaces: bool,
    has_user_defined: bool,
) -> tuple[Array, Array]:
    """Return the normalized text, (m,), and the source position of each of its bytes, (m + 1,)."""
    out, origin = np.empty(3 * len(data) + 16, np.uint8), np.empty(3 * len(data) + 17, np.int64)
    size, position, after_space, started = 0, 0, remove_extra_whitespaces, False
    while position < len(data):
        consumed = match_user_defined(data, position, keys, nodes, piece_ids, types) if has_user_defined else 0
        source, start, stop = data, position, position + consumed
        if not consumed:
            consumed, matched, start, stop = _replace_at(data, position, units, replacements)
            source = replacements if matched else data
        if remove_extra_whitespaces and not started and stop == start + 1 and source[start] == _SPACE:
            position += consumed
            continue
        if not started and add_dummy_prefix:
            size = _write(out, origin, size, _SPACE, position, escape_whitespaces)
        started = True
        while after_space and start < stop and source[start] == _SPACE:
            start += 1
        if size + 3 * (stop - start) + 8 > len(out):
            extra = len(out) + 3 * (stop - start) + 8
            out, origin = np.append(out, np.empty(extra, np.uint8)), np.append(origin, np.empty(extra, np.int64))
        for index in range(start, stop):
            size = _write(out, origin, size, source[index], position, escape_whitespaces)
        if start < stop:
            after_space = remove_extra_whitespaces and source[stop - 1] == _SPACE
        position += consumed
    end = position
    while remove_extra_whitespaces and size and _ends_in_space(out, size, escape_whitespaces):
        size -= 3 if escape_whitespaces else 1
        end = origin[size]
    origin[size] = end
    return out[:size], origin[: size + 1]


@jit_compile
def _write(out: Array, origin: Array, size: int, byte: int, position: int, escape_whitespaces: bool) -> int:
    """Write a byte, or "▁" for a space, with its source position; return the new size."""
    if byte != _SPACE or not escape_whitespaces:
        out[size], origin[size] = byte, position
        return size + 1
    for number in range(3):
        out[size + number], origin[size + number] = _METASPACE[number], position
    return size + 3


@jit_compile
def _ends_in_space(out: Array, size: int, escape_whitespaces: bool) -> bool:
    if not escape_whitespaces:
        return bool(out[size - 1] == _SPACE)
    return bool(
        size >= 3
        and out[size - 3] == _METASPACE[0]
        and out[size - 2] == _METASPACE[1]
        and out[size - 1] == _METASPACE[2]
    )
