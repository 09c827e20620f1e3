"""Span prediction head: start and end logits for extractive question answering, and the search for the best spans.

Devlin et al. 2019, section 4.2: S and E are two vectors, T_i the hidden state of token i, C that of [CLS],

    p_start(i) = exp(S · T_i) / Σ_j exp(S · T_j)             over the window's passage and C, which means no answer here
    score(i, j) = S · T_i + E · T_j                          of the span from i to j ≥ i
    null        = S · C + E · C                              (section 4.3)

The loss is the mean of -log p of the gold start and of the gold end. Departure: in the paper's code the softmax
includes the question and its special tokens, where no answer can be.
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
from weft.models.base import num_matrix_parameters
from weft.nn.attention.positions import rows_of
from weft.nn.layers.scalar_mix import ScalarMix
from weft.nn.layers.segment_ops import MASKED_SCORE, segment_logsumexp
from weft.tasks.batch import IGNORE_INDEX, Batch
from weft.tasks.head import Sums
from weft.tasks.soft_targets import SoftTargetHead
from weft.tokens import Tokens

START, END = 1, 2  # a token's target: 0, or a sum of these; IGNORE_INDEX where no answer can be


class SpanOptions(Section):
    """The options of a call: the number of candidates, and by how much "no answer" must outscore the best span.

    Without a threshold there is always an answer.
    """

    top: int = Field(1, ge=1, le=1000)
    null_threshold: float | None = None


class Window(NamedTuple):
    """The position of a window's passage in its sequence, and the character offsets of its tokens."""

    first: int  # the position in the sequence where the passage begins
    own: tuple[int, int]  # the passage tokens, first and stop, where its spans may start: each is in one window only
    offsets: np.ndarray  # (P, 2) the characters of the passage that each token covers


@dataclass(frozen=True)
class SpanBatch(Batch):
    """A batch with the windows of its sequences, on the CPU; none where there are targets."""

    windows: Sequence[Window] = ()


class Candidate(NamedTuple):
    """A span: its score, its characters, and its first and last token in the window's sequence."""

    score: float
    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True)
class WindowOutput:
    """The best spans of a window, the log-sum of all its spans' scores, and the score of no answer."""

    spans: list[Candidate]  # the best first
    total: float  # log Σ exp(score) over all of its spans
    null: float
    options: SpanOptions


class SpanHead(SoftTargetHead):
    """One linear layer on the hidden state of each token: a start logit and an end logit."""

    def __init__(self, body: Any, layers: Any, dropout: float, longest: int) -> None:
        super().__init__(body)
        body.drop_pooler()
        self._layers = body.mixable_layers if layers == "mix" else layers
        self.mix = None if layers == "last" else ScalarMix(len(self._layers))
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(body.width, 2)
        self._longest = longest

    def scores(self, tokens: Tokens) -> Tensor:
        """Return the start and end logits of each token, (N, 2), in float32 or wider."""
        return self.read(Batch(tokens))[0]

    def read(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the start and end logits of each token, (N, 2), in float32 or wider, and the hidden states."""
        tokens = batch.tokens
        encoded = self.body.encode(tokens) if self.mix is None else self.body.encode(tokens, self._layers)
        hidden = encoded[0] if self.mix is None else self.mix(encoded)
        logits: Tensor = self.output(self.dropout(hidden))
        return (logits if logits.dtype.itemsize >= 4 else logits.float()), hidden

    def losses(self, logits: Tensor, batch: Batch) -> Sums:
        """Return the loss, summed over the windows: the mean of -log p of the gold start and of the gold end."""
        assert batch.targets is not None
        targets, rows = batch.targets, rows_of(batch.tokens)
        ignored = targets == IGNORE_INDEX
        sums = [
            _loss(column.masked_fill(ignored, MASKED_SCORE), ~ignored & ((targets & bit) > 0), rows, len(batch.tokens))
            for column, bit in zip(logits.unbind(1), (START, END), strict=True)
        ]
        return {"windows": (sums[0] + sums[1]) / 2}

    def soft_losses(self, logits: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Sums:
        """Return the mean distance of both distributions over a window from the teacher's, summed over the windows."""
        assert batch.targets is not None
        ignored, rows = (batch.targets == IGNORE_INDEX)[:, None], rows_of(batch.tokens)
        columns = (scores.masked_fill(ignored, MASKED_SCORE).unbind(1) for scores in (logits, teacher))
        pairs = zip(*columns, strict=True)
        distances = [_soft_loss(own, theirs, rows, len(batch.tokens), temperature) for own, theirs in pairs]
        return {"windows": (distances[0] + distances[1]) / 2}

    def flops(self, batch: Batch) -> int:
        """Return the FLOPs of the body, and of two logits a token."""
        return super().flops(batch) + 2 * num_matrix_parameters(self.output) * batch.size

    def predict(self, batch: Batch, options: Section) -> list[WindowOutput]:
        """Return the best spans of each window."""
        assert isinstance(batch, SpanBatch)
        assert isinstance(options, SpanOptions)
        logits = self.scores(batch.tokens).double().cpu()
        windows = zip(batch.tokens.split(logits), batch.windows, strict=True)
        return [best_spans(window_logits.numpy(), window, self._longest, options) for window_logits, window in windows]


def _loss(logits: Tensor, gold: Tensor, rows: Tensor, count: int) -> Tensor:
    """Sum log Σ exp(logits) - logits[gold] over the sequences that have a gold token; padding has none."""
    has_gold = rows.new_zeros(count).index_add(0, rows, gold.to(rows.dtype)) > 0
    log_totals = segment_logsumexp(logits, rows, count)
    return torch.where(has_gold, log_totals, 0).sum() - torch.where(gold, logits, 0).sum()


def _soft_loss(logits: Tensor, teacher: Tensor, rows: Tensor, count: int, temperature: float) -> Tensor:
    """Sum T² KL(teacher || logits) of the softmaxes over each sequence, at temperature T."""
    own, target = (
        scores / temperature - segment_logsumexp(scores / temperature, rows, count)[rows.long()]
        for scores in (logits, teacher)
    )
    return temperature**2 * (target.exp() * (target - own)).sum()


def best_spans(logits: np.ndarray, window: Window, longest: int, options: SpanOptions) -> WindowOutput:
    """Return the best spans of up to `longest` tokens, from the window's own tokens, with text at both ends."""
    first, (low, high), offsets = window
    char_starts, char_ends = offsets[:, 0], offsets[:, 1]
    inside, null = logits[first : first + len(offsets)], float(logits[0].sum())
    positions = np.arange(len(offsets))
    has_text = char_starts < char_ends
    start_scores = np.where(has_text & (low <= positions) & (positions < high), inside[:, 0], -np.inf)
    end_scores = np.concatenate([np.where(has_text, inside[:, 1], -np.inf), np.full(longest, -np.inf)])
    ends_ahead = np.lib.stride_tricks.sliding_window_view(end_scores, longest)  # (P + 1, longest)
    flat = (start_scores[:, None] + ends_ahead[: len(positions)]).ravel()  # of (P, longest)
    count = min(options.top, len(flat))
    order = np.argpartition(-flat, count - 1)[:count] if count else np.zeros(0, int)
    order = order[np.lexsort((order, -flat[order]))]  # ties in order of position
    ranked = [(float(flat[index]), *divmod(int(index), longest)) for index in order if flat[index] > -np.inf]
    spans = [
        Candidate(score, int(char_starts[at]), int(char_ends[at + extra]), first + at, first + at + extra)
        for score, at, extra in ranked
    ]
    return WindowOutput(spans, logsumexp(flat), null, options)


def logsumexp(scores: np.ndarray | Sequence[float]) -> float:
    """Return log Σ exp(scores); -inf where there are none."""
    values = np.asarray(scores, np.float64)
    peak = float(values.max(initial=-np.inf))
    return peak + math.log(float(np.exp(values - peak).sum())) if peak > -np.inf else peak
