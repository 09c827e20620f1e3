"""Batch: what a head reads, padded to nothing, or to a static shape for a compiled graph."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.data.batching.static_shape import StaticShape
from weft.tokens import Tokens, to_device

Item = tuple[np.ndarray, ...]  # integer arrays of one sequence or more; the task defines their meaning
IGNORE_INDEX = -100  # the target of padding, which torch's losses ignore


@dataclass(frozen=True)
class Batch:
    """The input of a head: tokens, targets, and the number of terms in each part of the loss."""

    tokens: Tokens
    targets: Tensor | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    source: Tokens | None = None
    positions: Tokens | None = None  # flat positions that a head reads, such as the first token of each word
    labels: Tensor | None = None  # (B,) a label for each sequence, where the targets are of tokens
    unpadded: "Batch | None" = None  # of a batch padded to a static shape: the batch before padding, on the CPU
    task: str = ""  # of several tasks, the name of the one whose items these are
    rows: Sequence[int] = ()  # each sequence's index in the caller's order; it alone seeds what is sampled for it

    @property
    def size(self) -> int:
        """The number of tokens, without padding."""
        unpadded = self.unpadded or self
        return len(unpadded.tokens.ids) + (len(unpadded.source.ids) if unpadded.source else 0)

    def numbered(self, rows: Sequence[int]) -> "Batch":
        """Return the batch with the index that each sequence has in the caller's order."""
        return replace(self, rows=rows)

    def to_static_shape(self, frame: StaticShape, num_positions: int | None = None) -> "Batch":
        """Pad to the shape of all batches; padding has no target and adds nothing to the loss.

        `num_positions` is that of `positions`, the same in every batch; None: as many as there are tokens.
        """
        rows, sides = frame.rows + frame.fillers, [self.tokens] if self.source is None else [self.source, self.tokens]
        shapes = list(zip(sides, frame.sizes, frame.longest, strict=True))
        fillers = max(-(-(size - len(side.ids)) // longest) for side, size, longest in shapes)  # as few as possible
        *source, tokens = (side.padded_to(size, longest, fillers, rows) for side, size, longest in shapes)
        positions = None if self.positions is None else self._pad_positions(num_positions or len(tokens.ids), rows)
        return replace(
            self,
            tokens=tokens,
            targets=_pad_targets(self.targets, self._num_targets(tokens, positions)),
            source=source[0] if source else None,
            positions=positions,
            labels=_pad_targets(self.labels, rows),
            unpadded=self,
        )

    def _pad_positions(self, size: int, rows: int) -> Tokens:
        """Pad `positions` to `size` positions; padding points at the first token, and has no target there."""
        assert self.positions is not None
        return self.positions.padded_to(size, size, min(1, size - len(self.positions.ids)), rows + 1)

    def _num_targets(self, tokens: Tokens, positions: Tokens | None) -> int:
        """Return the number of targets in a static shape: one for each of `positions`, a token, or a sequence."""
        if positions is not None:
            return len(positions.ids)
        per_token = self.targets is not None and len(self.targets) == len(self.tokens.ids)
        return len(tokens.ids) if per_token else len(tokens)

    def to(self, device: torch.device | str) -> "Batch":
        """Move to a device."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            targets=None if self.targets is None else to_device(self.targets, device),
            source=None if self.source is None else self.source.to(device),
            positions=None if self.positions is None else self.positions.to(device),
            labels=None if self.labels is None else to_device(self.labels, device),
        )


def _pad_targets(targets: Tensor | None, size: int) -> Tensor | None:
    """Pad targets (M, ...) to (size, ...): integers with IGNORE_INDEX, floats with NaN, which losses ignore too."""
    if targets is None:
        return None
    padding = math.nan if targets.is_floating_point() else IGNORE_INDEX
    return F.pad(targets, (0, 0) * (targets.ndim - 1) + (0, size - len(targets)), value=padding)
