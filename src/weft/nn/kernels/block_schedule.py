"""Block schedule for variable-length attention kernels: the longest sequences first, and no empty blocks."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

TILE_LENGTHS = (64, 128)  # lengths up to which a sequence is one tile
QUERY_BLOCK, KEY_BLOCK = 64, 128  # block sizes


class BlockSchedule(NamedTuple):
    """Work lists of the self-attention kernels, computed on the device without synchronisation."""

    order: Tensor  # (B,) the sequences, the longest first
    spans: Tensor  # (2, 2) for each tile length, where in that order its sequences begin and end
    queries: Tensor  # (U, 2) for every block of queries its sequence, -1 for an unused entry, and its first token in it
    keys: Tensor  # (U, 2) the same for blocks of keys

    @classmethod
    def of(cls, starts: Tensor, tokens: int) -> "BlockSchedule":
        """Return the schedule of sequences with the offsets `starts` (B+1,), of so many tokens in all."""
        lengths = starts.diff()
        order = lengths.argsort(descending=True)
        longer = [(lengths > length).sum() for length in (-1, *TILE_LENGTHS)]
        spans = torch.stack([torch.stack(pair[::-1]) for pair in pairwise(longer)])
        blocks = (_blocks(lengths, order, tokens, size) for size in (QUERY_BLOCK, KEY_BLOCK))
        return cls(order.int(), spans.int(), *blocks)


def _blocks(lengths: Tensor, order: Tensor, tokens: int, size: int) -> Tensor:
    """Return all blocks of a size, (U, 2); U bounds their number, given the numbers of tokens and sequences."""
    counts = (lengths[order] + size - 1) // size
    ends = counts.cumsum(0)
    block = torch.arange(tokens // size + len(order), device=lengths.device)
    rank = torch.searchsorted(ends, block, right=True)
    used, rank = rank < len(order), rank.clamp(max=len(order) - 1)
    first = (block - (ends - counts)[rank]) * size
    return torch.stack([torch.where(used, order[rank], -1), first], 1).int()
