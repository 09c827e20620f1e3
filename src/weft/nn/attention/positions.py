"""Where a token stands, as a vector that is added to what it is."""

import math
from functools import cache

import torch
from torch import Tensor, nn

from weft.errors import DataError
from weft.tokens import Tokens


def rows_of(tokens: Tokens) -> Tensor:
    """Say of each token which sequence it is in: (N,)."""
    total, starts = len(tokens.ids), tokens.starts
    begun = starts.new_zeros(total + 1).index_add(0, starts[1:], torch.ones_like(starts[1:]))
    return begun[:total].cumsum(0)  # not by bucketize, which is compiled wrongly for a part of a tensor (torch 2.11)


def positions_of(tokens: Tokens) -> Tensor:
    """Number the tokens of each sequence from 0: (N,)."""
    place = torch.arange(len(tokens.ids), dtype=torch.int32, device=tokens.device)
    return place - tokens.starts[rows_of(tokens)]


class Sinusoidal(nn.Module):
    """Waves of lengths from 2π to 10000 · 2π: nothing is learned, and no text is too long.

    PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos(pos / 10000^(2i/D)) (Vaswani et al. 2017, section 3.5)

    In `halves` all sines come before all cosines, as in Marian, in the order and the precision that its weights know.
    """

    def __init__(self, width: int, halves: bool = False) -> None:
        super().__init__()
        self.width, self.halves = width, halves

    def forward(self, positions: Tensor, longest: int | None = None) -> Tensor:
        """Make the vectors of positions (N,), in float32: (N, D); where many are below `longest`, each once."""
        if longest is not None and longest < len(positions):
            table: Tensor = self(torch.arange(longest, device=positions.device))
            return table[positions]
        precise = torch.float64 if self.halves else None
        turn = torch.arange(0, self.width, 2, dtype=precise, device=positions.device)
        angle = positions[:, None] * torch.exp(turn * (-math.log(10000.0) / self.width))
        if self.halves:
            return torch.cat([angle.sin(), angle.cos()], -1)[:, : self.width].float()
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[:, : self.width]

    def vectors(self, longest: int, device: torch.device) -> Tensor:
        """Return the vectors of the first positions, (longest, D), made once."""
        return _waves(self.width, self.halves, longest, device)

    def check(self, tokens: Tokens) -> None:
        """Every length will do."""


@cache
def _waves(width: int, halves: bool, longest: int, device: torch.device) -> Tensor:
    found: Tensor = Sinusoidal(width, halves)(torch.arange(longest, device=device))
    return found


class Learned(nn.Module):
    """A vector for each position up to the longest (Gehring et al. 2017, section 3.1)."""

    def __init__(self, longest: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(longest, width)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, positions: Tensor, longest: int | None = None) -> Tensor:
        """Look positions (N,) up: (N, D)."""
        found: Tensor = self.table(positions)
        return found

    def vectors(self, longest: int, device: torch.device) -> Tensor:
        """Return the vectors of all positions."""
        return self.table.weight

    def check(self, tokens: Tokens) -> None:
        """Refuse a sequence that is longer than what was learned."""
        check_position(tokens.longest, self.table.num_embeddings)


def check_position(length: int, longest: int) -> None:
    """Refuse a text that is longer than the positions that were learned."""
    if length > longest:
        raise DataError(
            f"a sequence has {length} tokens, but the model has learned {longest} positions; shorten it "
            "(data.longest, max_length), or train with a larger model.longest"
        )
