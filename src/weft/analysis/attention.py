"""Where a model looked: every layer and head that was captured, with the tokens on both sides."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

import numpy as np

from weft.analysis.render.heatmaps import alignments, cell_side
from weft.analysis.render.page import page, paragraph, reply
from weft.errors import ConfigError
from weft.nn.attention.capture import Maps

_DIGITS = 6  # of a weight in plain data; float32 has no more
_TALLEST = 900  # pixels of a frame in a notebook; it scrolls


@dataclass(frozen=True)
class View:
    """The weights of one layer: how much each token of the rows looked at each token of the columns."""

    place: str  # "cross" from the target to the source, "encoder", "decoder", "self", ...
    layer: int
    heads: Sequence[int]  # the numbers of the heads that `weights` has; [0] where a model has no heads
    weights: np.ndarray  # (H, T, S)
    rows: Sequence[str]  # T
    columns: Sequence[str]  # S

    @property
    def name(self) -> str:
        """Which part of the model this is; with several heads, the first of them."""
        head = f", head {self.heads[0]}" if len(self.heads) > 1 else ""
        return f"{self.place}, layer {self.layer}{head}"

    def plain(self) -> dict[str, Any]:
        """Return it as JSON-ready numbers and words."""
        named = {"place": self.place, "layer": self.layer, "heads": list(self.heads)}
        weights = np.round(self.weights.astype(np.float64), _DIGITS).tolist()
        return named | {"rows": list(self.rows), "columns": list(self.columns), "weights": weights}


@dataclass(frozen=True)
class Attention:
    """All that was captured of one example, in the order in which the model computed it.

    `weights` (T, S), `source`, `target` and `place` are those of the first head of one view: the first that looks
    across, at the source, or where none does the first.
    """

    text: str
    answer: dict[str, Any]
    said: str  # the answer as one line
    views: Sequence[View]

    @property
    def chief(self) -> View:
        """The view that is at hand."""
        return next((view for view in self.views if view.place == "cross"), self.views[0])

    @property
    def weights(self) -> np.ndarray:
        """How much each row looked at each column, (T, S)."""
        first: np.ndarray = self.chief.weights[0]
        return first

    @property
    def source(self) -> list[str]:
        """The tokens that were looked at, one a column."""
        return list(self.chief.columns)

    @property
    def target(self) -> list[str]:
        """The tokens that looked, one a row."""
        return list(self.chief.rows)

    @property
    def place(self) -> str:
        """Which part of the model looked."""
        return self.chief.name

    def plain(self) -> dict[str, Any]:
        """Return it as JSON-ready numbers and words."""
        return {"text": self.text, "answer": self.answer, "views": [view.plain() for view in self.views]}

    def figures(self, name: str = "") -> list[str]:
        """Draw one figure a place, with all its layers and heads, for a page."""
        return [_figure(list(views), name) for views in self.places()]

    def shown(self) -> str:
        """Draw all figures for a page; of several places with heads, the page opens one at a time under an overview."""
        return f'<div class="places">{"".join(self.figures())}</div>'

    def places(self) -> Iterable[list[View]]:
        """Group the views that have one place and the same tokens on their sides."""

        def side(view: View) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
            return view.place, tuple(view.rows), tuple(view.columns)

        order = {key: number for number, key in enumerate(dict.fromkeys(map(side, self.views)))}
        grouped = groupby(sorted(self.views, key=lambda view: order[side(view)]), key=side)
        return [list(views) for _, views in grouped]

    def _repr_html_(self) -> str:
        """Show it in a notebook, in a frame of its own: its style touches nothing, and its script runs."""
        inner = page(self.text, [reply(self.said), self.shown()], compact=True)
        tall = min(_TALLEST, 130 + _height(list(self.places())))
        frame = f'sandbox="allow-scripts" width="100%" height="{tall}" style="border:0" title="attention"'
        return f'<iframe {frame} srcdoc="{escape(inner)}"></iframe>'


def explained(looks: Sequence[Attention] = ()) -> str:
    """Say how a map is read, and what places mean where there are several."""
    told = {
        "encoder": " Encoder: the source looks at itself.",
        "decoder": " Decoder: the answer looks at itself, no further than it has got.",
        "cross": " Cross: the answer looks at the source.",
    }
    found = dict.fromkeys(view.place for look in looks for view in look.views)
    named = "".join(told.get(place, "") for place in found) if len(found) > 1 else ""
    return paragraph(
        "Each row is a token that looks, each column one that is looked at: the stronger a cell's colour, the more. "
        f"Every map has its own scale, from nothing to its largest weight.{named}"
    )


def views_of(maps: Maps, source: Sequence[str], target: Sequence[str], read: Sequence[str]) -> list[View]:
    """Name what was captured of one sequence.

    Across, from each step of the `target` to the `source`; within the encoder, the source on both sides; elsewhere
    the tokens that were `read`, "backward" from the last on. Where these do not fit, steps go by their numbers.
    A layer that has none of the heads that are asked for is left out.
    """
    sides = {"cross": (target, source), "encoder": (source, source)}
    found = []
    for (place, layer), calls in maps.weights.items():
        weights = calls[0][0].float().cpu().numpy()  # (T, S) or (H, T, S): the first call's first sequence
        weights = weights[..., ::-1, ::-1] if place == "backward" else weights
        heads, weights = _headed(weights, maps.numbers.get((place, layer)), maps.heads)
        rows, columns = sides.get(place, (read, read))
        sized = _fitting(rows, weights.shape[1]), _fitting(columns, weights.shape[2])
        found += [View(place, layer, heads, weights, *sized)] if heads else []
    if maps.weights and not found:
        raise ConfigError(
            f"heads: {sorted(maps.heads or ())} are left out of all layers that are looked at (model.heads_off)"
        )
    return found


def _headed(
    weights: np.ndarray, numbers: Sequence[int] | None, asked: Collection[int] | None
) -> tuple[list[int], np.ndarray]:
    """Number the heads; what has none is head 0."""
    if numbers is not None:
        return list(numbers), weights
    if asked is not None and set(asked) != {0}:
        raise ConfigError(
            f"heads: the model has no heads to choose from, but {sorted(asked)} are asked for; leave it out"
        )
    return [0], weights[None]


def _fitting(names: Sequence[str], count: int) -> Sequence[str]:
    return names if len(names) == count else [str(number) for number in range(1, count + 1)]


def _height(places: Sequence[Sequence[View]]) -> int:
    """Estimate what figures take: maps with words and titles, of those under an overview one, and the overview."""
    alone, chosen, overview = 0, 0, 0
    for views in places:
        rows, columns = len(views[0].rows), len(views[0].columns)
        tall = rows * cell_side(rows, columns) + 170
        if len(views) > 1 or len(views[0].heads) > 1:
            chosen, overview = max(chosen, tall), overview + 100 * len(views) + 60
        else:
            alone += tall
    return alone + chosen + overview


def _figure(views: Sequence[View], name: str) -> str:
    places = [(view.layer, head) for view in views for head in view.heads]
    title = views[0].place if len(places) > 1 else views[0].name
    weights = np.concatenate([view.weights for view in views])
    return alignments(weights, places, views[0].columns, views[0].rows, f"{name}: {title}" if name else title)
