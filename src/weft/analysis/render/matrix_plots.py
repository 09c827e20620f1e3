"""Heat maps of numbers by their rows and columns: where they are of either sign, one hue above nought, another below.

The axes are drawn here; the page's script paints the cells, from half-precision numbers.
"""

import base64
from dataclasses import dataclass

import numpy as np

from weft.analysis.render.axes import Axis, even
from weft.analysis.render.page import number
from weft.analysis.render.svg import figure, plot, svg, words

_LEFT, _TOP, _FOOT = 44, 4, 54  # the room around the cells
_WIDE = 600  # what the cells take, and between these at most and at least what they take down
_TALL = (260, 600)


@dataclass(frozen=True)
class Grid:
    """Numbers (R, C) under a title; `down` says what a row is, `across` what a column."""

    title: str
    values: np.ndarray
    down: str
    across: str

    @property
    def ends(self) -> tuple[float, float]:
        """Where the colours end: as far below nought as above it, or, where nothing is below, at the smallest."""
        known = self.values[np.isfinite(self.values)]
        low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
        peak = max(abs(low), abs(high)) or 1.0
        return (low, high) if 0 <= low < high else (-peak, peak)

    @property
    def tall(self) -> float:
        """How high it is drawn for each unit of width: cells are square where that is neither flat nor tall."""
        rows, columns = self.values.shape
        return float(np.clip(rows / columns, _TALL[0] / _WIDE, _TALL[1] / _WIDE))

    def drawn(self) -> str:
        """Draw it for a page."""
        (rows, columns), height = self.values.shape, round(self.tall * _WIDE)
        wide, tall = _WIDE / columns, height / rows
        place = f'x="{_LEFT}" y="{_TOP}" width="{_WIDE}" height="{height}"'
        drawing = f'<foreignObject {place}><canvas width="{columns}" height="{rows}"></canvas></foreignObject>\n'
        for size in (f'width="{_WIDE}" height="{tall:g}"', f'width="{wide:g}" height="{height}"'):
            drawing += f'<rect data-mark="" class="band" {size} visibility="hidden"/>'
        low, high = (number(end).replace("-", "−") for end in self.ends)
        told = f"{rows} rows, each a {self.down}, by {columns} columns, each a {self.across}, from {low} to {high}"
        made = svg(_LEFT + _WIDE + 4, _TOP + height + _FOOT, self.title, told, drawing + self._ticks(wide, tall))
        data = {"width": _LEFT + _WIDE + 4, "left": _LEFT, "top": _TOP, "cell": [wide, tall], "shape": [rows, columns]}
        data |= {"down": self.down, "across": self.across, "ends": self.ends}
        data["values"] = base64.b64encode(np.clip(self.values, -6e4, 6e4).astype("<f2").tobytes()).decode()
        key = f'<span>{low}<span class="ramp"></span>{high}</span>'
        return figure(self.title, plot("grid", self.title, made, data), key, "signed" if self.ends[0] < 0 else "")

    def _ticks(self, wide: float, tall: float) -> str:
        """Number rows and columns, and say what they are."""
        down, across = map(_numbered, self.values.shape)
        foot, middle, parts = _TOP + len(self.values) * tall, 'class="quiet" text-anchor="middle"', []
        for tick in down.ticks:
            at = down.at(tick, _TOP + tall / 2, foot - tall / 2)
            parts.append(words(_LEFT - 8, at, down.written(tick), 'class="quiet" text-anchor="end"'))
        for tick in across.ticks:
            at = across.at(tick, _LEFT + wide / 2, _LEFT + _WIDE - wide / 2)
            parts.append(words(at, foot + 18, across.written(tick), middle))
        half = (_TOP + foot) / 2
        parts.append(words(_LEFT + _WIDE / 2, foot + 42, self.across, middle))
        parts.append(words(8, half, self.down, f'{middle} transform="rotate(-90 8 {half:g})"'))
        return "".join(parts) + "\n"


def _numbered(count: int) -> Axis:
    """Count from 0, in whole steps."""
    whole = even([0, max(count - 1, 5)])
    return Axis(0, max(count - 1, 1), [tick for tick in whole.ticks if tick < count], whole.step)
