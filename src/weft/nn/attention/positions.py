"""Position encodings, sinusoidal and learned, that are added to token embeddings."""

import math
from functools import cache

import torch
from torch import Tensor, nn

from weft.errors import DataError
from weft.tokens import Tokens


def rows_of(tokens: Tokens) -> Tensor:
    """Return the index of the sequence that each token is in: (N,)."""
    total, starts = len(tokens.ids), tokens.starts
    begins = starts.new_zeros(total + 1).index_add(0, starts[1:], torch.ones_like(starts[1:]))
    return begins[:total].cumsum(0)  # not bucketize: torch.compile gets it wrong for a slice of a tensor (torch 2.11)


def positions_of(tokens: Tokens) -> Tensor:
    """Return each token's position in its sequence, from 0: (N,)."""
    index = torch.arange(len(tokens.ids), dtype=torch.int32, device=tokens.device)
    return index - tokens.starts[rows_of(tokens)]


class Sinusoidal(nn.Module):
    """Sinusoidal position encoding, with wavelengths from 2π to 10000 · 2π: no parameters, and no maximum length.

    PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos(pos / 10000^(2i/D)) (Vaswani et al. 2017, section 3.5)

    With `halves` all sines come before all cosines, in the order and precision of Marian, as its checkpoints need.
    """

    def __init__(self, width: int, halves: bool = False) -> None:
        super().__init__()
        self.width, self.halves = width, halves

    def forward(self, positions: Tensor, longest: int | None = None) -> Tensor:
        """Return the encodings of positions (N,), in float32: (N, D); if there are more than `longest`, via a table."""
        if longest is not None and longest < len(positions):
            table: Tensor = self(torch.arange(longest, device=positions.device))
            return table[positions]
        dtype = torch.float64 if self.halves else None
        index = torch.arange(0, self.width, 2, dtype=dtype, device=positions.device)
        angle = positions[:, None] * torch.exp(index * (-math.log(10000.0) / self.width))
        if self.halves:
            return torch.cat([angle.sin(), angle.cos()], -1)[:, : self.width].float()
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[:, : self.width]

    def vectors(self, longest: int, device: torch.device) -> Tensor:
        """Return the encodings of the first positions, (longest, D), cached."""
        return _sinusoidal_table(self.width, self.halves, longest, device)

    def check(self, tokens: Tokens) -> None:
        """Accept sequences of any length."""


@cache
def _sinusoidal_table(width: int, halves: bool, longest: int, device: torch.device) -> Tensor:
    table: Tensor = Sinusoidal(width, halves)(torch.arange(longest, device=device))
    return table


class Learned(nn.Module):
    """Learned position embeddings, up to position `longest` (Gehring et al. 2017, section 3.1)."""

    def __init__(self, longest: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(longest, width)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, positions: Tensor, longest: int | None = None) -> Tensor:
        """Return the embeddings of positions (N,): (N, D)."""
        embeddings: Tensor = self.table(positions)
        return embeddings

    def vectors(self, longest: int, device: torch.device) -> Tensor:
        """Return the embeddings of all positions."""
        return self.table.weight

    def check(self, tokens: Tokens) -> None:
        """Raise DataError if a sequence is longer than the learned positions."""
        check_position(tokens.longest, self.table.num_embeddings)


def check_position(length: int, longest: int) -> None:
    """Raise DataError if a text is longer than the learned positions."""
    if length > longest:
        raise DataError(
            f"a sequence has {length} tokens, but the model has learned {longest} positions; shorten it "
            "(data.max_length, max_length), or use a model with more positions"
        )
