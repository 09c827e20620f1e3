"""`weft look`: attention, gradients, positions or neighbours as a page, a picture or data, by the file's ending."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from weft.analysis.attention import Attention, explained
from weft.analysis.gradients import GradientNorms
from weft.analysis.neighbours import Neighbours
from weft.analysis.positions import Positions
from weft.analysis.render.charts import line_chart
from weft.analysis.render.page import details, heading, page, paragraph, reply, table
from weft.analysis.render.png import check_plots, draw_grids, draw_lines, draw_maps
from weft.analysis.render.svg import visible
from weft.errors import ConfigError

ENDINGS = (".html", ".png", ".json")
_HEADING = 90  # characters
_ACROSS, _UP = "steps back", "norm of the gradient"

Tell = Callable[[str], object]


@dataclass(frozen=True)
class Reached:
    """How strongly the loss at the end reaches back, in one text, by one model or by several."""

    text: str
    reaches: Sequence[GradientNorms]

    def charts(self) -> dict[str, dict[str, list[tuple[float, float]]]]:
        """Group the lines by what they are over."""
        sides = dict.fromkeys(reach.side for reach in self.reaches)
        return {side: {one.model: one.points for one in self.reaches if one.side == side} for side in sides}

    def plain(self) -> dict[str, Any]:
        """Return it as JSON-ready numbers and words."""
        return {"text": self.text, "gradients": [reach.plain() for reach in self.reaches]}


def check_out(out: Path) -> None:
    """Refuse a file that could not be written in the end, before any work is done."""
    if out.suffix not in ENDINGS:
        raise ConfigError(f"--out: must end in {', '.join(ENDINGS)}, but is {str(out)!r} instead")
    if out.is_dir():
        raise ConfigError(f"--out: must be a file, but {str(out)!r} is a folder")
    _check_place(out)
    if out.suffix == ".png":
        check_plots()


def _check_place(out: Path) -> None:
    """Folders that are missing are made in the end: the nearest that is there must be one, and be open for that."""
    there = next(path for path in (out, *out.absolute().parents) if os.path.lexists(path))
    if there != out and not there.is_dir():
        raise ConfigError(f"--out: {out} cannot be written: {there} is no folder")
    if not os.access(there, os.W_OK):
        raise ConfigError(f"--out: {out} cannot be written: {there} is not open for writing")


def render_attention(looks: Sequence[Attention], ending: str, title: str, about: str, tell: Tell) -> bytes:
    """Show looks as `.html`, `.png` or `.json`."""
    if ending == ".png":
        return draw_maps(looks, tell)
    if ending == ".json":
        return _encoded([look.plain() for look in looks])
    parts = [part for look in looks for part in (*_headed(look.text), reply(look.said), look.shown())]
    return page(title, [explained(looks), *parts], about).encode()


def render_gradients(found: Sequence[Reached], ending: str, title: str, about: str, tell: Tell) -> bytes:
    """Show how far gradients reach as `.html`, `.png` or `.json`."""
    if ending == ".json":
        return _encoded([one.plain() for one in found])
    if ending == ".png":
        charts = {f"{_short(one.text)} {side}".strip(): lines for one in found for side, lines in one.charts().items()}
        return draw_lines(charts, _ACROSS, _UP, tell)
    told = paragraph(
        "How strongly the loss at the last step depends on what each earlier step read: the norm of its gradient "
        "there. Where a line falls, the gradient vanishes; where it rises, it explodes."
    )
    return page(title, [told, *(part for one in found for part in _reached(one))], about).encode()


def render_positions(found: Sequence[Positions], ending: str, title: str, about: str, tell: Tell) -> bytes:
    """Show the vectors of positions, and how like one another they are, as `.html`, `.png` or `.json`."""
    if ending == ".json":
        return _encoded([one.plain() for one in found])
    grids = [grid for one in found for grid in one.grids()]
    if ending == ".png":
        return draw_grids(grids, tell)
    told = paragraph(
        "A token's place is a vector that is added to its embedding. Each row is a place, counted from 0, each column "
        "one of its numbers. Below, the dot product of every two of them says how near two places are to the model."
    )
    return page(title, [told, *(grid.drawn() for grid in grids)], about).encode()


def render_neighbours(found: Neighbours, ending: str, title: str, about: str) -> bytes:
    """Show the nearest contexts of a word as `.html` or `.json`."""
    return _encoded([found.plain()]) if ending == ".json" else page(title, found.shown(), about).encode()


def save(out: Path, content: bytes) -> None:
    """Write the file, and the folder it is to be in."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}") from None


def _encoded(found: Sequence[object]) -> bytes:
    """Write one thing as itself and several as a list."""
    return (json.dumps(found[0] if len(found) == 1 else found, ensure_ascii=False) + "\n").encode()


def _headed(text: str) -> list[str]:
    """Head a section with a text; a long one stands below its beginning."""
    return [heading(_short(text))] + ([paragraph(text)] if len(text) > _HEADING else [])


def _short(text: str) -> str:
    return shorten(text, _HEADING, placeholder=" …") if len(text) > _HEADING else text


def _reached(one: Reached) -> list[str]:
    parts = _headed(one.text) if one.text else []
    for side, lines in one.charts().items():
        reaches = [reach for reach in one.reaches if reach.side == side]
        parts.append(line_chart(lines, _ACROSS, _UP, side, log_y=True, stops=_stops(reaches)))
        parts += [_numbers(reaches)] if any(reach.tokens for reach in reaches) else []
    return parts


def _stops(reaches: Sequence[GradientNorms]) -> dict[float, str]:
    """Name the steps by their tokens, where all models read the same ones."""
    tokens = {tuple(reach.tokens) for reach in reaches}
    if len(tokens) > 1 or tokens == {()}:
        return {}
    return {x: visible(token) for (x, _), token in zip(reaches[0].points, reaches[0].tokens, strict=True)}


def _numbers(reaches: Sequence[GradientNorms]) -> str:
    def rows(one: GradientNorms) -> list[list[object]]:
        steps = enumerate(zip(one.tokens, one.norms, strict=True), 1)
        return [[step, visible(token), f"{norm:.3g}"] for step, (token, norm) in steps]

    return details("In numbers", [table(["step", "token", one.model], rows(one)) for one in reaches])
