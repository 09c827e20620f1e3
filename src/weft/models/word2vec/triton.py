"""word2vec on CUDA, in Triton: a few hundred readers, each a program that goes through its own stretch of the text.

What `word2vec_kernels` does with threads is done here with programs: all read and write the same rows with no lock, and
what they add is added by atomic operations. So what a place has taught is there for the next, as on the CPU; large
batches would sum what hundreds of places have to say of a frequent word, each as if the others were silent. Which words
sub-sampling keeps, how far each looks and the drawn words are made before, for a piece of the text at a time.
Imported only where Triton is.
"""

# mypy: ignore-errors

from collections.abc import Iterator

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.models.base import Budget, Pass
from weft.models.word2vec.fit import PIECE, Array, Corpus, Hyperparameters, alias_table, passes

READERS = 256
OWN = 16  # words for each reader at least: what many learn of one word at once, none of them has seen the others learn
LARGEST = 1 << 14  # numbers of a tile that a program can hold
MANY = 16  # rows that a product of tiles has at least


@triton.jit
def _skipgram(x, o, inside, used, rate, k):
    """Let each row of X guess; return what is added to X and to O, and the loss of each guess."""
    f = tl.dot(x, tl.trans(o), input_precision="ieee")  # (C, K)
    learns, right = inside[:, None] & used[None, :], tl.where(k == 0, 1.0, 0.0)[None, :]
    g = tl.where(learns, rate * (right - tl.sigmoid(f)), 0.0)
    missed = tl.where(learns, tl.log(1.0 + tl.exp((1.0 - 2.0 * right) * f)), 0.0)
    gx, go = tl.dot(g, o, input_precision="ieee"), tl.dot(tl.trans(g), x, input_precision="ieee")
    return gx, go, tl.sum(tl.sum(missed, 1), 0)


@triton.jit
def _cbow(x, o, rows, used, rate, k, C: tl.constexpr):
    """Let the mean of X guess, where there is one."""
    mean = tl.sum(x, 0) / tl.maximum(rows, 1.0)  # (D,)
    f, right = tl.sum(o * mean[None, :], 1), tl.where(k == 0, 1.0, 0.0)  # (K,)
    g = tl.where(used, rate * (right - tl.sigmoid(f)), 0.0)
    missed = tl.where(used, tl.log(1.0 + tl.exp((1.0 - 2.0 * right) * f)), 0.0)
    gx = tl.sum(g[:, None] * o, 0)[None, :] + tl.zeros((C, 1), tl.float32)  # all of it to each word
    return gx, g[:, None] * mean[None, :], tl.sum(missed, 0) * tl.minimum(rows, 1.0)


@triton.jit(do_not_specialize=["count", "each"])
def _learn(
    words, documents, reaches, drawn, inputs, outputs, heard, count, each, first, last, SIDES: tl.constexpr,
    WINDOW: tl.constexpr, DRAWN: tl.constexpr, WIDTH: tl.constexpr, CBOW: tl.constexpr, C: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Learn from the places of this program's stretch; `heard` gets its loss, and of how many guesses."""
    low = tl.program_id(0) * each
    high = tl.minimum(low + each, count)
    c, k, d = tl.arange(0, C), tl.arange(0, K), tl.arange(0, D)
    away = tl.where(c < WINDOW, c - WINDOW, c - WINDOW + 1)  # -5 … -1, 1 … 5
    total, guesses = 0.0, 0.0
    for place in range(low, high):
        rate = first + (last - first) * (place - low) / each
        word, own, at = tl.load(words + place), tl.load(documents + place), place + away
        inside = (c < WINDOW * SIDES) & (at >= 0) & (at < count) & (tl.abs(away) <= tl.load(reaches + place))
        inside = inside & (tl.load(documents + at, inside, -1) == own)
        around = tl.load(words + at, inside, 0).to(tl.int64)
        rows = tl.sum(inside.to(tl.float32), 0)
        other = tl.load(drawn + place * DRAWN + k - 1, (k > 0) & (k <= DRAWN), -1)
        target = tl.where(k == 0, word, other).to(tl.int64)
        used = (k == 0) | ((k <= DRAWN) & (target != word))
        x_at, x_in = inputs + around[:, None] * WIDTH + d[None, :], inside[:, None] & (d < WIDTH)[None, :]
        o_at, o_in = outputs + target[:, None] * WIDTH + d[None, :], used[:, None] & (d < WIDTH)[None, :]
        # Past the L1 cache, which does not see what other programs add.
        x, o = tl.load(x_at, x_in, 0.0, cache_modifier=".cg"), tl.load(o_at, o_in, 0.0, cache_modifier=".cg")
        if CBOW:
            gx, go, missed = _cbow(x, o, rows, used, rate, k, C)
            guesses += tl.minimum(rows, 1.0)
        else:
            gx, go, missed = _skipgram(x, o, inside, used, rate, k)
            guesses += rows
        total += missed
        tl.atomic_add(x_at, gx, x_in, sem="relaxed")
        tl.atomic_add(o_at, go, o_in, sem="relaxed")
    tl.store(heard + 2 * tl.program_id(0), total)
    tl.store(heard + 2 * tl.program_id(0) + 1, guesses)


def tiles(shape: Hyperparameters, width: int) -> tuple[int, int, int] | None:
    """Return the sizes of a program's tiles: words around, words guessed, numbers of a vector; None: too large."""
    _, window, sides, drawn = shape
    c, k = (max(MANY, triton.next_power_of_2(size)) for size in (window * sides, drawn + 1))
    d = max(MANY, triton.next_power_of_2(width))
    return (c, k, d) if max(c, k) * d <= LARGEST else None


def stretch(corpus: Corpus, low: int, high: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids[low:high] with the ends of documents put in, which document each is of, and which begins one."""
    ids = torch.from_numpy(np.array(corpus.ids[low:high], np.int32)).to(device)
    first, last = np.searchsorted(corpus.starts, low), np.searchsorted(corpus.starts, high, side="right")
    begins = torch.from_numpy(np.array(corpus.starts[first:last])).to(device) - low
    own = torch.bucketize(torch.arange(len(ids), device=device), begins, right=True)
    if corpus.end is None:
        return ids, own, torch.zeros_like(ids, dtype=torch.bool)
    firsts = torch.zeros(len(ids) + 1, dtype=torch.bool, device=device)
    firsts[begins] = True
    times = 1 + firsts[1:].long()  # the last of each document stands twice, and then is its end
    ends = (times.cumsum(0) - 1)[firsts[1:]]
    ids, own, firsts = (part.repeat_interleave(times) for part in (ids, own, firsts[:-1]))
    ids[ends], firsts[ends] = corpus.end, False
    return ids, own, firsts


def draw(cuts: Tensor, others: Tensor, count: int, drawn: int, rng: torch.Generator) -> Tensor:
    """Draw words by the alias method."""
    place = torch.randint(len(cuts), (count, drawn), device=cuts.device, generator=rng)
    sure = torch.rand(count, drawn, device=cuts.device, generator=rng) < cuts[place]
    return torch.where(sure, place.int(), others[place])


def fit_on_gpu(
    weights: tuple[Tensor, Tensor],
    corpus: Corpus,
    shape: Hyperparameters,
    noise: Array,
    kept: Array,
    budget: Budget,
    readers: int | None = None,
) -> Iterator[Pass]:
    """Learn on the GPU that holds the weights."""
    inputs, outputs = weights
    device, (cbow, window, sides, drawn) = inputs.device, shape
    c, k, d = tiles(shape, inputs.shape[1])
    readers = readers or max(1, min(READERS, len(inputs) // OWN))
    cuts, others = alias_table(noise)
    sure = torch.from_numpy(cuts / 2**32).to(device, torch.float32)
    others, keep = torch.from_numpy(others).to(device), torch.from_numpy(kept).to(device, torch.float32)

    def learn(low, high, rates, seed):
        rng = torch.Generator(device).manual_seed(seed >> 1)
        ids, own, firsts = stretch(corpus, low, high, device)
        left = (torch.rand(len(ids), device=device, generator=rng) < keep[ids]) | firsts
        ids, own, firsts = ids[left], own[left].int(), firsts[left]
        if not len(ids):
            return 0.0, 0.0
        reach = torch.randint(1, window + 1, (len(ids),), device=device, generator=rng, dtype=torch.int32)
        reach[firsts] = 0  # what begins a document is read, and never guessed
        each = max(MANY, triton.cdiv(len(ids), readers))
        heard = torch.zeros(triton.cdiv(len(ids), each), 2, device=device)
        _learn[(len(heard),)](
            ids, own, reach, draw(sure, others, len(ids), drawn, rng), inputs, outputs, heard, len(ids), each, *rates,
            sides, window, drawn, inputs.shape[1], cbow, c, k, d,
        )  # fmt: skip
        loss, guesses = heard.double().sum(0).tolist()
        return loss, guesses

    return passes(corpus, budget, learn, PIECE, lambda: None)
