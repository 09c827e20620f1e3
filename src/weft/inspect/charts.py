"""Charts as inline SVG for `page`: learning curves, and an alignment as Bahdanau et al. (2015) draw it in figure 3.

Sizes are in the drawing's own units. Colours come from the page's style, so that one drawing serves light and dark.
What the pointer and the arrow keys show travels beside the drawing, as JSON.
"""

import json
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from weft.errors import DataError
from weft.inspect.axes import LIMIT, Axis, even, logarithmic
from weft.inspect.page import escaped, number

_HUES = 5  # the page's style has --s0 to --s4; beyond that, lines differ by their dashes
_DASHES = ("", ' stroke-dasharray="7 5"', ' stroke-dasharray="1.5 5"', ' stroke-dasharray="11 4 2 4"')
_WIDTH, _HEIGHT, _TOP, _FOOT = 640, 330, 32, 282  # of a line chart; _FOOT is where the horizontal axis lies
_GAP = 16  # between the names at the ends of the lines
_DRAWN = 18  # characters of a token or a name that are drawn; the rest is one hover away
_SHADES = 50
_SMALL = 200  # cells: as many as one may want to hear one by one
_MARKS = {" ": "␣", "\n": "⏎", "\t": "⇥"}
_JOINERS = "\u200c\u200d"  # they have no shape, but Persian, Hindi and emoji are wrong without them

Point = tuple[float, float, float, float]  # where it is drawn, x and y, then its values, x and y


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]],
    x: str,
    y: str,
    title: str = "",
    log_y: bool = False,
    percent: bool = False,
) -> str:
    """Draw `(x, y)` points as one line a series; `x` and `y` name the axes.

    A point that cannot be drawn (not finite, or not positive when `log_y`) is left out. With `percent`, 1 reads 100%.
    """
    curves = {name: _drawable(points, log_y) for name, points in series.items()}
    places = [point[0] for curve in curves.values() for point in curve]
    heights = [point[1] for curve in curves.values() for point in curve]
    if not places:
        return _figure(title or y, "", "Nothing to draw.")
    across = even(places).cut(min(places), max(places))
    up = logarithmic(heights) if log_y else even(heights)
    left = 14 + 7 * max(len(up.written(tick, percent)) for tick in up.ticks)
    lines = [
        _Line(name, index, _thin([(across.at(a, left, _WIDTH), up.at(b, _FOOT, _TOP), a, b) for a, b in curve]))
        for index, (name, curve) in enumerate(curves.items())
        if curve
    ]
    ends = _end_names(lines)
    told = "; ".join(line.told(x, y, percent) for line in lines)
    drawing = _frame(across, up, left, x, y, percent) + "".join(line.drawn() for line in lines) + ends + _cursor(lines)
    svg = _svg(_WIDTH, _HEIGHT, title or y, told, drawing)
    key = "".join(_key(name, index, bool(curve)) for index, (name, curve) in enumerate(curves.items()))
    plot = _plot("lines", title or y, svg, _read_out(lines, x, percent))
    return _figure(title, plot, key, "labelled" if ends else "")


def alignment(weights: np.ndarray, source: Sequence[str], target: Sequence[str], title: str = "") -> str:
    """Draw attention weights (T, S) as a heat map: source tokens along the top, target tokens down the side."""
    grid = np.asarray(weights, dtype=np.float64)
    rows, columns = len(target), len(source)
    if grid.shape != (rows, columns):
        raise DataError(f"alignment weights must be (target, source), here {(rows, columns)}: got {grid.shape}")
    title = title or "Alignment"
    if not grid.size:
        return _figure(title, "", "Nothing to align.")
    source, target = [visible(token) for token in source], [visible(token) for token in target]
    cell = max(15, min(36, 560 // max(rows, columns)))
    left = round(max(_extent(_clip(token)) for token in target)) + 10
    top, right, heads = _heads(source, left, cell)
    known = np.where(np.isfinite(grid), grid, 0.0).clip(0)
    peak = float(known.max()) or 1.0
    drawing = _tiles(known / peak, left, top, cell) + heads
    for row, token in enumerate(target):
        drawing += _text(left - 8, top + cell * (row + 0.5), _clip(token), 'data-label="" text-anchor="end"')
    for width, height, kind in ((columns * cell, cell, "band"), (cell, rows * cell, "band"), (cell, cell, "spot")):
        drawing += f'<rect data-mark="" class="{kind}" width="{width}" height="{height}" visibility="hidden"/>'
    told = f"{rows} target tokens by {columns} source tokens"
    svg = _svg(right, top + rows * cell + 4, title, told, drawing, fixed=True)
    data = {"width": right, "left": left, "top": top, "cell": cell, "source": source, "target": target}
    shown = [[round(weight, 4) if math.isfinite(weight) else None for weight in row] for row in grid.tolist()]
    plot = _plot("map", title, svg, data | {"weights": shown}) + _spoken(shown, source, target, title)
    return _figure(title, plot, f'<span>0<span class="ramp"></span>{peak:.2g}</span>')


def encode_data(value: object) -> str:
    """Write JSON in ASCII that can neither end nor open anything when it stands in a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def visible(token: str) -> str:
    """Give spaces, line ends and whatever else has no shape a visible mark."""

    def mark(char: str) -> str:
        kind = unicodedata.category(char)
        if char in _MARKS or kind[0] == "Z":
            return _MARKS.get(char, "␣")
        return f"‹{ord(char):04X}›" if kind in ("Cc", "Cf", "Cs") and char not in _JOINERS else char

    return "".join(map(mark, token)) or "∅"


def _figure(title: str, plot: str, key: str, style: str = "") -> str:
    head = f'<b dir="auto">{escaped(title)}</b>' if title else ""
    return f'<figure class="{style}"><figcaption>{head}<span class="key">{key}</span></figcaption>\n{plot}</figure>'


def _svg(width: int, height: int, title: str, told: str, drawing: str, fixed: bool = False) -> str:
    size = f' width="{width}" height="{height}"' if fixed else ""
    name = escaped(title)
    start = f'<svg viewBox="0 0 {width} {height}"{size} role="img" aria-label="{name}"><title>{name}</title>'
    return f"{start}<desc>{escaped(told)}</desc>\n{drawing}</svg>"


def _plot(kind: str, title: str, svg: str, data: Mapping[str, object]) -> str:
    label = f'aria-label="{escaped(title)}: arrow keys move from value to value"'
    return (
        f'<div class="plot {kind}" tabindex="0" role="group" {label}>{svg}</div>\n'
        f'<div class="tip" role="status"></div>\n<script type="application/json">{encode_data(data)}</script>\n'
    )


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" dy=".35em" {attributes}>{escaped(text)}</text>'


def _clip(text: str) -> str:
    return text if len(text) <= _DRAWN else text[: _DRAWN - 1] + "…"


def _extent(text: str) -> float:
    """Estimate the width of `text` at 12 units: without the font, a guess on the wide side."""
    shaped = (char for char in text if unicodedata.category(char) not in ("Mn", "Me", "Cf"))
    return sum(12.5 if unicodedata.east_asian_width(c) in "WF" else 9.0 if c.isupper() else 7.0 for c in shaped)


@dataclass(frozen=True)
class _Line:
    name: str
    index: int
    points: Sequence[Point]

    @property
    def hue(self) -> str:
        return f"s{self.index % _HUES}"

    def drawn(self) -> str:
        path = "M" + "L".join(f"{point[0]:g} {point[1]:g}" for point in self.points)
        inner = _stroke(self.index, path) + _dot(*self.points[-1][:2])
        return f'<g class="{self.hue}"><title>{escaped(self.name)}</title>{inner}</g>\n'

    def told(self, x: str, y: str, percent: bool) -> str:
        ends = (f"{_value(p[3], percent)} at {x} {number(p[2])}" for p in (self.points[0], self.points[-1]))
        return f"{self.name}: {y} from {' to '.join(ends)}"


def _drawable(points: Iterable[tuple[float, float]], log_y: bool) -> list[tuple[float, float]]:
    def fits(x: float, y: float) -> bool:
        return abs(x) < LIMIT and abs(y) < LIMIT and (not log_y or y > 1 / LIMIT)  # false for a NaN, too

    return sorted((float(x), float(y)) for x, y in points if fits(x, y))


def _thin(points: Sequence[Point]) -> list[Point]:
    """Keep the first, last, lowest and highest point of every two units: more could not be seen."""
    kept: list[Point] = []
    for _, near in groupby(points, key=lambda point: point[0] // 2):
        group = list(near)
        heights = [point[1] for point in group]
        keep = {0, heights.index(min(heights)), heights.index(max(heights)), len(group) - 1}
        kept += [group[index] for index in sorted(keep)]
    return kept


def _value(value: float, percent: bool) -> str:
    return f"{value:.1%}" if percent else number(value)


def _stroke(index: int, path: str) -> str:
    return f'<path class="line" d="{path}"{_DASHES[index // _HUES % len(_DASHES)]}/>'


def _dot(x: float, y: float) -> str:
    return f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="4"/>'


def _key(name: str, index: int, drawn: bool) -> str:
    swatch = f'<svg class="s{index % _HUES}" viewBox="0 0 22 10" aria-hidden="true">{_stroke(index, "M1 5H21")}</svg>'
    return f'<span class="{"drawn" if drawn else ""}">{swatch}{escaped(name)}{"" if drawn else " (no data)"}</span>'


def _frame(across: Axis, up: Axis, left: int, x: str, y: str, percent: bool) -> str:
    parts = [_text(0, 8, y, 'class="quiet"')]
    for tick in up.ticks:
        at = up.at(tick, _FOOT, _TOP)
        parts.append(f'<path class="{"axis" if at == _FOOT else "rule"}" d="M{left} {at:g}H{_WIDTH}"/>')
        parts.append(_text(left - 9, at, up.written(tick, percent), 'class="quiet" text-anchor="end"'))
    for tick in across.ticks:
        at = across.at(tick, left, _WIDTH)
        parts.append(_text(at, _FOOT + 16, across.written(tick), 'class="quiet" text-anchor="middle"'))
    parts.append(_text((left + _WIDTH) / 2, _FOOT + 41, x, 'class="quiet" text-anchor="middle"'))
    return "".join(parts) + "\n"


def _end_names(lines: Sequence[_Line]) -> str:
    """Name each line at its right end, moved apart where names would touch; no names where they cannot all fit."""
    order = sorted(lines, key=lambda line: line.points[-1][1])
    if len(order) * _GAP > _FOOT - _TOP:
        return ""
    heights = [line.points[-1][1] for line in order]
    for i in range(1, len(order)):
        heights[i] = max(heights[i], heights[i - 1] + _GAP)
    parts = []
    for i, line in enumerate(order):
        x, y, height = *line.points[-1][:2], min(heights[i], _FOOT - _GAP * (len(order) - 1 - i))
        lead = f'<path class="lead" d="M{x:g} {y:g}H{_WIDTH}l10 {height - y:g}h4"/>'
        parts.append(f'<g class="end {line.hue}">{lead}{_text(_WIDTH + 18, height, _clip(line.name))}</g>')
    return "".join(parts) + "\n"


def _cursor(lines: Sequence[_Line]) -> str:
    rule = f'<path class="cursor" data-mark="" d="M0 {_TOP}V{_FOOT}" visibility="hidden"/>'
    return rule + "".join(f'<g class="{li.hue}" data-mark="" visibility="hidden">{_dot(0, 0)}</g>' for li in lines)


def _read_out(lines: Sequence[_Line], x: str, percent: bool) -> dict[str, object]:
    places = {point[0]: point[2] for line in lines for point in line.points}
    stops = [[place, f"{x} {number(value)}"] for place, value in sorted(places.items())]
    series = [
        {"name": li.name, "hue": li.hue, "points": [[p[0], p[1], _value(p[3], percent)] for p in li.points]}
        for li in lines
    ]
    return {"width": _WIDTH, "top": _TOP, "stops": stops, "series": series}


def _heads(source: Sequence[str], left: int, cell: int) -> tuple[int, int, str]:
    """Set the source tokens along the top, turned where they are wider than a cell; return (top, right, drawing)."""
    widths = [_extent(_clip(token)) for token in source]
    turn = 0 if max(widths) <= cell - 4 else 45 if cell >= 22 else 90
    rise, run = math.sin(math.radians(turn)), math.cos(math.radians(turn))
    top, right, drawing = round(max(widths) * rise) + 22, left + len(source) * cell + 4.0, ""
    for column, token in enumerate(source):
        x = left + (column + 0.5) * cell
        right = max(right, x + widths[column] * run + 4)
        place = f'transform="translate({x:g} {top - 9}) rotate({-turn})"' + ("" if turn else ' text-anchor="middle"')
        drawing += _text(0, 0, _clip(token), f'data-label="" {place}')
    return top, math.ceil(right), drawing + "\n"


def _tiles(shares: np.ndarray, left: int, top: int, cell: int) -> str:
    """Draw the cells that have weight on a pale ground, one path a shade, so that a large map stays a small file."""
    rows, columns = shares.shape
    shades = np.rint(shares * _SHADES).astype(int)
    drawing = f'<rect class="ground" x="{left}" y="{top}" width="{columns * cell}" height="{rows * cell}"/>'
    for shade in np.unique(shades[shades > 0]).tolist():
        places, side = np.argwhere(shades == shade).tolist(), cell - 1
        path = "".join(f"M{left + column * cell} {top + row * cell}h{side}v{side}h-{side}z" for row, column in places)
        drawing += f'<path class="heat" fill-opacity="{shade / _SHADES:g}" d="{path}"/>'
    return drawing + "\n"


def _spoken(weights: Sequence[Sequence[float | None]], source: Sequence[str], target: Sequence[str], title: str) -> str:
    """Give a screen reader the map as a table; where that is long, each target token with its strongest source."""
    if len(source) * len(target) <= _SMALL:
        body = "<tr><td></td>" + "".join(f'<th scope="col">{escaped(token)}</th>' for token in source) + "</tr>"
        for token, row in zip(target, weights, strict=True):
            cells = "".join(f"<td>{_weight(weight)}</td>" for weight in row)
            body += f'<tr><th scope="row">{escaped(token)}</th>{cells}</tr>'
        return f'<div class="hidden"><table><caption>{escaped(title)}</caption>{body}</table></div>\n'
    items = ""
    for token, row in zip(target, weights, strict=True):
        best = max(range(len(row)), key=lambda at: -math.inf if (weight := row[at]) is None else weight)
        items += f"<li>{escaped(f'{token} ← {source[best]} {_weight(row[best])}')}</li>"
    return f'<div class="hidden"><ul>{items}</ul></div>\n'


def _weight(weight: float | None) -> str:
    return "–" if weight is None else f"{weight:.2f}"
