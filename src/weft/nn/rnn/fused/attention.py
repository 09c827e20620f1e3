"""Attention inside a walk: before each step the state looks at a memory, and what it reads goes into the step.

Forward and backward are written by hand, for the walk of `weft.nn.rnn.fused.scan`: what each step sends back is kept,
and the gradients of memory and matrices are products over all steps at once. Two kinds of scores can walk so: products
of query and key, here, and the additive one (`weft.nn.rnn.fused.additive_numba`); the others walk under autograd.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.nn.attention.scores import Additive, Dot, General, Score


@dataclass(frozen=True)
class AttentionSpec:
    """A memory that a walk looks at, and by what."""

    memory: Tensor  # (B, S, D)
    keys: Tensor  # (B, S, A)
    from_context: Tensor  # (G·D, D) what a context puts into a step
    query: Any  # (A, D) additive: the query's matrix; else None
    energy: Any  # (A,) additive: v; else None
    empty: Tensor  # (B, S)
    scale: float = 1.0  # of products

    @property
    def tensors(self) -> list[Any]:
        """Those that gradients go back to."""
        return [self.memory, self.keys, self.from_context, self.query, self.energy]

    def holding(self, tensors: Sequence[Any]) -> "AttentionSpec":
        """Return the same with these in their place."""
        memory, keys, from_context, query, energy = tensors
        return AttentionSpec(memory, keys, from_context, query, energy, self.empty, self.scale)

    def begin(self, tapes: list[Tensor]) -> "AttentionStep":
        """Make the looks of one walk, whose states go to `tapes`."""
        if self.query is None:
            return AttentionStep(self, tapes)
        if self.memory.is_cuda:
            from weft.nn.rnn.fused.additive_triton import TritonAdditiveStep

            return TritonAdditiveStep(self, tapes)
        from weft.nn.rnn.fused.additive_numba import NumbaAdditiveStep

        return NumbaAdditiveStep(self, tapes)


def attention_spec(
    score: Score, memory: Tensor, keys: Tensor, empty: Tensor, from_context: Tensor
) -> AttentionSpec | None:
    """Say how to look by this score inside a walk, or None if that is not known here."""
    if isinstance(score, Additive):
        return AttentionSpec(memory, keys, from_context, score.query.weight, score.energy.weight[0], empty)
    if isinstance(score, Dot | General):
        return AttentionSpec(
            memory, keys, from_context, None, None, empty, score.scale if isinstance(score, Dot) else 1.0
        )
    return None


class AttentionStep:
    """One walk's looks at a memory, and what they send back."""

    starts: list[Tensor]  # what steps start from: each part of the state
    asked: Tensor  # (T, B, D) the states that look

    def __init__(self, at: AttentionSpec, tapes: list[Tensor]) -> None:
        self.at, self.starts, self.asked = at, tapes, tapes[0][:-1]
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
        self.see(t)
        known.addmm_(self.contexts[t], self.into_step)

    def finish(self) -> None:
        """Do what is left after the last step: nothing."""

    def see(self, t: int) -> None:
        """Look with state number t."""
        self._ask(t, self.asked[t])
        self._see(t)

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

    def arrive(self, t: int, gknown: Tensor, gstate: list[Tensor]) -> None:
        """Add what comes back to the state after step t by other ways than the next step's start: there is none."""

    def backward(self, t: int, gknown: Tensor, gstate: list[Tensor]) -> None:
        """Send back to the state before step t what came back for the step and for its context."""
        torch.mm(gknown, self.at.from_context, out=self.gcontexts[t])
        if self.given is not None:
            self.gcontexts[t] += self.given[t]
        self.see_back(t, gstate[0])

    def see_back(self, t: int, gstate: Tensor) -> None:
        """Send what came back for context number t to the state that looked."""
        came, weights = torch.bmm(self.at.memory, self.gcontexts[t][..., None]).squeeze(-1), self.weights[t]  # (B, S)
        torch.mul(weights, came - (weights * came).sum(-1, keepdim=True), out=self.gscores[t])
        gstate += torch.bmm(self.gscores[t][:, None], self.at.keys).squeeze(1) * self.at.scale

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


def attend_all(queries: Tensor, at: AttentionSpec) -> Tensor:
    """Look with all queries (T, B, D) where no step waits for what was seen: the contexts (T, B, D).

    As one tensor operation the additive score would hold the tanh of every query with every key.
    """
    contexts: Tensor = _AttendAll.apply(at, queries, *at.tensors)  # type: ignore[no-untyped-call]
    return contexts


class _AttendAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, at: AttentionSpec, queries: Tensor, *tensors: Any) -> Tensor:
        ctx.looks = at.holding(tensors).begin([torch.cat([queries, queries[:1]])])  # a walk's tape has one state more
        for t in range(len(queries)):
            ctx.looks.see(t)
        return ctx.looks.contexts[:]  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> Any:
        looks: AttentionStep = ctx.looks
        looks.turn_back([None])
        looks.gcontexts.copy_(given)
        to_queries = torch.zeros_like(looks.asked)
        for t in range(len(to_queries)):
            looks.see_back(t, to_queries[t])
        return None, to_queries, *looks.gradients(given[..., :0])


@dataclass(frozen=True)
class InputFeedingSpec:
    """A memory that each step's new state looks at; what it then reads out goes into the next step (input feeding)."""

    attention: AttentionSpec  # its from_context is what a readout puts into a step
    readout: Tensor  # (D, 2D)
    bias: Tensor  # (D,)
    begun: Tensor  # (B, D) what goes into the first step; no gradient goes there

    @property
    def tensors(self) -> list[Any]:
        """Those that gradients go back to."""
        return [*self.attention.tensors, self.readout, self.bias]

    def holding(self, tensors: Sequence[Any]) -> "InputFeedingSpec":
        """Return the same with these in their place."""
        *seen, readout, bias = tensors
        return InputFeedingSpec(self.attention.holding(seen), readout, bias, self.begun)

    def begin(self, tapes: list[Tensor]) -> "InputFeedingStep":
        """Make the looks of one walk, whose states go to `tapes`."""
        return InputFeedingStep(self, tapes)


class InputFeedingStep:
    """One walk with input feeding: h~_t = tanh(W_c [s_t ; c_t]), by Luong et al. 2015, section 3.3."""

    def __init__(self, at: InputFeedingSpec, tapes: list[Tensor]) -> None:
        self.at, self.starts, self.steps = at, tapes, len(tapes[0]) - 1
        self.looks = at.attention.begin(tapes)
        self.looks.asked = tapes[0][1:]
        self.reads = torch.empty_like(tapes[0])
        self.reads[0] = at.begun
        self.joined = tapes[0].new_empty(self.steps, *at.begun.shape[:1], 2 * at.begun.shape[1])
        self.turned = at.readout.t().contiguous()

    @property
    def outputs(self) -> list[Tensor]:
        """What the walk returns beside the states: what was read out after each step."""
        return [self.reads[1:]]

    def forward(self, t: int, known: Tensor) -> None:
        """Read out what the state before step t sees, and add what that decides to known (B, G·D)."""
        if t:
            self._read(t - 1)
        known.addmm_(self.reads[t], self.looks.into_step)

    def finish(self) -> None:
        """Read out after the last step."""
        self._read(self.steps - 1)

    def _read(self, t: int) -> None:
        self.looks.see(t)
        torch.cat([self.looks.asked[t], self.looks.contexts[t]], -1, out=self.joined[t])
        torch.addmm(self.at.bias, self.joined[t], self.turned, out=self.reads[t + 1]).tanh_()

    def turn_back(self, given: Sequence[Tensor | None]) -> None:
        """Make room for the way back, and take what comes back for what was read out."""
        (self.given,) = given
        self.looks.turn_back([None])
        self.greads = torch.empty_like(self.reads[1:])

    def arrive(self, t: int, gknown: Tensor, gstate: list[Tensor]) -> None:
        """Add what comes back to the state after step t through what was read out of it."""
        back = torch.zeros_like(self.reads[0]) if self.given is None else self.given[t]
        if t + 1 < self.steps:
            back = torch.addmm(back, gknown[t + 1], self.at.attention.from_context)
        torch.mul(back, 1 - self.reads[t + 1] ** 2, out=self.greads[t])
        to_state, to_context = (self.greads[t] @ self.at.readout).chunk(2, -1)
        self.looks.gcontexts[t] = to_context
        gstate[0] += to_state
        self.looks.see_back(t, gstate[0])

    def backward(self, t: int, gknown: Tensor, gstate: list[Tensor]) -> None:
        """Send nothing more to the state before step t: what it read out comes when that step is walked back."""

    def gradients(self, gknown: Tensor) -> tuple[Tensor | None, ...]:
        """Return what goes back to each of the tensors."""
        memory, keys, _, query, energy = self.looks.gradients(gknown)
        flat = self.greads.flatten(0, 1)
        into_step = gknown.flatten(0, 1).t() @ self.reads[:-1].flatten(0, 1)
        return memory, keys, into_step, query, energy, flat.t() @ self.joined.flatten(0, 1), flat.sum(0)
