"""Attention inside a fused scan: before each step the state attends to a memory; the context is an input of the step.

Forward and backward are written by hand, for `weft.nn.rnn.fused.scan`: the gradients of each step are kept, and those
of memory and matrices are products over all steps at once. Two kinds of scores are supported: dot products of query and
key, here, and the additive score (`weft.nn.rnn.fused.additive`). The others run eagerly under autograd.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.nn.attention.scores import Additive, Dot, General, Score
from weft.nn.kernels import dispatch


@dataclass(frozen=True)
class AttentionSpec:
    """The memory that a scan attends to, and the weights of the score."""

    memory: Tensor  # (B, S, D)
    keys: Tensor  # (B, S, A)
    context_weight: Tensor  # (G·D, D) the context's part of the input projection
    query_weight: Any  # (A, D) additive: the query's weight; else None
    energy: Any  # (A,) additive: v; else None
    padding_mask: Tensor  # (B, S) True at padding
    scale: float = 1.0  # of dot products

    @property
    def tensors(self) -> list[Any]:
        """The differentiable tensors."""
        return [self.memory, self.keys, self.context_weight, self.query_weight, self.energy]

    def with_tensors(self, tensors: Sequence[Any]) -> "AttentionSpec":
        """Return the spec with these tensors instead."""
        memory, keys, context_weight, query_weight, energy = tensors
        return AttentionSpec(memory, keys, context_weight, query_weight, energy, self.padding_mask, self.scale)

    def make_step(self, states: list[Tensor]) -> "AttentionStep":
        """Return the attention of one scan, which writes its states to `states`, (T + 1, B, D) each."""
        if self.query_weight is None:
            return AttentionStep(self, states)
        step: AttentionStep = dispatch.additive_step_class(self.memory)(self, states)
        return step


def attention_spec(
    score: Score, memory: Tensor, keys: Tensor, padding_mask: Tensor, context_weight: Tensor
) -> AttentionSpec | None:
    """Return the spec for attention by this score inside a scan; None if the score is not supported."""
    if isinstance(score, Additive):
        return AttentionSpec(memory, keys, context_weight, score.query.weight, score.energy.weight[0], padding_mask)
    if isinstance(score, Dot | General):
        return AttentionSpec(
            memory, keys, context_weight, None, None, padding_mask, score.scale if isinstance(score, Dot) else 1.0
        )
    return None


class AttentionStep:
    """The attention of one scan over a memory, forward and backward, step by step."""

    start_states: list[Tensor]  # each part of the state before every step
    query_states: Tensor  # (T, B, D) the states that attend

    def __init__(self, spec: AttentionSpec, states: list[Tensor]) -> None:
        self.spec, self.start_states, self.query_states = spec, states, states[0][:-1]
        steps = len(states[0]) - 1
        rows, positions, width = spec.memory.shape
        self.weights = spec.memory.new_zeros(steps, rows, positions)
        self.contexts = spec.memory.new_zeros(steps, rows, width)
        self.queries = spec.memory.new_zeros(steps, rows, spec.keys.shape[-1])
        self.context_weight_t = spec.context_weight.t().contiguous()

    @property
    def outputs(self) -> list[Tensor]:
        """Return the context vectors, an output of the scan beside the states."""
        return [self.contexts[:]]  # a view: returning the tensor stored here would make a reference cycle

    def forward(self, t: int, input_proj: Tensor) -> None:
        """Attend with the state before step t, and add the projected context to input_proj (B, G·D)."""
        self.attend(t)
        input_proj.addmm_(self.contexts[t], self.context_weight_t)

    def finish(self) -> None:
        """Do nothing after the last step."""

    def attend(self, t: int) -> None:
        """Compute context number t."""
        self._compute_query(t, self.query_states[t])
        self._compute_context(t)

    def _compute_query(self, t: int, state: Tensor) -> None:
        torch.mul(state, self.spec.scale, out=self.queries[t])

    def _compute_context(self, t: int) -> None:
        scores = torch.bmm(self.spec.keys, self.queries[t][..., None]).squeeze(-1)
        torch.softmax(
            scores.masked_fill_(self.spec.padding_mask, torch.finfo(scores.dtype).min), -1, out=self.weights[t]
        )
        torch.bmm(self.weights[t][:, None], self.spec.memory, out=self.contexts[t][:, None])

    def setup_backward(self, grad_outputs: Sequence[Tensor | None]) -> None:
        """Allocate the gradients, and store those of the outputs."""
        (self.grad_outputs,) = grad_outputs
        self.grad_contexts = torch.empty_like(self.contexts)
        self.grad_scores = torch.zeros_like(self.weights)

    def accumulate_state_grad(self, t: int, grad_input_proj: Tensor, grad_state: list[Tensor]) -> None:
        """Add gradients of the state after step t other than the next step's: there are none."""

    def backward(self, t: int, grad_input_proj: Tensor, grad_state: list[Tensor]) -> None:
        """Add to the gradient of the state before step t what reaches it through the context."""
        torch.mm(grad_input_proj, self.spec.context_weight, out=self.grad_contexts[t])
        if self.grad_outputs is not None:
            self.grad_contexts[t] += self.grad_outputs[t]
        self.attend_backward(t, grad_state[0])

    def attend_backward(self, t: int, grad_state: Tensor) -> None:
        """Add the gradient through context number t to that of the state that attended."""
        weights = self.weights[t]  # (B, S)
        grad_weights = torch.bmm(self.spec.memory, self.grad_contexts[t][..., None]).squeeze(-1)
        torch.mul(weights, grad_weights - (weights * grad_weights).sum(-1, keepdim=True), out=self.grad_scores[t])
        grad_state += torch.bmm(self.grad_scores[t][:, None], self.spec.keys).squeeze(1) * self.spec.scale

    def gradients(self, grad_input_proj: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each of the spec's tensors."""
        return (
            self._grad_memory(),
            torch.bmm(self.grad_scores.permute(1, 2, 0), self.queries.transpose(0, 1)),
            self._grad_context_weight(grad_input_proj),
            None,
            None,
        )

    def _grad_memory(self) -> Tensor:
        return torch.bmm(self.weights.permute(1, 2, 0), self.grad_contexts.transpose(0, 1))

    def _grad_context_weight(self, grad_input_proj: Tensor) -> Tensor:
        return grad_input_proj.flatten(0, 1).t() @ self.contexts.flatten(0, 1)


def attend_all(queries: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the contexts (T, B, D) of all queries (T, B, D), where no step depends on a context.

    As one tensor operation the additive score would hold the tanh of every query with every key.
    """
    contexts: Tensor = _AttendAll.apply(spec, queries, *spec.tensors)  # type: ignore[no-untyped-call]
    return contexts


class _AttendAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: AttentionSpec, queries: Tensor, *tensors: Any) -> Tensor:
        # A scan has T + 1 states.
        ctx.attention = spec.with_tensors(tensors).make_step([torch.cat([queries, queries[:1]])])
        for t in range(len(queries)):
            ctx.attention.attend(t)
        return ctx.attention.contexts[:]  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_contexts: Tensor) -> Any:
        attention: AttentionStep = ctx.attention
        attention.setup_backward([None])
        attention.grad_contexts.copy_(grad_contexts)
        grad_queries = torch.zeros_like(attention.query_states)
        for t in range(len(grad_queries)):
            attention.attend_backward(t, grad_queries[t])
        return None, grad_queries, *attention.gradients(grad_contexts[..., :0])


@dataclass(frozen=True)
class InputFeedingSpec:
    """The memory that each new state attends to; the readout is an input of the next step (input feeding)."""

    attention: AttentionSpec  # its context_weight is the readout's part of the input projection
    readout: Tensor  # (D, 2D)
    bias: Tensor  # (D,)
    initial_readout: Tensor  # (B, D) the input of the first step; it gets no gradient

    @property
    def tensors(self) -> list[Any]:
        """The differentiable tensors."""
        return [*self.attention.tensors, self.readout, self.bias]

    def with_tensors(self, tensors: Sequence[Any]) -> "InputFeedingSpec":
        """Return the spec with these tensors instead."""
        *attended, readout, bias = tensors
        return InputFeedingSpec(self.attention.with_tensors(attended), readout, bias, self.initial_readout)

    def make_step(self, states: list[Tensor]) -> "InputFeedingStep":
        """Return the attention of one scan, which writes its states to `states`, (T + 1, B, D) each."""
        return InputFeedingStep(self, states)


class InputFeedingStep:
    """The attention and readout of one scan: h~_t = tanh(W_c [s_t ; c_t]), Luong et al. 2015, section 3.3."""

    def __init__(self, spec: InputFeedingSpec, states: list[Tensor]) -> None:
        self.spec, self.start_states, self.steps = spec, states, len(states[0]) - 1
        self.attention = spec.attention.make_step(states)
        self.attention.query_states = states[0][1:]
        self.readouts = torch.empty_like(states[0])
        self.readouts[0] = spec.initial_readout
        rows, width = spec.initial_readout.shape
        self.readout_inputs = states[0].new_empty(self.steps, rows, 2 * width)
        self.readout_t = spec.readout.t().contiguous()

    @property
    def outputs(self) -> list[Tensor]:
        """Return the readout of each step, an output of the scan beside the states."""
        return [self.readouts[1:]]

    def forward(self, t: int, input_proj: Tensor) -> None:
        """Compute the readout of the state before step t, and add its projection to input_proj (B, G·D)."""
        if t:
            self._read_out(t - 1)
        input_proj.addmm_(self.readouts[t], self.attention.context_weight_t)

    def finish(self) -> None:
        """Compute the readout after the last step."""
        self._read_out(self.steps - 1)

    def _read_out(self, t: int) -> None:
        self.attention.attend(t)
        torch.cat([self.attention.query_states[t], self.attention.contexts[t]], -1, out=self.readout_inputs[t])
        torch.addmm(self.spec.bias, self.readout_inputs[t], self.readout_t, out=self.readouts[t + 1]).tanh_()

    def setup_backward(self, grad_outputs: Sequence[Tensor | None]) -> None:
        """Allocate the gradients, and store those of the readouts."""
        (self.grad_outputs,) = grad_outputs
        self.attention.setup_backward([None])
        self.grad_preactivations = torch.empty_like(self.readouts[1:])

    def accumulate_state_grad(self, t: int, grad_input_proj: Tensor, grad_state: list[Tensor]) -> None:
        """Add to the gradient of the state after step t what reaches it through its readout."""
        grad_readout = torch.zeros_like(self.readouts[0]) if self.grad_outputs is None else self.grad_outputs[t]
        if t + 1 < self.steps:
            grad_readout = torch.addmm(grad_readout, grad_input_proj[t + 1], self.spec.attention.context_weight)
        torch.mul(grad_readout, 1 - self.readouts[t + 1] ** 2, out=self.grad_preactivations[t])
        grad_query_state, grad_context = (self.grad_preactivations[t] @ self.spec.readout).chunk(2, -1)
        self.attention.grad_contexts[t] = grad_context
        grad_state[0] += grad_query_state
        self.attention.attend_backward(t, grad_state[0])

    def backward(self, t: int, grad_input_proj: Tensor, grad_state: list[Tensor]) -> None:
        """Add nothing to the gradient of the state before step t: `accumulate_state_grad` of step t - 1 does."""

    def gradients(self, grad_input_proj: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each of the spec's tensors, in their order."""
        grad_memory, grad_keys, _, grad_query_weight, grad_energy = self.attention.gradients(grad_input_proj)
        flat = self.grad_preactivations.flatten(0, 1)
        grad_feed_weight = grad_input_proj.flatten(0, 1).t() @ self.readouts[:-1].flatten(0, 1)
        grad_readout = flat.t() @ self.readout_inputs.flatten(0, 1)
        return grad_memory, grad_keys, grad_feed_weight, grad_query_weight, grad_energy, grad_readout, flat.sum(0)
