"""Static batch shape, so that a model is compiled once.

Batches have no padding, so their sizes differ, and torch.compile would recompile for each. A static shape fixes the
number of tokens per side, the number of sequences and the maximum length for all batches of a run. The rest of a batch
is filler sequences, which the loss ignores; empty sequences come last.
"""

from dataclasses import dataclass

import numpy as np

_MULTIPLE = 64  # sizes are multiples of it, for tensor cores
_ROW_MARGIN = 1.1  # rows relative to the average of a batch


@dataclass(frozen=True)
class StaticShape:
    """The shape of all batches of a run; `sizes` and `longest` have one entry per side, such as source and target."""

    sizes: tuple[int, ...]  # tokens, including filler
    longest: tuple[int, ...]  # maximum sequence length
    rows: int  # maximum number of sequences
    fillers: int  # filler sequences, of at least one token each

    @classmethod
    def of(cls, lengths: np.ndarray, budget: int) -> "StaticShape":
        """Return a shape that splits a token budget among the sides as in the data of these lengths (sides, items)."""
        mean = lengths.mean(1)
        longest = tuple(max(2, length) for length in lengths.max(1).tolist())
        shares = np.maximum(budget * mean / mean.sum(), lengths.max(1)).tolist()
        # Enough to fill a whole side, rounded up, and room for a token of each.
        fillers = max(-(-int(share + _MULTIPLE) // (limit - 1)) for share, limit in zip(shares, longest, strict=True))
        sizes = tuple(_round_up(share + fillers) for share in shares)
        average = min(share / max(length, 1) for share, length in zip(shares, mean.tolist(), strict=True))
        rows = _round_up(_ROW_MARGIN * average)
        return cls(sizes, longest, rows, fillers)

    @property
    def room(self) -> np.ndarray:
        """The capacity for the items of a batch: tokens per side, and number of items."""
        return np.array([*(size - self.fillers for size in self.sizes), self.rows])


def _round_up(size: float) -> int:
    return int(-(-size // _MULTIPLE) * _MULTIPLE)


def split_by_room(order: np.ndarray, lengths: np.ndarray, room: np.ndarray) -> list[np.ndarray]:
    """Split items, in this order, into batches that fit `room` on every side; `lengths` is (sides, items)."""
    totals = np.concatenate([lengths[:, order], np.ones((1, len(order)), int)]).cumsum(1)  # (sides + 1, items)
    batches, start = [], 0
    while start < len(order):
        used = totals[:, start - 1] if start else np.zeros(len(totals), int)
        stops = [np.searchsorted(side, limit, side="right") for side, limit in zip(totals, used + room, strict=True)]
        stop = max(start + 1, int(min(stops)))
        batches.append(order[start:stop])
        start = stop
    return batches
