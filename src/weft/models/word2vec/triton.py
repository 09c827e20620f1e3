"""word2vec training on CUDA: a Triton kernel of a few hundred programs, each sequential over its own part of the text.

As the threads of `weft.models.word2vec.numba`, all programs read and write the same rows without locks; updates are
atomic adds. So the update of a position is visible to the next, as on the CPU; large batches would sum the gradients of
hundreds of positions for a frequent word, each computed without the others' updates. Sub-sampling, window sizes and
negatives are drawn beforehand, for a piece of the text at a time. Imported only where Triton is available.
"""

# mypy: ignore-errors

from collections.abc import Iterator

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.jit import Array
from weft.models.base import FitBudget, FitProgress
from weft.models.word2vec.fit import CHUNK_TOKENS, Hyperparameters, Word2VecCorpus, alias_table, run_passes

MAX_PROGRAMS = 256  # maximum number of programs
WORDS_PER_PROGRAM = 16  # minimum vocabulary size per program: concurrent updates of a word do not see each other
MAX_TILE = 1 << 14  # maximum elements of a tile
MIN_DOT = 16  # minimum rows of tl.dot


@triton.jit
def _skipgram(x, o, inside, used, rate, k):
    """Return the updates of X and O where each row of X predicts the target, and the summed loss."""
    f = tl.dot(x, tl.trans(o), input_precision="ieee")  # (C, K)
    mask, label = inside[:, None] & used[None, :], tl.where(k == 0, 1.0, 0.0)[None, :]
    g = tl.where(mask, rate * (label - tl.sigmoid(f)), 0.0)
    loss = tl.where(mask, tl.log(1.0 + tl.exp((1.0 - 2.0 * label) * f)), 0.0)
    gx, go = tl.dot(g, o, input_precision="ieee"), tl.dot(tl.trans(g), x, input_precision="ieee")
    return gx, go, tl.sum(tl.sum(loss, 1), 0)


@triton.jit
def _cbow(x, o, rows, used, rate, k, C: tl.constexpr):
    """Return the updates of X and O where the mean of X predicts the target, and the loss; 0 without context words."""
    mean = tl.sum(x, 0) / tl.maximum(rows, 1.0)  # (D,)
    f, label = tl.sum(o * mean[None, :], 1), tl.where(k == 0, 1.0, 0.0)  # (K,)
    g = tl.where(used, rate * (label - tl.sigmoid(f)), 0.0)
    loss = tl.where(used, tl.log(1.0 + tl.exp((1.0 - 2.0 * label) * f)), 0.0)
    gx = tl.sum(g[:, None] * o, 0)[None, :] + tl.zeros((C, 1), tl.float32)  # the whole gradient to each word
    return gx, g[:, None] * mean[None, :], tl.sum(loss, 0) * tl.minimum(rows, 1.0)


@triton.jit(do_not_specialize=["count", "each"])
def _learn(
    words, documents, radii, negatives, inputs, outputs, losses, count, each, first, last, SIDES: tl.constexpr,
    WINDOW: tl.constexpr, DRAWN: tl.constexpr, WIDTH: tl.constexpr, CBOW: tl.constexpr, C: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Train on the positions of this program; `losses` gets its summed loss, and the number of predictions."""
    low = tl.program_id(0) * each
    high = tl.minimum(low + each, count)
    c, k, d = tl.arange(0, C), tl.arange(0, K), tl.arange(0, D)
    offset = tl.where(c < WINDOW, c - WINDOW, c - WINDOW + 1)  # -5 … -1, 1 … 5
    total, predictions = 0.0, 0.0
    for position in range(low, high):
        rate = first + (last - first) * (position - low) / each
        word, own, near = tl.load(words + position), tl.load(documents + position), position + offset
        inside = (c < WINDOW * SIDES) & (near >= 0) & (near < count) & (tl.abs(offset) <= tl.load(radii + position))
        inside = inside & (tl.load(documents + near, inside, -1) == own)
        around = tl.load(words + near, inside, 0).to(tl.int64)
        rows = tl.sum(inside.to(tl.float32), 0)
        other = tl.load(negatives + position * DRAWN + k - 1, (k > 0) & (k <= DRAWN), -1)
        target = tl.where(k == 0, word, other).to(tl.int64)
        used = (k == 0) | ((k <= DRAWN) & (target != word))
        x_at, x_in = inputs + around[:, None] * WIDTH + d[None, :], inside[:, None] & (d < WIDTH)[None, :]
        o_at, o_in = outputs + target[:, None] * WIDTH + d[None, :], used[:, None] & (d < WIDTH)[None, :]
        # Bypass the L1 cache, which does not see the updates of other programs.
        x, o = tl.load(x_at, x_in, 0.0, cache_modifier=".cg"), tl.load(o_at, o_in, 0.0, cache_modifier=".cg")
        if CBOW:
            gx, go, loss = _cbow(x, o, rows, used, rate, k, C)
            predictions += tl.minimum(rows, 1.0)
        else:
            gx, go, loss = _skipgram(x, o, inside, used, rate, k)
            predictions += rows
        total += loss
        tl.atomic_add(x_at, gx, x_in, sem="relaxed")
        tl.atomic_add(o_at, go, o_in, sem="relaxed")
    tl.store(losses + 2 * tl.program_id(0), total)
    tl.store(losses + 2 * tl.program_id(0) + 1, predictions)


def tile_sizes(hyperparameters: Hyperparameters, width: int) -> tuple[int, int, int] | None:
    """Return a program's tile sizes: context words C, targets K, vector elements D; None if they are too large."""
    _, window, sides, negatives = hyperparameters
    c, k = (max(MIN_DOT, triton.next_power_of_2(size)) for size in (window * sides, negatives + 1))
    d = max(MIN_DOT, triton.next_power_of_2(width))
    return (c, k, d) if max(c, k) * d <= MAX_TILE else None


def with_eos(corpus: Word2VecCorpus, low: int, high: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids[low:high] with eos after each document, the document of each token, and the mask of first tokens."""
    ids = torch.from_numpy(np.array(corpus.ids[low:high], np.int32)).to(device)
    first, last = np.searchsorted(corpus.starts, low), np.searchsorted(corpus.starts, high, side="right")
    begins = torch.from_numpy(np.array(corpus.starts[first:last])).to(device) - low
    own = torch.bucketize(torch.arange(len(ids), device=device), begins, right=True)
    if corpus.end is None:
        return ids, own, torch.zeros_like(ids, dtype=torch.bool)
    firsts = torch.zeros(len(ids) + 1, dtype=torch.bool, device=device)
    firsts[begins] = True
    times = 1 + firsts[1:].long()  # the last token of each document is repeated, and the copy becomes eos
    ends = (times.cumsum(0) - 1)[firsts[1:]]
    ids, own, firsts = (part.repeat_interleave(times) for part in (ids, own, firsts[:-1]))
    ids[ends], firsts[ends] = corpus.end, False
    return ids, own, firsts


def draw_negatives(cuts: Tensor, others: Tensor, count: int, negatives: int, rng: torch.Generator) -> Tensor:
    """Return random words (count, negatives) by the alias method (Walker 1977)."""
    slot = torch.randint(len(cuts), (count, negatives), device=cuts.device, generator=rng)
    own = torch.rand(count, negatives, device=cuts.device, generator=rng) < cuts[slot]
    return torch.where(own, slot.int(), others[slot])


def fit_on_gpu(
    weights: tuple[Tensor, Tensor],
    corpus: Word2VecCorpus,
    hyperparameters: Hyperparameters,
    noise: Array,
    keep_probabilities: Array,
    budget: FitBudget,
    num_programs: int | None = None,
) -> Iterator[FitProgress]:
    """Train on the GPU that holds the weights; yield reports."""
    inputs, outputs = weights
    device, (cbow, window, sides, negatives) = inputs.device, hyperparameters
    c, k, d = tile_sizes(hyperparameters, inputs.shape[1])
    num_programs = num_programs or max(1, min(MAX_PROGRAMS, len(inputs) // WORDS_PER_PROGRAM))
    cuts, others = alias_table(noise)
    cuts = torch.from_numpy(cuts / 2**32).to(device, torch.float32)
    others, keep = torch.from_numpy(others).to(device), torch.from_numpy(keep_probabilities).to(device, torch.float32)

    def learn(low, high, rates, seed):
        rng = torch.Generator(device).manual_seed(seed >> 1)
        ids, own, firsts = with_eos(corpus, low, high, device)
        mask = (torch.rand(len(ids), device=device, generator=rng) < keep[ids]) | firsts
        ids, own, firsts = ids[mask], own[mask].int(), firsts[mask]
        if not len(ids):
            return 0.0, 0.0
        radius = torch.randint(1, window + 1, (len(ids),), device=device, generator=rng, dtype=torch.int32)
        radius[firsts] = 0  # bos is context, never a target
        each = max(MIN_DOT, triton.cdiv(len(ids), num_programs))
        losses = torch.zeros(triton.cdiv(len(ids), each), 2, device=device)
        _learn[(len(losses),)](
            ids, own, radius, draw_negatives(cuts, others, len(ids), negatives, rng), inputs, outputs, losses, len(ids),
            each, *rates, sides, window, negatives, inputs.shape[1], cbow, c, k, d,
        )  # fmt: skip
        loss, predictions = losses.double().sum(0).tolist()
        return loss, predictions

    return run_passes(corpus, budget, learn, CHUNK_TOKENS, lambda: None)
