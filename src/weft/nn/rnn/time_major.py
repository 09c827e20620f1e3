"""Conversion between flat tokens (N, ...) and a padded time-major grid (T, B, ...), for recurrent kernels.

The padding is after each sequence's end, so a forward pass reads it only after the sequence, and it is taken out
again: no result depends on it.
"""

from functools import cached_property

import torch
from torch import Tensor

from weft.tokens import Tokens, to_device


class TimeMajor:
    """Index maps between flat (N, ...) and grid (T, B, ...) for the lengths of one batch, each made when it is used."""

    def __init__(self, tokens: Tokens) -> None:
        self.lengths = lengths = tokens.lengths
        self.rows, self.steps = len(tokens), tokens.longest
        self.device = tokens.device
        self._first = lengths.cumsum(0) - lengths  # (B,)
        self._limit = max(int(lengths.sum()) - 1, 0)
        self._time = torch.arange(self.steps)[:, None]  # (T, 1)
        self._inside = torch.minimum(self._time, (lengths - 1).clamp(min=0))  # padding repeats the last token

    @cached_property
    def _token_index(self) -> Tensor:
        return self._to_device((self._first + self._inside).clamp(max=self._limit))  # (T, B)

    @cached_property
    def _token_index_reversed(self) -> Tensor:
        from_end = (self.lengths - 1 - self._inside).clamp(min=0)
        return self._to_device((self._first + from_end).clamp(max=self._limit))

    @cached_property
    def _row_and_step(self) -> tuple[Tensor, Tensor]:
        row = torch.repeat_interleave(torch.arange(self.rows), self.lengths)  # (N,), on the CPU
        return row, torch.arange(len(row)) - self._first[row]

    @cached_property
    def _grid_index(self) -> Tensor:
        row, step = self._row_and_step
        return self._to_device(step * self.rows + row)

    @cached_property
    def _grid_index_reversed(self) -> Tensor:
        row, step = self._row_and_step
        return self._to_device((self.lengths[row] - 1 - step) * self.rows + row)

    @cached_property
    def _last_step(self) -> Tensor:
        return self._to_device((self.lengths - 1).clamp(min=0) * self.rows + torch.arange(self.rows))  # (B,)

    @cached_property
    def _last_token(self) -> Tensor:
        return self._to_device((self._first + self.lengths - 1).clamp(min=0, max=self._limit))  # (B,) index into flat

    @cached_property
    def _first_token(self) -> Tensor:
        return self._to_device(self._first.clamp(max=self._limit))

    @cached_property
    def _empty_rows(self) -> Tensor:
        return self._to_device((self.lengths == 0).nonzero().squeeze(1))  # sequences of length 0

    def _to_device(self, index: Tensor) -> Tensor:
        return to_device(index, self.device)

    @property
    def full(self) -> bool:
        """Return whether there is no padding; computed from CPU lengths, without a device synchronisation."""
        return bool((self.lengths == self.steps).all())

    @cached_property
    def mask(self) -> Tensor:
        """Mask (T, B): True at tokens, False at padding."""
        return self._to_device(self._time < self.lengths)

    @cached_property
    def row(self) -> Tensor:
        """Index of the sequence of each flat token: (N,)."""
        return self._to_device(self._row_and_step[0])

    def pad(self, flat: Tensor, reverse: bool = False) -> Tensor:
        """Return flat (N, ...) padded to (T, B, ...), each sequence reversed if `reverse`."""
        index = self._token_index_reversed if reverse else self._token_index
        return flat.index_select(0, index.flatten()).view(self.steps, self.rows, *flat.shape[1:])

    def unpad(self, grid: Tensor, reverse: bool = False) -> Tensor:
        """Return the tokens of a grid (T, B, ...) as flat (N, ...), the inverse of `pad`."""
        return grid.flatten(0, 1).index_select(0, self._grid_index_reversed if reverse else self._grid_index)

    def before(self, flat: Tensor, reverse: bool = False) -> Tensor:
        """Shift flat (N, ...) by one step within each sequence: the previous step's value, zeros at the first step."""
        grid = self.pad(flat, reverse)
        return self.unpad(torch.cat([torch.zeros_like(grid[:1]), grid[:-1]]), reverse)

    def end(self, flat: Tensor, reverse: bool = False) -> Tensor:
        """Return flat (N, ...) at each last token, or first if `reverse`: (B, ...), zeros for an empty sequence."""
        if not len(flat):
            return flat.new_zeros(self.rows, *flat.shape[1:])
        return flat.index_select(0, self._first_token if reverse else self._last_token).index_fill(
            0, self._empty_rows, 0
        )

    def last(self, grid: Tensor) -> Tensor:
        """Return each sequence's last real step of a grid (T, B, ...): (B, ...), zeros for an empty sequence."""
        if not self.steps:
            return grid.new_zeros(self.rows, *grid.shape[2:])
        return grid.flatten(0, 1).index_select(0, self._last_step).index_fill(0, self._empty_rows, 0)
