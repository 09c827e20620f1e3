"""Self-attention of each sequence in compiled loops: the CPU's way to answer (Vaswani et al. 2017, eq. 1).

For each head, softmax(Q Kᵀ / √d) V is two products by `weft.nn.kernels.numba.matmul`. Between them scores lie by key,
and within a key by head and query: so the softmax, which goes over the keys, is made of long loops over all heads and
queries at once, however short the sequence.
"""

import math

import numpy as np
import torch
from torch import Tensor

from weft.nn.kernels.numba.matmul import multiply_panel, tile
from weft.nn.rnn.fused.codegen_numba import keeper

_ROWS, _COLUMNS = tile().rows, tile().columns
FEW = 160  # tokens up to which these loops are the better ones


def attend(qkv: Tensor, starts: Tensor, heads: int, causal: bool) -> Tensor:
    """Attend within sequences, with queries, keys and values side by side in qkv (N, 3·D): (N, D)."""
    out = qkv.new_empty(len(qkv), qkv.shape[1] // 3)
    if out.shape[1] // heads % _COLUMNS:  # the last panel of values is read to its end
        qkv = torch.cat([qkv.flatten(), qkv.new_zeros(_COLUMNS)])[:-_COLUMNS].view_as(qkv)
    _attend(heads, causal, *(each.numpy() for each in (qkv, starts, out)))
    return out


@keeper()
def _pack(qkv, first, length, size, panels):  # type: ignore[no-untyped-def]
    """Pack the queries of a sequence, for each head into panels (T / columns, d, columns)."""
    blocks = (length + _COLUMNS - 1) // _COLUMNS
    for t in range(length):
        for h in range(qkv.shape[1] // 3 // size):
            at = (h * blocks + t // _COLUMNS) * size * _COLUMNS + t % _COLUMNS
            for k in range(size):
                panels[at + k * _COLUMNS] = qkv[first + t, h * size + k]


@keeper()
def _score(qkv, panels, heads, size, length, scores):  # type: ignore[no-untyped-def]
    """Write K Qᵀ of each head side by side, (T, heads · queries); `qkv` is where the sequence begins."""
    none = np.zeros(_COLUMNS, np.float32)
    bias, width, blocks = none.ctypes.data, heads * size, (length + _COLUMNS - 1) // _COLUMNS
    for panel in range(heads * blocks):
        keys, queries = qkv + 4 * (width + panel // blocks * size), panels.ctypes.data + 4 * panel * size * _COLUMNS
        y, row = scores.ctypes.data + 4 * panel * _COLUMNS, scores.strides[0]
        multiply_panel(
            none, _ROWS, length, keys, 12 * width, 4, 0, 0, queries, 4 * _COLUMNS, size, 0, 0, bias, y, row, _COLUMNS
        )


@keeper()
def _mix(qkv, weights, heads, size, length, out):  # type: ignore[no-untyped-def]
    """Write the sums of values by weights (T, heads · queries), for each head; `out` is where the sequence begins."""
    none = np.zeros(_COLUMNS, np.float32)
    bias, width, blocks = none.ctypes.data, heads * size, (length + _COLUMNS - 1) // _COLUMNS
    for h in range(heads):
        x, step = weights.ctypes.data + 4 * h * blocks * _COLUMNS, weights.strides[0]
        for column in range(0, size, _COLUMNS):
            values, y = qkv + 4 * (2 * width + h * size + column), out + 4 * (h * size + column)
            left = size - column
            multiply_panel(
                none, _ROWS, length, x, 4, step, 0, 0, values, 12 * width, length, 0, 0, bias, y, 4 * width, left
            )


@keeper()
def _mask(scores, heads, wide):  # type: ignore[no-untyped-def]
    """Let no query see what comes after it."""
    for j in range(scores.shape[0]):
        for h in range(heads):
            for i in range(j):
                scores[j, h * wide + i] = -np.inf


@keeper()
def exp_nonpositive(x):  # type: ignore[no-untyped-def]
    """Cephes' expf for x ≤ 0, which vector instructions can do: 2ⁿ · exp(r), |r| ≤ ln(2) / 2."""
    x = max(x, np.float32(-64))  # the least that counts; numbers that are all but nought are slow
    whole = np.int32(x * np.float32(1.44269504) - np.float32(0.5))
    n = np.float32(whole)
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    return (y * r * r + r + np.float32(1)) * np.int32((whole + np.int32(127)) << np.int32(23)).view(np.float32)


@keeper(sums=True)
def _softmax(scores, sharp, top, total):  # type: ignore[no-untyped-def]
    """Turn scores (T, heads · queries), times `sharp`, into weights: over the keys."""
    lanes = scores.shape[1]
    for lane in range(lanes):
        top[lane], total[lane] = scores[0, lane], 0
    for j in range(1, scores.shape[0]):
        for lane in range(lanes):
            top[lane] = max(top[lane], scores[j, lane])
    for j in range(scores.shape[0]):
        for lane in range(lanes):
            scores[j, lane] = exp_nonpositive((scores[j, lane] - top[lane]) * sharp)
            total[lane] += scores[j, lane]
    for lane in range(lanes):
        total[lane] = np.float32(1) / total[lane]
    for j in range(scores.shape[0]):
        for lane in range(lanes):
            scores[j, lane] *= total[lane]


@keeper()
def _attend(heads, causal, qkv, starts, out):  # type: ignore[no-untyped-def]
    width, longest = out.shape[1], 0
    for b in range(len(starts) - 1):
        longest = max(longest, starts[b + 1] - starts[b])
    size, lanes = width // heads, heads * ((longest + _COLUMNS - 1) // _COLUMNS * _COLUMNS)
    panels, memory = np.zeros(size * lanes, np.float32), np.empty(longest * lanes, np.float32)
    top, total = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    for b in range(len(starts) - 1):
        first, T = starts[b], starts[b + 1] - starts[b]
        if T == 0:
            continue
        wide = (T + _COLUMNS - 1) // _COLUMNS * _COLUMNS
        scores = memory[: T * heads * wide].reshape(T, heads * wide)
        _pack(qkv, first, T, size, panels)
        _score(qkv.ctypes.data + first * qkv.strides[0], panels, heads, size, T, scores)
        if causal:
            _mask(scores, heads, wide)
        _softmax(scores, np.float32(1 / math.sqrt(size)), top, total)
        _mix(qkv.ctypes.data + first * qkv.strides[0], scores, heads, size, T, out.ctypes.data + first * out.strides[0])
