"""Where a token stands, as a vector that is added to what it is."""

import math

import torch
from torch import Tensor, nn

from weft.errors import DataError
from weft.tokens import Tokens


def positions_of(tokens: Tokens) -> Tensor:
    """Number the tokens of each sequence from 0: (N,)."""
    step = torch.arange(len(tokens.ids), dtype=torch.int32, device=tokens.device)
    row = torch.bucketize(step, tokens.starts[1:], right=True)
    return step - tokens.starts[row]


class Sinusoidal(nn.Module):
    """Waves of lengths from 2π to 10000 · 2π: nothing is learned, and no text is too long.

    PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos(pos / 10000^(2i/D)) (Vaswani et al. 2017, section 3.5)
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, positions: Tensor) -> Tensor:
        """Make the vectors of positions (N,), in float32: (N, D)."""
        turn = torch.arange(0, self.width, 2, device=positions.device) * (-math.log(10000.0) / self.width)
        angle = positions[:, None] * torch.exp(turn)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[:, : self.width]

    def check(self, tokens: Tokens) -> None:
        """Every length will do."""


class Learned(nn.Module):
    """A vector for each position up to the longest (Gehring et al. 2017, section 3.1)."""

    def __init__(self, longest: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(longest, width)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        """Look positions (N,) up: (N, D)."""
        found: Tensor = self.table(positions)
        return found

    def check(self, tokens: Tokens) -> None:
        """Refuse a sequence that is longer than what was learned."""
        longest = int(tokens.lengths.max()) if len(tokens) else 0
        check_position(longest, self.table.num_embeddings)


def check_position(length: int, longest: int) -> None:
    """Refuse a text that is longer than the positions that were learned."""
    if length > longest:
        raise DataError(
            f"a sequence has {length} tokens, but the model has learned {longest} positions; shorten it "
            "(data.longest, max_length), or train with a larger model.longest"
        )
