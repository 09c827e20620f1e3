"""Attention inside a walk: before each step the state looks at a memory, and what it reads goes into the step.

Forward and backward are written by hand, for the walk of `weft.nn.scan`: what each step sends back is kept, and the
gradients of memory and matrices are products over all steps at once. Two kinds of scores are known here: products of
query and key, and the additive one; the others walk under autograd.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from weft.nn.kernels import compiler, tanh_of
from weft.nn.scores import Additive, Dot, General, Score

WORTH_THREADS = 300_000  # numbers read in one look at one's own past


@dataclass(frozen=True)
class Sight:
    """A memory that a walk looks at, and by what."""

    tensors: ClassVar[tuple[str, ...]] = ("memory", "keys", "from_context", "query", "energy")  # those with gradients

    memory: Tensor  # (B, S, D)
    keys: Tensor  # (B, S, A)
    from_context: Tensor  # (G·D, D) what a context puts into a step
    query: Any  # (A, D) additive: the query's matrix; else None
    energy: Any  # (A,) additive: v; else None
    empty: Tensor  # (B, S)
    scale: float = 1.0  # of products


@dataclass(frozen=True)
class Past:
    """A walk's own earlier states, by products: what each step asks of them, beside what it last mixed."""

    tensors: ClassVar[tuple[str, ...]] = ("queries",)

    queries: Tensor  # (T, B, D)
    scale: float = 1.0


def sight(score: Score, memory: Tensor, keys: Tensor, empty: Tensor, from_context: Tensor) -> Sight | None:
    """Say how to look by this score inside a walk, or None if that is not known here."""
    if isinstance(score, Additive):
        return Sight(memory, keys, from_context, score.query.weight, score.energy.weight[0], empty)
    if isinstance(score, Dot | General):
        return Sight(memory, keys, from_context, None, None, empty, score.scale if isinstance(score, Dot) else 1.0)
    return None


class Look:
    """One walk's looks at a memory, and what they send back."""

    starts: list[Tensor]  # what steps start from: each part of the state

    def __init__(self, at: Sight, tapes: list[Tensor]) -> None:
        self.at, self.starts = at, tapes
        steps = len(tapes[0]) - 1
        rows, places, width = at.memory.shape
        self.weights = at.memory.new_zeros(steps, rows, places)
        self.contexts = at.memory.new_zeros(steps, rows, width)
        self.queries = at.memory.new_zeros(steps, rows, at.keys.shape[-1])
        self.into_step = at.from_context.t().contiguous()

    @property
    def outputs(self) -> list[Tensor]:
        """What the walk returns beside the states."""
        return [self.contexts[:]]  # not the tensor that is kept here: it would keep itself alive

    def forward(self, t: int, known: Tensor) -> None:
        """Look with the state before step t, and add what the context decides to known (B, G·D)."""
        self._ask(t, self.starts[0][t])
        self._see(t)
        known.addmm_(self.contexts[t], self.into_step)

    def _ask(self, t: int, state: Tensor) -> None:
        torch.mul(state, self.at.scale, out=self.queries[t])

    def _see(self, t: int) -> None:
        scores = torch.bmm(self.at.keys, self.queries[t][..., None]).squeeze(-1)
        torch.softmax(scores.masked_fill_(self.at.empty, torch.finfo(scores.dtype).min), -1, out=self.weights[t])
        torch.bmm(self.weights[t][:, None], self.at.memory, out=self.contexts[t][:, None])

    def turn_back(self, given: Sequence[Tensor | None]) -> None:
        """Make room for the way back, and take what comes back for the outputs."""
        (self.given,) = given
        self.gcontexts = torch.empty_like(self.contexts)
        self.gscores = torch.zeros_like(self.weights)

    def arrive(self, t: int, gstate: list[Tensor]) -> None:
        """Add what comes back to the state after step t by other ways than the next step's start: there is none."""

    def backward(self, t: int, gknown: Tensor, gstate: list[Tensor]) -> None:
        """Send back to the state before step t what came back for the step and for its context."""
        torch.mm(gknown, self.at.from_context, out=self.gcontexts[t])
        if self.given is not None:
            self.gcontexts[t] += self.given[t]
        self._see_back(t, gstate[0])

    def _weigh_back(self, t: int) -> Tensor:
        back = torch.bmm(self.at.memory, self.gcontexts[t][..., None]).squeeze(-1)  # (B, S)
        weights = self.weights[t]
        return torch.mul(weights, back - (weights * back).sum(-1, keepdim=True), out=self.gscores[t])

    def _see_back(self, t: int, gstate: Tensor) -> None:
        gstate += torch.bmm(self._weigh_back(t)[:, None], self.at.keys).squeeze(1) * self.at.scale

    def gradients(self, gknown: Tensor) -> tuple[Tensor | None, ...]:
        """Return what goes back to each of the sight's tensors."""
        return (
            self._to_memory(),
            torch.bmm(self.gscores.permute(1, 2, 0), self.queries.transpose(0, 1)),
            self._to_step(gknown),
            None,
            None,
        )

    def _to_memory(self) -> Tensor:
        return torch.bmm(self.weights.permute(1, 2, 0), self.gcontexts.transpose(0, 1))

    def _to_step(self, gknown: Tensor) -> Tensor:
        return gknown.flatten(0, 1).t() @ self.contexts.flatten(0, 1)


class AdditiveLook(Look):
    """Looks by v · tanh(W q + k); the tanh of every pair is not kept, but made again on the way back."""

    def __init__(self, at: Sight, tapes: list[Tensor]) -> None:
        super().__init__(at, tapes)
        assert at.query is not None
        self.turned = at.query.t().contiguous()

    def _ask(self, t: int, state: Tensor) -> None:
        torch.mm(state, self.turned, out=self.queries[t])

    def _see(self, t: int) -> None:
        hidden = torch.tanh(self.at.keys + self.queries[t][:, None])
        scores = hidden @ self.at.energy
        torch.softmax(scores.masked_fill_(self.at.empty, torch.finfo(scores.dtype).min), -1, out=self.weights[t])
        torch.bmm(self.weights[t][:, None], self.at.memory, out=self.contexts[t][:, None])

    def turn_back(self, given: Sequence[Tensor | None]) -> None:
        """Make room for the way back."""
        super().turn_back(given)
        self.gqueries = torch.zeros_like(self.queries)
        self.gkeys = torch.zeros_like(self.at.keys)
        self.genergy = torch.zeros_like(self.queries[0])  # (B, A)

    def _see_back(self, t: int, gstate: Tensor) -> None:
        self._additive_back(t)
        gstate.addmm_(self.gqueries[t], self.at.query)

    def _additive_back(self, t: int) -> None:
        gscores = self._weigh_back(t)[..., None]
        hidden = torch.tanh(self.at.keys + self.queries[t][:, None])
        self.genergy += (gscores * hidden).sum(1)
        back = gscores * self.at.energy * (1 - hidden * hidden)
        self.gkeys += back
        torch.sum(back, 1, out=self.gqueries[t])

    def gradients(self, gknown: Tensor) -> tuple[Tensor | None, ...]:
        """Return what goes back to each of the sight's tensors."""
        gquery = self.gqueries.flatten(0, 1).t() @ self.starts[0][:-1].flatten(0, 1)
        gkeys = self.gkeys.to(self.at.keys.dtype)
        return self._to_memory(), gkeys, self._to_step(gknown), gquery, self.genergy.sum(0).to(gkeys.dtype)


class CompiledAdditiveLook(AdditiveLook):
    """The same in compiled loops over the real places alone, for the CPU."""

    def __init__(self, at: Sight, tapes: list[Tensor]) -> None:
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


class Recall:
    """One walk's looks at its own earlier states: what a step starts from is a mixture of them.

    The past is kept once more, row by row: read as the walk writes it, step by step, it would not stay in the cache.
    """

    def __init__(self, at: Past, tapes: list[Tensor]) -> None:
        self.at, (self.steps, rows, width) = at, at.queries.shape
        self.tapes, self.queries = tapes, at.queries.clone(memory_format=torch.contiguous_format)
        self.starts = [tape.new_zeros(self.steps, rows, width) for tape in tapes]
        self.past = [tape.new_zeros(rows, self.steps, width) for tape in tapes]
        self.weights = tapes[0].new_zeros(self.steps, rows, self.steps)
        self._scale = _zero(tapes[0].dtype) + at.scale
        self._forward, self._backward = _own_loops(tapes[0].dtype, len(tapes))
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

    def arrive(self, t: int, gstate: list[Tensor]) -> None:
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


def look(at: Sight | Past, tapes: list[Tensor]) -> Look | Recall:
    """Make the looks of one walk, whose states go to `tapes`."""
    if isinstance(at, Past):
        return Recall(at, tapes)
    if at.query is None:
        return Look(at, tapes)
    if at.memory.is_cuda:
        from weft.nn.looks_cuda import CudaAdditiveLook

        return CudaAdditiveLook(at, tapes)
    return CompiledAdditiveLook(at, tapes)


# Rows are read by their numbers, not as slices: a slice is counted, and that costs more than a short row.


@cache
def _loops(dtype: torch.dtype) -> tuple[Callable[..., None], Callable[..., None]]:
    """Compile the additive look, and its way back."""
    compiled, tanh, exp, zero = compiler(sums=True), tanh_of(dtype), math.exp, _zero(dtype)
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


@cache
def _own_loops(dtype: torch.dtype, parts: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """Compile the look at one's own past: of a state's parts the first, h, is asked, and a second, c, goes with it."""
    compiled, exp, zero, both = compiler(sums=True), math.exp, _zero(dtype), parts > 1
    lowest = zero - np.inf

    @compiled
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

    @compiled
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

    return forward, backward


def _zero(dtype: torch.dtype) -> Any:
    return np.zeros((), str(dtype).removeprefix("torch."))[()]
