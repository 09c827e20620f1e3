"""Layers of cells over flat tokens: deep, forward, backward or both, with dropout between them and residuals around.

The two directions of a layer are two forward walks, one over each sequence reversed, so that the fused kernel for
whole grids serves ragged batches too: on a CPU it is two to three times as fast in training as the packed one.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from weft.nn.layers.dropout import SequenceDropout
from weft.nn.rnn.cells import State, make_cell
from weft.nn.rnn.self_attentive import LSTMN
from weft.nn.rnn.time_major import Grid

Direction = Literal["forward", "backward", "both"]

REVERSED: dict[Direction, tuple[bool, ...]] = {"forward": (False,), "backward": (True,), "both": (False, True)}


class RecurrentStack(nn.Module):
    """Recurrent layers; where both directions are read, each has half the width, concatenated (Graves et al. 2013).

    `last` is the last layer's width, where it has one of its own. `apart` lets the walks of one direction stand on
    those of the same direction alone, so that none of them sees what is still before it (Peters et al. 2018).
    """

    def __init__(
        self,
        cell: str,
        inputs: int,
        width: int,
        layers: int,
        direction: Direction = "forward",
        dropout: float = 0.0,
        residual: bool = False,
        attention: str = "none",
        *,
        last: int | None = None,
        apart: bool = False,
        variational: bool = False,
        recurrent: float = 0.0,
    ) -> None:
        super().__init__()
        self.ways = REVERSED[direction]
        self.residual, self.apart = residual, apart
        self.dropout = SequenceDropout(dropout, variational)
        widths = [width] * (layers - 1) + [last or width]
        sizes = [inputs] + [one // (len(self.ways) if apart else 1) for one in widths[:-1]]
        self.layers = nn.ModuleList(
            nn.ModuleList(
                _layer(cell, size, wide // len(self.ways), attention, depth, way, recurrent) for way in self.ways
            )
            for depth, (size, wide) in enumerate(zip(sizes, widths, strict=True))
        )

    def forward(self, flat: Tensor, grid: Grid) -> tuple[list[Tensor], list[Tensor]]:
        """Read (N, I); return each layer's outputs, (N, D) each, and each layer's last ones, (B, D) each.

        The last output of a backward walk stands at the sequence's first token.
        """
        outputs, ends = [], []
        for depth, ways in enumerate(self.layers):
            assert isinstance(ways, nn.ModuleList)
            reads = self._reads(flat, grid, depth)
            walked = [
                layer(grid.lay(read, reverse=reverse))[0]
                for layer, read, reverse in zip(ways, reads, self.ways, strict=True)
            ]  # (T, B, D') each
            found = [grid.gather(one, reverse=reverse) for one, reverse in zip(walked, self.ways, strict=True)]
            flat = self._around(flat, torch.cat(found, -1))
            outputs.append(flat)
            parts = flat.chunk(len(self.ways), -1)
            ends.append(torch.cat([grid.end(*pair) for pair in zip(parts, self.ways, strict=True)], -1))
        return outputs, ends

    @property
    def ahead(self) -> list[nn.Module]:
        """The layers of the first direction."""
        return [ways[0] for ways in self.layers]  # type: ignore[index]

    def walk(
        self, inputs: Tensor, states: Sequence[State] | None = None, real: Tensor | None = None
    ) -> tuple[list[Tensor], tuple[State, ...]]:
        """Go on from `states` over a grid (T, B, I), forwards; return each layer's outputs and state."""
        outputs, after = [], []
        for depth, layer in enumerate(self.ahead):
            read = self.dropout(inputs) if depth and layer.training == self.training else inputs
            walked, state = layer(read, states[depth] if states else None, real)
            inputs = self._around(inputs, walked)
            outputs.append(inputs)
            after.append(state)
        return outputs, tuple(after)

    def _reads(self, flat: Tensor, grid: Grid, depth: int) -> Sequence[Tensor]:
        """Say what each direction of a layer reads of the one below; a layer that is frozen reads all of it."""
        if not depth:
            return [flat] * len(self.ways)
        dropped: Tensor = self.dropout(flat, grid) if self.layers[depth].training == self.training else flat
        return dropped.chunk(len(self.ways), -1) if self.apart else [dropped] * len(self.ways)

    def _around(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Add the way around a layer, where it keeps the width (He et al. 2016)."""
        return inputs + outputs if self.residual and inputs.shape == outputs.shape else outputs


def _layer(cell: str, inputs: int, width: int, attention: str, depth: int, reverse: bool, drop: float) -> nn.Module:
    made = make_cell(cell, inputs, width)
    made.drop = drop
    return made if attention == "none" else LSTMN(made, attention, depth, "backward" if reverse else "self")
