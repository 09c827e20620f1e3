"""Training loop of word2vec: word counts, sampling tables, learning-rate schedule and threads.

With counts n(w), a word of the text is kept with probability √(t/f) + t/f, f = n(w) / Σ n and t the sub-sampling
(word2vec's own code; the paper has √(t/f) alone), and drawn as a negative with q(w) ∝ n(w)^exponent. The learning rate
decays linearly to zero over all passes, or over the time where that is the budget.
"""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from weft.data.batching.packed_items import PackedItems
from weft.errors import DataError
from weft.jit import Array
from weft.models.base import FitBudget, FitProgress

CHUNK_TOKENS = 1 << 21  # tokens that a thread, or a GPU, trains on between two reports
MIN_RATE = 1e-4  # the minimum learning rate, relative to the initial one
LOSS_EVERY = 64  # the loss is computed at one position in so many: a logarithm costs as much as a product

Rates = tuple[float, float]  # learning rates at the first position, and after the last
Hyperparameters = tuple[bool, int, int, int]  # cbow?, window, sides (1: left only), negatives
# start, stop, rates, seed -> summed loss, number of losses
Learn = Callable[[int, int, Rates, int], tuple[float, float]]


@dataclass(frozen=True)
class Word2VecCorpus:
    """Concatenated documents and their word counts; `end` is the eos of each document, which is not in the ids."""

    ids: Array
    starts: Array  # (documents + 1,)
    counts: Array  # (V,) of each word as context
    target_counts: Array  # (V,) of each word as target: bos is none
    end: int | None = None

    @classmethod
    def of(cls, data: PackedItems, vocab: int, end: int | None = None) -> "Word2VecCorpus":
        """Return the corpus with its counts, computed a block at a time."""
        ids, counts = data.ids, np.zeros(vocab, np.int64)
        for start in range(0, len(ids), CHUNK_TOKENS):
            counts += np.bincount(ids[start : start + CHUNK_TOKENS], minlength=vocab)
        target_counts = counts.copy()
        if end is not None:
            starts = data.starts[:-1][np.diff(data.starts) > 0]
            target_counts -= np.bincount(ids[starts], minlength=vocab)
            target_counts[end] += len(starts)
            counts[end] += len(starts)
        if not target_counts.any():
            raise DataError("data.train: there is no word to learn from; see the tokenizer and data.columns")
        return cls(ids, data.starts, counts, target_counts, end)

    def documents(self, low: int, high: int) -> Array:
        """Return the starts of the documents in ids[low:high], and the end of the last one, relative to `low`."""
        first, last = np.searchsorted(self.starts, low, side="right") - 1, np.searchsorted(self.starts, high)
        return np.array(self.starts[first : last + 1], np.int64) - low

    def keep_probabilities(self, subsample: float) -> Array:
        """Return the probability (V,) that sub-sampling keeps a word; 1 for one that does not occur."""
        if not subsample:
            return np.ones(len(self.counts))
        rarity = subsample * self.counts.sum() / np.maximum(self.counts, 1)  # t / f
        probabilities: Array = np.minimum(np.sqrt(rarity) + rarity, 1.0)
        return probabilities

    def noise_distribution(self, exponent: float, least: float = 0.0) -> Array:
        """Return the noise distribution q (V,); a word that is never a target has the weight `least`."""
        weights = np.where(self.target_counts > 0, np.maximum(self.target_counts, 1) ** exponent, least)
        probabilities: Array = weights / weights.sum()
        return probabilities


def alias_table(probabilities: Array) -> tuple[Array, Array]:
    """Return the alias table (Walker 1977): slot i yields i with probability cuts[i] / 2^32, else others[i]."""
    size = len(probabilities)
    scaled, cuts, others = probabilities * size, np.full(size, 2**32 - 1, np.uint32), np.arange(size, dtype=np.int32)
    small, large = np.flatnonzero(scaled < 1).tolist(), np.flatnonzero(scaled >= 1).tolist()
    while small and large:
        low, high = small.pop(), large[-1]
        cuts[low], others[low] = min(int(scaled[low] * 2**32), 2**32 - 1), high
        scaled[high] -= 1 - scaled[low]
        if scaled[high] < 1:
            small.append(large.pop())
    for low in small:  # left over by rounding: probability 1, or 0 for words that are never drawn
        if not probabilities[low]:
            cuts[low], others[low] = 0, int(probabilities.argmax())
    return cuts, others


def thresholds(probabilities: Array) -> Array:
    """Return 32-bit thresholds: 32 random bits are at most the threshold with this probability."""
    bits: Array = np.minimum(probabilities * 2**32, 2**32 - 1).astype(np.uint32)
    return bits


def run_passes(
    corpus: Word2VecCorpus, budget: FitBudget, learn: Learn, chunk: int, store: Callable[[], None]
) -> Iterator[FitProgress]:
    """Train `chunk` tokens at a time; yield reports. `store` is called after each pass, before its report."""
    started, total = time.perf_counter() - budget.elapsed, len(corpus.ids)

    def spent(done: float) -> float:
        timed = 0.0 if budget.seconds is None else (time.perf_counter() - started) / budget.seconds
        return max(done / budget.passes, timed)

    for number in range(budget.done, budget.passes):
        for low in range(0, total, chunk):
            high = min(low + chunk, total)
            before, after = number + low / total, number + high / total
            first = spent(before)
            rates = _rate(budget.lr, first), _rate(budget.lr, max(first, after / budget.passes))
            loss, count = learn(low, high, rates, _seed(budget.seed, number, low))
            whole = high == total
            if whole:
                store()
            yield FitProgress(after, loss / count if count else math.nan, high - low, whole)
        if budget.seconds is not None and spent(0) >= 1:
            return


def _rate(lr: float, spent: float) -> float:
    return lr * max(1 - spent, MIN_RATE)


def _seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


def fit_on_cpu(
    weights: tuple[torch.Tensor, torch.Tensor],
    corpus: Word2VecCorpus,
    hyperparameters: Hyperparameters,
    noise: Array,
    keep_probabilities: Array,
    budget: FitBudget,
) -> Iterator[FitProgress]:
    """Train with threads that share padded weights, copied back to `weights` after each pass; yield reports."""
    from weft.models.word2vec import numba as kernels

    rows = _pad_rows(weights[0], kernels.ROW), _pad_rows(weights[1], kernels.ROW)
    worker = _Worker(corpus, rows, (thresholds(keep_probabilities), *alias_table(noise)), hyperparameters)

    def learn(low: int, high: int, rates: Rates, seed: int) -> tuple[float, float]:
        cuts = np.linspace(low, high, budget.threads + 1).astype(int).tolist()
        parts = [part for part in pairwise(cuts) if part[0] < part[1]]
        futures = [pool.submit(worker.learn, *part, rates, _seed(seed, number)) for number, part in enumerate(parts)]
        losses = [future.result() for future in futures]
        return sum(loss for loss, _ in losses), sum(count for _, count in losses)

    def store() -> None:
        for weight, padded in zip(weights, rows, strict=True):
            weight.copy_(torch.from_numpy(padded[:, : weight.shape[1]]))

    with ThreadPoolExecutor(budget.threads) as pool:
        yield from run_passes(corpus, budget, learn, CHUNK_TOKENS * budget.threads, store)


def negative_sampling_loss(
    weights: tuple[torch.Tensor, torch.Tensor],
    data: PackedItems,
    hyperparameters: Hyperparameters,
    noise: Array,
    keep_probabilities: Array,
    seed: int,
) -> float:
    """Return the mean loss of all predictions in the data, with a learning rate of 0."""
    from weft.models.word2vec import numba as kernels

    rows = _pad_rows(weights[0], kernels.ROW), _pad_rows(weights[1], kernels.ROW)
    corpus = Word2VecCorpus(data.ids, data.starts, np.zeros(0), np.zeros(0))
    worker = _Worker(corpus, rows, (thresholds(keep_probabilities), *alias_table(noise)), hyperparameters)
    loss, count = worker.learn(0, len(data.ids), (0.0, 0.0), seed, every=1)
    return loss / count if count else math.nan


@dataclass(frozen=True)
class _Worker:
    """The fixed arguments of the CPU kernel."""

    corpus: Word2VecCorpus
    rows: tuple[Array, Array]
    tables: tuple[Array, Array, Array]
    hyperparameters: Hyperparameters

    def learn(self, low: int, high: int, rates: Rates, seed: int, every: int = LOSS_EVERY) -> tuple[float, float]:
        """Train on ids[low:high]; return the summed loss and the number of losses."""
        from weft.models.word2vec import numba as kernels

        corpus, losses, state = self.corpus, np.zeros(2), np.array([seed], np.uint64)
        parameters = (*self.hyperparameters, -1 if corpus.end is None else corpus.end, every)
        # Copies, so that the kernel is compiled for one array type, memory-mapped data or not.
        ids, starts = np.array(corpus.ids[low:high], np.int32), corpus.documents(low, high)
        kernels.learn(ids, starts, self.rows, self.tables, parameters, rates, state, losses)
        return float(losses[0]), float(losses[1])


def _pad_rows(weight: torch.Tensor, multiple: int) -> Array:
    """Return a copy of a matrix with its rows zero-padded to a multiple of so many elements."""
    vocab, width = weight.shape
    padded = np.zeros((vocab, -(-width // multiple) * multiple), np.float32)
    padded[:, :width] = weight.float().cpu().numpy()
    return padded
