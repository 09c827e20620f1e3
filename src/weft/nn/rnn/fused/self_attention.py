"""A walk that looks back at its own earlier states (`weft.nn.rnn.self_attentive`), forward and backward by hand.

As in `weft.nn.rnn.fused.attention`, for the walk of `weft.nn.rnn.fused.scan`; scores are products, and the loops are
the CPU's.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.nn.rnn.fused.codegen_numba import keeper, zero_of

WORTH_THREADS = 300_000  # numbers read in one look


@dataclass(frozen=True)
class SelfAttentionSpec:
    """A walk's own earlier states, by products: what each step asks of them, beside what it last mixed."""

    queries: Tensor  # (T, B, D)
    scale: float = 1.0

    @property
    def tensors(self) -> list[Any]:
        """Those that gradients go back to."""
        return [self.queries]

    def holding(self, tensors: Sequence[Any]) -> "SelfAttentionSpec":
        """Return the same with these in their place."""
        (queries,) = tensors
        return SelfAttentionSpec(queries, self.scale)

    def begin(self, tapes: list[Tensor]) -> "SelfAttentionStep":
        """Make the looks of one walk, whose states go to `tapes`."""
        return SelfAttentionStep(self, tapes)


class SelfAttentionStep:
    """One walk's looks at its own earlier states: what a step starts from is a mixture of them.

    The past is kept once more, row by row: read as the walk writes it, step by step, it would not stay in the cache.
    """

    def __init__(self, at: SelfAttentionSpec, tapes: list[Tensor]) -> None:
        self.at, (self.steps, rows, width) = at, at.queries.shape
        self.tapes, self.queries = tapes, at.queries.clone(memory_format=torch.contiguous_format)
        self.starts = [tape.new_zeros(self.steps, rows, width) for tape in tapes]
        self.past = [tape.new_zeros(rows, self.steps, width) for tape in tapes]
        self.weights = tapes[0].new_zeros(self.steps, rows, self.steps)
        self._scale = zero_of(tapes[0].dtype) + at.scale
        self._forward, self._backward = (build(tapes[0].dtype, len(tapes)) for build in (_mix, _mix_back))
        read = [self.queries, self.weights, *(pair[n] for n in (0, -1) for pair in (self.past, self.starts))]
        self._read = [one.numpy() for one in read]

    @property
    def outputs(self) -> list[Tensor]:
        """What the walk returns beside the states: what its last step started from."""
        return [self.starts[0][-1]]

    def forward(self, t: int, known: Tensor) -> None:
        """Mix the states after the steps before t."""
        if t:
            for past, tape in zip(self.past, self.tapes, strict=True):
                past[:, t - 1] = tape[t]
            self._by_rows(self._forward, t, *self._read)

    def _by_rows(self, loop: Callable[..., None], t: int, *arrays: Any) -> None:
        """Share the rows between threads, where that is worth more than it costs."""
        rows, threads = self.queries.shape[1], torch.get_num_threads()
        if threads == 1 or t * self.queries[0].numel() < WORTH_THREADS:
            loop(t, 0, rows, self._scale, *arrays)
            return
        edges = [rows * number // threads for number in range(threads + 1)]
        waiting = [_pool(threads).submit(loop, t, low, high, self._scale, *arrays) for low, high in pairwise(edges[1:])]
        loop(t, 0, edges[1], self._scale, *arrays)
        for one in waiting:
            one.result()

    def turn_back(self, given: Sequence[Tensor | None]) -> None:
        """Make room for the way back."""
        (self.given,) = given
        self.gpast = [torch.zeros_like(past) for past in self.past]
        self.gqueries = torch.zeros_like(self.queries)
        self._written = [one.numpy() for one in (self.gqueries, self.gpast[0], self.gpast[-1])]

    def finish(self) -> None:
        """Do what is left after the last step: nothing."""

    def arrive(self, t: int, gknown: Tensor, gstate: list[Tensor]) -> None:
        """Replace what would come from the next step's start by what all later steps sent back."""
        for part, past in zip(gstate, self.gpast, strict=True):
            part.copy_(past[:, t])

    def backward(self, t: int, gknown: Tensor, gstate: list[Tensor]) -> None:
        """Send back what came back for the mixture that step t started from."""
        if t + 1 < self.steps:
            gstate[0] += self.gqueries[t + 1]
        elif self.given is not None:
            gstate[0] += self.given
        if t:
            parts = [part.numpy() for part in (gstate[0], gstate[-1])]
            self._by_rows(self._backward, t, *self._read, *self._written, *parts)

    def gradients(self, gknown: Tensor) -> tuple[Tensor | None, ...]:
        """Return what goes back to the queries."""
        return (self.gqueries,)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1)


# Of a state's parts the first, h, is asked, and a second, c, goes with it.


@cache
def _mix(dtype: torch.dtype, parts: int) -> Callable[..., None]:
    """Compile the look at one's own past."""
    kept, exp, zero, both = keeper(sums=True), math.exp, zero_of(dtype), parts > 1
    lowest = zero - np.inf

    @kept
    def forward(t, low, high, scale, queries, weights, past, start, past_c, start_c):  # type: ignore[no-untyped-def]
        D = past.shape[2]
        for b in range(low, high):
            top, total = lowest, zero
            for d in range(D):
                queries[t, b, d] += start[t - 1, b, d]
            for i in range(t):
                score = zero
                for d in range(D):
                    score += queries[t, b, d] * past[b, i, d]
                weights[t, b, i] = scale * score
                top = max(top, scale * score)
            for i in range(t):
                weights[t, b, i] = exp(weights[t, b, i] - top)
                total += weights[t, b, i]
            for i in range(t):
                weight = weights[t, b, i] / total
                weights[t, b, i] = weight
                for d in range(D):
                    start[t, b, d] += weight * past[b, i, d]
                if both:
                    for d in range(D):
                        start_c[t, b, d] += weight * past_c[b, i, d]

    return forward  # type: ignore[no-any-return]


@cache
def _mix_back(dtype: torch.dtype, parts: int) -> Callable[..., None]:
    """Compile its way back."""
    kept, zero, both = keeper(sums=True), zero_of(dtype), parts > 1

    @kept
    def backward(  # type: ignore[no-untyped-def]
        t, low, high, scale, queries, weights, past, start, past_c, start_c, gqueries, gpast, gpast_c, back, back_c
    ):
        D = past.shape[2]
        for b in range(low, high):
            mean = zero  # Σ_i w_i (back · state_i) is back · Σ_i w_i state_i
            for d in range(D):
                mean += back[b, d] * start[t, b, d]
            if both:
                for d in range(D):
                    mean += back_c[b, d] * start_c[t, b, d]
            for i in range(t):
                came, weight = zero, weights[t, b, i]
                for d in range(D):
                    came += back[b, d] * past[b, i, d]
                if both:
                    for d in range(D):
                        came += back_c[b, d] * past_c[b, i, d]
                        gpast_c[b, i, d] += weight * back_c[b, d]
                score = scale * weight * (came - mean)
                for d in range(D):
                    gqueries[t, b, d] += score * past[b, i, d]
                    gpast[b, i, d] += weight * back[b, d] + score * queries[t, b, d]

    return backward  # type: ignore[no-any-return]
