"""Masked-LM training sequences from a corpus: full windows, or segment pairs for next-sentence prediction.

The documents are concatenated, each after its bos: bos a b c bos d e. A sequence has at most `longest` tokens, bos and
eos included.

`MLMWindows` cross document boundaries, with an eos where a document ends (FULL-SENTENCES of Liu et al. 2019, section
4.2), so that every sequence has `longest` tokens:

    bos b c eos d e eos

`SentencePairs` are for next-sentence prediction (Devlin et al. 2019, section 3.1, task 2, and A.1): bos A eos B eos,
where B follows A in the document, or is a segment of another document. A document is split into chunks of the maximum
length; which of them is the shorter one changes from epoch to epoch. Some of the chunks are split once more, with
probability `short_probability`. Each chunk gets a partner: a chunk of another document that, like itself, is or is not
the last of its document. Then `join_pairs` splits both at the start of a sentence (or if there is none, of a word),
with about the same number of tokens after the split, truncates these to equal length, and picks one of the two as B at
random. All lengths are fixed before the label is drawn: neither a length nor the way a segment begins or ends reveals
the label.

Without partners, `join_consecutive` splits a chunk in two: B follows A, or they are swapped (Lan et al. 2020, 3.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from weft.data.batching.lm_stream import LMWindows, Spans, TokenStream
from weft.data.batching.static_shape import StaticShape, split_by_room
from weft.errors import DataError
from weft.tokens import Tokens

MIN_CHUNK = 2  # minimum tokens of a chunk: one for each segment
MAX_DRAWS = 8  # draws of a partner before any chunk of another document is accepted
NEIGHBOURHOOD = 32  # chunks of nearest larger and smaller size to draw from; more where there are many chunks


@dataclass(frozen=True)
class SequenceStream:
    """Concatenated documents, of which each span is a sequence of its own."""

    ids: np.ndarray  # (N,) memory-mapped
    bos: int
    eos: int

    def item(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        """Return a span between bos and eos; a bos inside it becomes the eos of the document before."""
        ids = np.empty(stop - start + 2, np.int64)
        ids[1:-1] = self.ids[start:stop]
        ids[ids == self.bos] = self.eos
        ids[0], ids[-1] = self.bos, self.eos
        return (ids,)


@dataclass(frozen=True)
class MLMWindows:
    """Sequences of `width` tokens, including bos and eos, `rows` per batch: all batches have the same shape."""

    stream: SequenceStream
    width: int
    rows: int

    @classmethod
    def of(cls, stream: SequenceStream, longest: int, tokens: int) -> "MLMWindows":
        """Return windows of `longest` tokens, or of a whole short corpus, in batches of `tokens` tokens."""
        width = min(longest, len(stream.ids) + 2)
        return cls(stream, width, max(1, min(tokens // width, len(stream.ids) // (width - 2))))

    @property
    def static_shape(self) -> StaticShape | None:
        """The shape of all batches, without filler."""
        return StaticShape((self.rows * self.width,), (self.width,), self.rows, 0)

    def epoch(self, seed: int, number: int, streams: int) -> Sequence[Spans]:
        """Return the windows of one epoch, from a random offset on, shuffled."""
        ids = self.stream.ids
        batches = LMWindows(TokenStream(ids, self.stream.bos, self.stream.eos), self.width - 2, self.rows).epoch(
            seed, number, streams
        )
        return [self._skip_bos(spans) for spans in batches]

    def every(self) -> Sequence[Spans]:
        """Return windows over the whole corpus, in order; the last sequence may be shorter."""
        starts = np.arange(0, len(self.stream.ids), self.width - 2)
        spans = np.stack([starts, np.minimum(starts + self.width - 2, len(self.stream.ids))], -1)
        return [self._skip_bos(spans[start : start + self.rows]) for start in range(0, len(spans), self.rows)]

    def _skip_bos(self, spans: Spans) -> Spans:
        """Return spans, those that begin with a document's bos shifted by one token: the sequence has its own bos."""
        at_bos = self.stream.ids[spans[:, 0]] == self.stream.bos
        shifted: Spans = spans + (at_bos & (spans[:, 1] < len(self.stream.ids)))[:, None]
        return shifted


@dataclass(frozen=True)
class DocumentStream:
    """Concatenated documents, each after its bos, and the start of each."""

    ids: np.ndarray  # (N,) memory-mapped
    starts: np.ndarray  # (documents + 1,)

    def item(self, since: int, start: int, stop: int, other: int, until: int) -> tuple[np.ndarray, ...]:
        """Return the tokens before a chunk, the chunk, and its partner."""
        return self.ids[since:start], self.ids[start:stop], self.ids[other:until]


@dataclass(frozen=True)
class DocumentChunks:
    """Chunks of documents: start, number of tokens, and document of each, (P,), in order."""

    starts: np.ndarray
    sizes: np.ndarray
    owners: np.ndarray

    @classmethod
    def of(cls, documents: np.ndarray, room: int, rng: np.random.Generator) -> "DocumentChunks":
        """Split documents, given by their starts, into chunks of `room` tokens and one chunk of the remainder."""
        sizes = np.diff(documents) - 1  # without bos
        counts = -(-sizes // room)
        odd_index = (rng.random(len(sizes)) * counts).astype(np.int64)  # index of the chunk with the remainder
        owners = np.repeat(np.arange(len(sizes)), counts)
        numbers = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        remainder, odd_index = (sizes - (counts - 1) * room)[owners], odd_index[owners]
        starts = documents[owners] + 1 + numbers * room - np.where(numbers > odd_index, room - remainder, 0)
        return cls(starts, np.where(numbers == odd_index, remainder, room), owners)

    def split_some(self, probability: float, rng: np.random.Generator) -> "DocumentChunks":
        """Split random chunks in two, each with this probability; drop chunks that are too short for two segments."""
        chosen = np.flatnonzero((rng.random(len(self.sizes)) < probability) & (self.sizes >= 2 * MIN_CHUNK))
        first = rng.integers(MIN_CHUNK, self.sizes[chosen] - MIN_CHUNK + 1)
        sizes = np.insert(self.sizes, chosen + 1, self.sizes[chosen] - first)
        sizes[chosen + np.arange(len(chosen))] = first
        starts = np.insert(self.starts, chosen + 1, self.starts[chosen] + first)
        owners = np.insert(self.owners, chosen + 1, self.owners[chosen])
        long_enough = sizes >= MIN_CHUNK
        return DocumentChunks(starts[long_enough], sizes[long_enough], owners[long_enough])

    def partners(self, rng: np.random.Generator) -> np.ndarray:
        """Return a partner (P,) of each chunk: in another document, of nearly equal size, last there if the chunk is.

        After `MAX_DRAWS` draws without such a partner, any chunk of another document is taken.
        """
        count, last = len(self.sizes), np.diff(self.owners, append=-1) != 0
        order = np.lexsort((self.sizes, last))
        ranks = np.empty(count, np.int64)
        ranks[order] = np.arange(count)
        split = count - int(last.sum())
        low, high = np.where(last, split, 0), np.where(last, count, split)  # range of its group in that order
        near = max(NEIGHBOURHOOD, count // 128)
        first, stop = np.maximum(ranks - near, low), np.minimum(ranks + near, high)
        partners, pending = np.zeros(count, np.int64), np.arange(count)
        for _ in range(MAX_DRAWS):
            partners[pending] = order[first[pending] + _random_below(stop[pending] - first[pending], rng)]
            pending = pending[self.owners[partners[pending]] == self.owners[pending]]
        first_own = np.searchsorted(self.owners, self.owners[pending])  # the chunks of its own document are skipped
        num_own = np.searchsorted(self.owners, self.owners[pending], "right") - first_own
        drawn = _random_below(count - num_own, rng)
        partners[pending] = drawn + np.where(drawn >= first_own, num_own, 0)
        return partners


def _random_below(ends: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a random integer in [0, end) for each end."""
    drawn: np.ndarray = (rng.random(len(ends)) * ends).astype(np.int64)
    return drawn


@dataclass(frozen=True)
class SentencePairs:
    """Chunks with their partners, in batches of a static shape."""

    stream: DocumentStream
    room: int  # maximum tokens of a chunk, and so of both segments together
    num_special_tokens: int  # number of special tokens around and between them
    short_probability: float
    static_shape: StaticShape
    has_partners: bool = True  # without them, the tokens before a chunk and its partner are empty

    @classmethod
    def of(
        cls,
        stream: DocumentStream,
        longest: int,
        num_special_tokens: int,
        tokens: int,
        short_probability: float,
        partners: bool = True,
    ) -> "SentencePairs":
        """Return pairs in batches of `tokens` tokens; raise for partners in a corpus of one document."""
        room, rng = longest - num_special_tokens, np.random.default_rng(0)
        whole = DocumentChunks.of(stream.starts, room, rng)
        chunks = whole.split_some(short_probability, rng)
        num_documents = len(np.unique(chunks.owners))
        if not partners and num_documents == 0:
            raise DataError("segment pairs need a document of two tokens at least; see data.documents")
        if partners and num_documents < 2:
            raise DataError(
                "next-sentence prediction needs two documents at least, of two tokens each; see data.documents, or set "
                "task.next_sentence: false"
            )
        lengths = np.append(chunks.sizes, whole.sizes.max()) + num_special_tokens
        static_shape = StaticShape.of(lengths[None], tokens)
        return cls(stream, room, num_special_tokens, short_probability, static_shape, partners)

    def epoch(self, seed: int, number: int, streams: int) -> Sequence[Spans]:
        """Return the spans of one epoch: split documents, draw any partners and shuffle, seeded by (seed, number)."""
        rng = np.random.default_rng((seed, number))
        chunks = DocumentChunks.of(self.stream.starts, self.room, rng).split_some(self.short_probability, rng)
        starts, stops = chunks.starts, chunks.starts + chunks.sizes
        spans = np.stack([starts, starts, stops, stops, stops], -1)
        if self.has_partners:
            others = chunks.partners(rng)
            since = np.maximum(self.stream.starts[chunks.owners] + 1, starts - self.room // 2)
            spans = np.stack([since, starts, stops, starts[others], stops[others]], -1)
        order = rng.permutation(len(spans))
        return [
            spans[batch]
            for batch in split_by_room(order, (chunks.sizes + self.num_special_tokens)[None], self.static_shape.room)
        ]


@dataclass(frozen=True)
class BoundaryTokens:
    """Special tokens around segments, and masks (V,) of tokens that begin words and that end sentences."""

    bos: int
    separator: Sequence[int]
    eos: int
    begins: np.ndarray
    ends: np.ndarray


def join_pairs(
    items: Sequence[tuple[np.ndarray, ...]], boundaries: BoundaryTokens, rng: np.random.Generator
) -> tuple[Tokens, np.ndarray]:
    """Return sequences bos A eos B eos with segment ids, and labels (B,): 0 where B follows A, else 1.

    If the second segment is shorter than the rest of its chunk, the first starts earlier by as much, where its document
    allows.
    """
    before, chunks, others = zip(*items, strict=True)
    splits, left = _draw_splits(chunks, boundaries, rng)
    other_splits, other_left = _draw_splits(others, boundaries, rng, left)
    second_sizes = np.minimum(left, other_left)
    labels = rng.integers(0, 2, len(items))
    extra = np.minimum(left - second_sizes, [len(text) for text in before])
    bos, between, eos = np.array([boundaries.bos]), np.array(boundaries.separator), np.array([boundaries.eos])
    parts: list[np.ndarray] = []
    for row, (split, start, size, label, extra_tokens) in enumerate(
        zip(*(column.tolist() for column in (splits, other_splits, second_sizes, labels, extra)), strict=True)
    ):
        second = others[row][start : start + size] if label else chunks[row][split : split + size]
        parts += [bos, before[row][len(before[row]) - extra_tokens :], chunks[row][:split], between, second, eos]
    return _pack_pairs(parts, splits + extra + 1 + len(between), second_sizes + 1), labels


def join_consecutive(
    chunks: Sequence[np.ndarray], boundaries: BoundaryTokens, rng: np.random.Generator, swap: bool
) -> tuple[Tokens, np.ndarray]:
    """Return sequences bos A eos B eos of chunks split in two, with segment ids, and labels (B,): 1 where swapped.

    With `swap` half of them are, at random: B then precedes A in the document.
    """
    splits, left = _draw_splits(chunks, boundaries, rng)
    labels = rng.integers(0, 2, len(chunks)) if swap else np.zeros(len(chunks), np.int64)
    bos, between, eos = np.array([boundaries.bos]), np.array(boundaries.separator), np.array([boundaries.eos])
    parts: list[np.ndarray] = []
    for chunk, split, label in zip(chunks, splits.tolist(), labels.tolist(), strict=True):
        first, second = (chunk[split:], chunk[:split]) if label else (chunk[:split], chunk[split:])
        parts += [bos, first, between, second, eos]
    firsts, seconds = np.where(labels, left, splits), np.where(labels, splits, left)
    return _pack_pairs(parts, firsts + 1 + len(between), seconds + 1), labels


def _pack_pairs(parts: Sequence[np.ndarray], firsts: np.ndarray, seconds: np.ndarray) -> Tokens:
    """Concatenate segment pairs, given as parts, with segment ids; `firsts` and `seconds` (B,) are their lengths."""
    flat = np.concatenate(parts).astype(np.int64, copy=False)
    tokens = Tokens.flat(torch.from_numpy(flat), torch.from_numpy(firsts + seconds))
    segments = np.repeat(np.tile([0, 1], len(firsts)), np.stack([firsts, seconds], -1).ravel())
    return replace(tokens, segments=torch.from_numpy(segments))


def _draw_splits(
    texts: Sequence[np.ndarray], boundaries: BoundaryTokens, rng: np.random.Generator, near: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return a random split of each text: the number of tokens before and after it, (B,) each.

    The split is before a sentence, else before a word, else anywhere; among equals it is random, or the one
    nearest to `near` tokens after it.
    """
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    flat, starts = np.concatenate(texts), np.cumsum(sizes) - sizes
    rows = np.repeat(np.arange(len(sizes)), sizes)
    positions = np.arange(len(flat)) - starts[rows]
    after_sentence = np.zeros(len(flat), bool)
    after_sentence[1:] = boundaries.ends[flat[:-1]]
    grade = np.where(boundaries.begins[flat], 1 + after_sentence, 0)
    scores = rng.random(len(flat))
    if near is not None:
        scores = 1 / (1 + np.abs(sizes[rows] - positions - near[rows]) + scores)
    scores = np.where(positions > 0, grade + scores, -1)
    candidates = np.flatnonzero(scores == np.maximum.reduceat(scores, starts)[rows])
    splits = positions[candidates[np.searchsorted(rows[candidates], np.arange(len(sizes)))]]
    return splits, sizes - splits
