"""Classification: one label or several, or a number, for a text or a pair of texts, by any model that encodes.

A pair is read as `bos text eos pair eos`, or with the tokenizer's own delimiter between the texts: the input of GPT,
whose summary is the state of the last token (Radford et al. 2018, section 3.3: start, delimiter, extract). There, too,
a pair that has no order of its own is read in both, and the two summaries are added (`symmetric`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from weft.config.schema import Named, Run, Section
from weft.data.batching.packed import PackedItems
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.models.base import matrix_numbers
from weft.tasks.base import Answer, Batch, Item, Sums
from weft.tasks.classification.targets import (
    HALF,
    ClassifyExample,
    MultiLabel,
    Output,
    RatedExample,
    Regression,
    SingleLabel,
    Threshold,
)
from weft.tasks.label_task import Labelling, LabellingConfig, LabellingHead
from weft.tasks.metrics import Confusion
from weft.tasks.text_pairs import Pieces, cut_pieces, lay, trimmed
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Tokens, spell

__all__ = ["Classify", "ClassifyConfig", "ClassifyExample", "ClassifyHead", "RatedExample", "Threshold"]


class ClassifyConfig(LabellingConfig):
    """`multiple`: a text may have several labels or none; each that is likelier than `threshold` is given.

    `regression`: a label is a number, and so is the answer. `symmetric`: pairs are read in both orders.
    """

    multiple: bool = False
    threshold: float = Field(HALF, gt=0, lt=1)
    regression: bool = False
    symmetric: bool = False

    @model_validator(mode="after")
    def _of_several(self) -> "ClassifyConfig":
        if self.threshold != HALF and not self.multiple:
            raise ValueError(
                f"task.threshold chooses among several labels a text, but is {self.threshold} for one; "
                "set task.multiple: true, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _of_numbers(self) -> "ClassifyConfig":
        for key in ("multiple", "labels", "weights", "smoothing") if self.regression else ():
            if getattr(self, key):
                raise ValueError(f"task.{key} is of labels, and with task.regression they are numbers; leave one out")
        return self

    @property
    def kind(self) -> SingleLabel:
        """What is said of a text."""
        return Regression() if self.regression else MultiLabel() if self.multiple else SingleLabel()


class ClassifyHead(LabellingHead):
    """Scores on the body's summary: a softmax over the labels, a sigmoid for each (`multiple`), or one number."""

    def __init__(
        self, body: Any, labels: int, config: ClassifyConfig, weights: Tensor | None, unknown: int | None = None
    ) -> None:
        super().__init__(body, labels, config, weights, unknown)
        self.kind = config.kind
        if self.mix is not None:
            body.drop_pooler()

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Sum over the texts how wrong the scores are: -log p of what is right, or the squared error."""
        assert batch.targets is not None
        return {"texts": self.kind.loss(self._scored(batch), batch.targets, *self.bent)}, None

    def predict(self, batch: Batch, options: Section) -> list[Output]:
        """Choose the likeliest label, or those that are likely enough, or give the number."""
        return self.kind.outputs(self._scored(batch).float(), options)

    def flops(self, batch: Batch) -> int:
        """Count both orders of a pair where both are read."""
        read: int = sum(self.body.flops(side) for side in (batch.tokens, batch.source) if side is not None)
        return read + 2 * matrix_numbers(self.output) * (0 if batch.targets is None else len(batch.targets))

    def _scored(self, batch: Batch) -> Tensor:
        """Score the texts, (B, K); where there is a source, it is the same texts in the other order."""
        states = self.summary(self.seen(batch.tokens))
        if batch.source is not None:
            states = states + self.summary(self.seen(batch.source))
        return self.scores(states)


class Classify(Labelling):
    """Items are (bos text eos, or bos text eos pair eos; where the pair begins, if any; spelling; labels, if known).

    With `symmetric` there are two orders of the tokens, of where the pair begins, and of the spelling.
    """

    Config: ClassVar[type[Named]] = ClassifyConfig
    Example = SingleLabel.Example
    metrics: tuple[str, ...] = SingleLabel.metrics
    metric: str = SingleLabel.metric
    fields = frozenset({"text", "pair"})
    config: ClassifyConfig

    def __init__(self, config: ClassifyConfig) -> None:
        super().__init__(config)
        self.kind = kind = config.kind
        self.Example, self.label_fields, self.fewest = kind.Example, (kind.label_fields,), kind.fewest
        self.metrics, self.metric = kind.metrics_of(len(self.labels)), kind.metric
        self.orders = self.num_token_arrays = 2 if config.symmetric else 1

    def check(self, run: Run) -> None:
        """A label of windows would not be the label of the text."""
        super().check(run)
        if run.data.too_long == "window":
            raise ConfigError("data.too_long: task 'classify' cannot use 'window'; try cut, drop or error")

    def resolve_config(self, examples: Any) -> LabellingConfig:
        """Fill in the labels, where there are any."""
        return super().resolve_config(examples) if self.kind.labelled else self.config

    def right(self, example: Any) -> list[str]:
        """The one label, or all."""
        return self.kind.right(example)

    def balanced(self, counts: Mapping[str, int], rows: int) -> dict[str, float]:
        """Weigh labels by how rare they are."""
        return self.kind.weighed(counts, rows)

    def texts(self, example: ClassifyExample) -> tuple[list[str], list[str]]:
        """Both texts train the one tokenizer."""
        return [example.text, *([] if example.pair is None else [example.pair])], []

    def encode(self, example: ClassifyExample, tokenizer: Tokenizer, limit: TruncationPolicy) -> list[Item]:
        """Encode one text or pair."""
        return self.encode_batch([example], tokenizer, limit)[0]

    def encode_batch(
        self, examples: Sequence[ClassifyExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many with one call of the tokenizer a side."""
        texts = cut_pieces([example.text for example in examples], tokenizer, self.uses_chars)
        given = [example.pair for example in examples if example.pair is not None]
        pairs = iter(cut_pieces(given, tokenizer, self.uses_chars) if given else ())
        return [
            self._items(example, text, None if example.pair is None else next(pairs), tokenizer, limit)
            for example, text in zip(examples, texts, strict=True)
        ]

    def _items(
        self, example: ClassifyExample, text: Pieces, pair: Pieces | None, tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[Item]:
        if pair is None and self.config.symmetric:
            raise DataError(
                "pair: required, since task.symmetric reads pairs in both orders, but not given; an example is "
                '{"text": "…", "pair": "…"}'
            )
        fits = limit.apply(range(len(text.ids) + (0 if pair is None else len(pair.ids))), windows=False)
        if not fits:
            return []
        laid = self._laid(text, pair, len(fits[0]), tokenizer)
        item: Item = tuple(np.array(pieces.ids, np.int32) for pieces, _ in laid)
        item = (*item, np.array([begins for _, begins in laid if begins is not None], np.int32))
        if self.uses_chars:
            item = (*item, *(spell(pieces.words or ()) for pieces, _ in laid))
        if getattr(example, self.kind.label_fields) is None:
            return [item]
        return [(*item, self.kind.kept(example, self.labels))]

    def _laid(
        self, text: Pieces, pair: Pieces | None, room: int, tokenizer: Tokenizer
    ) -> list[tuple[Pieces, int | None]]:
        """Put what there is room for between its signs, in each order, and say where the second text begins."""
        if pair is None:
            return [lay(text.upto(room), None, tokenizer)]
        first, second = trimmed(text, pair, room)
        orders = [(first, second), (second, first)][: self.orders]
        return [lay(*order, tokenizer) for order in orders]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join texts; there are segments where there are pairs, and targets where what is right of all is known.

        The other order, with `symmetric`, is the batch's source.
        """
        tokens, *other = (self._side(items, order) for order in range(self.orders))
        known = self.known(items)
        targets = None if known is None else self.kind.targets(known, len(self.labels))
        return Batch(tokens, targets, {"texts": len(items)}, other[0] if other else None)

    def _side(self, items: Sequence[Item], order: int) -> Tokens:
        tokens, begins = self.tokens(items, order), [item[self.orders][order : order + 1] for item in items]
        if not any(map(len, begins)):
            return tokens
        segments = [_segments(len(item[order]), second) for item, second in zip(items, begins, strict=True)]
        return replace(tokens, segments=torch.from_numpy(np.concatenate(segments)))

    @property
    def num_special_tokens(self) -> int:
        """One before the texts, one after them, and what stands between two."""
        return 2 + len(self.tokenizer.between)

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """The tokens of each order, that of the source first; texts that are spelt out have no one shape."""
        return None if self.uses_chars else self.lengths(data)[::-1]

    def head(self, model: Any) -> ClassifyHead:
        """Put the scores of the labels on a body, or the one number."""
        outputs = len(self.labels) if self.kind.labelled else 1
        return ClassifyHead(model, outputs, self.config, self.weights(), self.tokenizer.specials.unk)

    def options(self) -> Section:
        """The recipe's threshold, where there is one to set."""
        return Threshold(threshold=self.config.threshold) if self.config.multiple else Section()

    def answer(self, example: Any, outputs: list[Output]) -> Answer:
        """Name the labels chosen, and give the probability of each; or give the number."""
        (output,) = outputs
        return self.kind.answer(output, self.labels)

    def line(self, answer: Answer) -> str:
        """The label, several between commas, or the number."""
        return " ".join(", ".join(self.kind.names(answer)).splitlines())

    def preview(self, example: ClassifyExample) -> tuple[str, str]:
        """The text or pair, and what is right."""
        return " | ".join(self.texts(example)[0]), ", ".join(self.right(example))

    def teacher_forced(self, items: list[Item], outputs: list[Output]) -> tuple[list[str], list[str], Batch]:
        """Read a text with what was answered as if it were right; of a pair's two orders, the one it was given in."""
        (item,), (output,) = items, outputs
        names = [self.tokenizer.token(int(id)) for id in item[0]]
        batch = self.collate([(*item[: self.question], self.kind.chosen(output))], np.random.default_rng(0))
        return names, self.kind.names(self.kind.answer(output, self.labels)), replace(batch, source=None)

    def score(self, answers: Sequence[Answer], examples: Sequence[Any]) -> dict[str, float]:
        """Judge by the metrics of labels, as scikit-learn has them, or of numbers, as scipy has them."""
        return self.kind.score(answers, examples, self.labels)

    def confusion(self, answers: Sequence[Answer], examples: Sequence[Any]) -> Confusion | None:
        """Count which label was taken for which, where a text has one."""
        return self.kind.confusion(answers, examples, self.labels)


def _segments(size: int, second: np.ndarray) -> np.ndarray:
    """Number the tokens of the text 0, and those of the pair 1."""
    found = np.zeros(size, np.int64)
    for start in second.tolist():
        found[start:] = 1
    return found
