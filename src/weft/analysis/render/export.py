"""Output of `weft look`: attention, gradients, positions or neighbours as HTML, PNG or JSON, by the file's suffix."""

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
from weft.analysis.render.page import answer_html, details, heading, page, paragraph, table
from weft.analysis.render.png import Tell, check_plots, draw_lines, draw_maps, draw_matrices
from weft.analysis.render.svg import symbols_note, visible
from weft.config.json import write_json
from weft.errors import ConfigError

ENDINGS = (".html", ".png", ".json")
_HEADING = 90  # characters
_X, _Y = "steps back", "norm of the gradient"


@dataclass(frozen=True)
class TextGradients:
    """Gradient norms of one text, by one model or several."""

    text: str
    gradients: Sequence[GradientNorms]

    def charts(self) -> dict[str, dict[str, list[tuple[float, float]]]]:
        """Return the points of each model, grouped by side."""
        sides = dict.fromkeys(norms.side for norms in self.gradients)
        return {side: {norms.model: norms.points for norms in self.gradients if norms.side == side} for side in sides}

    def to_dict(self) -> dict[str, Any]:
        """Return the data as JSON-ready values."""
        return {"text": self.text, "gradients": [norms.to_dict() for norms in self.gradients]}


def check_writable(out: Path) -> None:
    """Raise an error if the file could not be written; called before any work is done."""
    if out.suffix not in ENDINGS:
        raise ConfigError(f"--out: must end in {', '.join(ENDINGS)}, but is {str(out)!r} instead")
    if out.is_dir():
        raise ConfigError(f"--out: must be a file, but {str(out)!r} is a folder")
    _check_writable(out)
    if out.suffix == ".png":
        check_plots()


def _check_writable(out: Path) -> None:
    """Raise an error unless the nearest existing parent, in which folders are created, is a writable folder."""
    existing = next(path for path in (out, *out.absolute().parents) if os.path.lexists(path))
    if existing != out and not existing.is_dir():
        raise ConfigError(f"--out: {out} cannot be written: {existing} is not a folder")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"--out: {out} cannot be written: {existing} is not writable")


def render_attention(attentions: Sequence[Attention], ending: str, title: str, about: str, tell: Tell) -> bytes:
    """Return attention maps as `.html`, `.png` or `.json`."""
    if ending == ".png":
        return draw_maps(attentions, tell)
    if ending == ".json":
        return _to_json([attention.to_dict() for attention in attentions])
    sections = [(*_heading(item.text), answer_html(item.answer_line), item.html()) for item in attentions]
    return page(title, [legend(attentions), *(part for section in sections for part in section)], about).encode()


def render_gradients(results: Sequence[TextGradients], ending: str, title: str, about: str, tell: Tell) -> bytes:
    """Return gradient norms as `.html`, `.png` or `.json`."""
    if ending == ".json":
        return _to_json([result.to_dict() for result in results])
    if ending == ".png":
        pairs = ((result.text, side, lines) for result in results for side, lines in result.charts().items())
        charts = {f"{_shorten(text)} {side}".strip(): lines for text, side, lines in pairs}
        return draw_lines(charts, _X, _Y, tell)
    intro = paragraph(
        "The norm of the gradient of the last step's loss with respect to the input of each earlier step. Where a line "
        "falls towards earlier steps, the gradient vanishes; where it rises, it explodes."
        + symbols_note(token for result in results for norms in result.gradients for token in norms.tokens)
    )
    return page(title, [intro, *(part for result in results for part in _gradient_parts(result))], about).encode()


def render_positions(encodings: Sequence[Positions], ending: str, title: str, about: str, tell: Tell) -> bytes:
    """Return position encodings and their dot products as `.html`, `.png` or `.json`."""
    if ending == ".json":
        return _to_json([encoding.to_dict() for encoding in encodings])
    matrices = [matrix for encoding in encodings for matrix in encoding.plots()]
    if ending == ".png":
        return draw_matrices(matrices, tell)
    intro = paragraph(
        "A position encoding is a vector that is added to a token's embedding. Each row is a position, counted from 0, "
        "each column a dimension. Below, the dot products of all pairs of positions show their similarity."
    )
    return page(title, [intro, *(matrix.html() for matrix in matrices)], about).encode()


def render_neighbours(neighbours: ContextualNeighbours, ending: str, title: str, about: str) -> bytes:
    """Return the nearest neighbours of a word in context as `.html` or `.json`."""
    return _to_json([neighbours.to_dict()]) if ending == ".json" else page(title, neighbours.html(), about).encode()


def write_file(out: Path, content: bytes) -> None:
    """Write the file; create its folder if missing."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}") from None


def _to_json(values: Sequence[object]) -> bytes:
    """Encode a single value as itself, several as a list."""
    return (write_json(values[0] if len(values) == 1 else values) + "\n").encode()


def _heading(text: str) -> list[str]:
    """Return a text as heading; a long one is shortened and repeated in full below."""
    return [heading(_shorten(text))] + ([paragraph(text)] if len(text) > _HEADING else [])


def _shorten(text: str) -> str:
    return shorten(text, _HEADING, placeholder=" …") if len(text) > _HEADING else text


def _gradient_parts(result: TextGradients) -> list[str]:
    """Return the HTML fragments of one text: a chart and a table per side."""
    parts = _heading(result.text) if result.text else []
    for side, lines in result.charts().items():
        models = [norms for norms in result.gradients if norms.side == side]
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
