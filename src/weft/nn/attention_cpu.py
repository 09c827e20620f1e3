"""Attention within short sequences in compiled loops: the CPU's way to answer.

A sequence's scores lie by key, and within a key by head and query: so the softmax, which goes over the keys, is made of
long loops over all heads and queries at once, however short the sequence. Products are made of four queries and four
keys at a time, so that what is read of memory is used four times.
"""

import math

import numpy as np
from torch import Tensor

from weft.nn.kernels import keeper

FEW = 96  # tokens up to which these loops are the better ones
_FOUR = 4


def attend(found: Tensor, scale: Tensor, bias: Tensor, starts: Tensor, heads: int, causal: bool) -> Tensor:
    """Attend within sequences, with q, k and v side by side in found · scale + bias (N, 3·D): (N, D)."""
    out = found.new_empty(len(found) + _FOUR, found.shape[1] // 3)  # a sequence writes up to four into the next one
    _attend(heads, causal, *(one.detach().numpy() for one in (found, scale, bias, starts, out)))
    return out[: len(found)]


@keeper(sums=True)
def _take(found, scale, bias, whole):  # type: ignore[no-untyped-def]
    """Scale and shift what the product has left; what fills up to four is nought."""
    for t in range(found.shape[0]):
        up = scale[t, 0]
        for place in range(whole.shape[1]):
            whole[t, place] = found[t, place] * up + bias[place]
    for t in range(found.shape[0], whole.shape[0]):
        for place in range(whole.shape[1]):
            whole[t, place] = 0


@keeper(sums=True)
def _score(apart, scores):  # type: ignore[no-untyped-def]
    zero = np.float32(0)
    for h in range(scores.shape[1]):
        for j in range(0, scores.shape[0], _FOUR):
            for i in range(0, scores.shape[2], _FOUR):
                aw = ax = ay = az = bw = bx = by = bz = cw = cx = cy = cz = dw = dx = dy = dz = zero
                for p in range(apart.shape[3]):
                    a, b, c, d = apart[j, 1, h, p], apart[j + 1, 1, h, p], apart[j + 2, 1, h, p], apart[j + 3, 1, h, p]
                    w, x, y, z = apart[i, 0, h, p], apart[i + 1, 0, h, p], apart[i + 2, 0, h, p], apart[i + 3, 0, h, p]
                    aw, ax, ay, az = aw + a * w, ax + a * x, ay + a * y, az + a * z
                    bw, bx, by, bz = bw + b * w, bx + b * x, by + b * y, bz + b * z
                    cw, cx, cy, cz = cw + c * w, cx + c * x, cy + c * y, cz + c * z
                    dw, dx, dy, dz = dw + d * w, dx + d * x, dy + d * y, dz + d * z
                _put(scores, j, h, i, aw, ax, ay, az)
                _put(scores, j + 1, h, i, bw, bx, by, bz)
                _put(scores, j + 2, h, i, cw, cx, cy, cz)
                _put(scores, j + 3, h, i, dw, dx, dy, dz)


@keeper()
def _put(scores, j, h, i, w, x, y, z):  # type: ignore[no-untyped-def]
    scores[j, h, i], scores[j, h, i + 1], scores[j, h, i + 2], scores[j, h, i + 3] = w, x, y, z


@keeper()
def _hide(scores):  # type: ignore[no-untyped-def]
    """Let no query see what comes after it."""
    for j in range(scores.shape[0]):
        for h in range(scores.shape[1]):
            for i in range(j):
                scores[j, h, i] = -np.inf


@keeper()
def _exp(x):  # type: ignore[no-untyped-def]
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
def _weigh(T, sharp, scores, top, total):  # type: ignore[no-untyped-def]
    """Turn scores into weights: softmax over the keys."""
    lanes = scores.shape[1]
    for lane in range(lanes):
        top[lane], total[lane] = scores[0, lane], 0
    for j in range(1, T):
        for lane in range(lanes):
            top[lane] = max(top[lane], scores[j, lane])
    for j in range(T):
        for lane in range(lanes):
            scores[j, lane] = _exp((scores[j, lane] - top[lane]) * sharp)
            total[lane] += scores[j, lane]
    for lane in range(lanes):
        total[lane] = np.float32(1) / total[lane]
    for j in range(T):
        for lane in range(lanes):
            scores[j, lane] *= total[lane]
    for j in range(T, scores.shape[0]):
        for lane in range(lanes):
            scores[j, lane] = 0


@keeper()
def _take_four(weights, j, h, i):  # type: ignore[no-untyped-def]
    return weights[j, h, i], weights[j, h, i + 1], weights[j, h, i + 2], weights[j, h, i + 3]


@keeper(sums=True)
def _mix(apart, weights, out):  # type: ignore[no-untyped-def]
    for h in range(out.shape[1]):
        for i in range(0, out.shape[0], _FOUR):
            for p in range(out.shape[2]):
                out[i, h, p] = out[i + 1, h, p] = out[i + 2, h, p] = out[i + 3, h, p] = np.float32(0)
            for j in range(0, weights.shape[0], _FOUR):
                aw, ax, ay, az = _take_four(weights, j, h, i)
                bw, bx, by, bz = _take_four(weights, j + 1, h, i)
                cw, cx, cy, cz = _take_four(weights, j + 2, h, i)
                dw, dx, dy, dz = _take_four(weights, j + 3, h, i)
                for p in range(out.shape[2]):
                    a, b, c, d = apart[j, 2, h, p], apart[j + 1, 2, h, p], apart[j + 2, 2, h, p], apart[j + 3, 2, h, p]
                    out[i, h, p] += aw * a + bw * b + cw * c + dw * d
                    out[i + 1, h, p] += ax * a + bx * b + cx * c + dx * d
                    out[i + 2, h, p] += ay * a + by * b + cy * c + dy * d
                    out[i + 3, h, p] += az * a + bz * b + cz * c + dz * d


@keeper(sums=True)
def _attend(heads, causal, found, scale, bias, starts, out):  # type: ignore[no-untyped-def]
    longest, width = 0, out.shape[1]
    for b in range(len(starts) - 1):
        longest = max(longest, starts[b + 1] - starts[b])
    most, size = (longest + _FOUR - 1) // _FOUR * _FOUR, width // heads
    room, held = np.empty(most * 3 * width, np.float32), np.empty(most * heads * most, np.float32)
    top, total = np.empty(heads * most, np.float32), np.empty(heads * most, np.float32)
    for b in range(len(starts) - 1):
        first, T = starts[b], starts[b + 1] - starts[b]
        most = (T + _FOUR - 1) // _FOUR * _FOUR
        whole, scores = room[: most * 3 * width], held[: most * heads * most]
        apart, by_key = whole.reshape(most, 3, heads, size), scores.reshape(most, heads, most)
        _take(found[first : first + T], scale[first : first + T], bias, whole.reshape(most, 3 * width))
        _score(apart, by_key)
        if causal:
            _hide(by_key)
        _weigh(T, np.float32(1 / math.sqrt(size)), scores.reshape(most, heads * most), top, total)
        _mix(apart, by_key, out[first : first + most].reshape(most, heads, size))
