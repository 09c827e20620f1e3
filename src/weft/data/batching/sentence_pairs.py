"""A corpus as texts to fill in, and as pairs of segments of which the second may follow the first.

The documents lie end to end, each after its sign of beginning: bos a b c bos d e. `longest` tokens, the signs of
beginning and end among them, are the most that a sequence has.

`Windows` reads on over the ends of documents, with an eos where one ends (the FULL-SENTENCES of Liu et al. 2019,
section 4.2), so that every sequence has `longest` tokens:

    bos b c eos d e eos

`Pairs` is for next-sentence prediction (Devlin et al. 2019, section 3.1, task 2, and A.1): bos A eos B eos, where B is
what follows A in the document, or a segment of another document. A document is cut into pieces of as many tokens as
can be; which of them is the one that is shorter changes from epoch to epoch. The share `shorter` of the pieces is cut
once more. Each piece gets a partner, a piece of another document that ends one or does not, as it does itself. Then
`join_pairs` cuts both where a sentence begins (or if none does, a word), with about as much behind the cut, makes what
is behind it of one length, and tosses a coin which of the two is B. All that is settled before the coin is tossed: no
length tells which it is, nor how a segment begins or ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from weft.data.batching.lm_stream import Packs, Spans, Stream
from weft.data.batching.static_shape import StaticShape, cut
from weft.errors import DataError
from weft.tokens import Tokens

LEAST = 2  # tokens of a piece: one for each segment
TRIES = 8  # draws of a partner before any of another document will do
NEAR = 32  # pieces above and below its size among which it is drawn, or more where there are many


@dataclass(frozen=True)
class Texts:
    """Documents end to end, of which a span is read as a text of its own."""

    ids: np.ndarray  # (N,) memory-mapped
    bos: int
    eos: int

    def pair(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        """Read a span between bos and eos; a document that begins in it begins after the eos of the one before."""
        read = np.empty(stop - start + 2, np.int64)
        read[1:-1] = self.ids[start:stop]
        read[read == self.bos] = self.eos
        read[0], read[-1] = self.bos, self.eos
        return (read,)


@dataclass(frozen=True)
class Windows:
    """Texts of `width` tokens, bos and eos among them, `rows` to a batch: all batches have one shape."""

    stream: Texts
    width: int
    rows: int

    @classmethod
    def of(cls, stream: Texts, longest: int, tokens: int) -> "Windows":
        """Fill batches of so many tokens, with windows of `longest` or, of a short corpus, of all that there is."""
        width = min(longest, len(stream.ids) + 2)
        return cls(stream, width, max(1, min(tokens // width, len(stream.ids) // (width - 2))))

    @property
    def frame(self) -> StaticShape | None:
        """What all batches have: no filler."""
        return StaticShape((self.rows * self.width,), (self.width,), self.rows, 0)

    def epoch(self, seed: int, number: int, world: int) -> Sequence[Spans]:
        """Cut from a random place on, and shuffle."""
        ids = self.stream.ids
        batches = Packs(Stream(ids, self.stream.bos, self.stream.eos), self.width - 2, self.rows).epoch(
            seed, number, world
        )
        return [self._after_beginnings(spans) for spans in batches]

    def every(self) -> Sequence[Spans]:
        """Read all that there is, in order: the last sequence may be shorter."""
        starts = np.arange(0, len(self.stream.ids), self.width - 2)
        spans = np.stack([starts, np.minimum(starts + self.width - 2, len(self.stream.ids))], -1)
        return [self._after_beginnings(spans[at : at + self.rows]) for at in range(0, len(spans), self.rows)]

    def _after_beginnings(self, spans: Spans) -> Spans:
        """A window that would begin with a document's own sign begins, and ends, a token later: its bos is enough."""
        own = self.stream.ids[spans[:, 0]] == self.stream.bos
        later: Spans = spans + (own & (spans[:, 1] < len(self.stream.ids)))[:, None]
        return later


@dataclass(frozen=True)
class Documents:
    """Documents end to end, each after its bos, and where each begins."""

    ids: np.ndarray  # (N,) memory-mapped
    starts: np.ndarray  # (documents + 1,)

    def pair(self, since: int, start: int, stop: int, other: int, until: int) -> tuple[np.ndarray, ...]:
        """Read what stands before a piece, the piece, and its partner."""
        return self.ids[since:start], self.ids[start:stop], self.ids[other:until]


@dataclass(frozen=True)
class Pieces:
    """Stretches of documents: where each begins, how many tokens it has, and whose it is, (P,) each, in order."""

    starts: np.ndarray
    sizes: np.ndarray
    owners: np.ndarray

    @classmethod
    def of(cls, documents: np.ndarray, room: int, rng: np.random.Generator) -> "Pieces":
        """Cut documents, given by where each begins, into pieces of `room` tokens and one of the rest."""
        sizes = np.diff(documents) - 1  # without bos
        counts = -(-sizes // room)
        odd = (rng.random(len(sizes)) * counts).astype(np.int64)  # the number of the piece that has the rest
        owners = np.repeat(np.arange(len(sizes)), counts)
        numbers = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        rest, odd = (sizes - (counts - 1) * room)[owners], odd[owners]
        starts = documents[owners] + 1 + numbers * room - np.where(numbers > odd, room - rest, 0)
        return cls(starts, np.where(numbers == odd, rest, room), owners)

    def cut_again(self, share: float, rng: np.random.Generator) -> "Pieces":
        """Cut a share of the pieces in two, anywhere; leave out those that are too short for two segments."""
        chosen = np.flatnonzero((rng.random(len(self.sizes)) < share) & (self.sizes >= 2 * LEAST))
        first = rng.integers(LEAST, self.sizes[chosen] - LEAST + 1)
        sizes = np.insert(self.sizes, chosen + 1, self.sizes[chosen] - first)
        sizes[chosen + np.arange(len(chosen))] = first
        starts = np.insert(self.starts, chosen + 1, self.starts[chosen] + first)
        owners, kept = np.insert(self.owners, chosen + 1, self.owners[chosen]), sizes >= LEAST
        return Pieces(starts[kept], sizes[kept], owners[kept])

    def partners(self, rng: np.random.Generator) -> np.ndarray:
        """Draw for each a piece (P,) of another document, which ends one if it does and is as long, or almost so.

        Where such a one is not soon found, any of another document will do.
        """
        count, last = len(self.sizes), np.diff(self.owners, append=-1) != 0
        order = np.lexsort((self.sizes, last))
        ranks = np.empty(count, np.int64)
        ranks[order] = np.arange(count)
        split = count - int(last.sum())
        low, high = np.where(last, split, 0), np.where(last, count, split)  # where its like stand in that order
        near = max(NEAR, count // 128)
        first, stop = np.maximum(ranks - near, low), np.minimum(ranks + near, high)
        found, same = np.zeros(count, np.int64), np.arange(count)
        for _ in range(TRIES):
            found[same] = order[first[same] + _below(stop[same] - first[same], rng)]
            same = same[self.owners[found[same]] == self.owners[same]]
        own = np.searchsorted(self.owners, self.owners[same])  # all of its document's pieces are passed over
        owned = np.searchsorted(self.owners, self.owners[same], "right") - own
        drawn = _below(count - owned, rng)
        found[same] = drawn + np.where(drawn >= own, owned, 0)
        return found


def _below(ends: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a number below each end."""
    drawn: np.ndarray = (rng.random(len(ends)) * ends).astype(np.int64)
    return drawn


@dataclass(frozen=True)
class Pairs:
    """Pieces with their partners, as many to a batch as a frame has room for."""

    stream: Documents
    room: int  # tokens of a piece, and so of both segments
    signs: int  # tokens around and between them
    shorter: float
    frame: StaticShape

    @classmethod
    def of(cls, stream: Documents, longest: int, signs: int, tokens: int, shorter: float) -> "Pairs":
        """Let a batch have so many tokens; a corpus of one document has no pairs and is refused."""
        room, rng = longest - signs, np.random.default_rng(0)
        whole = Pieces.of(stream.starts, room, rng)
        pieces = whole.cut_again(shorter, rng)
        if len(pieces.owners) == 0 or pieces.owners[0] == pieces.owners[-1]:
            raise DataError(
                "next-sentence prediction needs two documents at least, of two tokens each; see data.documents, or set "
                "task.next_sentence: false"
            )
        lengths = np.append(pieces.sizes, whole.sizes.max()) + signs
        return cls(stream, room, signs, shorter, StaticShape.of(lengths[None], tokens))

    def epoch(self, seed: int, number: int, world: int) -> Sequence[Spans]:
        """Cut the documents, draw partners, and shuffle: all as seed and number say."""
        rng = np.random.default_rng((seed, number))
        pieces = Pieces.of(self.stream.starts, self.room, rng).cut_again(self.shorter, rng)
        others = pieces.partners(rng)
        starts, stops = pieces.starts, pieces.starts + pieces.sizes
        since = np.maximum(self.stream.starts[pieces.owners] + 1, starts - self.room // 2)
        spans = np.stack([since, starts, stops, starts[others], stops[others]], -1)
        order = rng.permutation(len(spans))
        return [spans[batch] for batch in cut(order, (pieces.sizes + self.signs)[None], self.frame.room)]


@dataclass(frozen=True)
class Signs:
    """What stands around segments, and which tokens begin words and end sentences, (V,) each."""

    bos: int
    between: Sequence[int]
    eos: int
    begins: np.ndarray
    ends: np.ndarray


def join_pairs(
    items: Sequence[tuple[np.ndarray, ...]], signs: Signs, rng: np.random.Generator
) -> tuple[Tokens, np.ndarray]:
    """Make sequences bos A eos B eos, with their segments; the labels (B,) are 0 where B follows A, else 1.

    What the second segment is shorter than its piece had left, the first one begins earlier, if its document does.
    """
    before, pieces, others = zip(*items, strict=True)
    cuts, left = _cuts(pieces, signs, rng)
    froms, other_left = _cuts(others, signs, rng, left)
    seconds = np.minimum(left, other_left)
    labels = rng.integers(0, 2, len(items))
    lent = np.minimum(left - seconds, [len(text) for text in before])
    bos, between, eos = np.array([signs.bos]), np.array(signs.between), np.array([signs.eos])
    parts: list[np.ndarray] = []
    for row, (at, start, size, label, more) in enumerate(
        zip(*(each.tolist() for each in (cuts, froms, seconds, labels, lent)), strict=True)
    ):
        second = others[row][start : start + size] if label else pieces[row][at : at + size]
        parts += [bos, before[row][len(before[row]) - more :], pieces[row][:at], between, second, eos]
    first, second = cuts + lent + 1 + len(between), seconds + 1
    flat = np.concatenate(parts).astype(np.int64, copy=False)
    tokens = Tokens.flat(torch.from_numpy(flat), torch.from_numpy(first + second))
    kinds = np.repeat(np.tile([0, 1], len(items)), np.stack([first, second], -1).ravel())
    return replace(tokens, segments=torch.from_numpy(kinds)), labels


def _cuts(
    texts: Sequence[np.ndarray], signs: Signs, rng: np.random.Generator, near: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Draw where to cut each text: how much stands before the cut, and how much behind it, (B,) each.

    It is before a sentence, else a word, else anywhere; of places that are alike any, or the one with nearly `near`
    tokens behind it.
    """
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    flat, starts = np.concatenate(texts), np.cumsum(sizes) - sizes
    rows = np.repeat(np.arange(len(sizes)), sizes)
    places = np.arange(len(flat)) - starts[rows]
    ended = np.zeros(len(flat), bool)
    ended[1:] = signs.ends[flat[:-1]]
    grade = np.where(signs.begins[flat], 1 + ended, 0)
    likely = rng.random(len(flat))
    if near is not None:
        likely = 1 / (1 + np.abs(sizes[rows] - places - near[rows]) + likely)
    likely = np.where(places > 0, grade + likely, -1)
    best = np.flatnonzero(likely == np.maximum.reduceat(likely, starts)[rows])
    cuts = places[best[np.searchsorted(rows[best], np.arange(len(sizes)))]]
    return cuts, sizes - cuts
