"""Output of `weft look`: attention, gradients, positions or neighbours as HTML, PNG or JSON, by the file's suffix."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from weft.analysis.attention import Attention, legend
from weft.analysis.contextual_neighbours import ContextualNeighbours
from weft.analysis.gradient_flow import GradientNorms
from weft.analysis.positions import Positions
from weft.analysis.render.charts import line_chart
from weft.analysis.render.page import details, heading, page, paragraph, reply, table
from weft.analysis.render.png import Tell, check_plots, draw_lines, draw_maps, draw_matrices
from weft.analysis.render.svg import visible
from weft.errors import ConfigError

ENDINGS = (".html", ".png", ".json")
_HEADING = 90  # characters
_X, _Y = "steps back", "norm of the gradient"


@dataclass(frozen=True)
class Reached:
    """Gradient norms of one text, by one model or several."""

    text: str
    reaches: Sequence[GradientNorms]

    def charts(self) -> dict[str, dict[str, list[tuple[float, float]]]]:
        """Return the points of each model, grouped by side."""
        sides = dict.fromkeys(norms.side for norms in self.reaches)
        return {side: {norms.model: norms.points for norms in self.reaches if norms.side == side} for side in sides}

    def plain(self) -> dict[str, Any]:
        """Return the data as JSON-ready values."""
        return {"text": self.text, "gradients": [norms.plain() for norms in self.reaches]}


def check_out(out: Path) -> None:
    """Refuse a file that could not be written, before any work is done."""
    if out.suffix not in ENDINGS:
        raise ConfigError(f"--out: must end in {', '.join(ENDINGS)}, but is {str(out)!r} instead")
    if out.is_dir():
        raise ConfigError(f"--out: must be a file, but {str(out)!r} is a folder")
    _check_writable(out)
    if out.suffix == ".png":
        check_plots()


def _check_writable(out: Path) -> None:
    """Missing folders are created on saving: the nearest existing parent must be a folder and writable."""
    existing = next(path for path in (out, *out.absolute().parents) if os.path.lexists(path))
    if existing != out and not existing.is_dir():
        raise ConfigError(f"--out: {out} cannot be written: {existing} is no folder")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"--out: {out} cannot be written: {existing} is not open for writing")


def render_attention(attentions: Sequence[Attention], ending: str, title: str, about: str, tell: Tell) -> bytes:
    """Return attention maps as `.html`, `.png` or `.json`."""
    if ending == ".png":
        return draw_maps(attentions, tell)
    if ending == ".json":
        return _to_json([attention.plain() for attention in attentions])
    sections = [(*_heading(item.text), reply(item.said), item.html()) for item in attentions]
    return page(title, [legend(attentions), *(part for section in sections for part in section)], about).encode()


def render_gradients(results: Sequence[Reached], ending: str, title: str, about: str, tell: Tell) -> bytes:
    """Return gradient norms as `.html`, `.png` or `.json`."""
    if ending == ".json":
        return _to_json([result.plain() for result in results])
    if ending == ".png":
        pairs = ((result.text, side, lines) for result in results for side, lines in result.charts().items())
        charts = {f"{_shorten(text)} {side}".strip(): lines for text, side, lines in pairs}
        return draw_lines(charts, _X, _Y, tell)
    intro = paragraph(
        "How strongly the loss at the last step depends on what each earlier step read: the norm of its gradient "
        "there. Where a line falls, the gradient vanishes; where it rises, it explodes."
    )
    return page(title, [intro, *(part for result in results for part in _gradient_parts(result))], about).encode()


def render_positions(encodings: Sequence[Positions], ending: str, title: str, about: str, tell: Tell) -> bytes:
    """Return position encodings and their dot products as `.html`, `.png` or `.json`."""
    if ending == ".json":
        return _to_json([encoding.plain() for encoding in encodings])
    matrices = [matrix for encoding in encodings for matrix in encoding.plots()]
    if ending == ".png":
        return draw_matrices(matrices, tell)
    intro = paragraph(
        "A token's place is a vector that is added to its embedding. Each row is a place, counted from 0, each column "
        "one of its numbers. Below, the dot product of every two of them says how near two places are to the model."
    )
    return page(title, [intro, *(matrix.html() for matrix in matrices)], about).encode()


def render_neighbours(neighbours: ContextualNeighbours, ending: str, title: str, about: str) -> bytes:
    """Return the nearest neighbours of a word in context as `.html` or `.json`."""
    return _to_json([neighbours.plain()]) if ending == ".json" else page(title, neighbours.html(), about).encode()


def save(out: Path, content: bytes) -> None:
    """Write the file; create its folder if missing."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}") from None


def _to_json(values: Sequence[object]) -> bytes:
    """Encode a single value as itself, several as a list."""
    return (json.dumps(values[0] if len(values) == 1 else values, ensure_ascii=False) + "\n").encode()


def _heading(text: str) -> list[str]:
    """Return a text as heading; a long one is shortened and repeated in full below."""
    return [heading(_shorten(text))] + ([paragraph(text)] if len(text) > _HEADING else [])


def _shorten(text: str) -> str:
    return shorten(text, _HEADING, placeholder=" …") if len(text) > _HEADING else text


def _gradient_parts(result: Reached) -> list[str]:
    """Return the HTML fragments of one text: a chart and a table per side."""
    parts = _heading(result.text) if result.text else []
    for side, lines in result.charts().items():
        models = [norms for norms in result.reaches if norms.side == side]
        parts.append(line_chart(lines, _X, _Y, side, log_y=True, stops=_step_names(models)))
        parts += [_norms_table(models)] if any(norms.tokens for norms in models) else []
    return parts


def _step_names(models: Sequence[GradientNorms]) -> dict[float, str]:
    """Return the token at each step, if all models read the same tokens."""
    tokens = {tuple(norms.tokens) for norms in models}
    if len(tokens) > 1 or tokens == {()}:
        return {}
    return {x: visible(token) for (x, _), token in zip(models[0].points, models[0].tokens, strict=True)}


def _norms_table(models: Sequence[GradientNorms]) -> str:
    def rows(result: GradientNorms) -> list[list[object]]:
        steps = enumerate(zip(result.tokens, result.norms, strict=True), 1)
        return [[step, visible(token), f"{norm:.3g}"] for step, (token, norm) in steps]

    return details("In numbers", [table(["step", "token", result.model], rows(result)) for result in models])
