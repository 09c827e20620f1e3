"""Self-attention of ragged sequences in numba, for inference on the CPU (Vaswani et al. 2017, eq. 1).

For each head, softmax(Q Kᵀ / √d) V is two products by `weft.nn.kernels.numba.matmul`. Between them the scores are laid
out as (keys, heads · queries), so that the softmax, which is over the keys, consists of long loops over all heads and
queries at once, however short the sequence.
"""

import math

import numpy as np
import torch
from torch import Tensor

from weft.nn.kernels.numba.microkernel import COLUMNS, ROWS, multiply_panel
from weft.nn.rnn.fused.codegen_numba import cached_njit

MAX_LENGTH = 160  # sequence length up to which these loops are faster


def ragged_self_attention(qkv: Tensor, starts: Tensor, heads: int, causal: bool) -> Tensor:
    """Return the self-attention (N, D) of sequences with queries, keys and values concatenated in qkv (N, 3·D)."""
    out = qkv.new_empty(len(qkv), qkv.shape[1] // 3)
    if out.shape[1] // heads % COLUMNS:  # the last panel of values is read to its end
        qkv = torch.cat([qkv.flatten(), qkv.new_zeros(COLUMNS)])[:-COLUMNS].view_as(qkv)
    attend(heads, causal, *(x.numpy() for x in (qkv, starts, out)))
    return out


@cached_njit()
def _pack(qkv, first, length, size, panels):  # type: ignore[no-untyped-def]
    """Pack the queries of a sequence, for each head into panels (T / columns, d, columns)."""
    blocks = (length + COLUMNS - 1) // COLUMNS
    for t in range(length):
        for h in range(qkv.shape[1] // 3 // size):
            offset = (h * blocks + t // COLUMNS) * size * COLUMNS + t % COLUMNS
            for k in range(size):
                panels[offset + k * COLUMNS] = qkv[first + t, h * size + k]


@cached_njit()
def _score(qkv, panels, heads, size, length, scores):  # type: ignore[no-untyped-def]
    """Write K Qᵀ of each head side by side, (T, heads · queries); `qkv` is the address of the sequence's first row."""
    zeros = np.zeros(COLUMNS, np.float32)
    bias, width, blocks = zeros.ctypes.data, heads * size, (length + COLUMNS - 1) // COLUMNS
    for panel in range(heads * blocks):
        keys, queries = qkv + 4 * (width + panel // blocks * size), panels.ctypes.data + 4 * panel * size * COLUMNS
        y, row_stride = scores.ctypes.data + 4 * panel * COLUMNS, scores.strides[0]
        multiply_panel(
            zeros,
            ROWS,
            length,
            keys,
            12 * width,
            4,
            0,
            0,
            queries,
            4 * COLUMNS,
            size,
            0,
            0,
            bias,
            y,
            row_stride,
            COLUMNS,
        )


@cached_njit()
def _weighted_sum(qkv, weights, heads, size, length, out):  # type: ignore[no-untyped-def]
    """Write each head's weighted sums of values, by weights (T, heads · queries); `out` is the first row's address."""
    zeros = np.zeros(COLUMNS, np.float32)
    bias, width, blocks = zeros.ctypes.data, heads * size, (length + COLUMNS - 1) // COLUMNS
    for h in range(heads):
        x, step = weights.ctypes.data + 4 * h * blocks * COLUMNS, weights.strides[0]
        for column in range(0, size, COLUMNS):
            values, y = qkv + 4 * (2 * width + h * size + column), out + 4 * (h * size + column)
            left = size - column
            multiply_panel(
                zeros, ROWS, length, x, 4, step, 0, 0, values, 12 * width, length, 0, 0, bias, y, 4 * width, left
            )


@cached_njit()
def _mask_future(scores, heads, wide):  # type: ignore[no-untyped-def]
    """Mask the keys that come after each query."""
    for j in range(scores.shape[0]):
        for h in range(heads):
            for i in range(j):
                scores[j, h * wide + i] = -np.inf


@cached_njit()
def exp_nonpositive(x):  # type: ignore[no-untyped-def]
    """Return exp(x) for x ≤ 0 by Cephes' expf, which vectorises: 2ⁿ · exp(r), |r| ≤ ln(2) / 2."""
    x = max(x, np.float32(-64))  # the smallest that matters; denormal numbers are slow
    whole = np.int32(x * np.float32(1.44269504) - np.float32(0.5))
    n = np.float32(whole)
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    return (y * r * r + r + np.float32(1)) * np.int32((whole + np.int32(127)) << np.int32(23)).view(np.float32)


@cached_njit(sums=True)
def _softmax(scores, scale, max_score, total):  # type: ignore[no-untyped-def]
    """Replace scores (T, heads · queries) by softmax(scale · scores) over the keys, in place."""
    lanes = scores.shape[1]
    for lane in range(lanes):
        max_score[lane], total[lane] = scores[0, lane], 0
    for j in range(1, scores.shape[0]):
        for lane in range(lanes):
            max_score[lane] = max(max_score[lane], scores[j, lane])
    for j in range(scores.shape[0]):
        for lane in range(lanes):
            scores[j, lane] = exp_nonpositive((scores[j, lane] - max_score[lane]) * scale)
            total[lane] += scores[j, lane]
    for lane in range(lanes):
        total[lane] = np.float32(1) / total[lane]
    for j in range(scores.shape[0]):
        for lane in range(lanes):
            scores[j, lane] *= total[lane]


@cached_njit()
def attend(heads, causal, qkv, starts, out):  # type: ignore[no-untyped-def]
    """Write the self-attention of all sequences to `out`; behind qkv there is memory of one panel more."""
    width, longest = out.shape[1], 0
    for b in range(len(starts) - 1):
        longest = max(longest, starts[b + 1] - starts[b])
    size, lanes = width // heads, heads * ((longest + COLUMNS - 1) // COLUMNS * COLUMNS)
    panels, memory = np.zeros(size * lanes, np.float32), np.empty(longest * lanes, np.float32)
    max_score, total = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    for b in range(len(starts) - 1):
        first, T = starts[b], starts[b + 1] - starts[b]
        if T == 0:
            continue
        padded = (T + COLUMNS - 1) // COLUMNS * COLUMNS
        scores = memory[: T * heads * padded].reshape(T, heads * padded)
        _pack(qkv, first, T, size, panels)
        _score(qkv.ctypes.data + first * qkv.strides[0], panels, heads, size, T, scores)
        if causal:
            _mask_future(scores, heads, padded)
        _softmax(scores, np.float32(1 / math.sqrt(size)), max_score, total)
        _weighted_sum(
            qkv.ctypes.data + first * qkv.strides[0], scores, heads, size, T, out.ctypes.data + first * out.strides[0]
        )
