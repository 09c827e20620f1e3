"""Batches of one shape, for a graph that is compiled once.

A batch has no padding, so its size changes from one to the next, and a compiler would have to start anew for each. A
frame is a size that all batches of a run are brought to: so many tokens a side, so many sequences, none longer than so
much. What is left of it is taken up by filler sequences that no loss reads; sequences with nothing in them come last.
"""

from dataclasses import dataclass

import numpy as np

_EVEN = 64  # sizes are multiples of it, which matrix units like
_SPARE = 1.1  # rows beyond what batches have on average


@dataclass(frozen=True)
class StaticShape:
    """The shape of all batches of a run; `sizes` and `longest` have a number a side, such as source and target."""

    sizes: tuple[int, ...]  # tokens, the fillers' among them
    longest: tuple[int, ...]  # no sequence is longer
    rows: int  # sequences at most
    fillers: int  # sequences that take up the rest, at least a token each

    @classmethod
    def of(cls, lengths: np.ndarray, budget: int) -> "StaticShape":
        """Share a budget of tokens among the sides as the data (sides, items) does on average."""
        mean = lengths.mean(1)
        longest = tuple(max(2, one) for one in lengths.max(1).tolist())
        shares = np.maximum(budget * mean / mean.sum(), lengths.max(1)).tolist()
        # As many as can take up a whole side, evened, and leave room for a token of each.
        fillers = max(-(-int(share + _EVEN) // (most - 1)) for share, most in zip(shares, longest, strict=True))
        sizes = tuple(_even(share + fillers) for share in shares)
        rows = _even(_SPARE * min(share / max(one, 1) for share, one in zip(shares, mean.tolist(), strict=True)))
        return cls(sizes, longest, rows, fillers)

    @property
    def room(self) -> np.ndarray:
        """What the items of a batch may take together: tokens a side, and their number."""
        return np.array([*(size - self.fillers for size in self.sizes), self.rows])


def _even(size: float) -> int:
    return int(-(-size // _EVEN) * _EVEN)


def cut(order: np.ndarray, lengths: np.ndarray, room: np.ndarray) -> list[np.ndarray]:
    """Cut items, in this order, into batches of which no side has more than its room; `lengths` is (sides, items)."""
    taken = np.concatenate([lengths[:, order], np.ones((1, len(order)), int)]).cumsum(1)  # (sides + 1, items)
    batches, start = [], 0
    while start < len(order):
        used = taken[:, start - 1] if start else np.zeros(len(taken), int)
        stops = [np.searchsorted(side, most, side="right") for side, most in zip(taken, used + room, strict=True)]
        stop = max(start + 1, int(min(stops)))
        batches.append(order[start:stop])
        start = stop
    return batches
