"""Scatter plots as inline SVG: named points, with the frontier of the best drawn through those on it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from weft.analysis.render.axes import Axis, linear_axis, log_axis
from weft.analysis.render.charts import BOTTOM, HEIGHT, HUES, TOP, WIDTH, can_be_drawn, draw_frame, hue, left_margin
from weft.analysis.render.page import escaped, number
from weft.analysis.render.svg import figure, plot, shorten_label, svg, text_element, text_width

# Marks of radius 1 about (0, 0): after as many points as there are hues, the next shape.
_SHAPES = (
    "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0 -2 0z",
    "M-.9-.9H.9V.9H-.9z",
    "M0-1.15L1.1 .85H-1.1z",
    "M0-1.25L1.25 0L0 1.25L-1.25 0z",
)
_RADIUS = 5.5
_INSET = 12  # between the outermost points and the ends of the axes
_LINE = 15  # height of a name
_AWAY = 20  # a name that is further above or below its point is joined to it

Place = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class ScatterPoint:
    """A point, its standard deviation along y where it is known, and the number that gives it colour and shape."""

    x: float
    y: float
    spread: float | None = None
    number: int = 0


def scatter_chart(
    points: Mapping[str, ScatterPoint],
    x: str,
    y: str,
    title: str = "",
    percent: bool = False,
    log_y: bool = False,
    frontier: Sequence[str] = (),
    write_x: Callable[[float], str] = number,
) -> str:
    """Return a chart of named points over a logarithmic axis; those of the `frontier` are filled and joined by a line.

    Points that cannot be drawn (not finite, or not positive on a logarithmic axis) are left out.
    """
    points = {name: p for name, p in points.items() if can_be_drawn(p.x, True) and can_be_drawn(p.y, log_y)}
    if not points:
        return figure(title or y, "", "Nothing to draw.")
    ys = [value for point in points.values() for value in _ends(point) if can_be_drawn(value, log_y)]
    x_axis, y_axis = log_axis([point.x for point in points.values()]), (log_axis if log_y else linear_axis)(ys)
    left = left_margin(y_axis, percent)
    marks = [_Mark.of(name, point, x_axis, y_axis, left, name in frontier) for name, point in points.items()]
    places = {mark.name: (mark.x, mark.y) for mark in marks}
    corners = [places[name] for name in frontier if name in places]
    drawing = draw_frame(x_axis, y_axis, left, x, y, percent) + _draw_frontier(corners)
    upward = sorted(marks, key=lambda mark: mark.filled)  # what is on the frontier is hidden by nothing
    drawing += _names(marks, left, corners) + "".join(mark.svg() for mark in upward) + _cursor(marks)
    facts = "; ".join(mark.description(percent, write_x) for mark in marks)
    best = f". On the frontier: {', '.join(name for name in frontier if name in points)}" if frontier else ""
    chart = svg(WIDTH, HEIGHT, title or f"{y} by {x}", facts + best, drawing)
    key = "".join(mark.key() for mark in marks)
    return figure(title, plot("lines", title or y, chart, _tooltip_data(marks, x, percent, write_x)), key, "scatter")


@dataclass(frozen=True)
class _Mark:
    name: str
    point: ScatterPoint
    x: float
    y: float
    error: tuple[float, float] | None  # drawn ends of the bar
    filled: bool

    @classmethod
    def of(cls, name: str, point: ScatterPoint, x_axis: Axis, y_axis: Axis, left: int, filled: bool) -> "_Mark":
        def height(value: float) -> float:
            return y_axis.at(value, BOTTOM, TOP)

        ends = _ends(point)
        error = (height(ends[0]), height(ends[1])) if point.spread and can_be_drawn(ends[0], y_axis.log) else None
        return cls(name, point, x_axis.at(point.x, left + _INSET, WIDTH - _INSET), height(point.y), error, filled)

    @property
    def path(self) -> str:
        return _SHAPES[self.point.number // HUES % len(_SHAPES)]

    def svg(self) -> str:
        shape = f'<path class="mark{"" if self.filled else " hollow"}" d="{self.path}"'
        bar = f'<path class="error" d="M{self.x:g} {self.error[0]:g}V{self.error[1]:g}"/>' if self.error else ""
        place = f'transform="translate({self.x:g} {self.y:g}) scale({_RADIUS})"/>'
        return f'<g class="{hue(self.point.number)}"><title>{escaped(self.name)}</title>{bar}{shape} {place}</g>\n'

    def key(self) -> str:
        shape = f'<path class="mark{"" if self.filled else " hollow"}" d="{self.path}"/>'
        swatch = f'<svg class="{hue(self.point.number)}" viewBox="-1.6 -1.6 3.2 3.2" aria-hidden="true">{shape}</svg>'
        return f'<span class="drawn">{swatch}{escaped(self.name)}</span>'

    def value(self, percent: bool) -> str:
        return f"{self.point.y:.1%}" if percent and abs(self.point.y) < 100 else number(self.point.y)

    def description(self, percent: bool, write_x: Callable[[float], str]) -> str:
        return f"{self.name}: {self.value(percent)} at {write_x(self.point.x)}"


def _ends(point: ScatterPoint) -> tuple[float, float]:
    return point.y - (point.spread or 0.0), point.y + (point.spread or 0.0)


def _draw_frontier(corners: Sequence[Place]) -> str:
    """Draw the best that is reached at each cost: a step at each point of the frontier."""
    if not corners:
        return ""
    path = f"M{corners[0][0]:g} {corners[0][1]:g}" + "".join(f"H{x:g}V{y:g}" for x, y in corners[1:])
    return f'<path class="frontier" d="{path}H{WIDTH}"/>\n'


def _names(marks: Sequence[_Mark], left: int, corners: Sequence[Place]) -> str:
    """Write each name near its point, where it covers no point, no name and not the frontier; else at its right.

    A line leads from a name that stands away from its point.
    """
    taken: list[Box] = [(m.x - 7, m.y - 7, m.x + 7, m.y + 7) for m in marks]
    for (x, y), (next_x, next_y) in pairwise([*corners, *((WIDTH + 4.0, y) for _, y in corners[-1:])]):
        taken += [(x, y - 1, next_x, y + 1), (next_x - 1, min(y, next_y), next_x + 1, max(y, next_y))]
    leads = names = ""
    for mark in sorted(marks, key=lambda mark: mark.x):
        text = shorten_label(mark.name)
        places = _places(mark, text_width(text))
        free = [place for place in places if _fits(place[0], left) and not any(_overlap(place[0], t) for t in taken)]
        box, x, y, anchor = (free or places)[0]
        taken.append(box)
        if abs(y - mark.y) > _AWAY:
            lead = f'<path class="lead" d="M{mark.x:g} {mark.y:g}L{x:g} {y:g}"/>'
            leads += f'<g class="{hue(mark.point.number)}">{lead}</g>'
        names += text_element(x, y, text, f'class="end" text-anchor="{anchor}"')
    return f"{leads}{names}\n"


def _places(mark: _Mark, width: float) -> list[tuple[Box, float, float, str]]:
    """Return where a name may stand: its box, and the place and anchor of its text."""
    half = _LINE / 2
    places = []
    for dy in (0, *(sign * distance for distance in (12, *range(20, 92, 8)) for sign in (-1, 1))):
        y = mark.y + dy
        places.append(((mark.x + 9, y - half, mark.x + 9 + width, y + half), mark.x + 10, y, "start"))
        places.append(((mark.x - 9 - width, y - half, mark.x - 9, y + half), mark.x - 10, y, "end"))
        if abs(dy) > 12:
            places.append(((mark.x - width / 2, y - half, mark.x + width / 2, y + half), mark.x, y, "middle"))
    return places


def _fits(box: Box, left: int) -> bool:
    return box[0] >= left and box[1] >= TOP - 12 and box[2] <= WIDTH + 4 and box[3] <= BOTTOM


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _cursor(marks: Sequence[_Mark]) -> str:
    """Return what the page's script shows where the pointer is: a rule, and a ring about each point near it."""
    rule = f'<path class="cursor" data-mark="" d="M0 {TOP}V{BOTTOM}" visibility="hidden"/>'
    ring = '<circle class="ring" r="10"/>'
    return rule + "".join(
        f'<g class="{hue(m.point.number)}" data-mark="" visibility="hidden">{ring}</g>' for m in marks
    )


def _tooltip_data(marks: Sequence[_Mark], x: str, percent: bool, write_x: Callable[[float], str]) -> dict[str, object]:
    stops = [[place, x] for place in sorted({mark.x for mark in marks})]
    series = []
    for mark in marks:
        value = f"{mark.value(percent)} at {write_x(mark.point.x)}"
        series.append({"name": mark.name, "hue": hue(mark.point.number), "points": [[mark.x, mark.y, value]]})
    return {"width": WIDTH, "top": TOP, "stops": stops, "series": series}
