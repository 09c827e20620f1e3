"""The additive look inside a walk: what it keeps on any device, and its loops for the CPU."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from weft.nn.rnn.fused.attention import AttentionSpec, AttentionStep
from weft.nn.rnn.fused.codegen_numba import compiler, tanh_of, zero_of


class AdditiveStep(AttentionStep, ABC):
    """Looks by v · tanh(W q + k); the tanh of every pair is not kept, but made again on the way back."""

    def __init__(self, at: AttentionSpec, tapes: list[Tensor]) -> None:
        super().__init__(at, tapes)
        self.turned = at.query.t().contiguous()

    def _ask(self, t: int, state: Tensor) -> None:
        torch.mm(state, self.turned, out=self.queries[t])

    def turn_back(self, given: Sequence[Tensor | None]) -> None:
        """Make room for the way back."""
        super().turn_back(given)
        self.gqueries = torch.zeros_like(self.queries)
        self.gkeys = torch.zeros_like(self.at.keys)
        self.genergy = torch.zeros_like(self.queries[0])  # (B, A)

    def see_back(self, t: int, gstate: Tensor) -> None:
        """Send what came back for context number t to the state that looked."""
        self._additive_back(t)
        gstate.addmm_(self.gqueries[t], self.at.query)

    @abstractmethod
    def _additive_back(self, t: int) -> None:
        """Send what came back for the context to queries, keys and v; a device has its own way."""

    def gradients(self, gknown: Tensor) -> tuple[Tensor | None, ...]:
        """Return what goes back to each of the sight's tensors."""
        gquery = self.gqueries.flatten(0, 1).t() @ self.asked.flatten(0, 1)
        gkeys = self.gkeys.to(self.at.keys.dtype)
        return self._to_memory(), gkeys, self._to_step(gknown), gquery, self.genergy.sum(0).to(gkeys.dtype)


class NumbaAdditiveStep(AdditiveStep):
    """In compiled loops over the real places alone, for the CPU."""

    def __init__(self, at: AttentionSpec, tapes: list[Tensor]) -> None:
        super().__init__(at, tapes)
        self.lengths = (~at.empty).sum(1)
        self._forward, self._backward = _loops(at.memory.dtype)
        read = (self.lengths, self.queries, at.keys.contiguous(), at.memory, at.energy, self.weights, self.contexts)
        self._read = [one.detach().numpy() for one in read]

    def _see(self, t: int) -> None:
        self._forward(t, *self._read)

    def turn_back(self, given: Sequence[Tensor | None]) -> None:
        """Make room for the way back."""
        super().turn_back(given)
        written = (self.gcontexts, self.gscores, self.gqueries, self.gkeys, self.genergy)
        self._written = [one.numpy() for one in written]

    def _additive_back(self, t: int) -> None:
        self._backward(t, *self._read, *self._written)


# Rows are read by their numbers, not as slices: a slice is counted, and that costs more than a short row.


@cache
def _loops(dtype: torch.dtype) -> tuple[Callable[..., None], Callable[..., None]]:
    """Compile the additive look, and its way back."""
    compiled, tanh, exp, zero = compiler(sums=True), tanh_of(dtype), math.exp, zero_of(dtype)
    one, lowest = zero + 1, zero - np.inf

    @compiled
    def forward(t, lengths, queries, keys, memory, energy, weights, contexts):  # type: ignore[no-untyped-def]
        for b in range(len(lengths)):
            top, total = lowest, zero
            for s in range(lengths[b]):
                score = zero
                for a in range(len(energy)):
                    score += energy[a] * tanh(keys[b, s, a] + queries[t, b, a])
                weights[t, b, s] = score
                top = max(top, score)
            for s in range(lengths[b]):
                weights[t, b, s] = exp(weights[t, b, s] - top)
                total += weights[t, b, s]
            for s in range(lengths[b]):
                weight = weights[t, b, s] / total
                weights[t, b, s] = weight
                for d in range(memory.shape[2]):
                    contexts[t, b, d] += weight * memory[b, s, d]

    @compiled
    def backward(  # type: ignore[no-untyped-def]
        t, lengths, queries, keys, memory, energy, weights, contexts, gcontexts, gscores, gqueries, gkeys, genergy
    ):
        for b in range(len(lengths)):
            mean = zero  # Σ_s w_s (back · m_s) is back · Σ_s w_s m_s
            for d in range(memory.shape[2]):
                mean += gcontexts[t, b, d] * contexts[t, b, d]
            for s in range(lengths[b]):
                came = zero
                for d in range(memory.shape[2]):
                    came += gcontexts[t, b, d] * memory[b, s, d]
                back = weights[t, b, s] * (came - mean)
                gscores[t, b, s] = back
                for a in range(len(energy)):
                    hidden = tanh(keys[b, s, a] + queries[t, b, a])
                    genergy[b, a] += back * hidden
                    both = back * energy[a] * (one - hidden * hidden)
                    gqueries[t, b, a] += both
                    gkeys[b, s, a] += both

    return forward, backward
