"""Attention weights of one example: all captured layers and heads, with the tokens of rows and columns."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

import numpy as np

from weft.analysis.render.heatmaps import alignments, cell_side
from weft.analysis.render.page import answer_html, page, paragraph
from weft.analysis.render.svg import symbols_note
from weft.errors import ConfigError
from weft.nn.attention.capture import Maps

_DIGITS = 6  # decimals of a weight in JSON; float32 has no more
_MAX_HEIGHT = 900  # pixels of a frame in a notebook; it scrolls


@dataclass(frozen=True)
class View:
    """The weights of one layer: how much each token of the rows attends to each token of the columns."""

    place: str  # "cross" from the target to the source, "encoder", "decoder", "self", ...
    layer: int
    heads: Sequence[int]  # the heads in `weights`, by number; [0] for attention without heads
    weights: np.ndarray  # (H, T, S)
    rows: Sequence[str]  # T
    columns: Sequence[str]  # S

    @property
    def name(self) -> str:
        """Place and layer; with several heads, the first of them."""
        head = f", head {self.heads[0]}" if len(self.heads) > 1 else ""
        return f"{self.place}, layer {self.layer}{head}"

    def to_dict(self) -> dict[str, Any]:
        """Return the data as JSON-ready values."""
        key = {"place": self.place, "layer": self.layer, "heads": list(self.heads)}
        weights = np.round(self.weights.astype(np.float64), _DIGITS).tolist()
        return key | {"rows": list(self.rows), "columns": list(self.columns), "weights": weights}


@dataclass(frozen=True)
class Attention:
    """All attention weights captured for one example, in the order of computation.

    `weights` (T, S), `source`, `target` and `place` are those of the first head of the main view: the first
    cross-attention, or without any the first view.
    """

    text: str
    answer: dict[str, Any]
    answer_line: str  # the answer as one line
    views: Sequence[View]

    @property
    def main_view(self) -> View:
        """The first cross-attention, or without any the first view."""
        return next((view for view in self.views if view.place == "cross"), self.views[0])

    @property
    def weights(self) -> np.ndarray:
        """The weights (T, S) of the main view's first head."""
        first: np.ndarray = self.main_view.weights[0]
        return first

    @property
    def source(self) -> list[str]:
        """The tokens attended to (keys), one per column."""
        return list(self.main_view.columns)

    @property
    def target(self) -> list[str]:
        """The tokens that attend (queries), one per row."""
        return list(self.main_view.rows)

    @property
    def place(self) -> str:
        """The name of the main view."""
        return self.main_view.name

    def to_dict(self) -> dict[str, Any]:
        """Return the data as JSON-ready values."""
        return {"text": self.text, "answer": self.answer, "views": [view.to_dict() for view in self.views]}

    def figures(self, name: str = "") -> list[str]:
        """Return one HTML figure per place, with all its layers and heads."""
        return [_figure(list(views), name) for views in self.places()]

    def html(self) -> str:
        """Return all figures as HTML; of several places with heads, the page opens one at a time under an overview."""
        return f'<div class="places">{"".join(self.figures())}</div>'

    def places(self) -> Iterable[list[View]]:
        """Group the views that have the same place, rows and columns."""

        def key(view: View) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
            return view.place, tuple(view.rows), tuple(view.columns)

        order = {group: index for index, group in enumerate(dict.fromkeys(map(key, self.views)))}
        grouped = groupby(sorted(self.views, key=lambda view: order[key(view)]), key=key)
        return [list(views) for _, views in grouped]

    def _repr_html_(self) -> str:
        """Show it in a notebook, in an iframe, so that its style does not affect the notebook and its script runs."""
        symbols = [paragraph(note)] if (note := symbols_note(_tokens([self])).strip()) else []
        document = page(self.text, [answer_html(self.answer_line), *symbols, self.html()], compact=True)
        height = min(_MAX_HEIGHT, 130 + _estimate_height(list(self.places())))
        frame = f'sandbox="allow-scripts" width="100%" height="{height}" style="border:0" title="attention"'
        return f'<iframe {frame} srcdoc="{escape(document)}"></iframe>'


def legend(attentions: Sequence[Attention] = ()) -> str:
    """Return a paragraph on how to read a map, on its symbols and, if there are several places, what they mean."""
    meanings = {
        "encoder": " Encoder: self-attention of the source.",
        "decoder": " Decoder: causal self-attention of the output.",
        "cross": " Cross: attention of the output to the source.",
    }
    places = dict.fromkeys(view.place for attention in attentions for view in attention.views)
    explanation = "".join(meanings.get(place, "") for place in places) if len(places) > 1 else ""
    return paragraph(
        "Each row is a token that looks (the query), each column a token that is looked at (the key); a cell's colour "
        "is the attention weight. "
        f"Every map has its own scale, from 0 to its largest weight.{symbols_note(_tokens(attentions))}{explanation}"
    )


def _tokens(attentions: Sequence[Attention]) -> Iterator[str]:
    """Yield the tokens of all maps."""
    return (token for attention in attentions for view in attention.views for token in (*view.rows, *view.columns))


def views_of(maps: Maps, source: Sequence[str], target: Sequence[str], read: Sequence[str]) -> list[View]:
    """Return the captured weights of one sequence as views, with tokens as labels.

    Cross-attention is from the `target` to the `source`; encoder self-attention has the source on both sides; all other
    attention has the input tokens `read`, "backward" in reverse order. If the lengths differ, labels are step numbers.
    A layer without any of the requested heads is left out.
    """
    sides = {"cross": (target, source), "encoder": (source, source)}
    views = []
    for (place, layer), calls in maps.weights.items():
        weights = calls[0][0].float().cpu().numpy()  # (T, S) or (H, T, S): the first call's first sequence
        weights = weights[..., ::-1, ::-1] if place == "backward" else weights
        heads, weights = _with_heads(weights, maps.numbers.get((place, layer)), maps.heads)
        rows, columns = sides.get(place, (read, read))
        labels = _labels(rows, weights.shape[1]), _labels(columns, weights.shape[2])
        views += [View(place, layer, heads, weights, *labels)] if heads else []
    if maps.weights and not views:
        raise ConfigError(
            f"heads: {sorted(maps.heads or ())} are pruned in all of these layers (model.pruned_heads); choose others"
        )
    return views


def _with_heads(
    weights: np.ndarray, numbers: Sequence[int] | None, requested: Collection[int] | None
) -> tuple[list[int], np.ndarray]:
    """Return the head numbers and the weights (H, T, S); attention without heads is head 0."""
    if numbers is not None:
        return list(numbers), weights
    if requested is not None and set(requested) != {0}:
        raise ConfigError(
            f"heads: the model's attention has no heads, but {sorted(requested)} are requested; leave heads out"
        )
    return [0], weights[None]


def _labels(tokens: Sequence[str], count: int) -> Sequence[str]:
    return tokens if len(tokens) == count else [str(number) for number in range(1, count + 1)]


def _estimate_height(places: Sequence[Sequence[View]]) -> int:
    """Estimate the height of the figures in pixels; of those under an overview, one is open at a time."""
    single, opened, overview = 0, 0, 0
    for views in places:
        rows, columns = len(views[0].rows), len(views[0].columns)
        height = rows * cell_side(rows, columns) + 170
        if len(views) > 1 or len(views[0].heads) > 1:
            opened, overview = max(opened, height), overview + 100 * len(views) + 60
        else:
            single += height
    return single + opened + overview


def _figure(views: Sequence[View], name: str) -> str:
    """Draw the views of one place as a figure."""
    maps = [(view.layer, head) for view in views for head in view.heads]
    title = views[0].place if len(maps) > 1 else views[0].name
    weights = np.concatenate([view.weights for view in views])
    return alignments(weights, maps, views[0].columns, views[0].rows, f"{name}: {title}" if name else title)
