"""From flat tokens to a time-major grid and back, for kernels that walk in time.

A recurrent kernel takes (T, B, D). The grid's empty places stand after each sequence's end, where no forward walk
has read them yet, and are never read back: what they hold cannot reach a result.
"""

import torch
from torch import Tensor

from weft.tokens import Tokens


class Grid:
    """The index maps between flat (N, ...) and grid (T, B, ...) for one batch's lengths."""

    def __init__(self, tokens: Tokens) -> None:
        lengths = tokens.lengths
        self.rows, self.steps = len(tokens), tokens.longest
        self.device = tokens.device
        self.lengths = lengths
        first = lengths.cumsum(0) - lengths  # (B,)
        time = torch.arange(self.steps)[:, None]  # (T, 1)
        inside = torch.minimum(time, (lengths - 1).clamp(min=0))  # an empty place repeats the last token
        limit = max(int(lengths.sum()) - 1, 0)
        self._take = self._move((first + inside).clamp(max=limit))  # (T, B)
        self._take_reversed = self._move((first + (lengths - 1 - inside).clamp(min=0)).clamp(max=limit))
        row = torch.repeat_interleave(torch.arange(self.rows), lengths)  # (N,)
        step = torch.arange(len(row)) - first[row]
        self._row = self._move(row)
        self._put = self._move(step * self.rows + row)
        self._put_reversed = self._move((lengths[row] - 1 - step) * self.rows + row)
        self._last = self._move((lengths - 1).clamp(min=0) * self.rows + torch.arange(self.rows))  # (B,)
        self._final = self._move((first + lengths - 1).clamp(min=0, max=limit))  # (B,) of flat
        self._first = self._move(first.clamp(max=limit))
        self._none = self._move((lengths == 0).nonzero().squeeze(1))  # the sequences with no step at all
        self._real = self._move(time < lengths)  # (T, B)

    def _move(self, index: Tensor) -> Tensor:
        return index.to(self.device, non_blocking=True)

    @property
    def full(self) -> bool:
        """Whether every place holds a token; known without asking the device."""
        return bool((self.lengths == self.steps).all())

    @property
    def real(self) -> Tensor:
        """Where the grid holds a token: (T, B), bool."""
        return self._real

    @property
    def row(self) -> Tensor:
        """Which sequence each flat token is of: (N,)."""
        return self._row

    def lay(self, flat: Tensor, reverse: bool = False) -> Tensor:
        """Lay flat (N, ...) out as (T, B, ...), each sequence from its first step, or from its last if `reverse`."""
        take = self._take_reversed if reverse else self._take
        return flat.index_select(0, take.flatten()).view(self.steps, self.rows, *flat.shape[1:])

    def gather(self, grid: Tensor, reverse: bool = False) -> Tensor:
        """Read the real places of (T, B, ...) back to flat (N, ...)."""
        return grid.flatten(0, 1).index_select(0, self._put_reversed if reverse else self._put)

    def before(self, flat: Tensor, reverse: bool = False) -> Tensor:
        """Read at each place of flat (N, ...) what a walk left one step before it, zeros where it began: (N, ...)."""
        laid = self.lay(flat, reverse)
        return self.gather(torch.cat([torch.zeros_like(laid[:1]), laid[:-1]]), reverse)

    def end(self, flat: Tensor, reverse: bool = False) -> Tensor:
        """Read flat (N, ...) where walks end, at the last token or the first: (B, ...), zeros where there is none."""
        if not len(flat):
            return flat.new_zeros(self.rows, *flat.shape[1:])
        return flat.index_select(0, self._first if reverse else self._final).index_fill(0, self._none, 0)

    def last(self, grid: Tensor) -> Tensor:
        """Read each sequence's last real step of (T, B, ...): (B, ...), zeros for a sequence with no step."""
        if not self.steps:
            return grid.new_zeros(self.rows, *grid.shape[2:])
        return grid.flatten(0, 1).index_select(0, self._last).index_fill(0, self._none, 0)
