"""Decoding attention on the CPU, in numba: one query a hypothesis over its entries of the key-value cache."""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from weft.nn.kernels.numba.attention import exp_nonpositive
from weft.nn.rnn.fused.codegen_numba import cached_njit

if TYPE_CHECKING:
    from weft.nn.attention.kv_cache import KVIndex

_MIN_PARALLEL = 1 << 20  # products from which on it pays to use several threads


def attend_cached_numba(q: Tensor, kv: Tensor, kv_index: "KVIndex") -> Tensor:
    """Return the same as `weft.nn.attention.kv_cache.attend_cached`, in float32."""
    slots, first, last = kv_index
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    arrays = [x.numpy() for x in (q.contiguous(), kv, slots, first, last.contiguous(), out)]
    rows = len(q)
    parts = torch.get_num_threads() if q.numel() * slots.shape[1] > _MIN_PARALLEL else 1
    bounds = [rows * part // parts for part in range(parts + 1)]
    if parts == 1:
        _attend(0, rows, *arrays)
    else:
        list(_threads().map(lambda part: _attend(bounds[part], bounds[part + 1], *arrays), range(parts)))
    return out


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="weft-attend")


@cached_njit(sums=True)
def _attend(start, stop, q, kv, slots, first, last, out):  # type: ignore[no-untyped-def]
    heads, size = q.shape[1], q.shape[2]
    scale = np.float32(1.0 / math.sqrt(size))
    weights = np.empty((heads, slots.shape[1]), np.float32)
    for b in range(start, stop):
        low, high = first[b], last[b]
        for t in range(low, high):
            slot = slots[b, t]
            for h in range(heads):
                score = np.float32(0)
                for i in range(size):
                    score += q[b, h, i] * kv[slot, 0, h, i]
                weights[h, t] = score * scale
        for h in range(heads):
            max_score = np.float32(-np.inf)
            for t in range(low, high):
                max_score = max(max_score, weights[h, t])
            total = np.float32(0)
            for t in range(low, high):
                weights[h, t] = exp_nonpositive(weights[h, t] - max_score)
                total += weights[h, t]
            for i in range(size):
                out[b, h, i] = 0
            for t in range(low, high):
                weight = weights[h, t] / total
                slot = slots[b, t]
                for i in range(size):
                    out[b, h, i] += weight * kv[slot, 1, h, i]
