"""What word2vec learns from, and how a fit goes through it: counts, tables, pieces, rates and threads.

With counts n(w), a word of the text is kept with probability √(t/f) + t/f, f = n(w) / Σ n and t the sub-sampling
(word2vec's own code; the paper has √(t/f) alone), and drawn as a wrong one with q(w) ∝ n(w)^exponent. The learning
rate falls in a line from the first to nothing over all passes, or over the time where that is the budget.
"""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from weft.data.batching.packed import PackedItems
from weft.errors import DataError
from weft.models.base import Budget, Pass

PIECE = 1 << 21  # tokens that a thread, or a GPU, learns from between two reports
LEAST = 1e-4  # of the first learning rate, at the end
Array = np.ndarray[Any, Any]
HEARD = 64  # the loss is taken at one place in so many: a logarithm takes as long as a product

Rates = tuple[float, float]  # at the first place, and after the last
Hyperparameters = tuple[bool, int, int, int]  # cbow?, window, sides (1: left alone), drawn words
Learn = Callable[[int, int, Rates, int], tuple[float, float]]  # from, to, rates, seed: the loss heard, how often


@dataclass(frozen=True)
class Corpus:
    """The stream of documents with what is counted in it; `end` is what ends a document and stands not in the ids."""

    ids: Array
    starts: Array  # (documents + 1,)
    counts: Array  # (V,) how often each is read
    guessed: Array  # (V,) how often each is to be guessed: as often, but for what only begins documents
    end: int | None = None

    @classmethod
    def of(cls, data: PackedItems, vocab: int, end: int | None = None) -> "Corpus":
        """Count, a part of the data at a time."""
        ids, counts = data.ids, np.zeros(vocab, np.int64)
        for at in range(0, len(ids), PIECE):
            counts += np.bincount(ids[at : at + PIECE], minlength=vocab)
        guessed = counts.copy()
        if end is not None:
            starts = data.starts[:-1][np.diff(data.starts) > 0]
            guessed -= np.bincount(ids[starts], minlength=vocab)
            guessed[end] += len(starts)
            counts[end] += len(starts)
        if not guessed.any():
            raise DataError("data.train: there is no word to learn from; see the tokenizer and data.columns")
        return cls(ids, data.starts, counts, guessed, end)

    def documents(self, low: int, high: int) -> Array:
        """Return where the documents of ids[low:high] begin and where the last one ends, counted from `low`."""
        first, last = np.searchsorted(self.starts, low, side="right") - 1, np.searchsorted(self.starts, high)
        return np.array(self.starts[first : last + 1], np.int64) - low

    def kept(self, subsample: float) -> Array:
        """Return the probability (V,) that a word is kept, 1 for one that does not occur."""
        if not subsample:
            return np.ones(len(self.counts))
        rarity = subsample * self.counts.sum() / np.maximum(self.counts, 1)  # t / f
        found: Array = np.minimum(np.sqrt(rarity) + rarity, 1.0)
        return found

    def noise(self, exponent: float, least: float = 0.0) -> Array:
        """Return the probability (V,) that a word is drawn, where each is taken to occur `least` times or more."""
        weights = np.where(self.guessed > 0, np.maximum(self.guessed, 1) ** exponent, least)
        found: Array = weights / weights.sum()
        return found


def alias_table(probabilities: Array) -> tuple[Array, Array]:
    """Make the table of Walker 1977: each place's own word is taken with cut / 2^32, else the other."""
    size = len(probabilities)
    scaled, cuts, others = probabilities * size, np.full(size, 2**32 - 1, np.uint32), np.arange(size, dtype=np.int32)
    small, large = np.flatnonzero(scaled < 1).tolist(), np.flatnonzero(scaled >= 1).tolist()
    while small and large:
        low, high = small.pop(), large[-1]
        cuts[low], others[low] = min(int(scaled[low] * 2**32), 2**32 - 1), high
        scaled[high] -= 1 - scaled[low]
        if scaled[high] < 1:
            small.append(large.pop())
    for low in small:  # what rounding has left over: 1, unless it is never to be drawn
        if not probabilities[low]:
            cuts[low], others[low] = 0, int(probabilities.argmax())
    return cuts, others


def thresholds(kept: Array) -> Array:
    """Turn probabilities into what 32 random bits must not be above."""
    found: Array = np.minimum(kept * 2**32, 2**32 - 1).astype(np.uint32)
    return found


def passes(corpus: Corpus, budget: Budget, learn: Learn, piece: int, kept: Callable[[], None]) -> Iterator[Pass]:
    """Go through the corpus piece by piece, pass by pass; `kept` is called when a pass is whole, before it is told."""
    began, total = time.perf_counter() - budget.elapsed, len(corpus.ids)

    def spent(done: float) -> float:
        timed = 0.0 if budget.seconds is None else (time.perf_counter() - began) / budget.seconds
        return max(done / budget.passes, timed)

    for number in range(budget.done, budget.passes):
        for low in range(0, total, piece):
            high = min(low + piece, total)
            before, after = number + low / total, number + high / total
            first = spent(before)
            rates = _rate(budget.lr, first), _rate(budget.lr, max(first, after / budget.passes))
            loss, heard = learn(low, high, rates, _seed(budget.seed, number, low))
            whole = high == total
            if whole:
                kept()
            yield Pass(after, loss / heard if heard else math.nan, high - low, whole)
        if budget.seconds is not None and spent(0) >= 1:
            return


def _rate(lr: float, spent: float) -> float:
    return lr * max(1 - spent, LEAST)


def _seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


def fit_on_cpu(
    weights: tuple[torch.Tensor, torch.Tensor],
    corpus: Corpus,
    shape: Hyperparameters,
    noise: Array,
    kept: Array,
    budget: Budget,
) -> Iterator[Pass]:
    """Learn with threads that share the weights; these are brought up to date after each whole pass."""
    from weft.models.word2vec import numba as kernels

    rows = _padded(weights[0], kernels.ROW), _padded(weights[1], kernels.ROW)
    reader = _Reader(corpus, rows, (thresholds(kept), *alias_table(noise)), shape)

    def learn(low: int, high: int, rates: Rates, seed: int) -> tuple[float, float]:
        cuts = np.linspace(low, high, budget.threads + 1).astype(int).tolist()
        parts = [part for part in pairwise(cuts) if part[0] < part[1]]
        made = [pool.submit(reader.learn, *part, rates, _seed(seed, number)) for number, part in enumerate(parts)]
        heard = [one.result() for one in made]
        return sum(loss for loss, _ in heard), sum(times for _, times in heard)

    def store() -> None:
        for one, padded in zip(weights, rows, strict=True):
            one.copy_(torch.from_numpy(padded[:, : one.shape[1]]))

    with ThreadPoolExecutor(budget.threads) as pool:
        yield from passes(corpus, budget, learn, PIECE * budget.threads, store)


def measure(
    weights: tuple[torch.Tensor, torch.Tensor],
    data: PackedItems,
    shape: Hyperparameters,
    noise: Array,
    kept: Array,
    seed: int,
) -> float:
    """Return the mean loss of all guesses in the data, learning nothing: at a rate of 0."""
    from weft.models.word2vec import numba as kernels

    rows = _padded(weights[0], kernels.ROW), _padded(weights[1], kernels.ROW)
    corpus = Corpus(data.ids, data.starts, np.zeros(0), np.zeros(0))
    reader = _Reader(corpus, rows, (thresholds(kept), *alias_table(noise)), shape)
    loss, heard = reader.learn(0, len(data.ids), (0.0, 0.0), seed, every=1)
    return loss / heard if heard else math.nan


@dataclass(frozen=True)
class _Reader:
    """All that the CPU's kernel is given, but for what it is to read now."""

    corpus: Corpus
    rows: tuple[Array, Array]
    tables: tuple[Array, Array, Array]
    shape: Hyperparameters

    def learn(self, low: int, high: int, rates: Rates, seed: int, every: int = HEARD) -> tuple[float, float]:
        from weft.models.word2vec import numba as kernels

        corpus, heard, state = self.corpus, np.zeros(2), np.array([seed], np.uint64)
        shape = (*self.shape, -1 if corpus.end is None else corpus.end, every)
        # Copies: so the kernel is compiled for one kind of array, wherever the data lies.
        ids, starts = np.array(corpus.ids[low:high], np.int32), corpus.documents(low, high)
        kernels.learn(ids, starts, self.rows, self.tables, shape, rates, state, heard)
        return float(heard[0]), float(heard[1])


def _padded(weight: torch.Tensor, multiple: int) -> Array:
    """Copy a matrix to rows of a multiple of so many numbers, zeros behind."""
    vocab, width = weight.shape
    found = np.zeros((vocab, -(-width // multiple) * multiple), np.float32)
    found[:, :width] = weight.float().cpu().numpy()
    return found
