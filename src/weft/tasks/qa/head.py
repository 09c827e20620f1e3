"""The head of `span`: where an answer starts and where it ends, and the best of all spans.

Devlin et al. 2019, section 4.2: S and E are two vectors, T_i the state of token i, C that of [CLS],

    p_start(i) = exp(S · T_i) / Σ_j exp(S · T_j)             over the window's passage and C, which means no answer here
    score(i, j) = S · T_i + E · T_j                          of the span from i to j ≥ i
    null        = S · C + E · C                              (section 4.3)

The loss is the mean of -log p of the right start and of the right end. Departure: the paper's code lets the softmax run
over the question and its marks, too, which no answer can be.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from weft.config.schema import Section
from weft.models.base import matrix_numbers
from weft.nn.attention.positions import rows_of
from weft.nn.layers.scalar_mix import ScalarMix
from weft.nn.layers.segment_ops import LOWEST, segment_logsumexp
from weft.tasks.base import IGNORE_INDEX, Batch, Head, Sums
from weft.tokens import Tokens

START, END = 1, 2  # a token's target: 0, or a sum of these; UNREAD where no answer can be


class SpanOptions(Section):
    """What a call may set: how many candidates it gives, and how far no answer must score above the best.

    Without a threshold there is always an answer.
    """

    top: int = Field(1, ge=1, le=1000)
    null_threshold: float | None = None


class Window(NamedTuple):
    """What a head must know of a window to answer from it."""

    first: int  # where, in its sequence, the passage begins
    own: tuple[int, int]  # the tokens, counted from there, at which its answers start: each is some one window's own
    offsets: np.ndarray  # (P, 2) the characters of the passage that each token stands for


@dataclass(frozen=True)
class SpanBatch(Batch):
    """A batch with what questions need beside their tokens; on the CPU."""

    windows: Sequence[Window] = ()


class Candidate(NamedTuple):
    """A span: its score, its characters, and its first and last token in the window's sequence."""

    score: float
    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True)
class Found:
    """What a window has to offer."""

    spans: list[Candidate]  # the best ones, the best first
    total: float  # log Σ exp(score) over all of its spans
    null: float
    options: SpanOptions


class SpanHead(Head):
    """One linear layer on what an encoder gives for each token: a score to start and one to end."""

    def __init__(self, body: Any, layers: Any, dropout: float, longest: int) -> None:
        super().__init__(body)
        body.drop_pooler()
        self._layers = body.mixable_layers if layers == "mix" else layers
        self.mix = None if layers == "last" else ScalarMix(len(self._layers))
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(body.width, 2)
        self._longest = longest

    def scores(self, tokens: Tokens) -> Tensor:
        """Score each token as the start and as the end of an answer, (N, 2), in float32 at least."""
        encoded = self.body.encode(tokens) if self.mix is None else self.body.encode(tokens, self._layers)
        states = encoded[0] if self.mix is None else self.mix(encoded)
        found: Tensor = self.output(self.dropout(states))
        return found if found.dtype.itemsize >= 4 else found.float()

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Sum -log p of the right starts and ends over the windows."""
        assert batch.targets is not None
        scores, targets, rows = self.scores(batch.tokens), batch.targets, rows_of(batch.tokens)
        closed = targets == IGNORE_INDEX
        sums = [
            _loss(score.masked_fill(closed, LOWEST), ~closed & ((targets & mark) > 0), rows, len(batch.tokens))
            for score, mark in zip(scores.unbind(1), (START, END), strict=True)
        ]
        return {"windows": (sums[0] + sums[1]) / 2}, None

    def flops(self, batch: Batch) -> int:
        """Count the body's, and two scores a token."""
        return super().flops(batch) + 2 * matrix_numbers(self.output) * batch.size

    def predict(self, batch: Batch, options: Section) -> list[Found]:
        """Find the best spans of each window."""
        assert isinstance(batch, SpanBatch)
        assert isinstance(options, SpanOptions)
        scores = self.scores(batch.tokens).double().cpu()
        each = zip(batch.tokens.split(scores), batch.windows, strict=True)
        return [best_spans(one.numpy(), window, self._longest, options) for one, window in each]


def _loss(scores: Tensor, right: Tensor, rows: Tensor, count: int) -> Tensor:
    """Sum log Σ exp - score over the sequences that have a right token; those that only fill a batch up have none."""
    taught = rows.new_zeros(count).index_add(0, rows, right.to(rows.dtype)) > 0
    totals = segment_logsumexp(scores, rows, count)
    return torch.where(taught, totals, 0).sum() - torch.where(right, scores, 0).sum()


def best_spans(scores: np.ndarray, window: Window, longest: int, options: SpanOptions) -> Found:
    """Rank all spans that are the window's own, of at most so many tokens and with text at both ends."""
    first, (low, high), offsets = window
    begins, ends = offsets[:, 0], offsets[:, 1]
    inside, null = scores[first : first + len(offsets)], float(scores[0].sum())
    places = np.arange(len(offsets))
    written = begins < ends
    starts = np.where(written & (low <= places) & (places < high), inside[:, 0], -np.inf)
    stops = np.concatenate([np.where(written, inside[:, 1], -np.inf), np.full(longest, -np.inf)])
    table = starts[:, None] + np.lib.stride_tricks.sliding_window_view(stops, longest)[: len(places)]  # (P, longest)
    flat = table.ravel()
    some = min(options.top, len(flat))
    order = np.argpartition(-flat, some - 1)[:some] if some else np.zeros(0, int)
    order = order[np.lexsort((order, -flat[order]))]  # of equals, the first
    found = [(float(flat[one]), *divmod(int(one), longest)) for one in order if flat[one] > -np.inf]
    spans = [
        Candidate(score, int(begins[at]), int(ends[at + more]), first + at, first + at + more)
        for score, at, more in found
    ]
    return Found(spans, total_score(flat), null, options)


def total_score(scores: np.ndarray | Sequence[float]) -> float:
    """Return log Σ exp; -inf where there is nothing."""
    many = np.asarray(scores, np.float64)
    peak = float(many.max(initial=-np.inf))
    return peak + math.log(float(np.exp(many - peak).sum())) if peak > -np.inf else peak
