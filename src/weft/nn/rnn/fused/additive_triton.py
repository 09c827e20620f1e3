"""Additive attention inside a fused scan on CUDA: one Triton kernel per step, forward and backward, a program per row.

Imported only where Triton is installed. The tanh of every pair of query and key stays in registers; the weights are an
online softmax over blocks of positions (Milakov & Gimelshein 2018).
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from weft.nn.rnn.fused.additive import AdditiveStep

BLOCK_S = 16  # positions of the memory at a time


@triton.jit(do_not_specialize=["t"])
def forward(
    t, lengths, queries, keys, memory, energy, weights, contexts, B, S, A, D,
    BS: tl.constexpr, BA: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the attention weights and the context of one row."""
    b = tl.program_id(0)
    a, d, positions = tl.arange(0, BA), tl.arange(0, BD), tl.arange(0, BS)
    length = tl.load(lengths + b)
    query = tl.load(queries + (t * B + b) * A + a, a < A, 0).to(tl.float32)
    v = tl.load(energy + a, a < A, 0).to(tl.float32)
    row = weights + (t * B + b) * S
    highest, total, context = -float("inf"), 0.0, tl.zeros((BD,), tl.float32)
    for first in range(0, length, BS):
        s = first + positions
        key = tl.load(keys + (b * S + s[:, None]) * A + a[None, :], (s < length)[:, None] & (a < A)[None, :], 0)
        score = tl.sum(v[None, :] * libdevice.tanh(key.to(tl.float32) + query[None, :]), 1)
        score = tl.where(s < length, score, -float("inf"))
        tl.store(row + s, score, s < length)
        new_highest = tl.maximum(highest, tl.max(score, 0))
        part = tl.exp(score - new_highest)
        state = tl.load(memory + (b * S + s[:, None]) * D + d[None, :], (s < length)[:, None] & (d < D)[None, :], 0)
        context = context * tl.exp(highest - new_highest) + tl.sum(part[:, None] * state.to(tl.float32), 0)
        total = total * tl.exp(highest - new_highest) + tl.sum(part, 0)
        highest = new_highest
    total = tl.where(total > 0, total, 1.0)
    tl.store(contexts + (t * B + b) * D + d, context / total, d < D)
    tl.debug_barrier()
    for first in range(0, length, BS):
        s = first + positions
        score = tl.load(row + s, s < length, 0)
        tl.store(row + s, tl.exp(score - highest) / total, s < length)


@triton.jit(do_not_specialize=["t"])
def backward(
    t, lengths, queries, keys, memory, energy, weights, contexts,
    grad_contexts, grad_scores, grad_queries, grad_keys, grad_energy,
    B, S, A, D, BS: tl.constexpr, BA: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of scores, query, keys and v from that of one row's context."""
    b = tl.program_id(0)
    a, d, positions = tl.arange(0, BA), tl.arange(0, BD), tl.arange(0, BS)
    length = tl.load(lengths + b)
    query = tl.load(queries + (t * B + b) * A + a, a < A, 0).to(tl.float32)
    v = tl.load(energy + a, a < A, 0).to(tl.float32)
    grad_context = tl.load(grad_contexts + (t * B + b) * D + d, d < D, 0).to(tl.float32)
    mean = tl.sum(grad_context * tl.load(contexts + (t * B + b) * D + d, d < D, 0).to(tl.float32), 0)
    grad_query, grad_v = tl.zeros((BA,), tl.float32), tl.zeros((BA,), tl.float32)
    for first in range(0, length, BS):
        s = first + positions
        inside = (s < length)[:, None] & (a < A)[None, :]
        state = tl.load(memory + (b * S + s[:, None]) * D + d[None, :], (s < length)[:, None] & (d < D)[None, :], 0)
        weight = tl.load(weights + (t * B + b) * S + s, s < length, 0)
        grad_score = weight * (tl.sum(state.to(tl.float32) * grad_context[None, :], 1) - mean)
        tl.store(grad_scores + (t * B + b) * S + s, grad_score, s < length)
        offsets = (b * S + s[:, None]) * A + a[None, :]
        hidden = libdevice.tanh(tl.load(keys + offsets, inside, 0).to(tl.float32) + query[None, :])
        grad_v += tl.sum(grad_score[:, None] * hidden, 0)
        grad_sum = tl.where(inside, grad_score[:, None] * v[None, :] * (1.0 - hidden * hidden), 0.0)
        grad_query += tl.sum(grad_sum, 0)
        tl.store(grad_keys + offsets, tl.load(grad_keys + offsets, inside, 0) + grad_sum, inside)
    tl.store(grad_queries + (t * B + b) * A + a, grad_query, a < A)
    tl.store(grad_energy + b * A + a, tl.load(grad_energy + b * A + a, a < A, 0) + grad_v, a < A)


def _bind(kernel, arrays, sizes, blocks):
    """Compile once and return a direct launch: Triton's check of the arguments costs several times a launch."""
    grid = (sizes[0], 1, 1)
    launch = kernel.warmup(0, *arrays, *sizes, **blocks, grid=grid)[grid]
    return lambda t: launch(t, *arrays, *sizes, *blocks.values())


class TritonAdditiveStep(AdditiveStep):
    """Triton kernels; weights and accumulated gradients are float32."""

    def __init__(self, spec, states) -> None:
        super().__init__(spec, states)
        self.lengths, self.weights = (~spec.padding_mask).sum(1), self.weights.float()
        rows, positions, hidden = spec.keys.shape
        width = spec.memory.shape[-1]
        self._sizes = (rows, positions, hidden, width)
        self._blocks = {"BS": BLOCK_S, "BA": triton.next_power_of_2(hidden), "BD": triton.next_power_of_2(width)}
        keys = spec.keys.contiguous()
        inputs = (self.lengths, self.queries, keys, spec.memory, spec.energy, self.weights, self.contexts)
        self._forward = _bind(forward, [tensor.detach() for tensor in inputs], self._sizes, self._blocks)
        self._inputs = inputs

    def _compute_context(self, t: int) -> None:
        self._forward(t)

    def setup_backward(self, grad_outputs) -> None:
        """Allocate the gradients."""
        super().setup_backward(grad_outputs)
        self.grad_keys, self.grad_energy = self.grad_keys.float(), self.grad_energy.float()
        gradients = [self.grad_contexts, self.grad_scores, self.grad_queries, self.grad_keys, self.grad_energy]
        arrays = [tensor.detach() for tensor in (*self._inputs, *gradients)]
        self._backward = _bind(backward, arrays, self._sizes, self._blocks)

    def _additive_backward(self, t: int) -> None:
        self._backward(t)

    def _grad_memory(self) -> torch.Tensor:
        return torch.bmm(self.weights.permute(1, 2, 0).to(self.grad_contexts.dtype), self.grad_contexts.transpose(0, 1))
