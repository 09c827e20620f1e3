"""Heat maps and charts as PNG, by matplotlib: for papers and slides.

Lengths are in inches. Characters that no installed font has are drawn as boxes and reported through `tell`.
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
from weft.analysis.render.matrix_plots import MatrixPlot
from weft.analysis.render.svg import shorten_label, visible
from weft.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEAT = ("#f1f4f8", "#0b4a86")  # zero, and a map's largest weight
_SIGNED = ("#d9620b", *_HEAT)
_HUES = ("#1b74c5", "#d9620b", "#0a5f50", "#d85f9f", "#4b2a7b")
_STYLES = ("-", "--", ":", "-.")
_DPI = 160
_WIDTH = 9.0  # of a row of small maps, and of a large map's longer side, if its cells allow it
_CELLS = (0.15, 0.4)  # smallest and largest side of a cell
_THUMBNAILS = (0.5, 1.6)  # smallest and largest width
_GAP = 1.7  # above a large map, for its title and rotated labels
_SPACING = 0.08  # between small maps
_TITLE = 90  # characters of a text in a title
# Emoji fonts, the last-resort font of boxes, and fonts with symbols in place of letters.
_EXCLUDED_FONTS = re.compile("color|resort|^cm|^STIX", re.IGNORECASE)

Tell = Callable[[str], object]  # prints a notice


def check_plots() -> None:
    """Raise ConfigError if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("a .png needs matplotlib, which is not installed: pip install 'weft[plot]'") from None


def draw_maps(attentions: Sequence[Attention], tell: Tell) -> bytes:
    """Return the maps of all places, one below the other; a single map has labels, several are small."""
    check_plots()
    tokens = (token for item in attentions for view in item.views for token in (*view.rows, *view.columns))
    fonts = Fonts.for_texts([*tokens, *(text for item in attentions for text in (item.text, item.answer_line))], tell)
    blocks = [block for item in attentions for block in _blocks(item, fonts)]
    sheet = _Sheet(sum(_gap(title, views) + _block_height(views) for title, views in blocks))
    for title, views in blocks:
        sheet.top -= _gap(title, views)
        if _is_single(views):
            _draw_large(sheet, fonts, views[0], title)
        else:
            _draw_small(sheet, fonts, views, title)
        sheet.top -= _block_height(views)
    return sheet.png()


def draw_lines(charts: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], x: str, y: str, tell: Tell) -> bytes:
    """Return line charts with a logarithmic y axis, keyed by title, one below the other."""
    check_plots()
    fonts = Fonts.for_texts([*charts, *(name for series in charts.values() for name in series)], tell)
    height = 3.6
    sheet = _Sheet((height + 1) * len(charts))
    for title, series in charts.items():
        axes = sheet.axes(0, height, 7.0, height)
        for index, (name, points) in enumerate(series.items()):
            line = {"color": _HUES[index % len(_HUES)], "linestyle": _STYLES[index // len(_HUES) % len(_STYLES)]}
            axes.plot(*zip(*points, strict=True) if points else ([], []), label=fonts.displayable(name), **line)
        axes.set_yscale("log")
        axes.set_title(fonts.title(title), loc="left", **fonts.style(10))
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.spines[["top", "right"]].set_visible(False)
        legend = axes.legend(
            loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, prop={"family": fonts.families}
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
        sheet.top -= height + 1
    return sheet.png()


def draw_matrices(matrices: Sequence[MatrixPlot], tell: Tell) -> bytes:
    """Return heat maps of matrices, one below the other."""
    check_plots()
    from matplotlib.colors import LinearSegmentedColormap

    fonts = Fonts.for_texts([text for matrix in matrices for text in (matrix.title, matrix.down, matrix.across)], tell)
    width = 7.0
    sheet = _Sheet(sum(matrix.aspect * width + 1 for matrix in matrices))
    for matrix in matrices:
        height = matrix.aspect * width
        axes = sheet.axes(0, height, width, height)
        (low, high), hues = matrix.limits, _SIGNED if matrix.limits[0] < 0 else _HEAT
        colormap = LinearSegmentedColormap.from_list("grid", hues)
        image = axes.imshow(matrix.values, colormap, aspect="auto", vmin=low, vmax=high)
        axes.tick_params(labelsize=8)
        axes.set_title(fonts.title(matrix.title), loc="left", **fonts.style(10))
        axes.set_xlabel(fonts.displayable(matrix.across), **fonts.style(9))
        axes.set_ylabel(fonts.displayable(matrix.down), **fonts.style(9))
        _draw_colorbar(sheet, image, width, height)
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

        self.figure, self.top = Figure(figsize=(_WIDTH, self.height), dpi=_DPI, facecolor="white"), self.height

    def axes(self, left: float, down: float, width: float, height: float) -> Any:
        """Add axes whose bottom is `down` below the current top."""
        box = (left / _WIDTH, (self.top - down) / self.height, width / _WIDTH, height / self.height)
        return self.figure.add_axes(box)

    def text(self, left: float, down: float, text: str, style: Mapping[str, Any]) -> None:
        """Add a text whose baseline, or by its style another part, is `down` below the current top."""
        self.figure.text(left / _WIDTH, (self.top - down) / self.height, text, **style)

    def png(self) -> bytes:
        """Return the image, cropped to its content."""
        file = io.BytesIO()
        self.figure.savefig(file, format="png", bbox_inches="tight", pad_inches=0.25)
        return file.getvalue()


@dataclass(frozen=True)
class Fonts:
    """Font families for a set of texts, and the characters that none of them has."""

    families: Sequence[str]
    missing: frozenset[str]

    @classmethod
    def for_texts(cls, texts: Iterable[str], tell: Tell) -> "Fonts":
        """Find fonts for all characters; report those without one."""
        characters = {char for text in texts for char in visible(text)}
        families, missing = _fonts_for(characters)
        boxes = sorted(char for char in missing if not _is_invisible(char))
        if boxes:
            tell(
                f"no installed font has {' '.join(boxes[:10])}{' …' if len(boxes) > 10 else ''}: they are drawn as "
                "boxes; install one (on Debian: fonts-noto-cjk, fonts-noto-core, fonts-symbola), or look at the .html"
            )
        return cls(families, frozenset(missing))

    def displayable(self, text: str) -> str:
        """Return a token or a name with boxes for the characters that no font has."""
        replacements = {char: "" if _is_invisible(char) else "□" for char in self.missing}
        return "".join(replacements.get(char, char) for char in visible(text))

    def title(self, text: str) -> str:
        """Return a text for a title, shortened, with plain spaces."""
        return shorten(" ".join(map(self.displayable, text.split())), _TITLE, placeholder=" …")

    def style(self, size: float) -> dict[str, Any]:
        """Return the text properties for matplotlib; a dollar sign does not start a formula."""
        return {"fontsize": size, "fontfamily": list(self.families), "parse_math": False}


def _is_invisible(char: str) -> bool:
    return unicodedata.category(char) in ("Mn", "Me", "Cf")


def _fonts_for(characters: set[str]) -> tuple[list[str], set[str]]:
    """Return matplotlib's own font, others for the characters it lacks, and the characters that are still missing."""
    from matplotlib.font_manager import fontManager

    first = "DejaVu Sans"
    upright = (font for font in fontManager.ttflist if (font.style, font.weight) == ("normal", 400))
    families, missing = [first], characters - _characters(first)
    for name in sorted({font.name for font in upright if not _EXCLUDED_FONTS.search(font.name)}):
        if missing and missing & _characters(name):
            missing -= _characters(name)
            families.append(name)
    return families, missing


@cache
def _characters(family: str) -> frozenset[str]:
    from matplotlib.font_manager import findfont, get_font

    try:
        return frozenset(map(chr, get_font(findfont(family)).get_charmap()))
    except (OSError, RuntimeError):
        return frozenset()


def _blocks(attention: Attention, fonts: Fonts) -> Iterable[tuple[str, Sequence[View]]]:
    """Yield each place with its title; the title of the first begins with the text and the answer."""
    header = f"{fonts.title(attention.text)}\n→ {fonts.title(attention.answer_line)}\n"
    for index, views in enumerate(attention.places()):
        yield (header if not index else "") + (views[0].name if _is_single(views) else views[0].place), views


def _is_single(views: Sequence[View]) -> bool:
    return sum(len(view.heads) for view in views) == 1


def _gap(title: str, views: Sequence[View]) -> float:
    return _GAP if _is_single(views) else 0.6 + 0.2 * title.count("\n")


def _block_height(views: Sequence[View]) -> float:
    layers, _, height = _grid(views)
    if _is_single(views):
        return _cell(views[0]) * len(views[0].rows)
    return len(layers) * (height + _SPACING)


def _cell(view: View) -> float:
    return float(np.clip(_WIDTH / max(len(view.rows), len(view.columns)), *_CELLS))


def _grid(views: Sequence[View]) -> tuple[list[int], list[int], float]:
    """Return the layers, the heads, and the height of a small map."""
    heads = sorted({head for view in views for head in view.heads})
    width = float(np.clip(_WIDTH / len(heads) - _SPACING, *_THUMBNAILS))
    shape = len(views[0].rows) / len(views[0].columns)
    return sorted({view.layer for view in views}), heads, width * float(np.clip(shape, 0.25, 2))


def _draw_heatmap(axes: Any, weights: np.ndarray, lines: bool = False) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    colormap = LinearSegmentedColormap.from_list("heat", _HEAT)
    positive = np.where(np.isfinite(weights), weights, 0.0).clip(0)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    scale = {"cmap": colormap, "vmin": 0, "vmax": float(positive.max()) or 1.0}
    if not lines:
        return axes.imshow(positive, aspect="auto", **scale)
    axes.invert_yaxis()
    return axes.pcolormesh(positive, edgecolors="white", linewidth=0.5, **scale)


def _draw_large(sheet: _Sheet, fonts: Fonts, view: View, title: str) -> None:
    cell = _cell(view)
    width, height = cell * len(view.columns), cell * len(view.rows)
    axes = sheet.axes(0, height, width, height)
    image = _draw_heatmap(axes, view.weights[0], lines=True)
    columns, rows = ([fonts.displayable(shorten_label(token)) for token in side] for side in (view.columns, view.rows))
    style = fonts.style(float(np.clip(cell * 32, 6.5, 10)))
    angle = 0 if max(map(len, columns)) * 0.09 < cell else 90
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=angle, **style)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows, **style)
    axes.tick_params(length=0, top=False, labeltop=True, labelbottom=False)
    axes.set_title(title, loc="left", pad=8, **fonts.style(10))
    _draw_colorbar(sheet, image, width, height)


def _draw_colorbar(sheet: _Sheet, image: Any, width: float, height: float) -> None:
    """Draw the colour scale to the right of an image."""
    bar = sheet.figure.colorbar(image, cax=sheet.axes(width + 0.15, min(height, 1.5), 0.1, min(height, 1.5)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8)


def _draw_small(sheet: _Sheet, fonts: Fonts, views: Sequence[View], title: str) -> None:
    layers, heads, height = _grid(views)
    width = float(np.clip(_WIDTH / len(heads) - _SPACING, *_THUMBNAILS))
    across, down = width + _SPACING, height + _SPACING
    for view in views:
        row = layers.index(view.layer)
        for head, weights in zip(view.heads, view.weights, strict=True):
            _draw_heatmap(sheet.axes(heads.index(head) * across, row * down + height, width, height), weights)
    sheet.text(0, -0.25, title, {"va": "bottom", **fonts.style(10)})
    for column, head in enumerate(heads if len(heads) > 1 else ()):
        sheet.text(column * across + width / 2, -0.05, f"head {head}", {"ha": "center", "fontsize": 7})
    for row, layer in enumerate(layers):
        style = {"ha": "right", "va": "center", "rotation": 90, "fontsize": 7}
        sheet.text(-0.05, row * down + height / 2, f"layer {layer}", style)
