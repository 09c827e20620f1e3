"""Line charts as inline SVG, such as learning curves."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from weft.analysis.render.axes import LIMIT, Axis, linear_axis, log_axis
from weft.analysis.render.page import escaped, number
from weft.analysis.render.svg import figure, plot, shorten_label, svg, text_element

_HUES = 5  # the page's style has --s0 to --s4; beyond that, lines differ by their dashes
_DASHES = ("", ' stroke-dasharray="7 5"', ' stroke-dasharray="1.5 5"', ' stroke-dasharray="11 4 2 4"')
_WIDTH, _HEIGHT, _TOP, _BOTTOM = 640, 330, 32, 282  # of a line chart; the horizontal axis is at _BOTTOM
_GAP = 16  # between the names at the ends of the lines

Point = tuple[float, float, float, float]  # drawn coordinates x and y, then values x and y


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]],
    x: str,
    y: str,
    title: str = "",
    log_y: bool = False,
    percent: bool = False,
    stops: Mapping[float, str] | None = None,
) -> str:
    """Return a chart with one line per series of `(x, y)` points; `x` and `y` name the axes, `stops` values of x.

    Points that cannot be drawn (not finite, or not positive when `log_y`) are left out. With `percent`, 1 is 100%.
    """
    curves = {name: _drawable(points, log_y) for name, points in series.items()}
    xs = [point[0] for curve in curves.values() for point in curve]
    ys = [point[1] for curve in curves.values() for point in curve]
    if not xs:
        return figure(title or y, "", "Nothing to draw.")
    x_axis = linear_axis(xs).clipped(min(xs), max(xs))
    y_axis = log_axis(ys) if log_y else linear_axis(ys)
    left = 14 + 7 * max(len(y_axis.tick_label(tick, percent)) for tick in y_axis.ticks)
    lines = [
        _Line(name, index, _thin([(x_axis.at(a, left, _WIDTH), y_axis.at(b, _BOTTOM, _TOP), a, b) for a, b in curve]))
        for index, (name, curve) in enumerate(curves.items())
        if curve
    ]
    ends = _end_labels(lines)
    description = "; ".join(line.description(x, y, percent) for line in lines)
    frame = _frame(x_axis, y_axis, left, x, y, percent)
    drawing = frame + "".join(line.svg() for line in lines) + ends + _cursor(lines)
    chart = svg(_WIDTH, _HEIGHT, title or y, description, drawing)
    key = "".join(_key(name, index, bool(curve)) for index, (name, curve) in enumerate(curves.items()))
    content = plot("lines", title or y, chart, _tooltip_data(lines, x, percent, stops or {}))
    return figure(title, content, key, "labelled" if ends else "")


@dataclass(frozen=True)
class _Line:
    name: str
    index: int
    points: Sequence[Point]

    @property
    def hue(self) -> str:
        return f"s{self.index % _HUES}"

    def svg(self) -> str:
        path = "M" + "L".join(f"{point[0]:g} {point[1]:g}" for point in self.points)
        line = _stroke(self.index, path) + _dot(*self.points[-1][:2])
        return f'<g class="{self.hue}"><title>{escaped(self.name)}</title>{line}</g>\n'

    def description(self, x: str, y: str, percent: bool) -> str:
        ends = (f"{_value(p[3], percent)} at {x} {number(p[2])}" for p in (self.points[0], self.points[-1]))
        return f"{self.name}: {y} from {' to '.join(ends)}"


def _drawable(points: Iterable[tuple[float, float]], log_y: bool) -> list[tuple[float, float]]:
    def fits(x: float, y: float) -> bool:
        return abs(x) < LIMIT and abs(y) < LIMIT and (not log_y or y > 1 / LIMIT)  # false for a NaN, too

    return sorted((float(x), float(y)) for x, y in points if fits(x, y))


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
    return f'<path class="line" d="{path}"{_DASHES[index // _HUES % len(_DASHES)]}/>'


def _dot(x: float, y: float) -> str:
    return f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="4"/>'


def _key(name: str, index: int, drawn: bool) -> str:
    swatch = f'<svg class="s{index % _HUES}" viewBox="0 0 22 10" aria-hidden="true">{_stroke(index, "M1 5H21")}</svg>'
    return f'<span class="{"drawn" if drawn else ""}">{swatch}{escaped(name)}{"" if drawn else " (no data)"}</span>'


def _frame(x_axis: Axis, y_axis: Axis, left: int, x: str, y: str, percent: bool) -> str:
    """Draw axes, grid lines, tick labels and axis names."""
    parts = [text_element(0, 8, y, 'class="quiet"')]
    for tick in y_axis.ticks:
        at = y_axis.at(tick, _BOTTOM, _TOP)
        parts.append(f'<path class="{"axis" if at == _BOTTOM else "rule"}" d="M{left} {at:g}H{_WIDTH}"/>')
        parts.append(text_element(left - 9, at, y_axis.tick_label(tick, percent), 'class="quiet" text-anchor="end"'))
    for tick in x_axis.ticks:
        at = x_axis.at(tick, left, _WIDTH)
        parts.append(text_element(at, _BOTTOM + 16, x_axis.tick_label(tick), 'class="quiet" text-anchor="middle"'))
    parts.append(text_element((left + _WIDTH) / 2, _BOTTOM + 41, x, 'class="quiet" text-anchor="middle"'))
    return "".join(parts) + "\n"


def _end_labels(lines: Sequence[_Line]) -> str:
    """Label each line at its right end; labels are moved apart if they overlap, and left out if not all fit."""
    order = sorted(lines, key=lambda line: line.points[-1][1])
    if len(order) * _GAP > _BOTTOM - _TOP:
        return ""
    heights = [line.points[-1][1] for line in order]
    for i in range(1, len(order)):
        heights[i] = max(heights[i], heights[i - 1] + _GAP)
    parts = []
    for i, line in enumerate(order):
        x, y, height = *line.points[-1][:2], min(heights[i], _BOTTOM - _GAP * (len(order) - 1 - i))
        leader = f'<path class="lead" d="M{x:g} {y:g}H{_WIDTH}l10 {height - y:g}h4"/>'
        label = text_element(_WIDTH + 18, height, shorten_label(line.name))
        parts.append(f'<g class="end {line.hue}">{leader}{label}</g>')
    return "".join(parts) + "\n"


def _cursor(lines: Sequence[_Line]) -> str:
    rule = f'<path class="cursor" data-mark="" d="M0 {_TOP}V{_BOTTOM}" visibility="hidden"/>'
    return rule + "".join(f'<g class="{li.hue}" data-mark="" visibility="hidden">{_dot(0, 0)}</g>' for li in lines)


def _tooltip_data(lines: Sequence[_Line], x: str, percent: bool, names: Mapping[float, str]) -> dict[str, object]:
    """Return what the page's script shows at the pointer."""
    values = {point[0]: point[2] for line in lines for point in line.points}
    stops = [
        [position, f"{x} {number(value)}" + (f": {names[value]}" if value in names else "")]
        for position, value in sorted(values.items())
    ]
    series = [
        {"name": li.name, "hue": li.hue, "points": [[p[0], p[1], _value(p[3], percent)] for p in li.points]}
        for li in lines
    ]
    return {"width": _WIDTH, "top": _TOP, "stops": stops, "series": series}
