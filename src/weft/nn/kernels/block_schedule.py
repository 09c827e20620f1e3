"""Who does what in a kernel over ragged sequences: the longest come first, and nobody is sent for nothing."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

ROOMS = (64, 128)  # tokens up to which a sequence is one tile
QUERIES, KEYS = 64, 128  # of a block


class BlockSchedule(NamedTuple):
    """Lists that kernels for self-attention read, made on the device with no look at the lengths."""

    order: Tensor  # (B,) the sequences, the longest first
    spans: Tensor  # (2, 2) for each room, where in that order its sequences begin and end
    queries: Tensor  # (U, 2) a sequence and where in it a block begins, for every block; the sequence is -1 for none
    keys: Tensor  # (U, 2) the same for larger blocks

    @classmethod
    def of(cls, starts: Tensor, tokens: int) -> "BlockSchedule":
        """Plan for sequences that start so (B+1,), of so many tokens in all."""
        lengths = starts.diff()
        order = lengths.argsort(descending=True)
        more = [(lengths > room).sum() for room in (-1, *ROOMS)]
        spans = torch.stack([torch.stack(pair[::-1]) for pair in pairwise(more)])
        blocks = (_blocks(lengths, order, tokens, size) for size in (QUERIES, KEYS))
        return cls(order.int(), spans.int(), *blocks)


def _blocks(lengths: Tensor, order: Tensor, tokens: int, size: int) -> Tensor:
    """List all blocks of a size; how many there can be follows from the number of tokens and of sequences."""
    counts = (lengths[order] + size - 1) // size
    ends = counts.cumsum(0)
    block = torch.arange(tokens // size + len(order), device=lengths.device)
    place = torch.searchsorted(ends, block, right=True)
    real, place = place < len(order), place.clamp(max=len(order) - 1)
    first = (block - (ends - counts)[place]) * size
    return torch.stack([torch.where(real, order[place], -1), first], 1).int()
