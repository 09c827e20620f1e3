"""word2vec on the CPU: loops that numba compiles, run without the GIL by threads that share the weights and no lock.

Threads read and write the same rows at will (Hogwild: Niu et al. 2011); with one thread the result hangs on the seed
alone. The words around one place meet the same drawn words, so that a place is three small matrix products and not
dozens of vector ones (Ji et al. 2016, "Parallelizing word2vec in shared and distributed memory"):

    F = X Oᵀ        G = α (Y - σ(F))        X += G O        O += Gᵀ X

Rows of X are the words that are read, rows of O the word that is guessed and the drawn ones, Y is 1 for the first of
these. The loops take two rows of X and three of O at a time: most of what is loaded is then used more than once. A row
number is taken out of its array before a loop, for else the compiler must load it anew each time and makes no vector
instructions. Rows are a multiple of `ROW` numbers long, so that nothing is left over for a loop of single numbers.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import njit

ROW = 16  # float32 in a register of AVX-512
LONGEST = 8192  # words of a document, after sub-sampling, that are read at a time; no window goes across

Array = np.ndarray[Any, Any]
Weights = tuple[Array, Array]  # of the words that are read, and of those that are guessed: (V, a multiple of ROW)
Tables = tuple[Array, Array, Array]  # what sub-sampling keeps, and the two of `draw`
# cbow?, window, sides (1: left alone), drawn words, what ends a document or -1, one place in so many gives its loss
Hyperparameters = tuple[bool, int, int, int, int, int]
Workspace = tuple[Array, Array, Array, Array]  # X, O, F and then G, and what goes back to the mean

F = TypeVar("F", bound=Callable[..., Any])
_compiled: Callable[[F], F] = njit(nogil=True, fastmath=True, cache=True, error_model="numpy")


@_compiled
def _random(state: Array) -> Any:
    """Draw 64 bits: splitmix64 (Steele et al. 2014)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@_compiled
def _below(state: Array, count: int) -> Any:
    """Draw a number below `count`."""
    return np.int64(((_random(state) >> np.uint64(32)) * np.uint64(count)) >> np.uint64(32))


@_compiled
def draw(cuts: Array, others: Array, state: Array) -> Any:
    """Draw a word by the alias method (Walker 1977): a place, and whether its own word or the other."""
    bits = _random(state)
    place = np.int64(((bits >> np.uint64(32)) * np.uint64(len(cuts))) >> np.uint64(32))
    return place if (bits & np.uint64(0xFFFFFFFF)) < np.uint64(cuts[place]) else np.int64(others[place])


@_compiled
def sigmoid(values: Array, count: int) -> None:
    """Replace numbers by σ(x) = (1 + tanh(x / 2)) / 2, with the quotient of polynomials that Eigen has for tanh."""
    for place in range(count):
        x = min(max(np.float32(0.5) * values[place], np.float32(-9.0)), np.float32(9.0))
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
        values[place] = np.float32(0.5) + np.float32(0.5) * (x * top / low)


@_compiled
def _products(x: Array, o: Array, rows: int, columns: int, f: Array) -> None:
    """F = X Oᵀ; `rows` is even, `columns` a multiple of three, and what pads X and O is zero."""
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
def _add_rows(to: Array, row: int, g: Array, at: int, step: int, rows: Array, count: int) -> None:
    """Add Σ_j g[at + j step] rows[j] to a row, three at a time."""
    threes = count - count % 3
    for j in range(0, threes, 3):
        g0, g1, g2 = g[at + j * step], g[at + (j + 1) * step], g[at + (j + 2) * step]
        for d in range(to.shape[1]):
            to[row, d] += g0 * rows[j, d] + g1 * rows[j + 1, d] + g2 * rows[j + 2, d]
    for j in range(threes, count):
        _add(to, row, g[at + j * step], rows, j)


@_compiled
def _copy(to: Array, place: int, rows: Array, row: int) -> None:
    for d in range(to.shape[1]):
        to[place, d] = rows[row, d]


@_compiled
def _clear(to: Array, first: int, last: int) -> None:
    for place in range(first, last):
        for d in range(to.shape[1]):
            to[place, d] = np.float32(0)


@_compiled
def _cost(f: Array, rows: int, columns: int, targets: Array, count: int) -> float:
    """Σ -log σ(f) of the right word and -log σ(-f) of the others, over all rows."""
    total = 0.0
    for i in range(rows):
        for j in range(count):
            if j == 0 or targets[j] != targets[0]:
                score = np.float64(f[i * columns + j])
                right = score if j == 0 else -score
                total += max(-right, 0.0) + math.log1p(math.exp(-abs(right)))
    return total


@_compiled
def _gradients(f: Array, rows: int, columns: int, targets: Array, count: int, rate: float) -> None:
    """G = α (Y - σ(F)); nothing for what pads, and for a drawn word that is the right one."""
    sigmoid(f, rows * columns)
    for j in range(columns):
        used = j == 0 or (j < count and targets[j] != targets[0])
        scale, right = np.float32(rate if used else 0.0), np.float32(1.0 if j == 0 else 0.0)
        for i in range(rows):
            f[i * columns + j] = scale * (right - f[i * columns + j])


@_compiled
def skipgram(
    weights: Weights, around: Array, rows: int, targets: Array, count: int, rate: float, work: Workspace, hear: bool
) -> float:
    """Learn from one place: each of the `rows` words around it guesses the first of `count` targets; return the loss.

    The loss, which is that of before the update, is 0 unless it is to be heard.
    """
    (inputs, outputs), (x, o, f, _) = weights, work
    one: Any = np.int64(1)  # a plain 1 is a type of its own, and compiled for once more
    even, columns = rows + rows % 2, (count + 2) // 3 * 3
    for i in range(rows):
        _copy(x, i, inputs, around[i])
    for j in range(count):
        _copy(o, j, outputs, targets[j])
    _clear(x, rows, even)
    _clear(o, count, columns)
    _products(x, o, even, columns, f)
    loss = _cost(f, rows, columns, targets, count) if hear else 0.0
    _gradients(f, rows, columns, targets, count, rate)
    for i in range(rows):
        _add_rows(inputs, around[i], f, i * columns, one, o, columns)
    for j in range(count):
        _add_rows(outputs, targets[j], f, j, columns, x, rows)
    return loss


@_compiled
def _scores(x: Array, outputs: Array, targets: Array, columns: int, f: Array) -> None:
    """F = x Oᵀ of one row, three at a time, with no copy of O; `columns` is a multiple of three."""
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
def _exchange(back: Array, x: Array, g: Any, outputs: Array, row: int) -> None:
    """Send to the mean what comes from a row, and to the row what comes from the mean."""
    for d in range(x.shape[1]):
        number = outputs[row, d]
        back[0, d] += g * number
        outputs[row, d] = number + g * x[0, d]


@_compiled
def cbow(
    weights: Weights, around: Array, rows: int, targets: Array, count: int, rate: float, work: Workspace, hear: bool
) -> float:
    """Learn from one place: the mean of the words around it guesses the first of `count` targets; return the loss.

    Each word around gets all that goes back to the mean, not a share, as in word2vec's own code.
    """
    (inputs, outputs), (x, _, f, back) = weights, work
    none: Any = np.int64(0)
    one: Any = np.int64(1)
    _clear(x, none, one)
    for i in range(rows):
        _add(x, none, np.float32(1) / np.float32(rows), inputs, around[i])
    _scores(x, outputs, targets, (count + 2) // 3 * 3, f)
    loss = _cost(f, one, count, targets, count) if hear else 0.0
    _gradients(f, one, count, targets, count, rate)
    _clear(back, none, one)
    for j in range(count):
        _exchange(back, x, f[j], outputs, targets[j])
    for i in range(rows):
        _add(inputs, around[i], np.float32(1), back, none)
    return loss


@_compiled
def make_workspace(width: int, window: int, drawn: int) -> Workspace:
    """Make room for what a place takes."""
    rows, columns = 2 * window + 2, drawn + 3
    x, o = np.zeros((rows, width), np.float32), np.zeros((columns, width), np.float32)
    return x, o, np.zeros(rows * columns, np.float32), np.zeros((1, width), np.float32)


@_compiled
def _learn_from(
    words: Array, size: int, first: int, weights: Weights, tables: Tables,
    shape: Hyperparameters, rate: float, work: Workspace,
    state: Array, heard: Array,
) -> None:  # fmt: skip
    """Learn from each of the words, from the first on that is to be guessed."""
    is_cbow, window, sides, drawn, _, every = shape
    around, targets = np.zeros(2 * window, np.int64), np.zeros(drawn + 3, np.int64)
    for place in range(first, size):
        reach = 1 + _below(state, window)
        rows: Any = np.int64(0)
        for other in range(max(0, place - reach), min(size, place + 1 + reach * (sides - 1))):
            if other != place:
                around[rows] = words[other]
                rows += 1
        if rows == 0:
            continue
        targets[0] = words[place]
        for j in range(drawn):
            targets[j + 1] = draw(tables[1], tables[2], state)
        hear = _below(state, every) == 0
        if is_cbow:
            heard[0] += cbow(weights, around, rows, targets, drawn + 1, rate, work, hear)
        else:
            heard[0] += skipgram(weights, around, rows, targets, drawn + 1, rate, work, hear)
        if hear:
            heard[1] += 1 if is_cbow else rows


@_compiled
def learn(
    ids: Array,
    starts: Array,
    weights: Weights,
    tables: Tables,
    shape: Hyperparameters,
    rates: Any,
    state: Array,
    heard: Array,
) -> None:
    """Read ids and learn from the words that sub-sampling leaves; the rate goes from the first to the second.

    `starts` are the documents that the ids are of: the first may begin before them, and the last end after them.
    `heard` gets the sum of the losses that were heard, and their number.
    """
    keep, end, at, number = tables[0], shape[4], 0, 0
    words, work = np.zeros(LONGEST, np.int64), make_workspace(weights[0].shape[1], shape[1], shape[3])
    while at < len(ids):
        while starts[number + 1] <= at:
            number += 1
        last, size = min(starts[number + 1], len(ids)), 0
        rate = rates[0] + (rates[1] - rates[0]) * at / len(ids)
        first = 1 if end >= 0 and at == starts[number] else 0  # what begins a document is read, and never guessed
        while at < last and size < LONGEST - 1:
            word = np.int64(ids[at])
            if (_random(state) >> np.uint64(32)) <= np.uint64(keep[word]) or (size == 0 and first == 1):
                words[size] = word
                size += 1
            at += 1
        if end >= 0 and at == starts[number + 1]:
            words[size] = end
            size += 1
        _learn_from(words, size, first, weights, tables, shape, rate, work, state, heard)
