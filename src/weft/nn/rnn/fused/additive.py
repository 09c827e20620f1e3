"""Additive attention inside a fused scan, v · tanh(W q + k): the part that is common to all devices."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.nn.rnn.fused.attention import AttentionSpec, AttentionStep


class AdditiveStep(AttentionStep, ABC):
    """Attention by the score v · tanh(W q + k); the backward pass recomputes the tanh of every pair."""

    def __init__(self, spec: AttentionSpec, states: list[Tensor]) -> None:
        super().__init__(spec, states)
        self.query_weight_t = spec.query_weight.t().contiguous()

    def _compute_query(self, t: int, state: Tensor) -> None:
        torch.mm(state, self.query_weight_t, out=self.queries[t])

    def setup_backward(self, grad_outputs: Sequence[Tensor | None]) -> None:
        """Allocate the gradients."""
        super().setup_backward(grad_outputs)
        self.grad_queries = torch.zeros_like(self.queries)
        self.grad_keys = torch.zeros_like(self.spec.keys)
        self.grad_energy = torch.zeros_like(self.queries[0])  # (B, A)

    def attend_backward(self, t: int, grad_state: Tensor) -> None:
        """Add the gradient through context number t to that of the state that attended."""
        self._additive_backward(t)
        grad_state.addmm_(self.grad_queries[t], self.spec.query_weight)

    @abstractmethod
    def _additive_backward(self, t: int) -> None:
        """Compute the gradients of queries, keys and v from that of context number t."""

    def gradients(self, grad_input_proj: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each of the spec's tensors."""
        grad_query = self.grad_queries.flatten(0, 1).t() @ self.query_states.flatten(0, 1)
        grad_keys = self.grad_keys.to(self.spec.keys.dtype)
        return (
            self._grad_memory(),
            grad_keys,
            self._grad_context_weight(grad_input_proj),
            grad_query,
            self.grad_energy.sum(0).to(grad_keys.dtype),
        )
