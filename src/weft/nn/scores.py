"""Attention scores: how well a query fits each of the source's states.

Additive (Bahdanau et al. 2015, appendix A.1.2):  score(q, k_j) = v · tanh(W_q q + W_k k_j)
"""

import torch
from torch import Tensor, nn


class Additive(nn.Module):
    """The score of Bahdanau et al. 2015: a small network with one hidden layer."""

    def __init__(self, query: int, key: int, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(query, hidden, bias=False)
        self.key = nn.Linear(key, hidden)
        self.energy = nn.Linear(hidden, 1, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        """Project the source's states once: (B, S, D) to (B, S, A)."""
        projected: Tensor = self.key(memory)
        return projected

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        """Score queries (B, D) against projected keys (B, S, A): (B, S)."""
        hidden = torch.tanh(keys + self.query(query)[:, None])
        scores: Tensor = self.energy(hidden)
        return scores.squeeze(-1)


def attend(scores: Tensor, memory: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh memory (B, S, D) by softmax(scores) over its real places; return the context (B, D) and weights (B, S)."""
    # Not -inf: beside a real place this is zero after softmax too, and a row with no real place has no NaN to spread.
    weights = torch.softmax(scores.masked_fill(empty, torch.finfo(scores.dtype).min), -1)
    return torch.bmm(weights[:, None], memory).squeeze(1), weights
