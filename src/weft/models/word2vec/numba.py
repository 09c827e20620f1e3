"""word2vec training on the CPU: numba kernels without the GIL, run by lock-free threads that share the weights.

Threads read and write the same rows without synchronisation (Hogwild: Niu et al. 2011); with one thread the result
depends on the seed alone. The context words of one position share their negatives, so that a position is three small
matrix products and not dozens of dot products (Ji et al. 2016, "Parallelizing word2vec in shared and distributed
memory"):

    F = X Oᵀ        G = α (Y - σ(F))        X += G O        O += Gᵀ X

Rows of X are the input vectors of the context words, rows of O the output vectors of the target and the negatives, Y is
1 for the target. The loops are blocked, two rows of X and three of O at a time, so that most loads are used more than
once. A row index is read from its array before a loop: otherwise the compiler must reload it at each step and does not
vectorise. Rows are a multiple of `ROW` elements long, so that there is no scalar remainder loop.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from weft.jit import Array, jit_compile

ROW = 16  # float32 in a register of AVX-512
MAX_WORDS = 8192  # words of a document, after sub-sampling, that are trained on at a time; windows do not cross

Weights = tuple[Array, Array]  # input and output vectors: (V, a multiple of ROW)
SamplingTables = tuple[Array, Array, Array]  # sub-sampling thresholds, and the alias table of `draw_negative`
# cbow?, window, sides (1: left only), negatives, eos or -1, one position in so many computes its loss
KernelParameters = tuple[bool, int, int, int, int, int]
Workspace = tuple[Array, Array, Array, Array]  # X, O, F (then G), and the gradient of the mean

_F = TypeVar("_F", bound=Callable[..., Any])
_compiled: Callable[[_F], _F] = partial(jit_compile, fastmath=True)


@_compiled
def _random(state: Array) -> Any:
    """Return 64 random bits: splitmix64 (Steele et al. 2014)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@_compiled
def _random_below(state: Array, count: int) -> Any:
    """Return a random integer below `count`."""
    return np.int64(((_random(state) >> np.uint64(32)) * np.uint64(count)) >> np.uint64(32))


@_compiled
def draw_negative(cuts: Array, others: Array, state: Array) -> Any:
    """Return a random word by the alias method (Walker 1977): a slot, then its own word or the other."""
    bits = _random(state)
    slot = np.int64(((bits >> np.uint64(32)) * np.uint64(len(cuts))) >> np.uint64(32))
    return slot if (bits & np.uint64(0xFFFFFFFF)) < np.uint64(cuts[slot]) else np.int64(others[slot])


@_compiled
def sigmoid(values: Array, count: int) -> None:
    """Apply σ(x) = (1 + tanh(x / 2)) / 2 in place, with Eigen's rational approximation of tanh."""
    for i in range(count):
        x = min(max(np.float32(0.5) * values[i], np.float32(-9.0)), np.float32(9.0))
        y = x * x
        top = np.float32(-2.76076847742355e-16) * y + np.float32(2.00018790482477e-13)
        top = top * y + np.float32(-8.60467152213735e-11)
        top = top * y + np.float32(5.12229709037114e-08)
        top = top * y + np.float32(1.48572235717979e-05)
        top = top * y + np.float32(6.37261928875436e-04)
        top = top * y + np.float32(4.89352455891786e-03)
        low = np.float32(1.19825839466702e-06) * y + np.float32(1.18534705686654e-04)
        low = low * y + np.float32(2.26843463243900e-03)
        low = low * y + np.float32(4.89352518554385e-03)
        values[i] = np.float32(0.5) + np.float32(0.5) * (x * top / low)


@_compiled
def _products(x: Array, o: Array, rows: int, columns: int, f: Array) -> None:
    """Write F = X Oᵀ; `rows` is even, `columns` a multiple of three, and X and O are zero-padded."""
    for i in range(0, rows, 2):
        for j in range(0, columns, 3):
            s00 = s01 = s02 = s10 = s11 = s12 = np.float32(0)
            for d in range(x.shape[1]):
                a, b = x[i, d], x[i + 1, d]
                s00 += a * o[j, d]
                s01 += a * o[j + 1, d]
                s02 += a * o[j + 2, d]
                s10 += b * o[j, d]
                s11 += b * o[j + 1, d]
                s12 += b * o[j + 2, d]
            top = i * columns + j
            f[top], f[top + 1], f[top + 2] = s00, s01, s02
            low = top + columns
            f[low], f[low + 1], f[low + 2] = s10, s11, s12


@_compiled
def _add(to: Array, row: int, g: Any, rows: Array, other: int) -> None:
    for d in range(to.shape[1]):
        to[row, d] += g * rows[other, d]


@_compiled
def _add_rows(to: Array, row: int, g: Array, start: int, step: int, rows: Array, count: int) -> None:
    """Add Σ_j g[start + j step] rows[j] to a row, three at a time."""
    threes = count - count % 3
    for j in range(0, threes, 3):
        g0, g1, g2 = g[start + j * step], g[start + (j + 1) * step], g[start + (j + 2) * step]
        for d in range(to.shape[1]):
            to[row, d] += g0 * rows[j, d] + g1 * rows[j + 1, d] + g2 * rows[j + 2, d]
    for j in range(threes, count):
        _add(to, row, g[start + j * step], rows, j)


@_compiled
def _copy(to: Array, i: int, rows: Array, row: int) -> None:
    for d in range(to.shape[1]):
        to[i, d] = rows[row, d]


@_compiled
def _clear(to: Array, first: int, last: int) -> None:
    for i in range(first, last):
        for d in range(to.shape[1]):
            to[i, d] = np.float32(0)


@_compiled
def _loss(f: Array, rows: int, columns: int, targets: Array, count: int) -> float:
    """Return the loss, -log σ(f) of the target and -log σ(-f) of the negatives, summed over all rows."""
    total = 0.0
    for i in range(rows):
        for j in range(count):
            if j == 0 or targets[j] != targets[0]:
                score = np.float64(f[i * columns + j])
                margin = score if j == 0 else -score
                total += max(-margin, 0.0) + math.log1p(math.exp(-abs(margin)))
    return total


@_compiled
def _gradients(f: Array, rows: int, columns: int, targets: Array, count: int, rate: float) -> None:
    """Replace F by G = α (Y - σ(F)); zero for padding, and for negatives that equal the target."""
    sigmoid(f, rows * columns)
    for j in range(columns):
        used = j == 0 or (j < count and targets[j] != targets[0])
        scale, label = np.float32(rate if used else 0.0), np.float32(1.0 if j == 0 else 0.0)
        for i in range(rows):
            f[i * columns + j] = scale * (label - f[i * columns + j])


@_compiled
def skipgram(
    weights: Weights, around: Array, rows: int, targets: Array, count: int, rate: float, work: Workspace,
    with_loss: bool,
) -> float:  # fmt: skip
    """Update the weights for one position, where each of `rows` context words predicts targets[0]; return the loss.

    The other `count` - 1 targets are negatives. The loss is that before the update, and 0 unless `with_loss`.
    """
    (inputs, outputs), (x, o, f, _) = weights, work
    one: Any = np.int64(1)  # a literal 1 has a type of its own, and would be compiled once more
    even, columns = rows + rows % 2, (count + 2) // 3 * 3
    for i in range(rows):
        _copy(x, i, inputs, around[i])
    for j in range(count):
        _copy(o, j, outputs, targets[j])
    _clear(x, rows, even)
    _clear(o, count, columns)
    _products(x, o, even, columns, f)
    loss = _loss(f, rows, columns, targets, count) if with_loss else 0.0
    _gradients(f, rows, columns, targets, count, rate)
    for i in range(rows):
        _add_rows(inputs, around[i], f, i * columns, one, o, columns)
    for j in range(count):
        _add_rows(outputs, targets[j], f, j, columns, x, rows)
    return loss


@_compiled
def _scores(x: Array, outputs: Array, targets: Array, columns: int, f: Array) -> None:
    """Write F = x Oᵀ of one row, three columns at a time, without a copy of O; `columns` is a multiple of three."""
    for j in range(0, columns, 3):
        r0, r1, r2 = targets[j], targets[j + 1], targets[j + 2]
        s0 = s1 = s2 = np.float32(0)
        for d in range(x.shape[1]):
            a = x[0, d]
            s0 += a * outputs[r0, d]
            s1 += a * outputs[r1, d]
            s2 += a * outputs[r2, d]
        f[j], f[j + 1], f[j + 2] = s0, s1, s2


@_compiled
def _update_pair(gradient: Array, x: Array, g: Any, outputs: Array, row: int) -> None:
    """Add g times the output row to the gradient of the mean, and g times the mean to the output row."""
    for d in range(x.shape[1]):
        value = outputs[row, d]
        gradient[0, d] += g * value
        outputs[row, d] = value + g * x[0, d]


@_compiled
def cbow(
    weights: Weights, around: Array, rows: int, targets: Array, count: int, rate: float, work: Workspace,
    with_loss: bool,
) -> float:  # fmt: skip
    """Update the weights for one position, where the mean of the context words predicts targets[0]; return the loss.

    Each context word gets the whole gradient of the mean, not a share, as in word2vec's own code.
    """
    (inputs, outputs), (x, _, f, gradient) = weights, work
    zero: Any = np.int64(0)
    one: Any = np.int64(1)
    _clear(x, zero, one)
    for i in range(rows):
        _add(x, zero, np.float32(1) / np.float32(rows), inputs, around[i])
    _scores(x, outputs, targets, (count + 2) // 3 * 3, f)
    loss = _loss(f, one, count, targets, count) if with_loss else 0.0
    _gradients(f, one, count, targets, count, rate)
    _clear(gradient, zero, one)
    for j in range(count):
        _update_pair(gradient, x, f[j], outputs, targets[j])
    for i in range(rows):
        _add(inputs, around[i], np.float32(1), gradient, zero)
    return loss


@_compiled
def make_workspace(width: int, window: int, negatives: int) -> Workspace:
    """Return the buffers of a position."""
    rows, columns = 2 * window + 2, negatives + 3
    x, o = np.zeros((rows, width), np.float32), np.zeros((columns, width), np.float32)
    return x, o, np.zeros(rows * columns, np.float32), np.zeros((1, width), np.float32)


@_compiled
def _train_words(
    words: Array, size: int, first: int, weights: Weights, tables: SamplingTables,
    parameters: KernelParameters, rate: float, work: Workspace,
    state: Array, losses: Array,
) -> None:  # fmt: skip
    """Train with each of the words from `first` on as the target."""
    is_cbow, window, sides, negatives, _, every = parameters
    around, targets = np.zeros(2 * window, np.int64), np.zeros(negatives + 3, np.int64)
    for position in range(first, size):
        radius = 1 + _random_below(state, window)
        rows: Any = np.int64(0)
        for other in range(max(0, position - radius), min(size, position + 1 + radius * (sides - 1))):
            if other != position:
                around[rows] = words[other]
                rows += 1
        if rows == 0:
            continue
        targets[0] = words[position]
        for j in range(negatives):
            targets[j + 1] = draw_negative(tables[1], tables[2], state)
        with_loss = _random_below(state, every) == 0
        if is_cbow:
            losses[0] += cbow(weights, around, rows, targets, negatives + 1, rate, work, with_loss)
        else:
            losses[0] += skipgram(weights, around, rows, targets, negatives + 1, rate, work, with_loss)
        if with_loss:
            losses[1] += 1 if is_cbow else rows


@_compiled
def learn(
    ids: Array,
    starts: Array,
    weights: Weights,
    tables: SamplingTables,
    parameters: KernelParameters,
    rates: Any,
    state: Array,
    losses: Array,
) -> None:
    """Train on the ids that sub-sampling keeps; the learning rate goes linearly from the first to the second.

    `starts` are those of the ids' documents: the first may begin before the ids, and the last end after them.
    `losses` gets the sum of the computed losses, and their number.
    """
    keep, eos, at, document = tables[0], parameters[4], 0, 0
    words, work = np.zeros(MAX_WORDS, np.int64), make_workspace(weights[0].shape[1], parameters[1], parameters[3])
    while at < len(ids):
        while starts[document + 1] <= at:
            document += 1
        last, size = min(starts[document + 1], len(ids)), 0
        rate = rates[0] + (rates[1] - rates[0]) * at / len(ids)
        first = 1 if eos >= 0 and at == starts[document] else 0  # bos is context, never a target
        while at < last and size < MAX_WORDS - 1:
            word = np.int64(ids[at])
            if (_random(state) >> np.uint64(32)) <= np.uint64(keep[word]) or (size == 0 and first == 1):
                words[size] = word
                size += 1
            at += 1
        if eos >= 0 and at == starts[document + 1]:
            words[size] = eos
            size += 1
        _train_words(words, size, first, weights, tables, parameters, rate, work, state, losses)
