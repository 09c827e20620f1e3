"""What SentencePiece reads of a text, in compiled loops over its bytes: the text in its normal form.

At each place the longest rule for what stands there is taken, from a double-array trie (Darts; Aoe 1989) that the model
file brings. Spaces become "▁". Pieces are found by a trie of their bytes, a hash table from a node and a byte.
"""

from typing import Any

import numpy as np

from weft.tokenization.sentencepiece.model_file import USER
from weft.tokenization.whitespace import compiled

Array = np.ndarray[Any, Any]
_SPACE, _SIGN = 0x20, (0xE2, 0x96, 0x81)  # a space, and the "▁" that stands for it


def trie_of(pieces: dict[str, int]) -> tuple[Array, Array, Array]:
    """Make a trie of bytes: a hash table from a node and a byte to the next node, and the piece that ends at a node."""
    spelt = [name.encode() for name in pieces]
    data, ends = np.frombuffer(b"".join(spelt), np.uint8), np.cumsum([0, *map(len, spelt)])
    keys = np.full(1 << (2 * len(data) + 1).bit_length(), -1, np.int64)
    nodes, held = np.zeros(len(keys), np.int32), np.full(len(data) + 1, -1, np.int32)
    _enter(data, ends, np.fromiter(pieces.values(), np.int32, len(pieces)), keys, nodes, held)
    return keys, nodes, held


@compiled
def _slot(keys: Array, node: int, byte: int) -> Any:
    """Return the place of a node and a byte in the table, or the free one where they belong."""
    key = np.int64(node) * 256 + byte
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    slot = np.int64(mixed >> np.uint64(32)) & (len(keys) - 1)
    while keys[slot] >= 0 and keys[slot] != key:
        slot = (slot + 1) & (len(keys) - 1)
    return slot


@compiled
def _enter(data: Array, ends: Array, ids: Array, keys: Array, nodes: Array, held: Array) -> None:
    count = 1
    for piece in range(len(ids)):
        node = 0
        for place in range(ends[piece], ends[piece + 1]):
            slot = _slot(keys, node, data[place])
            if keys[slot] < 0:
                keys[slot] = np.int64(node) * 256 + data[place]
                nodes[slot] = count
                count += 1
            node = nodes[slot]
        held[node] = ids[piece]


@compiled
def next_node(keys: Array, nodes: Array, node: int, byte: int) -> int:
    """Go on from a node; -1 where nothing goes on."""
    slot = _slot(keys, node, byte)
    return nodes[slot] if keys[slot] >= 0 else -1


@compiled
def user_defined(data: Array, place: int, keys: Array, nodes: Array, held: Array, types: Array) -> int:
    """Return the length of the longest piece here that a user defined: it stays as it is, and whole; 0 if none."""
    node, found = 0, 0
    for at in range(place, len(data)):
        node = next_node(keys, nodes, node, data[at])
        if node < 0:
            break
        if held[node] >= 0 and types[held[node]] == USER:
            found = at + 1 - place
    return found


@compiled
def _rule(data: Array, place: int, units: Array) -> tuple[int, int]:
    """Return the length of the longest rule for what stands here, and where its form begins; 0 if there is none."""
    found: Any = 0
    form: Any = 0
    if not len(units):
        return found, form
    node = np.int64(units[0] >> 10) << np.int64((units[0] & 512) >> 6)
    for at in range(place, len(data)):
        node ^= np.int64(data[at])
        if node >= len(units) or units[node] & 0x800000FF != data[at]:
            break
        unit = units[node]
        node ^= np.int64(unit >> 10) << np.int64((unit & 512) >> 6)
        if (unit >> 8) & 1 and node < len(units):
            found, form = at + 1 - place, np.int64(units[node] & 0x7FFFFFFF)
    return found, form


@compiled
def _form(data: Array, place: int, units: Array, forms: Array) -> tuple[int, bool, int, int]:
    """Return how much is read here, whether a rule says what it becomes, and where that stands, in forms or data."""
    taken, start = _rule(data, place, units)
    if not taken:
        taken = min(width_of(data[place]), len(data) - place)
        return taken, False, place, place + taken
    stop = start
    while stop < len(forms) and forms[stop]:
        stop += 1
    return taken, True, start, stop


@compiled
def width_of(byte: int) -> int:
    """Return how many bytes the character has that begins with this one."""
    return 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4


@compiled
def normalise(
    data: Array,
    units: Array,
    forms: Array,
    keys: Array,
    nodes: Array,
    held: Array,
    types: Array,
    prefix: bool,
    squeeze: bool,
    escape: bool,
    users: bool,
) -> tuple[Array, Array]:
    """Return a text in its normal form, (m,), and where each byte of that comes from, (m + 1,)."""
    out, origin = np.empty(3 * len(data) + 16, np.uint8), np.empty(3 * len(data) + 17, np.int64)
    size, place, spaced, begun = 0, 0, squeeze, False
    while place < len(data):
        taken = user_defined(data, place, keys, nodes, held, types) if users else 0
        source, start, stop = data, place, place + taken
        if not taken:
            taken, ruled, start, stop = _form(data, place, units, forms)
            source = forms if ruled else data
        if squeeze and not begun and stop == start + 1 and source[start] == _SPACE:
            place += taken
            continue
        if not begun and prefix:
            size = _write(out, origin, size, _SPACE, place, escape)
        begun = True
        while spaced and start < stop and source[start] == _SPACE:
            start += 1
        if size + 3 * (stop - start) + 8 > len(out):
            more = len(out) + 3 * (stop - start) + 8
            out, origin = np.append(out, np.empty(more, np.uint8)), np.append(origin, np.empty(more, np.int64))
        for at in range(start, stop):
            size = _write(out, origin, size, source[at], place, escape)
        if start < stop:
            spaced = squeeze and source[stop - 1] == _SPACE
        place += taken
    end = place
    while squeeze and size and _ends_in_space(out, size, escape):
        size -= 3 if escape else 1
        end = origin[size]
    origin[size] = end
    return out[:size], origin[: size + 1]


@compiled
def _write(out: Array, origin: Array, size: int, byte: int, place: int, escape: bool) -> int:
    """Write a byte, or the sign of a space, and say where it comes from; return the new size."""
    if byte != _SPACE or not escape:
        out[size], origin[size] = byte, place
        return size + 1
    for number in range(3):
        out[size + number], origin[size + number] = _SIGN[number], place
    return size + 3


@compiled
def _ends_in_space(out: Array, size: int, escape: bool) -> bool:
    if not escape:
        return bool(out[size - 1] == _SPACE)
    return bool(size >= 3 and out[size - 3] == _SIGN[0] and out[size - 2] == _SIGN[1] and out[size - 1] == _SIGN[2])
