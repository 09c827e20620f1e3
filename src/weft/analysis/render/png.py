"""The same maps and charts as PNG, by matplotlib: for papers and slides.

Lengths are in inches. Characters that no installed font has become boxes, and `tell` hears of them.
"""

import io
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.analysis.attention import Attention, View
from weft.analysis.render.matrix_plots import Grid
from weft.analysis.render.svg import clip, visible
from weft.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEAT = ("#f1f4f8", "#0b4a86")  # nothing, and a map's largest weight
_SIGNED = ("#d9620b", *_HEAT)
_HUES = ("#1b74c5", "#d9620b", "#0a5f50", "#d85f9f", "#4b2a7b")
_STYLES = ("-", "--", ":", "-.")
_DPI = 160
_WIDE = 9.0  # of a row of small maps, and of a large map's longer side, where its cells allow it
_CELLS = (0.15, 0.4)  # the smallest and the largest side of a cell
_THUMBS = (0.5, 1.6)
_GAP = 1.7  # above a large map, for its title and turned words
_BETWEEN = 0.08  # small maps
_TITLE = 90  # characters of a text in a title
_ODD = re.compile("color|resort|^cm|^STIX", re.IGNORECASE)  # pictures, boxes for all, and symbols at letters' places

Tell = Callable[[str], object]


def check_plots() -> None:
    """Refuse to go on where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("a .png needs matplotlib, which is not installed: pip install 'weft[plot]'") from None


def draw_maps(looks: Sequence[Attention], tell: Tell) -> bytes:
    """Draw every place of every look, one below the other; one map has words on its sides, several are small."""
    check_plots()
    tokens = (token for look in looks for view in look.views for token in (*view.rows, *view.columns))
    pen = Pen.for_texts([*tokens, *(text for look in looks for text in (look.text, look.said))], tell)
    blocks = [block for look in looks for block in _blocks(look, pen)]
    sheet = _Sheet(sum(_gap(title, views) + _block_height(views) for title, views in blocks))
    for title, views in blocks:
        sheet.top -= _gap(title, views)
        if _alone(views):
            _draw_large(sheet, pen, views[0], title)
        else:
            _draw_small(sheet, pen, views, title)
        sheet.top -= _block_height(views)
    return sheet.png()


def draw_lines(charts: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], x: str, y: str, tell: Tell) -> bytes:
    """Draw logarithmic line charts, by their titles, one below the other."""
    check_plots()
    pen = Pen.for_texts([*charts, *(name for series in charts.values() for name in series)], tell)
    height = 3.6
    sheet = _Sheet((height + 1) * len(charts))
    for title, series in charts.items():
        axes = sheet.axes(0, height, 7.0, height)
        for index, (name, points) in enumerate(series.items()):
            look = {"color": _HUES[index % len(_HUES)], "linestyle": _STYLES[index // len(_HUES) % len(_STYLES)]}
            axes.plot(*zip(*points, strict=True) if points else ([], []), label=pen.shown(name), **look)
        axes.set_yscale("log")
        axes.set_title(pen.written(title), loc="left", **pen.style(10))
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.spines[["top", "right"]].set_visible(False)
        legend = axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, prop={"family": pen.fonts})
        for text in legend.get_texts():
            text.set_parse_math(False)
        sheet.top -= height + 1
    return sheet.png()


def draw_grids(grids: Sequence[Grid], tell: Tell) -> bytes:
    """Draw heat maps of numbers, one below the other."""
    check_plots()
    from matplotlib.colors import LinearSegmentedColormap

    pen = Pen.for_texts([text for grid in grids for text in (grid.title, grid.down, grid.across)], tell)
    wide = 7.0
    sheet = _Sheet(sum(grid.tall * wide + 1 for grid in grids))
    for grid in grids:
        height = grid.tall * wide
        axes = sheet.axes(0, height, wide, height)
        (low, high), hues = grid.ends, _SIGNED if grid.ends[0] < 0 else _HEAT
        colours = LinearSegmentedColormap.from_list("grid", hues)
        shades = axes.imshow(grid.values, colours, aspect="auto", vmin=low, vmax=high)
        axes.tick_params(labelsize=8)
        axes.set_title(pen.written(grid.title), loc="left", **pen.style(10))
        axes.set_xlabel(pen.shown(grid.across), **pen.style(9))
        axes.set_ylabel(pen.shown(grid.down), **pen.style(9))
        _draw_bar(sheet, shades, wide, height)
        sheet.top -= height + 1
    return sheet.png()


@dataclass
class _Sheet:
    """A figure on which axes are placed in inches, from the top down."""

    height: float
    figure: "Figure" = field(init=False)
    top: float = field(init=False)

    def __post_init__(self) -> None:
        from matplotlib.figure import Figure

        self.figure, self.top = Figure(figsize=(_WIDE, self.height), dpi=_DPI, facecolor="white"), self.height

    def axes(self, left: float, down: float, width: float, height: float) -> Any:
        """Place axes whose foot is `down` below the current top."""
        place = (left / _WIDE, (self.top - down) / self.height, width / _WIDE, height / self.height)
        return self.figure.add_axes(place)

    def words(self, left: float, down: float, text: str, style: Mapping[str, Any]) -> None:
        """Write a text whose foot, or by its style another part, is `down` below the current top."""
        self.figure.text(left / _WIDE, (self.top - down) / self.height, text, **style)

    def png(self) -> bytes:
        """Return the picture, cut to what is drawn."""
        file = io.BytesIO()
        self.figure.savefig(file, format="png", bbox_inches="tight", pad_inches=0.25)
        return file.getvalue()


@dataclass(frozen=True)
class Pen:
    """The fonts that have what is to be written, and the characters that none has."""

    fonts: Sequence[str]
    missing: frozenset[str]

    @classmethod
    def for_texts(cls, texts: Iterable[str], tell: Tell) -> "Pen":
        """Find fonts for all characters; say which have none."""
        wanted = {char for text in texts for char in visible(text)}
        fonts, missing = _fonts_for(wanted)
        boxes = sorted(char for char in missing if not _unseen(char))
        if boxes:
            tell(
                f"no installed font has {' '.join(boxes[:10])}{' …' if len(boxes) > 10 else ''}: they are drawn as "
                "boxes; install one (on Debian: fonts-noto-cjk, fonts-noto-core, fonts-symbola), or look at the .html"
            )
        return cls(fonts, frozenset(missing))

    def shown(self, text: str) -> str:
        """Write a token or a name with what the fonts have."""
        lacking = {char: "" if _unseen(char) else "□" for char in self.missing}
        return "".join(lacking.get(char, char) for char in visible(text))

    def written(self, text: str) -> str:
        """Write a text in a title, with plain spaces."""
        return shorten(" ".join(map(self.shown, text.split())), _TITLE, placeholder=" …")

    def style(self, size: float) -> dict[str, Any]:
        """How text is set: a dollar sign in it is a dollar sign."""
        return {"fontsize": size, "fontfamily": list(self.fonts), "parse_math": False}


def _unseen(char: str) -> bool:
    return unicodedata.category(char) in ("Mn", "Me", "Cf")


def _fonts_for(wanted: set[str]) -> tuple[list[str], set[str]]:
    """Take the font that comes with matplotlib, then any other that has what is still missing."""
    from matplotlib.font_manager import fontManager

    first = "DejaVu Sans"
    upright = (font for font in fontManager.ttflist if (font.style, font.weight) == ("normal", 400))
    chosen, missing = [first], wanted - _characters(first)
    for name in sorted({font.name for font in upright if not _ODD.search(font.name)}):
        if missing and missing & _characters(name):
            missing -= _characters(name)
            chosen.append(name)
    return chosen, missing


@cache
def _characters(family: str) -> frozenset[str]:
    from matplotlib.font_manager import findfont, get_font

    try:
        return frozenset(map(chr, get_font(findfont(family)).get_charmap()))
    except (OSError, RuntimeError):
        return frozenset()


def _blocks(look: Attention, pen: Pen) -> Iterable[tuple[str, Sequence[View]]]:
    """Give each place of a look its title; the text and the answer stand above the first."""
    said = f"{pen.written(look.text)}\n→ {pen.written(look.said)}\n"
    for number, views in enumerate(look.places()):
        yield (said if not number else "") + (views[0].name if _alone(views) else views[0].place), views


def _alone(views: Sequence[View]) -> bool:
    return sum(len(view.heads) for view in views) == 1


def _gap(title: str, views: Sequence[View]) -> float:
    return _GAP if _alone(views) else 0.6 + 0.2 * title.count("\n")


def _block_height(views: Sequence[View]) -> float:
    layers, _, tall = _grid(views)
    if _alone(views):
        return _cell(views[0]) * len(views[0].rows)
    return len(layers) * (tall + _BETWEEN)


def _cell(view: View) -> float:
    return float(np.clip(_WIDE / max(len(view.rows), len(view.columns)), *_CELLS))


def _grid(views: Sequence[View]) -> tuple[list[int], list[int], float]:
    """Return the layers, the heads, and the height of a small map."""
    heads = sorted({head for view in views for head in view.heads})
    width = float(np.clip(_WIDE / len(heads) - _BETWEEN, *_THUMBS))
    shape = len(views[0].rows) / len(views[0].columns)
    return sorted({view.layer for view in views}), heads, width * float(np.clip(shape, 0.25, 2))


def _shade(axes: Any, weights: np.ndarray, lines: bool = False) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("heat", _HEAT)
    known = np.where(np.isfinite(weights), weights, 0.0).clip(0)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    shades = {"cmap": colours, "vmin": 0, "vmax": float(known.max()) or 1.0}
    if not lines:
        return axes.imshow(known, aspect="auto", **shades)
    axes.invert_yaxis()
    return axes.pcolormesh(known, edgecolors="white", linewidth=0.5, **shades)


def _draw_large(sheet: _Sheet, pen: Pen, view: View, title: str) -> None:
    cell = _cell(view)
    width, height = cell * len(view.columns), cell * len(view.rows)
    axes = sheet.axes(0, height, width, height)
    shades = _shade(axes, view.weights[0], lines=True)
    columns, rows = ([pen.shown(clip(token)) for token in side] for side in (view.columns, view.rows))
    style = pen.style(float(np.clip(cell * 32, 6.5, 10)))
    turn = 0 if max(map(len, columns)) * 0.09 < cell else 90
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=turn, **style)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows, **style)
    axes.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
    axes.set_title(title, loc="left", pad=8, **pen.style(10))
    _draw_bar(sheet, shades, width, height)


def _draw_bar(sheet: _Sheet, shades: Any, width: float, height: float) -> None:
    """Show what the shades mean, to the right of what they are in."""
    bar = sheet.figure.colorbar(shades, cax=sheet.axes(width + 0.15, min(height, 1.5), 0.1, min(height, 1.5)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8)


def _draw_small(sheet: _Sheet, pen: Pen, views: Sequence[View], title: str) -> None:
    layers, heads, tall = _grid(views)
    wide = float(np.clip(_WIDE / len(heads) - _BETWEEN, *_THUMBS))
    across, down = wide + _BETWEEN, tall + _BETWEEN
    for view in views:
        row = layers.index(view.layer)
        for head, weights in zip(view.heads, view.weights, strict=True):
            _shade(sheet.axes(heads.index(head) * across, row * down + tall, wide, tall), weights)
    sheet.words(0, -0.25, title, {"va": "bottom", **pen.style(10)})
    for column, head in enumerate(heads if len(heads) > 1 else ()):
        sheet.words(column * across + wide / 2, -0.05, f"head {head}", {"ha": "center", "fontsize": 7})
    for row, layer in enumerate(layers):
        turned = {"ha": "right", "va": "center", "rotation": 90, "fontsize": 7}
        sheet.words(-0.05, row * down + tall / 2, f"layer {layer}", turned)
