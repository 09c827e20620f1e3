"""Heat maps of matrices; values of both signs have one hue above zero and another below.

The axes are drawn here; the page's script draws the cells, from half-precision values.
"""

import base64
from dataclasses import dataclass

import numpy as np

from weft.analysis.render.axes import Axis, linear_axis
from weft.analysis.render.page import number
from weft.analysis.render.svg import figure, plot, svg, text_element

_LEFT, _TOP, _BOTTOM = 44, 4, 54  # margins around the cells
_WIDTH = 600  # of all cells
_HEIGHTS = (260, 600)  # smallest and largest height of all cells


@dataclass(frozen=True)
class MatrixPlot:
    """A matrix (R, C) with a title; `down` names the rows, `across` the columns."""

    title: str
    values: np.ndarray
    down: str
    across: str

    @property
    def limits(self) -> tuple[float, float]:
        """The range of the colours: symmetric about zero or, without negative values, from minimum to maximum."""
        finite = self.values[np.isfinite(self.values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        peak = max(abs(low), abs(high)) or 1.0
        return (low, high) if 0 <= low < high else (-peak, peak)

    @property
    def aspect(self) -> float:
        """Height by width as drawn: cells are square unless that is too flat or too tall."""
        rows, columns = self.values.shape
        return float(np.clip(rows / columns, _HEIGHTS[0] / _WIDTH, _HEIGHTS[1] / _WIDTH))

    def html(self) -> str:
        """Return the figure as HTML."""
        (rows, columns), height = self.values.shape, round(self.aspect * _WIDTH)
        cell_width, cell_height = _WIDTH / columns, height / rows
        box = f'x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{height}"'
        drawing = f'<foreignObject {box}><canvas width="{columns}" height="{rows}"></canvas></foreignObject>\n'
        for size in (f'width="{_WIDTH}" height="{cell_height:g}"', f'width="{cell_width:g}" height="{height}"'):
            drawing += f'<rect data-mark="" class="band" {size} visibility="hidden"/>'
        low, high = (number(limit).replace("-", "−") for limit in self.limits)
        description = (
            f"{rows} rows, each a {self.down}, by {columns} columns, each a {self.across}, from {low} to {high}"
        )
        drawing += self._ticks(cell_width, cell_height)
        image = svg(_LEFT + _WIDTH + 4, _TOP + height + _BOTTOM, self.title, description, drawing)
        cell, shape = [cell_width, cell_height], [rows, columns]
        data = {"width": _LEFT + _WIDTH + 4, "left": _LEFT, "top": _TOP, "cell": cell, "shape": shape}
        data |= {"down": self.down, "across": self.across, "ends": self.limits}
        data["values"] = base64.b64encode(np.clip(self.values, -6e4, 6e4).astype("<f2").tobytes()).decode()
        key = f'<span>{low}<span class="ramp"></span>{high}</span>'
        return figure(self.title, plot("grid", self.title, image, data), key, "signed" if self.limits[0] < 0 else "")

    def _ticks(self, cell_width: float, cell_height: float) -> str:
        """Draw the indices and the names of rows and columns."""
        down, across = map(_index_axis, self.values.shape)
        bottom, middle, parts = _TOP + len(self.values) * cell_height, 'class="quiet" text-anchor="middle"', []
        for tick in down.ticks:
            at = down.at(tick, _TOP + cell_height / 2, bottom - cell_height / 2)
            parts.append(text_element(_LEFT - 8, at, down.tick_label(tick), 'class="quiet" text-anchor="end"'))
        for tick in across.ticks:
            at = across.at(tick, _LEFT + cell_width / 2, _LEFT + _WIDTH - cell_width / 2)
            parts.append(text_element(at, bottom + 18, across.tick_label(tick), middle))
        half = (_TOP + bottom) / 2
        parts.append(text_element(_LEFT + _WIDTH / 2, bottom + 42, self.across, middle))
        parts.append(text_element(8, half, self.down, f'{middle} transform="rotate(-90 8 {half:g})"'))
        return "".join(parts) + "\n"


def _index_axis(count: int) -> Axis:
    """Return the axis of indices from 0, in whole steps."""
    axis = linear_axis([0, max(count - 1, 5)])
    return Axis(0, max(count - 1, 1), [tick for tick in axis.ticks if tick < count], axis.step)
