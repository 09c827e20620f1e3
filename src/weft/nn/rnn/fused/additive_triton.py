"""The additive look on CUDA: one Triton kernel a step forward, and one back, a program a row.

Imported only where Triton is. The tanh of every pair of query and key lives in registers alone; the weights come by a
softmax that is carried on from block to block of places (Milakov & Gimelshein 2018).
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from weft.nn.rnn.fused.additive_numba import AdditiveStep

PLACES = 16  # of the memory, at a time


@triton.jit(do_not_specialize=["t"])
def forward(
    t, lengths, queries, keys, memory, energy, weights, contexts, B, S, A, D,
    BS: tl.constexpr, BA: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Weigh one row's places, and read its context."""
    b = tl.program_id(0)
    a, d, place = tl.arange(0, BA), tl.arange(0, BD), tl.arange(0, BS)
    length = tl.load(lengths + b)
    query = tl.load(queries + (t * B + b) * A + a, a < A, 0).to(tl.float32)
    v = tl.load(energy + a, a < A, 0).to(tl.float32)
    row = weights + (t * B + b) * S
    top, total, context = -float("inf"), 0.0, tl.zeros((BD,), tl.float32)
    for first in range(0, length, BS):
        s = first + place
        key = tl.load(keys + (b * S + s[:, None]) * A + a[None, :], (s < length)[:, None] & (a < A)[None, :], 0)
        score = tl.sum(v[None, :] * libdevice.tanh(key.to(tl.float32) + query[None, :]), 1)
        score = tl.where(s < length, score, -float("inf"))
        tl.store(row + s, score, s < length)
        new_top = tl.maximum(top, tl.max(score, 0))
        part = tl.exp(score - new_top)
        state = tl.load(memory + (b * S + s[:, None]) * D + d[None, :], (s < length)[:, None] & (d < D)[None, :], 0)
        context = context * tl.exp(top - new_top) + tl.sum(part[:, None] * state.to(tl.float32), 0)
        total = total * tl.exp(top - new_top) + tl.sum(part, 0)
        top = new_top
    total = tl.where(total > 0, total, 1.0)
    tl.store(contexts + (t * B + b) * D + d, context / total, d < D)
    tl.debug_barrier()
    for first in range(0, length, BS):
        s = first + place
        score = tl.load(row + s, s < length, 0)
        tl.store(row + s, tl.exp(score - top) / total, s < length)


@triton.jit(do_not_specialize=["t"])
def backward(
    t, lengths, queries, keys, memory, energy, weights, contexts, gcontexts, gscores, gqueries, gkeys, genergy,
    B, S, A, D, BS: tl.constexpr, BA: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Send back what came back for one row's context."""
    b = tl.program_id(0)
    a, d, place = tl.arange(0, BA), tl.arange(0, BD), tl.arange(0, BS)
    length = tl.load(lengths + b)
    query = tl.load(queries + (t * B + b) * A + a, a < A, 0).to(tl.float32)
    v = tl.load(energy + a, a < A, 0).to(tl.float32)
    came = tl.load(gcontexts + (t * B + b) * D + d, d < D, 0).to(tl.float32)
    mean = tl.sum(came * tl.load(contexts + (t * B + b) * D + d, d < D, 0).to(tl.float32), 0)
    to_query, to_energy = tl.zeros((BA,), tl.float32), tl.zeros((BA,), tl.float32)
    for first in range(0, length, BS):
        s = first + place
        inside = (s < length)[:, None] & (a < A)[None, :]
        state = tl.load(memory + (b * S + s[:, None]) * D + d[None, :], (s < length)[:, None] & (d < D)[None, :], 0)
        weight = tl.load(weights + (t * B + b) * S + s, s < length, 0)
        back = weight * (tl.sum(state.to(tl.float32) * came[None, :], 1) - mean)
        tl.store(gscores + (t * B + b) * S + s, back, s < length)
        places = (b * S + s[:, None]) * A + a[None, :]
        hidden = libdevice.tanh(tl.load(keys + places, inside, 0).to(tl.float32) + query[None, :])
        to_energy += tl.sum(back[:, None] * hidden, 0)
        both = tl.where(inside, back[:, None] * v[None, :] * (1.0 - hidden * hidden), 0.0)
        to_query += tl.sum(both, 0)
        tl.store(gkeys + places, tl.load(gkeys + places, inside, 0) + both, inside)
    tl.store(gqueries + (t * B + b) * A + a, to_query, a < A)
    tl.store(genergy + b * A + a, tl.load(genergy + b * A + a, a < A, 0) + to_energy, a < A)


def _bound(kernel, arrays, sizes, blocks):
    """Compile and launch apart: to look its arguments over costs Triton several times what a launch does."""
    grid = (sizes[0], 1, 1)
    ready = kernel.warmup(0, *arrays, *sizes, **blocks, grid=grid)[grid]
    return lambda t: ready(t, *arrays, *sizes, *blocks.values())


class TritonAdditiveStep(AdditiveStep):
    """In these kernels; weights and what is added up are float32."""

    def __init__(self, at, tapes) -> None:
        super().__init__(at, tapes)
        self.lengths, self.weights = (~at.empty).sum(1), self.weights.float()
        rows, places, hidden = at.keys.shape
        width = at.memory.shape[-1]
        self._sizes = (rows, places, hidden, width)
        self._blocks = {"BS": PLACES, "BA": triton.next_power_of_2(hidden), "BD": triton.next_power_of_2(width)}
        read = (self.lengths, self.queries, at.keys.contiguous(), at.memory, at.energy, self.weights, self.contexts)
        self._forward = _bound(forward, [one.detach() for one in read], self._sizes, self._blocks)
        self._read = read

    def _see(self, t: int) -> None:
        self._forward(t)

    def turn_back(self, given) -> None:
        """Make room for the way back."""
        super().turn_back(given)
        self.gkeys, self.genergy = self.gkeys.float(), self.genergy.float()
        written = [self.gcontexts, self.gscores, self.gqueries, self.gkeys, self.genergy]
        arrays = [one.detach() for one in (*self._read, *written)]
        self._backward = _bound(backward, arrays, self._sizes, self._blocks)

    def _additive_back(self, t: int) -> None:
        self._backward(t)

    def _to_memory(self) -> torch.Tensor:
        return torch.bmm(self.weights.permute(1, 2, 0).to(self.gcontexts.dtype), self.gcontexts.transpose(0, 1))
