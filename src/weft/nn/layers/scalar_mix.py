"""Scalar mix: a learned weighted sum of a model's layers, for each task its own.

Peters et al. 2018, "Deep contextualized word representations" (arXiv:1802.05365), eq. 1: for token k with the layers
h_{k,0} .. h_{k,L},

    ELMo_k = γ Σ_j s_j h_{k,j}                      s = softmax(w)

where w and γ are learned with the task: lower layers capture more of a word's syntax, higher ones more of its meaning.
It is initialised to the mean. Left out are the layer norm and the penalty λ‖w‖² that the paper tries on some tasks.
"""

import torch
from torch import Tensor, nn


class ScalarMix(nn.Module):
    """Weighted sum of `layers` layers, with a learned scale."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(layers))  # w
        self.scale = nn.Parameter(torch.ones(()))  # γ

    @property
    def shares(self) -> Tensor:
        """The softmax weights s of the layers, (L,)."""
        return self.weights.softmax(0)

    def forward(self, layers: Tensor) -> Tensor:
        """Mix layers (L, N, D) to (N, D)."""
        return self.scale * torch.einsum("l,lnd->nd", self.shares, layers)
