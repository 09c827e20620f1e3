"""Self-attention of a fused scan over its own earlier states (`weft.nn.rnn.self_attentive`), forward and backward.

Written by hand as `weft.nn.rnn.fused.attention`, for `weft.nn.rnn.fused.scan`. Scores are dot products; numba loops for
the CPU.
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

from weft.nn.rnn.fused.codegen_numba import cached_njit, zero_scalar

MIN_THREADED_SIZE = 300_000  # numbers of past states read in one step


@dataclass(frozen=True)
class SelfAttentionSpec:
    """Dot-product attention over the scan's own earlier states; a query is W_x x_t plus the last mixture h~_{t-1}."""

    queries: Tensor  # (T, B, D) W_x x_t
    scale: float = 1.0

    @property
    def tensors(self) -> list[Any]:
        """The differentiable tensors."""
        return [self.queries]

    def with_tensors(self, tensors: Sequence[Any]) -> "SelfAttentionSpec":
        """Return the spec with these tensors instead."""
        (queries,) = tensors
        return SelfAttentionSpec(queries, self.scale)

    def make_step(self, states: list[Tensor]) -> "SelfAttentionStep":
        """Return the attention of one scan, which writes its states to `states`, (T + 1, B, D) each."""
        return SelfAttentionStep(self, states)


class SelfAttentionStep:
    """The self-attention of one scan: a step starts from a mixture of all earlier states.

    They are stored a second time, batch-first: in time-major order they would not stay in the CPU cache.
    """

    def __init__(self, spec: SelfAttentionSpec, states: list[Tensor]) -> None:
        self.spec, (self.steps, rows, width) = spec, spec.queries.shape
        self.states, self.queries = states, spec.queries.clone(memory_format=torch.contiguous_format)
        self.start_states = [state.new_zeros(self.steps, rows, width) for state in states]
        self.past = [state.new_zeros(rows, self.steps, width) for state in states]
        self.weights = states[0].new_zeros(self.steps, rows, self.steps)
        self._scale = zero_scalar(states[0].dtype) + spec.scale
        self._forward, self._backward = (
            build(states[0].dtype, len(states)) for build in (_compile_forward, _compile_backward)
        )
        inputs = [self.queries, self.weights, *(pair[n] for n in (0, -1) for pair in (self.past, self.start_states))]
        self._inputs = [tensor.numpy() for tensor in inputs]

    @property
    def outputs(self) -> list[Tensor]:
        """Return the mixture of earlier states that the last step started from, an output beside the states."""
        return [self.start_states[0][-1]]

    def forward(self, t: int, input_proj: Tensor) -> None:
        """Compute the mixture of the states after the steps before t."""
        if t:
            for past, state in zip(self.past, self.states, strict=True):
                past[:, t - 1] = state[t]
            self._run_rows(self._forward, t, *self._inputs)

    def _run_rows(self, loop: Callable[..., None], t: int, *arrays: Any) -> None:
        """Run a loop over all rows, in threads if there is enough work."""
        rows, threads = self.queries.shape[1], torch.get_num_threads()
        if threads == 1 or t * self.queries[0].numel() < MIN_THREADED_SIZE:
            loop(t, 0, rows, self._scale, *arrays)
            return
        bounds = [rows * number // threads for number in range(threads + 1)]
        futures = [
            _thread_pool(threads).submit(loop, t, low, high, self._scale, *arrays) for low, high in pairwise(bounds[1:])
        ]
        loop(t, 0, bounds[1], self._scale, *arrays)
        for future in futures:
            future.result()

    def setup_backward(self, grad_outputs: Sequence[Tensor | None]) -> None:
        """Allocate the gradients, and store that of the output."""
        (self.grad_outputs,) = grad_outputs
        self.grad_past = [torch.zeros_like(past) for past in self.past]
        self.grad_queries = torch.zeros_like(self.queries)
        self._gradients = [tensor.numpy() for tensor in (self.grad_queries, self.grad_past[0], self.grad_past[-1])]

    def finish(self) -> None:
        """Do nothing after the last step."""

    def accumulate_state_grad(self, t: int, grad_input_proj: Tensor, grad_state: list[Tensor]) -> None:
        """Replace the gradient from the next step's start by the sum of those from all later steps."""
        for part, past in zip(grad_state, self.grad_past, strict=True):
            part.copy_(past[:, t])

    def backward(self, t: int, grad_input_proj: Tensor, grad_state: list[Tensor]) -> None:
        """Compute the gradients of queries and past states from that of the mixture that step t started from."""
        if t + 1 < self.steps:
            grad_state[0] += self.grad_queries[t + 1]
        elif self.grad_outputs is not None:
            grad_state[0] += self.grad_outputs
        if t:
            parts = [part.numpy() for part in (grad_state[0], grad_state[-1])]
            self._run_rows(self._backward, t, *self._inputs, *self._gradients, *parts)

    def gradients(self, grad_input_proj: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the queries."""
        return (self.grad_queries,)


@cache
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1)


# Of a state's parts, the first, h, is also the key; a second, c, if there is one, is mixed with the same weights.


@cache
def _compile_forward(dtype: torch.dtype, parts: int) -> Callable[..., None]:
    """Compile self-attention of one step, for a range of rows."""
    compiled, exp, zero, has_cell = cached_njit(sums=True), math.exp, zero_scalar(dtype), parts > 1
    lowest = zero - np.inf

    @compiled
    def forward(t, low, high, scale, queries, weights, past, start, past_c, start_c):  # type: ignore[no-untyped-def]
        D = past.shape[2]
        for b in range(low, high):
            highest, total = lowest, zero
            for d in range(D):
                queries[t, b, d] += start[t - 1, b, d]
            for i in range(t):
                score = zero
                for d in range(D):
                    score += queries[t, b, d] * past[b, i, d]
                weights[t, b, i] = scale * score
                highest = max(highest, scale * score)
            for i in range(t):
                weights[t, b, i] = exp(weights[t, b, i] - highest)
                total += weights[t, b, i]
            for i in range(t):
                weight = weights[t, b, i] / total
                weights[t, b, i] = weight
                for d in range(D):
                    start[t, b, d] += weight * past[b, i, d]
                if has_cell:
                    for d in range(D):
                        start_c[t, b, d] += weight * past_c[b, i, d]

    return forward  # type: ignore[no-any-return]


@cache
def _compile_backward(dtype: torch.dtype, parts: int) -> Callable[..., None]:
    """Compile the backward pass of one step, for a range of rows."""
    compiled, zero, has_cell = cached_njit(sums=True), zero_scalar(dtype), parts > 1

    @compiled
    def backward(  # type: ignore[no-untyped-def]
        t,
        low,
        high,
        scale,
        queries,
        weights,
        past,
        start,
        past_c,
        start_c,
        grad_queries,
        grad_past,
        grad_past_c,
        grad_start,
        grad_start_c,
    ):
        D = past.shape[2]
        for b in range(low, high):
            mean = zero  # Σ_i w_i (grad_start · state_i) = grad_start · Σ_i w_i state_i
            for d in range(D):
                mean += grad_start[b, d] * start[t, b, d]
            if has_cell:
                for d in range(D):
                    mean += grad_start_c[b, d] * start_c[t, b, d]
            for i in range(t):
                grad_weight, weight = zero, weights[t, b, i]
                for d in range(D):
                    grad_weight += grad_start[b, d] * past[b, i, d]
                if has_cell:
                    for d in range(D):
                        grad_weight += grad_start_c[b, d] * past_c[b, i, d]
                        grad_past_c[b, i, d] += weight * grad_start_c[b, d]
                grad_score = scale * weight * (grad_weight - mean)
                for d in range(D):
                    grad_queries[t, b, d] += grad_score * past[b, i, d]
                    grad_past[b, i, d] += weight * grad_start[b, d] + grad_score * queries[t, b, d]

    return backward  # type: ignore[no-any-return]
