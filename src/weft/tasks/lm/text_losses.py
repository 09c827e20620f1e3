"""What each text of an evaluation costs a language model, from which the metrics of any sample of them follow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.tasks.encoding import EvaluationData


@dataclass(frozen=True)
class TextLosses:
    """Of each text (n,): -log p of its tokens in nats, its tokens and its bytes, the end of a text among both.

    `spelling` is what its unknown words cost, in nats; None where the tokens do not determine the texts.
    """

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray
    spelling: np.ndarray | None

    def of(self, rows: np.ndarray) -> "TextLosses":
        """Return those of some of the texts."""
        spelling = None if self.spelling is None else self.spelling[rows]
        return TextLosses(self.nats[rows], self.tokens[rows], self.bytes[rows], spelling)

    def metric(self, name: str, rows: np.ndarray | slice = slice(None)) -> float:
        """Return a metric of some of the texts, a text as often as it is named; NaN where it is not given."""
        nats = float(self.nats[rows].sum())
        if name == "perplexity":
            loss = nats / float(self.tokens[rows].sum())
            return math.exp(loss) if loss < 700 else math.inf
        if name != "bits_per_byte" or self.spelling is None:
            return math.nan
        return (nats + float(self.spelling[rows].sum())) / math.log(2) / float(self.bytes[rows].sum())


def texts_of_items(data: EvaluationData, eos: int) -> np.ndarray | None:
    """Return the number of each item's text: several windows may be of one. None where that cannot be told."""
    items = data.items
    if len(items) == len(data.examples):
        return np.arange(len(items))
    ends = items.ids[items.starts[items.items[:-1] + 2] - 1] == eos  # of pairs (inputs, targets): the last target
    if int(ends.sum()) != len(data.examples):
        return None
    owners: np.ndarray = np.cumsum(ends) - ends
    return owners


def sums_by_text(values: np.ndarray, texts: np.ndarray, count: int) -> np.ndarray:
    """Return the sum of the items' values of each text, (count,)."""
    return np.bincount(texts, weights=values, minlength=count)


def num_bytes(texts: Sequence[str], lossless: bool) -> np.ndarray:
    """Return the bytes of each text, with one for its end; a tokenizer that is not lossless has no outer spaces."""
    return np.array([len((text if lossless else text.strip(" ")).encode()) + 1 for text in texts])
