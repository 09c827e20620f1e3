"""Texts to pieces exactly as SentencePiece cuts them, in compiled loops over bytes: normalise, then search.

    rules      each place takes the longest rule for what stands there; spaces become "▁"
    unigram    the most probable pieces (Viterbi), summed in single precision as there (Kudo 2018, section 3.2)
    bpe        the pair whose piece has the best score is merged first, of equals the leftmost (Sennrich et al. 2016)

What no piece covers is unknown, and one piece however long. The `tokenizers` library differs: it takes the first rule
that fits rather than the longest, and sums in double precision, so that of equals another one wins.
"""

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.tokenization.sentencepiece.model_file import NORMAL, UNUSED, USER, Spm, rules_of
from weft.tokenization.sentencepiece.normalizer import Array, next_node, normalise, trie_of, user_defined, width_of
from weft.tokenization.whitespace import compiled

UNKNOWN_COST = 10.0  # by how much the unknown is less probable than the rarest piece


@dataclass(frozen=True)
class Cut:
    """A text in pieces: which they are, where each ends in the normal form, and where that stands in the text."""

    ids: Array  # (n,)
    ends: Array  # (n,) bytes of `normal`
    normal: Array  # (m,)
    origin: Array  # (m + 1,) the byte of the text that each byte of the normal form comes from

    def pieces(self) -> list[str]:
        """Spell the pieces."""
        whole = self.normal.tobytes()
        return [whole[begin:end].decode(errors="replace") for begin, end in self._bounds()]

    def surface(self, place: int) -> str:
        """Spell one piece."""
        begin = self.ends[place - 1] if place else 0
        return bytes(self.normal[begin : self.ends[place]]).decode(errors="replace")

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Say where each piece stands in the text, in characters."""
        data = np.frombuffer(text.encode(), np.uint8)
        number = np.concatenate([[0], np.cumsum(data & 0xC0 != 0x80)])  # of the characters begun before a byte
        return [(int(number[self.origin[begin]]), int(number[self.origin[end]])) for begin, end in self._bounds()]

    def _bounds(self) -> list[tuple[int, int]]:
        ends = self.ends.tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []


class Pieces:
    """Cuts texts as a model file says."""

    def __init__(self, spm: Spm) -> None:
        types, scores = np.array(spm.types, np.int8), np.array(spm.scores, np.float32)
        normal = scores[types == NORMAL]
        least, most = (normal.min(), normal.max()) if len(normal) else (np.float32(0), np.float32(0))
        self._scores = scores, types, np.float32(least - np.float32(UNKNOWN_COST)), most, spm.unk
        self._trie = trie_of({name: id for id, name in enumerate(spm.pieces) if types[id] in (NORMAL, USER, UNUSED)})
        trie, forms = rules_of(spm.charsmap)
        self._rules = np.frombuffer(trie, "<u4").astype(np.uint32), np.frombuffer(forms, np.uint8)
        self._flags = spm.prefix, spm.squeeze, spm.escape, bool((types == USER).any())
        self._search = _viterbi if spm.kind == "unigram" else _merge

    def cut(self, text: str) -> Cut:
        """Cut one text."""
        data = np.frombuffer(text.encode(), np.uint8)
        normal, origin = normalise(data, *self._rules, *self._trie, self._scores[1], *self._flags)
        ids, ends = self._search(normal, *self._trie, *self._scores)
        return Cut(ids, ends, normal, origin)


@compiled
def _viterbi(
    data: Array,
    keys: Array,
    nodes: Array,
    held: Array,
    scores: Array,
    types: Array,
    unknown: float,
    most: float,
    unk: int,
) -> tuple[Array, Array]:
    """Return the most probable pieces of a text, and where they end."""
    best = np.zeros(len(data) + 1, np.float32)
    begun, which = np.full(len(data) + 1, -1, np.int64), np.empty(len(data) + 1, np.int64)
    place = 0
    while place < len(data):
        width, single, node = min(width_of(data[place]), len(data) - place), False, 0
        here = best[place]
        for at in range(place, len(data)):
            node = next_node(keys, nodes, node, data[at])
            if node < 0:
                break
            piece, end = held[node], at + 1
            if piece < 0 or types[piece] == UNUSED:
                continue
            score = scores[piece]
            if types[piece] == USER:  # always taken
                score = np.float32(np.float32(end - place) * most - 0.1)
            total = np.float32(score + here)
            if begun[end] < 0 or total > best[end]:
                best[end], begun[end], which[end] = total, place, piece
            single = single or end - place == width
        end, total = place + width, np.float32(unknown + here)
        if not single and (begun[end] < 0 or total > best[end]):
            best[end], begun[end], which[end] = total, place, unk
        place += width
    found: tuple[Array, Array] = _path(begun, which, unk)
    return found


@compiled
def _path(begun: Array, which: Array, unk: int) -> tuple[Array, Array]:
    """Read the way back; neighbours that are unknown are one."""
    ids, ends = np.empty(len(begun), np.int64), np.empty(len(begun), np.int64)
    count, end = 0, len(begun) - 1
    while end > 0:
        if not count or which[end] != unk or ids[count - 1] != unk:
            ids[count], ends[count] = which[end], end
            count += 1
        end = begun[end]
    return ids[:count][::-1].copy(), ends[:count][::-1].copy()


@compiled
def _found(data: Array, start: int, stop: int, keys: Array, nodes: Array, held: Array) -> Any:
    """Return the piece that is spelt so; -1 if there is none."""
    node = 0
    for at in range(start, stop):
        node = next_node(keys, nodes, node, data[at])
        if node < 0:
            return -1
    return held[node]


@compiled
def _merge(
    data: Array,
    keys: Array,
    nodes: Array,
    held: Array,
    scores: Array,
    types: Array,
    unknown: float,
    most: float,
    unk: int,
) -> tuple[Array, Array]:
    """Return the pieces of a text that merging makes of its characters, and where they end.

    A symbol is the bytes from its begin to its end, kept under its begin; one that is merged into another has no end.
    """
    ends, before = np.zeros(len(data) + 1, np.int64), np.full(len(data) + 1, -1, np.int64)
    whole = np.zeros(len(data) + 1, np.bool_)
    place, last = 0, -1
    while place < len(data):
        taken = user_defined(data, place, keys, nodes, held, types)
        whole[place] = taken > 0
        ends[place] = place + (taken if taken else min(width_of(data[place]), len(data) - place))
        before[place], last, place = last, place, ends[place]
    before[len(data)] = last
    agenda = [(np.float32(0), np.int64(0), np.int64(0), np.int64(0)) for _ in range(0)]
    place = 0
    while place < len(data):
        _offer(agenda, data, place, ends, whole, keys, nodes, held, scores)
        place = ends[place]
    while len(agenda):
        _, left, right, end = heapq.heappop(agenda)
        if ends[left] != right or ends[right] != end:
            continue
        ends[left], ends[right], before[end] = end, 0, left
        if before[left] >= 0:
            _offer(agenda, data, before[left], ends, whole, keys, nodes, held, scores)
        _offer(agenda, data, left, ends, whole, keys, nodes, held, scores)
    found: tuple[Array, Array] = _symbols(data, ends, keys, nodes, held, unk)
    return found


@compiled
def _offer(
    agenda: Any,
    data: Array,
    left: int,
    ends: Array,
    whole: Array,
    keys: Array,
    nodes: Array,
    held: Array,
    scores: Array,
) -> None:
    """Put a symbol and the next one on the agenda, if there is a piece of both."""
    right = ends[left]
    if right >= len(data) or whole[left] or whole[right]:
        return
    piece = _found(data, left, ends[right], keys, nodes, held)
    if piece >= 0:
        heapq.heappush(agenda, (-scores[piece], np.int64(left), right, ends[right]))


@compiled
def _symbols(data: Array, ends: Array, keys: Array, nodes: Array, held: Array, unk: int) -> tuple[Array, Array]:
    """Read the symbols that are left; neighbours that are unknown are one."""
    ids, stops = np.empty(len(data), np.int64), np.empty(len(data), np.int64)
    count, place = 0, 0
    while place < len(data):
        piece = _found(data, place, ends[place], keys, nodes, held)
        piece = unk if piece < 0 else piece
        if not (count and piece == unk and ids[count - 1] == unk):
            count += 1
        ids[count - 1], stops[count - 1] = piece, ends[place]
        place = ends[place]
    return ids[:count].copy(), stops[:count].copy()
