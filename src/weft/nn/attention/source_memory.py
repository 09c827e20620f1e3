"""Encoded sources, padded for attention and held once however many hypotheses read them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.nn.rnn.time_major import TimeMajor


@dataclass(frozen=True)
class SourceMemory:
    """The states of each source, with what attention and copying read of its tokens."""

    states: Tensor  # (B, S, D)
    keys: Tensor  # (B, S, A) the states projected for the attention score
    empty: Tensor  # (B, S) the padding mask: True past the end of a source
    ids: Tensor  # (B, S)

    @classmethod
    def of(cls, states: Tensor, ids: Tensor, grid: TimeMajor, keys: Callable[[Tensor], Tensor]) -> "SourceMemory":
        """Return the memory of flat states (N, D) and ids (N,); `keys` projects padded states."""
        padded = grid.pad(states).masked_fill(~grid.mask[..., None], 0).transpose(0, 1).contiguous()  # (B, S, D)
        return cls(padded, keys(padded), ~grid.mask.T, grid.pad(ids).T)

    def rows(self, owner: Tensor) -> "SourceMemory":
        """Return the memory with a row for each hypothesis."""
        parts = (self.states, self.keys, self.empty, self.ids)
        return SourceMemory(*(part.index_select(0, owner) for part in parts))

    def join(self, other: "SourceMemory") -> "SourceMemory":
        """Return these sources and, after them, the other's; the shorter ones are padded."""
        longest = max(self.states.shape[1], other.states.shape[1])
        padded = [memory._padded(longest) for memory in (self, other)]
        return SourceMemory(*(torch.cat(parts) for parts in zip(*padded, strict=True)))

    def _padded(self, longest: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        missing = longest - self.states.shape[1]
        states, keys = (F.pad(part, (0, 0, 0, missing)) for part in (self.states, self.keys))
        return states, keys, F.pad(self.empty, (0, missing), value=True), F.pad(self.ids, (0, missing))
