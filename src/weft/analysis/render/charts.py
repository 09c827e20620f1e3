"""Line charts as inline SVG, such as learning curves."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from weft.analysis.render.axes import LIMIT, Axis, linear_axis, log_axis
from weft.analysis.render.page import escaped, number
from weft.analysis.render.svg import figure, plot, shorten_label, svg, text_element

HUES = 5  # the page's style has --s0 to --s4; beyond that, lines differ by their dashes
_DASHES = ("", ' stroke-dasharray="7 5"', ' stroke-dasharray="1.5 5"', ' stroke-dasharray="11 4 2 4"')
WIDTH, HEIGHT, TOP, BOTTOM = 640, 330, 32, 282  # of a line chart; the horizontal axis is at BOTTOM
_GAP = 16  # between the names at the ends of the lines

Point = tuple[float, float, float, float]  # drawn coordinates x and y, then values x and y
Band = Sequence[tuple[float, float, float]]  # x, and the lowest and the highest y there


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]],
    x: str,
    y: str,
    title: str = "",
    log_y: bool = False,
    percent: bool = False,
    stops: Mapping[float, str] | None = None,
    log_x: bool = False,
    numbers: Mapping[str, int] | None = None,
    bands: Mapping[str, Band] | None = None,
    groups: Sequence[str] = (),
) -> str:
    """Return a chart with one line per series of `(x, y)` points; `x` and `y` name the axes, `stops` values of x.

    Points that cannot be drawn (not finite, or not positive on a logarithmic axis) are left out. With `percent`, 1 is
    100%. A series has the colour and the dashes of its place, or of its number in `numbers`, so that it looks the same
    in several charts. `bands` are shaded behind the lines. With `groups`, x is an index of them, and all points are
    marked.
    """
    curves = {name: _drawable(points, log_x, log_y) for name, points in series.items()}
    places = {name: (numbers or {}).get(name, place) for place, name in enumerate(series)}
    shades = {name: _drawable_band(band, log_x, log_y) for name, band in (bands or {}).items()}
    xs = [point[0] for curve in curves.values() for point in curve] + [float(index) for index in range(len(groups))]
    ys = [point[1] for curve in curves.values() for point in curve]
    if not ys:
        return figure(title or y, "", "Nothing to draw.")
    x_axis = log_axis(xs) if log_x else linear_axis(xs).clipped(min(xs), max(xs))
    if groups:
        x_axis = Axis(-0.5, len(groups) - 0.5, range(len(groups)))
    ys += [value for name, band in shades.items() if curves.get(name) for _, *ends in band for value in ends]
    y_axis = log_axis(ys) if log_y else linear_axis(ys)
    left = left_margin(y_axis, percent)

    def drawn(a: float, b: float) -> Point:
        return x_axis.at(a, left, WIDTH), y_axis.at(b, BOTTOM, TOP), a, b

    lines = [
        _Line(name, places[name], _thin([drawn(*point) for point in curve]), bool(groups))
        for name, curve in curves.items()
        if curve
    ]
    ends = _end_labels(lines)
    description = "; ".join(line.description(x, y, percent) for line in lines)
    drawing = draw_frame(x_axis, y_axis, left, x, y, percent, groups)
    for line in lines:
        high, low = ([drawn(a, side[i])[:2] for a, *side in shades.get(line.name, [])] for i in (1, 0))
        drawing += _band(line.hue, high + low[::-1])
    drawing += "".join(line.svg() for line in lines) + ends + _cursor(lines)
    chart = svg(WIDTH, HEIGHT, title or y, description, drawing)
    key = "".join(_key(name, places[name], bool(curve)) for name, curve in curves.items())
    stops = stops or {float(index): group for index, group in enumerate(groups)}
    content = plot("lines", title or y, chart, _tooltip_data(lines, x, percent, stops, bool(groups)))
    return figure(title, content, key, "labelled" if ends else "")


@dataclass(frozen=True)
class _Line:
    name: str
    index: int
    points: Sequence[Point]
    marked: bool = False  # at every point, not only at the last

    @property
    def hue(self) -> str:
        return hue(self.index)

    def svg(self) -> str:
        path = "M" + "L".join(f"{point[0]:g} {point[1]:g}" for point in self.points)
        marks = self.points if self.marked else self.points[-1:]
        line = _stroke(self.index, path) + "".join(_dot(*point[:2]) for point in marks)
        return f'<g class="{self.hue}"><title>{escaped(self.name)}</title>{line}</g>\n'

    def description(self, x: str, y: str, percent: bool) -> str:
        ends = (f"{_value(p[3], percent)} at {x} {number(p[2])}" for p in (self.points[0], self.points[-1]))
        return f"{self.name}: {y} from {' to '.join(ends)}"


def hue(index: int) -> str:
    """Return the class of a series' colour; after some series, colours come again."""
    return f"s{index % HUES}"


def can_be_drawn(value: float, log: bool) -> bool:
    """Return whether a value has a place on an axis; a NaN has none."""
    return abs(value) < LIMIT and (not log or value > 1 / LIMIT)


def _drawable(points: Iterable[tuple[float, float]], log_x: bool, log_y: bool) -> list[tuple[float, float]]:
    return sorted((float(x), float(y)) for x, y in points if can_be_drawn(x, log_x) and can_be_drawn(y, log_y))


def _drawable_band(band: Band, log_x: bool, log_y: bool) -> list[tuple[float, float, float]]:
    return sorted(
        (float(x), float(low), float(high))
        for x, low, high in band
        if can_be_drawn(x, log_x) and can_be_drawn(low, log_y) and can_be_drawn(high, log_y)
    )


def _band(hue: str, corners: Sequence[tuple[float, float]]) -> str:
    """Draw what lies between the lowest and the highest values."""
    path = "L".join(f"{x:g} {y:g}" for x, y in corners)
    return f'<path class="spread {hue}" d="M{path}z"/>\n' if corners else ""


def _thin(points: Sequence[Point]) -> list[Point]:
    """Keep the first, last, lowest and highest point of every two units: more would not be visible."""
    thinned: list[Point] = []
    for _, near in groupby(points, key=lambda point: point[0] // 2):
        group = list(near)
        heights = [point[1] for point in group]
        keep = {0, heights.index(min(heights)), heights.index(max(heights)), len(group) - 1}
        thinned += [group[index] for index in sorted(keep)]
    return thinned


def _value(value: float, percent: bool) -> str:
    return f"{value:.1%}" if percent else number(value)


def _stroke(index: int, path: str) -> str:
    return f'<path class="line" d="{path}"{_DASHES[index // HUES % len(_DASHES)]}/>'


def _dot(x: float, y: float) -> str:
    return f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="4"/>'


def _key(name: str, index: int, drawn: bool) -> str:
    swatch = f'<svg class="{hue(index)}" viewBox="0 0 22 10" aria-hidden="true">{_stroke(index, "M1 5H21")}</svg>'
    return f'<span class="{"drawn" if drawn else ""}">{swatch}{escaped(name)}{"" if drawn else " (no data)"}</span>'


def left_margin(y_axis: Axis, percent: bool) -> int:
    """Return how much room the labels of the vertical axis need."""
    return 14 + 7 * max(len(y_axis.tick_label(tick, percent)) for tick in y_axis.ticks)


def draw_frame(x_axis: Axis, y_axis: Axis, left: int, x: str, y: str, percent: bool, groups: Sequence[str] = ()) -> str:
    """Draw axes, grid lines, tick labels and axis names; with `groups`, these are the labels of x."""
    parts = [text_element(0, 8, y, 'class="quiet"')]
    for tick in y_axis.ticks:
        at = y_axis.at(tick, BOTTOM, TOP)
        parts.append(f'<path class="{"axis" if at == BOTTOM else "rule"}" d="M{left} {at:g}H{WIDTH}"/>')
        parts.append(text_element(left - 9, at, y_axis.tick_label(tick, percent), 'class="quiet" text-anchor="end"'))
    for tick in x_axis.ticks:
        label = groups[int(tick)] if groups else x_axis.tick_label(tick)
        at = x_axis.at(tick, left, WIDTH)
        parts.append(text_element(at, BOTTOM + 16, label, 'class="quiet" text-anchor="middle"'))
    parts.append(text_element((left + WIDTH) / 2, BOTTOM + 41, x, 'class="quiet" text-anchor="middle"'))
    return "".join(parts) + "\n"


def _end_labels(lines: Sequence[_Line]) -> str:
    """Label each line at its right end; labels are moved apart if they overlap, and left out if not all fit."""
    order = sorted(lines, key=lambda line: line.points[-1][1])
    if len(order) * _GAP > BOTTOM - TOP:
        return ""
    heights = [line.points[-1][1] for line in order]
    for i in range(1, len(order)):
        heights[i] = max(heights[i], heights[i - 1] + _GAP)
    parts = []
    for i, line in enumerate(order):
        x, y, height = *line.points[-1][:2], min(heights[i], BOTTOM - _GAP * (len(order) - 1 - i))
        leader = f'<path class="lead" d="M{x:g} {y:g}H{WIDTH}l10 {height - y:g}h4"/>'
        label = text_element(WIDTH + 18, height, shorten_label(line.name))
        parts.append(f'<g class="end {line.hue}">{leader}{label}</g>')
    return "".join(parts) + "\n"


def _cursor(lines: Sequence[_Line]) -> str:
    rule = f'<path class="cursor" data-mark="" d="M0 {TOP}V{BOTTOM}" visibility="hidden"/>'
    return rule + "".join(f'<g class="{li.hue}" data-mark="" visibility="hidden">{_dot(0, 0)}</g>' for li in lines)


def _tooltip_data(
    lines: Sequence[_Line], x: str, percent: bool, names: Mapping[float, str], grouped: bool
) -> dict[str, object]:
    """Return what the page's script shows at the pointer."""

    def label(value: float) -> str:
        name = names.get(value)
        return f"{x} {name}" if grouped else f"{x} {number(value)}" + (f": {name}" if name is not None else "")

    values = {point[0]: point[2] for line in lines for point in line.points}
    stops = [[position, label(value)] for position, value in sorted(values.items())]
    series = [
        {"name": li.name, "hue": li.hue, "points": [[p[0], p[1], _value(p[3], percent)] for p in li.points]}
        for li in lines
    ]
    return {"width": WIDTH, "top": TOP, "stops": stops, "series": series}
