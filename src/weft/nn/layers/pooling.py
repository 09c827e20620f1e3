"""Pooling: the hidden states of a sequence's tokens to one vector."""

from typing import Literal

import torch
from torch import Tensor

from weft.nn.attention.positions import rows_of
from weft.tokens import Tokens

PoolingMode = Literal["mean", "cls", "max", "last"]


def pool_tokens(states: Tensor, tokens: Tokens, pool: PoolingMode) -> Tensor:
    """Pool hidden states (..., N, D) over the tokens of each non-empty sequence: (..., B, D).

    The mean and the maximum are of (N, D) alone, in float32 at least.
    """
    if pool in ("cls", "last"):
        return states[..., tokens.starts[:-1].long() if pool == "cls" else tokens.starts[1:].long() - 1, :]
    lengths = tokens.starts.diff().long()
    values = states.to(torch.promote_types(states.dtype, torch.float32))
    return torch.segment_reduce(values, pool, lengths=lengths, axis=0, unsafe=True)


def mean_states(states: Tensor, tokens: Tokens) -> Tensor:
    """Return the mean state of each sequence: (N, D) to (B, D), zeros for one that is empty."""
    sums = states.new_zeros(len(tokens), states.shape[1]).index_add(0, rows_of(tokens), states)
    return sums / tokens.starts.diff().clamp(min=1)[:, None]


def concat_pool(final: Tensor, states: Tensor, tokens: Tokens) -> Tensor:
    """Return h_c = [h_T ; maxpool(H) ; meanpool(H)] (Howard & Ruder 2018, equation 4): (B, D), (N, D) to (B, 3 D)."""
    rows = rows_of(tokens).long()[:, None].expand_as(states)
    peaks = states.new_zeros(len(tokens), states.shape[1])  # of a sequence that is empty
    peaks = peaks.scatter_reduce(0, rows, states, "amax", include_self=False)
    return torch.cat([final, peaks, mean_states(states, tokens)], -1)
