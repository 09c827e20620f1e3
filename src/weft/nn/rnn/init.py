"""Initialisation of recurrent weights: orthogonal and Xavier, forget-gate bias 1."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def init_recurrent_(
    from_input: Tensor, from_state: Tensor, *biases: Tensor, gates: int, open_gate: int | None = None
) -> None:
    """Initialise the weights of a recurrent layer in place, gate by gate.

    State-to-state weights are orthogonal (Saxe et al. 2014), input weights Xavier (Glorot & Bengio 2010), biases zero,
    but 1 for the forget gate, number `open_gate` (Jozefowicz et al. 2015).
    """
    for weight in from_input.chunk(gates):
        nn.init.xavier_uniform_(weight)
    for weight in from_state.chunk(gates):
        nn.init.orthogonal_(weight)
    for bias in biases:
        bias.zero_()
    if open_gate is not None:
        biases[0].chunk(gates)[open_gate].fill_(1.0)
