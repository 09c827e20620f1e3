"""Attention as a heat map, as Bahdanau et al. (2015) draw it in figure 3, or as one such map a layer and head.

The first map is drawn here; the page's script draws the others when they are asked for, from half-precision weights:
twelve layers of twelve heads over sixty tokens are a megabyte and a half.
"""

import base64
import math
from collections.abc import Sequence

import numpy as np

from weft.analysis.render.page import escaped
from weft.analysis.render.svg import clip, extent, figure, plot, svg, visible, words
from weft.errors import DataError

_SHADES = 50
_CELLS = (13, 42)  # the smallest and the largest side of a cell
_ROOM = 560  # what a map's longer side takes between these
_SMALL = 200  # cells: as many as one may want to hear one by one


def alignment(weights: np.ndarray, source: Sequence[str], target: Sequence[str], title: str = "") -> str:
    """Draw attention weights (T, S) as a heat map: source tokens along the top, target tokens down the side."""
    return alignments(np.asarray(weights)[None], [(0, 0)], source, target, title)


def alignments(
    weights: np.ndarray, places: Sequence[tuple[int, int]], source: Sequence[str], target: Sequence[str], title: str
) -> str:
    """Draw weights (M, T, S), one map a layer and head named in `places`: an overview of all, and the first large."""
    rows, columns = len(target), len(source)
    if weights.shape != (len(places), rows, columns):
        raise DataError(f"alignment weights must be (target, source), here {(rows, columns)}: got {weights.shape[1:]}")
    title = title or "Alignment"
    if not weights.size:
        return figure(title, "", "Nothing to align.")
    source, target = [visible(token) for token in source], [visible(token) for token in target]
    halves = np.where(np.isfinite(weights), np.clip(weights, -6e4, 6e4), np.nan).astype("<f2")
    first = halves[0].astype(np.float64)
    known = np.nan_to_num(first).clip(0)
    peak = float(known.max()) or 1.0
    drawing, data = _drawn(known / peak, source, target, title)
    data |= {"source": source, "target": target, "maps": places, "shades": _SHADES}
    data["weights"] = base64.b64encode(halves.tobytes()).decode()
    choice = '<div class="choice"></div>\n' if len(places) > 1 else ""
    shown = choice + plot("map", title, drawing, data) + _spoken(first, source, target, title)
    return figure(title, shown, f'<span>0<span class="ramp"></span><span class="peak">{peak:.2g}</span></span>')


def cell_side(rows: int, columns: int) -> int:
    """Say how large the cells of a map are."""
    return max(_CELLS[0], min(_CELLS[1], _ROOM // max(rows, columns, 1)))


def _drawn(
    shares: np.ndarray, source: Sequence[str], target: Sequence[str], title: str
) -> tuple[str, dict[str, object]]:
    """Draw one map; return it with where its cells are."""
    rows, columns = shares.shape
    cell = cell_side(rows, columns)
    left = round(max(map(_room, target))) + 10
    top, right, heads = _heads(source, left, cell)
    height = top + rows * cell + 4
    sides = "".join(
        words(left - 8, top + cell * (row + 0.5), clip(token), 'data-label="" text-anchor="end"')
        for row, token in enumerate(target)
    )
    drawing = _tiles(shares, left, top, cell)
    for width, tall, kind in ((columns * cell, cell, "band"), (cell, rows * cell, "band"), (cell, cell, "spot")):
        drawing += f'<rect data-mark="" class="{kind}" width="{width}" height="{tall}" visibility="hidden"/>'
    drawing += _stuck("y", right, top, heads) + _stuck("x", left, height, sides) + _stuck("xy", left, top, "")
    told = f"{rows} rows, {target[0]} to {target[-1]}, by {columns} columns, {source[0]} to {source[-1]}"
    made = svg(right, height, title, told, drawing, "small" if cell < 16 else "")
    return made, {"width": right, "left": left, "top": top, "cell": cell}


def _room(token: str) -> float:
    """Say how wide a word of a side may get: bold, when the pointer is on its row or column."""
    return 1.12 * extent(clip(token))


def _stuck(way: str, width: int, height: int, inner: str) -> str:
    """Group words that stay in sight when the map scrolls under them, on the page's own ground."""
    return f'<g data-stick="{way}"><rect class="shade" width="{width}" height="{height}"/>{inner}</g>\n'


def _heads(source: Sequence[str], left: int, cell: int) -> tuple[int, int, str]:
    """Set the source tokens along the top, turned where they are wider than a cell; return (top, right, drawing)."""
    widths = [_room(token) for token in source]
    turn = 0 if max(widths) <= cell - 4 else 45 if cell >= 22 else 90
    rise, run = math.sin(math.radians(turn)), math.cos(math.radians(turn))
    top, right, drawing = round(max(widths) * rise) + 22, left + len(source) * cell + 4.0, ""
    for column, token in enumerate(source):
        x = left + (column + 0.5) * cell
        right = max(right, x + widths[column] * run + 4)
        place = f'transform="translate({x:g} {top - 9}) rotate({-turn})"' + ("" if turn else ' text-anchor="middle"')
        drawing += words(0, 0, clip(token), f'data-label="" {place}')
    return top, math.ceil(right), drawing


def _tiles(shares: np.ndarray, left: int, top: int, cell: int) -> str:
    """Draw the cells that have weight on a pale ground, one path a shade, so that a large map stays a small file."""
    rows, columns = shares.shape
    shades = np.floor(shares * _SHADES + 0.5).astype(int)  # as the page's script rounds
    drawing = f'<rect class="ground" x="{left}" y="{top}" width="{columns * cell}" height="{rows * cell}"/>'
    drawing += '<g data-tiles="">'
    for shade in np.unique(shades[shades > 0]).tolist():
        places, side = np.argwhere(shades == shade).tolist(), cell - 1
        path = "".join(f"M{left + column * cell} {top + row * cell}h{side}v{side}h-{side}z" for row, column in places)
        drawing += f'<path class="heat" fill-opacity="{shade / _SHADES:g}" d="{path}"/>'
    return drawing + "</g>\n"


def _spoken(weights: np.ndarray, source: Sequence[str], target: Sequence[str], title: str) -> str:
    """Give a screen reader the map as a table; where that is long, each target token with its strongest source."""
    if weights.size <= _SMALL:
        body = "<tr><td></td>" + "".join(f'<th scope="col">{escaped(token)}</th>' for token in source) + "</tr>"
        for token, row in zip(target, weights.tolist(), strict=True):
            cells = "".join(f'<td class="weight">{_weight(weight)}</td>' for weight in row)
            body += f'<tr><th scope="row">{escaped(token)}</th>{cells}</tr>'
        return f'<div class="hidden"><table><caption>{escaped(title)}</caption>{body}</table></div>\n'
    items = ""
    for token, row in zip(target, np.nan_to_num(weights, nan=-np.inf), strict=True):
        best = int(row.argmax())
        items += f"<li>{escaped(f'{token} ← {source[best]} {_weight(row[best])}')}</li>"
    return f'<div class="hidden"><ul>{items}</ul></div>\n'


def _weight(weight: float) -> str:
    return f"{weight:.3f}" if math.isfinite(weight) else "–"
