"""Stacked recurrent layers over flat tokens: uni- or bidirectional, with dropout between layers and residuals.

The backward direction is a forward pass over each reversed sequence, so that the fused kernel for rectangular batches
serves ragged batches too: on a CPU it is two to three times as fast in training as the one for packed sequences.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from weft.errors import ConfigError, RoleError
from weft.nn.layers.dropout import SequenceDropout
from weft.nn.rnn.cells import CellState, make_cell
from weft.nn.rnn.self_attentive import LSTMN
from weft.nn.rnn.time_major import TimeMajor

StackDirection = Literal["forward", "backward", "both"]

REVERSED: dict[StackDirection, tuple[bool, ...]] = {"forward": (False,), "backward": (True,), "both": (False, True)}


class RecurrentStack(nn.Module):
    """Stacked recurrent layers; with both directions, each has half the width, concatenated (Graves et al. 2013).

    `last` is the last layer's width, if different. With `apart` a direction of a layer reads only the same direction of
    the layer below, so that no output depends on tokens that its direction has not read yet (Peters et al. 2018).
    """

    def __init__(
        self,
        cell: str,
        inputs: int,
        width: int,
        layers: int,
        direction: StackDirection = "forward",
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
        sizes = [inputs] + [below // (len(self.ways) if apart else 1) for below in widths[:-1]]
        self.layers = nn.ModuleList(
            nn.ModuleList(
                _make_layer(cell, size, out // len(self.ways), attention, depth, way, recurrent) for way in self.ways
            )
            for depth, (size, out) in enumerate(zip(sizes, widths, strict=True))
        )

    def forward(self, flat: Tensor, grid: TimeMajor) -> tuple[list[Tensor], list[Tensor]]:
        """Return each layer's outputs, (N, D) each, and final outputs, (B, D) each, for flat inputs (N, I).

        The final output of the backward direction is at the sequence's first token.
        """
        outputs, finals = [], []
        for depth, directions in enumerate(self.layers):
            assert isinstance(directions, nn.ModuleList)
            inputs = self._layer_inputs(flat, grid, depth)
            hidden = [
                layer(grid.pad(part, reverse=reverse))[0]
                for layer, part, reverse in zip(directions, inputs, self.ways, strict=True)
            ]  # (T, B, D') each
            gathered = [grid.unpad(part, reverse=reverse) for part, reverse in zip(hidden, self.ways, strict=True)]
            flat = self._add_residual(flat, torch.cat(gathered, -1))
            outputs.append(flat)
            finals.append(self.final(flat, grid))
        return outputs, finals

    def final(self, outputs: Tensor, grid: TimeMajor) -> Tensor:
        """Return the final output of each direction, (B, D), of a layer's outputs (N, D)."""
        parts = outputs.chunk(len(self.ways), -1)
        return torch.cat([grid.end(*pair) for pair in zip(parts, self.ways, strict=True)], -1)

    @property
    def ahead(self) -> list[nn.Module]:
        """The layers of the first direction, forward unless the stack is backward only."""
        return [directions[0] for directions in self.layers]  # type: ignore[index]

    def run(
        self, inputs: Tensor, states: Sequence[CellState] | None = None, real: Tensor | None = None
    ) -> tuple[list[Tensor], tuple[CellState, ...]]:
        """Run the forward direction over (T, B, I) from `states` on; return each layer's outputs and new state."""
        outputs, new_states = [], []
        for depth, layer in enumerate(self.ahead):
            dropped = self.dropout(inputs) if depth and layer.training == self.training else inputs
            hidden, state = layer(dropped, states[depth] if states else None, real)
            inputs = self._add_residual(inputs, hidden)
            outputs.append(inputs)
            new_states.append(state)
        return outputs, tuple(new_states)

    def _layer_inputs(self, flat: Tensor, grid: TimeMajor, depth: int) -> Sequence[Tensor]:
        """Return the input of each direction of a layer; a frozen layer gets it without dropout."""
        if not depth:
            return [flat] * len(self.ways)
        dropped: Tensor = self.dropout(flat, grid) if self.layers[depth].training == self.training else flat
        return dropped.chunk(len(self.ways), -1) if self.apart else [dropped] * len(self.ways)

    def _add_residual(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Add the residual connection, if enabled and the shapes agree (He et al. 2016)."""
        return inputs + outputs if self.residual and inputs.shape == outputs.shape else outputs


def choose_layers(states: Sequence[Tensor], layers: Sequence[int], model: str) -> Tensor:
    """Return the chosen of a model's states, (L, N, D): the embeddings are 0, and the last layer, of width D, is -1."""
    depth, width = len(states) - 1, states[-1].shape[-1]
    if not all(-depth <= layer + 1 and layer <= depth for layer in layers):
        raise ConfigError(f"layers: this {model} has 0, the embeddings, to {depth}, but {list(layers)} is asked for")
    for layer in layers:
        if states[layer].shape[-1] != width:
            raise RoleError(
                f"layers: layer {layer % (depth + 1)} is {states[layer].shape[-1]} wide and the last is {width}: they "
                "do not go together; leave it out"
            )
    return torch.stack([states[layer] for layer in layers])


def _make_layer(
    cell: str, inputs: int, width: int, attention: str, depth: int, reverse: bool, drop: float
) -> nn.Module:
    layer = make_cell(cell, inputs, width)
    layer.drop = drop
    return layer if attention == "none" else LSTMN(layer, attention, depth, "backward" if reverse else "self")
