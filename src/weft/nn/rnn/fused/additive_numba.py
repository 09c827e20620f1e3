"""Additive attention inside a fused scan on the CPU: numba loops."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.nn.rnn.fused.additive import AdditiveStep
from weft.nn.rnn.fused.attention import AttentionSpec
from weft.nn.rnn.fused.codegen_numba import cached_with, tanh_of, zero_scalar


class NumbaAdditiveStep(AdditiveStep):
    """Numba loops for the CPU, which skip padding."""

    def __init__(self, spec: AttentionSpec, states: list[Tensor]) -> None:
        super().__init__(spec, states)
        self.lengths = (~spec.padding_mask).sum(1)
        self._forward, self._backward = _loops(spec.memory.dtype)
        keys = spec.keys.contiguous()
        energy = (
            spec.energy.detach().clone()
        )  # memory that numpy has seen cannot be freed, as FSDP does with parameters
        inputs = (self.lengths, self.queries, keys, spec.memory, energy, self.weights, self.contexts)
        self._inputs = [tensor.detach().numpy() for tensor in inputs]

    def _compute_context(self, t: int) -> None:
        self._forward(t, *self._inputs)

    def setup_backward(self, grad_outputs: Sequence[Tensor | None]) -> None:
        """Allocate the gradients."""
        super().setup_backward(grad_outputs)
        gradients = (self.grad_contexts, self.grad_scores, self.grad_queries, self.grad_keys, self.grad_energy)
        self._gradients = [tensor.numpy() for tensor in gradients]

    def _additive_backward(self, t: int) -> None:
        self._backward(t, *self._inputs, *self._gradients)


@cache
def _loops(dtype: torch.dtype) -> tuple[Callable[..., None], Callable[..., None]]:
    """Compile additive attention of one step, forward and backward."""
    nought = zero_scalar(dtype)
    constants = {"tanh": tanh_of(dtype), "zero": nought, "unit": nought + 1, "lowest": nought - np.inf}
    return cached_with(_forward, constants), cached_with(_backward, constants)


# Of double precision: `_loops` puts those of the dtype in their place.
tanh: Any = math.tanh
zero, unit, lowest = 0.0, 1.0, -math.inf


# Arrays are indexed, not sliced: a slice is reference-counted, and that costs more than the work on a short row.


def _forward(t, lengths, queries, keys, memory, energy, weights, contexts):  # type: ignore[no-untyped-def]
    for b in range(len(lengths)):
        highest, total = lowest, zero
        for s in range(lengths[b]):
            score = zero
            for a in range(len(energy)):
                score += energy[a] * tanh(keys[b, s, a] + queries[t, b, a])
            weights[t, b, s] = score
            highest = max(highest, score)
        for s in range(lengths[b]):
            weights[t, b, s] = math.exp(weights[t, b, s] - highest)
            total += weights[t, b, s]
        for s in range(lengths[b]):
            weight = weights[t, b, s] / total
            weights[t, b, s] = weight
            for d in range(memory.shape[2]):
                contexts[t, b, d] += weight * memory[b, s, d]


def _backward(  # type: ignore[no-untyped-def]
    t,
    lengths,
    queries,
    keys,
    memory,
    energy,
    weights,
    contexts,
    grad_contexts,
    grad_scores,
    grad_queries,
    grad_keys,
    grad_energy,
):
    for b in range(len(lengths)):
        mean = zero  # Σ_s w_s (grad_context · m_s) = grad_context · Σ_s w_s m_s
        for d in range(memory.shape[2]):
            mean += grad_contexts[t, b, d] * contexts[t, b, d]
        for s in range(lengths[b]):
            grad_weight = zero
            for d in range(memory.shape[2]):
                grad_weight += grad_contexts[t, b, d] * memory[b, s, d]
            grad_score = weights[t, b, s] * (grad_weight - mean)
            grad_scores[t, b, s] = grad_score
            for a in range(len(energy)):
                hidden = tanh(keys[b, s, a] + queries[t, b, a])
                grad_energy[b, a] += grad_score * hidden
                grad_sum = grad_score * energy[a] * (unit - hidden * hidden)
                grad_queries[t, b, a] += grad_sum
                grad_keys[b, s, a] += grad_sum
