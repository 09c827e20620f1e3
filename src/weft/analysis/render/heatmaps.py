"""Attention weights as heat maps (Bahdanau et al. 2015, figure 3), one per layer and head.

The first map is drawn here; the page's script draws the others on demand, from half-precision weights: twelve layers of
twelve heads over sixty tokens are a megabyte and a half.
"""

import base64
import math
from collections.abc import Sequence

import numpy as np

from weft.analysis.render.page import escaped
from weft.analysis.render.svg import figure, plot, shorten_label, svg, text_element, text_width, visible
from weft.errors import DataError

_SHADES = 50
_CELLS = (13, 42, 112)  # the side of a cell: the smallest, the largest of a tall map, the largest
_FEW_ROWS_HEIGHT = 340  # of a map with large cells, so that it is seen whole
_LARGE = 50  # side of a cell from which labels are in larger print
_LARGE_PRINT = 4 / 3  # of the usual size: 16 px, as .large in page.css has it
_MAX_SIDE = 760  # of a map, within these limits: with its labels, the page's width
_SMALL = 200  # cells: up to so many are given to a screen reader one by one


def alignment(weights: np.ndarray, source: Sequence[str], target: Sequence[str], title: str = "") -> str:
    """Return attention weights (T, S) as a heat map: source tokens along the top, target tokens down the side."""
    return alignments(np.asarray(weights)[None], [(0, 0)], source, target, title)


def alignments(
    weights: np.ndarray, places: Sequence[tuple[int, int]], source: Sequence[str], target: Sequence[str], title: str
) -> str:
    """Return weights (M, T, S) as one map per (layer, head) in `places`: an overview of all, and the first large."""
    rows, columns = len(target), len(source)
    if weights.shape != (len(places), rows, columns):
        raise DataError(f"alignment weights must be (target, source), here {(rows, columns)}: got {weights.shape[1:]}")
    title = title or "Alignment"
    if not weights.size:
        return figure(title, "", "Nothing to align.")
    source, target = [visible(token) for token in source], [visible(token) for token in target]
    halves = np.where(np.isfinite(weights), np.clip(weights, -6e4, 6e4), np.nan).astype("<f2")
    first = halves[0].astype(np.float64)
    positive = np.nan_to_num(first).clip(0)
    peak = float(positive.max()) or 1.0
    drawing, data = _draw_map(positive / peak, source, target, title)
    data |= {"source": source, "target": target, "maps": places, "shades": _SHADES}
    data["weights"] = base64.b64encode(halves.tobytes()).decode()
    selector = '<div class="choice"></div>\n' if len(places) > 1 else ""
    content = selector + plot("map", title, drawing, data) + _screen_reader_table(first, source, target, title)
    return figure(title, content, f'<span>0<span class="ramp"></span><span class="peak">{peak:.2g}</span></span>')


def cell_side(rows: int, columns: int) -> int:
    """Return the side of a cell in pixels."""
    smallest, usual, largest = _CELLS
    side = max(smallest, min(largest, _MAX_SIDE // max(rows, columns, 1)))
    return side if side <= usual else max(usual, min(side, _FEW_ROWS_HEIGHT // rows))


def _draw_map(
    shares: np.ndarray, source: Sequence[str], target: Sequence[str], title: str
) -> tuple[str, dict[str, object]]:
    """Return one map as SVG, and the position and size of its cells."""
    rows, columns = shares.shape
    cell = cell_side(rows, columns)
    left = round(max(_label_width(token, cell) for token in target)) + 10
    top, right, column_labels = _column_labels(source, left, cell)
    height = top + rows * cell + 4
    row_labels = "".join(
        text_element(left - 8, top + cell * (row + 0.5), shorten_label(token), 'data-label="" text-anchor="end"')
        for row, token in enumerate(target)
    )
    drawing = _draw_cells(shares, left, top, cell)
    for w, h, kind in ((columns * cell, cell, "band"), (cell, rows * cell, "band"), (cell, cell, "spot")):
        drawing += f'<rect data-mark="" class="{kind}" width="{w}" height="{h}" visibility="hidden"/>'
    drawing += _sticky("y", right, top, column_labels) + _sticky("x", left, height, row_labels)
    drawing += _sticky("xy", left, top, "")
    description = f"{rows} rows, {target[0]} to {target[-1]}, by {columns} columns, {source[0]} to {source[-1]}"
    size = "small" if cell < 16 else "large" if cell >= _LARGE else ""
    image = svg(right, height, title, description, drawing, size)
    return image, {"width": right, "left": left, "top": top, "cell": cell}


def _label_width(token: str, cell: int) -> float:
    """Estimate the width of a label, which is bold when the pointer is on its row or column."""
    return 1.12 * text_width(shorten_label(token)) * (_LARGE_PRINT if cell >= _LARGE else 1)


def _sticky(axis: str, width: int, height: int, labels: str) -> str:
    """Group labels that stay visible when the map scrolls under them, on the page's background."""
    return f'<g data-stick="{axis}"><rect class="shade" width="{width}" height="{height}"/>{labels}</g>\n'


def _column_labels(source: Sequence[str], left: int, cell: int) -> tuple[int, int, str]:
    """Draw the source tokens along the top, rotated if wider than a cell; return (top, right, drawing)."""
    widths = [_label_width(token, cell) for token in source]
    angle = 0 if max(widths) <= cell - 4 else 45 if cell >= 22 else 90
    rise, run = math.sin(math.radians(angle)), math.cos(math.radians(angle))
    gap = 13 if cell >= _LARGE else 9  # between a label's middle and the map
    top, right, drawing = round(max(widths) * rise) + 13 + gap, left + len(source) * cell + 4.0, ""
    for column, token in enumerate(source):
        x = left + (column + 0.5) * cell
        right = max(right, x + widths[column] * run + 4)
        attributes = f'transform="translate({x:g} {top - gap}) rotate({-angle})"' + (
            "" if angle else ' text-anchor="middle"'
        )
        drawing += text_element(0, 0, shorten_label(token), f'data-label="" {attributes}')
    return top, math.ceil(right), drawing


def _draw_cells(shares: np.ndarray, left: int, top: int, cell: int) -> str:
    """Draw the cells with weight on a pale background, one path per shade, so that a large map is a small file."""
    rows, columns = shares.shape
    shades = np.floor(shares * _SHADES + 0.5).astype(int)  # as the page's script rounds
    drawing = f'<rect class="ground" x="{left}" y="{top}" width="{columns * cell}" height="{rows * cell}"/>'
    drawing += '<g data-tiles="">'
    for shade in np.unique(shades[shades > 0]).tolist():
        cells, side = np.argwhere(shades == shade).tolist(), cell - 1
        path = "".join(f"M{left + column * cell} {top + row * cell}h{side}v{side}h-{side}z" for row, column in cells)
        drawing += f'<path class="heat" fill-opacity="{shade / _SHADES:g}" d="{path}"/>'
    return drawing + "</g>\n"


def _screen_reader_table(weights: np.ndarray, source: Sequence[str], target: Sequence[str], title: str) -> str:
    """Return the map as a table for screen readers; if that is long, each target token with its strongest source."""
    if weights.size <= _SMALL:
        body = "<tr><td></td>" + "".join(f'<th scope="col">{escaped(token)}</th>' for token in source) + "</tr>"
        for token, row in zip(target, weights.tolist(), strict=True):
            cells = "".join(f'<td class="weight">{_format_weight(weight)}</td>' for weight in row)
            body += f'<tr><th scope="row">{escaped(token)}</th>{cells}</tr>'
        return f'<div class="hidden"><table><caption>{escaped(title)}</caption>{body}</table></div>\n'
    items = ""
    for token, row in zip(target, np.nan_to_num(weights, nan=-np.inf), strict=True):
        best = int(row.argmax())
        items += f"<li>{escaped(f'{token} ← {source[best]} {_format_weight(row[best])}')}</li>"
    return f'<div class="hidden"><ul>{items}</ul></div>\n'


def _format_weight(weight: float) -> str:
    return f"{weight:.3f}" if math.isfinite(weight) else "–"
