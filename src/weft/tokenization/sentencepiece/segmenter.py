"""SentencePiece segmentation, identical to its library, in compiled loops over bytes: normalize, then search.

    normalize  the longest matching rule at each position; spaces become "▁"
    unigram    the most probable segmentation (Viterbi), in single precision as in the library (Kudo 2018, section 3.2)
    bpe        merges the pair whose piece has the highest score first, the leftmost of equals (Sennrich et al. 2016)

Text that no piece covers is one unknown piece, however long. The `tokenizers` library differs: it applies the first
matching rule rather than the longest, and sums in double precision, so that ties are broken differently.
"""

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.jit import Array, jit_compile
from weft.tokenization.sentencepiece.model_file import NORMAL, UNUSED, USER, SentencePieceModel, split_charsmap
from weft.tokenization.sentencepiece.normalizer import (
    build_piece_trie,
    match_user_defined,
    next_node,
    normalize_utf8,
    utf8_length,
)

PieceTrie = tuple[Array, Array, Array]  # keys, nodes and piece ids (`build_piece_trie`)
# Scores and types of the pieces, the score of the unknown piece, the highest score, and the id of the unknown piece.
PieceScores = tuple[Array, Array, float, float, int]
UNKNOWN_COST = 10.0  # log-probability of the unknown piece below that of the rarest piece


@dataclass(frozen=True)
class Segmentation:
    """A segmented text: piece ids, their ends in the normalized text, and its alignment to the original text."""

    ids: Array  # (n,)
    ends: Array  # (n,) byte positions in `normalized`
    normalized: Array  # (m,)
    origin: Array  # (m + 1,) source position of each byte of the normalized text

    def pieces(self) -> list[str]:
        """Return the text of the pieces."""
        data = self.normalized.tobytes()
        return [data[begin:end].decode(errors="replace") for begin, end in self._bounds()]

    def surface(self, index: int) -> str:
        """Return the text of one piece."""
        begin = self.ends[index - 1] if index else 0
        return bytes(self.normalized[begin : self.ends[index]]).decode(errors="replace")

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Return the character offsets of each piece in the text."""
        data = np.frombuffer(text.encode(), np.uint8)
        chars = np.concatenate([[0], np.cumsum(data & 0xC0 != 0x80)])  # characters that start before each byte
        return [(int(chars[self.origin[begin]]), int(chars[self.origin[end]])) for begin, end in self._bounds()]

    def _bounds(self) -> list[tuple[int, int]]:
        ends = self.ends.tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []


class Segmenter:
    """Segments texts with a SentencePiece model."""

    def __init__(self, spm: SentencePieceModel) -> None:
        types, scores = np.array(spm.types, np.int8), np.array(spm.scores, np.float32)
        normal = scores[types == NORMAL]
        lowest, highest = (normal.min(), normal.max()) if len(normal) else (np.float32(0), np.float32(0))
        self._scores = scores, types, np.float32(lowest - np.float32(UNKNOWN_COST)), highest, spm.unk
        self._trie = build_piece_trie(
            {name: id for id, name in enumerate(spm.pieces) if types[id] in (NORMAL, USER, UNUSED)}
        )
        trie, replacements = split_charsmap(spm.charsmap)
        self._rules = np.frombuffer(trie, "<u4").astype(np.uint32), np.frombuffer(replacements, np.uint8)
        self._flags = (
            spm.add_dummy_prefix,
            spm.remove_extra_whitespaces,
            spm.escape_whitespaces,
            bool((types == USER).any()),
        )
        self._search = _viterbi if spm.kind == "unigram" else _merge_pairs

    def segment(self, text: str) -> Segmentation:
        """Return the segmentation of one text."""
        data = np.frombuffer(text.encode(), np.uint8)
        normalized, origin = normalize_utf8(data, *self._rules, *self._trie, self._scores[1], *self._flags)
        ids, ends = self._search(normalized, self._trie, self._scores)
        return Segmentation(ids, ends, normalized, origin)


@jit_compile
def _viterbi(data: Array, trie: PieceTrie, vocabulary: PieceScores) -> tuple[Array, Array]:
    """Return the ids of the most probable pieces of a text, and their ends."""
    (keys, nodes, piece_ids), (scores, types, unknown_score, max_score, unk) = trie, vocabulary
    best = np.zeros(len(data) + 1, np.float32)
    starts, pieces = np.full(len(data) + 1, -1, np.int64), np.empty(len(data) + 1, np.int64)
    position = 0
    while position < len(data):
        width, has_single_char, node = min(utf8_length(data[position]), len(data) - position), False, 0
        score_so_far = best[position]
        for index in range(position, len(data)):
            node = next_node(keys, nodes, node, data[index])
            if node < 0:
                break
            piece, end = piece_ids[node], index + 1
            if piece < 0 or types[piece] == UNUSED:
                continue
            score = scores[piece]
            if types[piece] == USER:  # always preferred
                score = np.float32(np.float32(end - position) * max_score - 0.1)
            total = np.float32(score + score_so_far)
            if starts[end] < 0 or total > best[end]:
                best[end], starts[end], pieces[end] = total, position, piece
            has_single_char = has_single_char or end - position == width
        end, total = position + width, np.float32(unknown_score + score_so_far)
        if not has_single_char and (starts[end] < 0 or total > best[end]):
            best[end], starts[end], pieces[end] = total, position, unk
        position += width
    path: tuple[Array, Array] = _backtrace(starts, pieces, unk)
    return path


@jit_compile
def _backtrace(starts: Array, pieces: Array, unk: int) -> tuple[Array, Array]:
    """Backtrace the best path; adjacent unknown pieces are merged into one."""
    ids, ends = np.empty(len(starts), np.int64), np.empty(len(starts), np.int64)
    count, end = 0, len(starts) - 1
    while end > 0:
        if not count or pieces[end] != unk or ids[count - 1] != unk:
            ids[count], ends[count] = pieces[end], end
            count += 1
        end = starts[end]
    return ids[:count][::-1].copy(), ends[:count][::-1].copy()


@jit_compile
def _lookup_piece(data: Array, start: int, stop: int, trie: PieceTrie) -> Any:
    """Return the id of the piece with these bytes; -1 if there is none."""
    keys, nodes, piece_ids = trie
    node = 0
    for index in range(start, stop):
        node = next_node(keys, nodes, node, data[index])
        if node < 0:
            return -1
    return piece_ids[node]


@jit_compile
def _merge_pairs(data: Array, trie: PieceTrie, vocabulary: PieceScores) -> tuple[Array, Array]:
    """Return the ids of the pieces of a text after BPE merges, and their ends.

    A symbol spans the bytes from its start to `ends[start]`; a symbol that was merged into another has end 0.
    """
    (keys, nodes, piece_ids), (scores, types, _, _, unk) = trie, vocabulary
    ends, previous = np.zeros(len(data) + 1, np.int64), np.full(len(data) + 1, -1, np.int64)
    is_user_defined = np.zeros(len(data) + 1, np.bool_)
    position, last = 0, -1
    while position < len(data):
        length = match_user_defined(data, position, keys, nodes, piece_ids, types)
        is_user_defined[position] = length > 0
        ends[position] = position + (length if length else min(utf8_length(data[position]), len(data) - position))
        previous[position], last, position = last, position, ends[position]
    previous[len(data)] = last
    heap = [(np.float32(0), np.int64(0), np.int64(0), np.int64(0)) for _ in range(0)]
    position = 0
    while position < len(data):
        _push_merge(heap, data, position, ends, is_user_defined, trie, scores)
        position = ends[position]
    while len(heap):
        _, left, right, end = heapq.heappop(heap)
        if ends[left] != right or ends[right] != end:
            continue
        ends[left], ends[right], previous[end] = end, 0, left
        if previous[left] >= 0:
            _push_merge(heap, data, previous[left], ends, is_user_defined, trie, scores)
        _push_merge(heap, data, left, ends, is_user_defined, trie, scores)
    output: tuple[Array, Array] = _collect_symbols(data, ends, trie, unk)
    return output


@jit_compile
def _push_merge(
    heap: Any, data: Array, left: int, ends: Array, is_user_defined: Array, trie: PieceTrie, scores: Array
) -> None:
    """Push the merge of a symbol and the next one onto the heap, if it is a piece."""
    right = ends[left]
    if right >= len(data) or is_user_defined[left] or is_user_defined[right]:
        return
    piece = _lookup_piece(data, left, ends[right], trie)
    if piece >= 0:
        heapq.heappush(heap, (-scores[piece], np.int64(left), right, ends[right]))


@jit_compile
def _collect_symbols(data: Array, ends: Array, trie: PieceTrie, unk: int) -> tuple[Array, Array]:
    """Return ids and ends of the final symbols; adjacent unknown pieces are merged into one."""
    ids, stops = np.empty(len(data), np.int64), np.empty(len(data), np.int64)
    count, position = 0, 0
    while position < len(data):
        piece = _lookup_piece(data, position, ends[position], trie)
        piece = unk if piece < 0 else piece
        if not (count and piece == unk and ids[count - 1] == unk):
            count += 1
        ids[count - 1], stops[count - 1] = piece, ends[position]
        position = ends[position]
    return ids[:count].copy(), stops[:count].copy()
