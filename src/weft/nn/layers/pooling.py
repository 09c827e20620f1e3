"""Pooling: the hidden states of a sequence's tokens to one vector."""

from typing import Literal

import torch
from torch import Tensor

from weft.tokens import Tokens

PoolingMode = Literal["mean", "cls", "max", "last"]


def pool_tokens(states: Tensor, tokens: Tokens, pool: PoolingMode) -> Tensor:
    """Pool hidden states (..., N, D) over the tokens of each non-empty sequence: (..., B, D).

    The mean and the maximum are of (N, D) alone, in float32 at least.
    """
    if pool in ("cls", "last"):
        return states[..., tokens.starts[:-1].long() if pool == "cls" else tokens.starts[1:].long() - 1, :]
    lengths = tokens.lengths.to(states.device, non_blocking=True)
    values = states.to(torch.promote_types(states.dtype, torch.float32))
    return torch.segment_reduce(values, pool, lengths=lengths, axis=0, unsafe=True)
