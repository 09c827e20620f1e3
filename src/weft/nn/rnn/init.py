"""The weights that recurrent networks start from."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def init_recurrent_(
    from_input: Tensor, from_state: Tensor, *biases: Tensor, gates: int, open_gate: int | None = None
) -> None:
    """Set weights that carry signals far from the first step on.

    Orthogonal from state to state (Saxe et al. 2014), Xavier from the input (Glorot & Bengio 2010), gate by gate, and a
    forget gate that starts open (Jozefowicz et al. 2015).
    """
    for weight in from_input.chunk(gates):
        nn.init.xavier_uniform_(weight)
    for weight in from_state.chunk(gates):
        nn.init.orthogonal_(weight)
    for bias in biases:
        bias.zero_()
    if open_gate is not None:
        biases[0].chunk(gates)[open_gate].fill_(1.0)
