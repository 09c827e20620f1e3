"""Text classification: one label, several, or a number, for a text or a pair of texts, by any encoder.

A pair is encoded as `bos text eos pair eos`, or with the tokenizer's own delimiter between the texts: the input of GPT,
pooled at the last token (Radford et al. 2018, section 3.3: start, delimiter, extract). As there, a pair that has no
inherent order is encoded in both orders, and the two pooled outputs are added (`symmetric`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from weft.config.run import Run
from weft.config.schema import Named, Section
from weft.data.batching.packed_items import PackedItems
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError
from weft.models.base import num_matrix_parameters
from weft.nn.layers.pooling import concat_pool, mean_states
from weft.tasks.base import Answer
from weft.tasks.batch import Batch, Item
from weft.tasks.capabilities import ErrorAnalysis, LabelPrediction, StaticBatches, WrongAnswer
from weft.tasks.classification.targets import (
    DEFAULT_THRESHOLD,
    ClassifyExample,
    LabelOutput,
    MultiLabel,
    RatedExample,
    Regression,
    SingleLabel,
    Threshold,
)
from weft.tasks.classification_report import ClassificationReport
from weft.tasks.head import Sums
from weft.tasks.label_task import LabelConfig, LabelHead, LabelTask
from weft.tasks.metrics import ConfusionMatrix
from weft.tasks.text_pairs import TextTokens, add_special_tokens, tokenize_texts, truncate_pair
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Tokens, char_ids

__all__ = ["Classify", "ClassifyConfig", "ClassifyExample", "ClassifyHead", "RatedExample", "Threshold"]


class ClassifyConfig(LabelConfig):
    """`pooling`: the vector of a text; `concat` is [h_T ; max ; mean] of the states (Howard & Ruder 2018, equation 4).

    `multiple`: a text may have several labels or none; each that is more probable than `threshold` is predicted.

    `regression`: the label and the prediction are a number. `symmetric`: pairs are encoded in both orders. `pairs`:
    every question must be a pair of texts.
    """

    # body: its own; concat: its last state beside the maximum and the mean of all
    pooling: Literal["body", "concat"] = "body"
    multiple: bool = False  # a text may have several labels, or none
    # multiple: the probability above which a label is predicted
    threshold: float = Field(DEFAULT_THRESHOLD, gt=0, lt=1)
    regression: bool = False  # the label is a number
    symmetric: bool = False  # pairs are encoded in both orders
    pairs: bool | None = None  # None: if the training data are pairs

    @model_validator(mode="after")
    def _check_threshold(self) -> "ClassifyConfig":
        if self.threshold != DEFAULT_THRESHOLD and not self.multiple:
            raise ValueError(
                f"task.threshold chooses among several labels a text, but is {self.threshold} for one; "
                "set task.multiple: true, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_regression(self) -> "ClassifyConfig":
        for key in ("multiple", "labels", "weights", "label_smoothing") if self.regression else ():
            if getattr(self, key):
                raise ValueError(f"task.{key} is of labels, and with task.regression they are numbers; leave one out")
        return self

    @property
    def kind(self) -> SingleLabel:
        """The kind of target: one label, several, or a number."""
        return Regression() if self.regression else MultiLabel() if self.multiple else SingleLabel()


class ClassifyHead(LabelHead):
    """A linear layer on the pooled output: a softmax over the labels, a sigmoid for each (`multiple`), or a number."""

    def __init__(
        self, body: Any, labels: int, config: ClassifyConfig, weights: Tensor | None, unknown: int | None = None
    ) -> None:
        self.concat = config.pooling == "concat"
        super().__init__(body, labels, config, weights, unknown, widths=3 if self.concat else 1)
        self.kind, self._num_labels = config.kind, labels
        self.has_states = self.mix is not None or self.concat
        if self.has_states:
            body.drop_pooler()

    def read(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the logits of the texts, (B, K); `batch.source` is the same pairs in the other order."""
        pooled, states = self._pool(self.seen(batch.tokens))
        if batch.source is not None:
            pooled = pooled + self._pool(self.seen(batch.source))[0]
        return self.scores(pooled), states

    def losses(self, logits: Tensor, batch: Batch) -> Sums:
        """Return the loss summed over the texts: -log p of the gold labels, or the squared error."""
        assert batch.targets is not None
        return {"texts": self.kind.loss(logits, batch.targets, *self.loss_args)}

    def soft_losses(self, logits: Tensor, teacher: Tensor, batch: Batch, temperature: float) -> Sums:
        """Return the distance from a teacher's distributions or numbers, summed over the texts."""
        return {"texts": self.kind.soft_loss(logits, teacher, temperature)}

    def predict(self, batch: Batch, options: Section) -> list[LabelOutput]:
        """Return the most probable label, the labels above the threshold, or the number."""
        return self.kind.outputs(self.read(batch)[0].float(), options)

    def logits_per_item(self, options: Section) -> int:
        """Return the number of labels."""
        return self._num_labels

    def flops(self, batch: Batch) -> int:
        """Return the FLOPs, of both orders of a pair where both are encoded."""
        flops: int = sum(self.body.flops(side) for side in (batch.tokens, batch.source) if side is not None)
        return flops + 2 * num_matrix_parameters(self.output) * (0 if batch.targets is None else len(batch.targets))

    def pooled_output(self, tokens: Tokens) -> Tensor:
        """Return the vector of each text: (B, D), or (B, 3 D) with concat pooling."""
        return self._pool(tokens)[0]

    def _pool(self, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
        """Return the vectors of the texts: the body's own, or made of hidden states, which are then returned too."""
        if not self.has_states:
            return self.body.pooled_output(tokens), None
        states = self.states(tokens)
        if self.concat:
            return concat_pool(self.body.final_states(states, tokens), states, tokens), states
        return mean_states(states, tokens), states


class Classify(LabelTask, StaticBatches, LabelPrediction, ErrorAnalysis):
    """Items are (bos text eos, or bos text eos pair eos; where the pair begins, if any; characters; labels, if known).

    With `symmetric` there are two arrays of token ids, two starts of the second text, and two arrays of characters.
    """

    Config: ClassVar[type[Named]] = ClassifyConfig
    Example = SingleLabel.Example
    metrics: tuple[str, ...] = SingleLabel.metrics
    metric: str = SingleLabel.metric
    json_fields = frozenset({"text", "pair"})
    config: ClassifyConfig
    kind: SingleLabel

    @property
    def input_fields(self) -> tuple[str, ...]:
        """A text or a pair of texts."""
        return ("text", "pair")

    def configure(self, config: Any) -> None:
        """Set the labels and the kind of target."""
        super().configure(config)
        self.kind = kind = config.kind
        self.Example, self.label_fields, self.min_labels = kind.Example, (kind.label_field,), kind.min_labels
        self.stratify_by = kind.label_field if type(kind) is SingleLabel else None
        self.metrics, self.metric = kind.metric_names(len(self.labels)), kind.metric
        self.orders = self.num_token_arrays = 2 if config.symmetric else 1
        self.required_optional_fields = ("pair",) if config.pairs else ()

    def check(self, run: Run) -> None:
        """Raise an error for `truncation: window`: a text is classified whole."""
        super().check(run)
        if run.data.truncation == "window":
            raise ConfigError("data.truncation: task 'classify' cannot use 'window'; try cut, drop or error")

    def resolve_config(self, examples: Any) -> LabelConfig:
        """Return the configuration with the labels filled in, where there are any, and whether texts come in pairs."""
        pairs = _PairCount(examples)
        config = super().resolve_config(pairs) if self.kind.has_labels else self.config
        return config.model_copy(update={"pairs": pairs.all_pairs()} if self.config.pairs is None else {})

    def right(self, example: Any) -> list[str]:
        """Return the gold labels of an example."""
        return self.kind.gold_labels(example)

    def balanced(self, counts: Mapping[str, int], rows: int) -> dict[str, float]:
        """Return label weights by inverse frequency."""
        return self.kind.balanced_weights(counts, rows)

    def texts(self, example: ClassifyExample) -> tuple[list[str], list[str]]:
        """Return both texts: they share one tokenizer."""
        return [example.text, *([] if example.pair is None else [example.pair])], []

    def encode_batch(
        self, examples: Sequence[ClassifyExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many examples with one call of the tokenizer for each side."""
        texts = tokenize_texts([example.text for example in examples], tokenizer, self.uses_chars, limit)
        second_texts = [example.pair for example in examples if example.pair is not None]
        pairs = iter(tokenize_texts(second_texts, tokenizer, self.uses_chars, limit) if second_texts else ())
        return [
            self._items(example, text, None if example.pair is None else next(pairs), tokenizer, limit)
            for example, text in zip(examples, texts, strict=True)
        ]

    def _items(
        self,
        example: ClassifyExample,
        text: TextTokens,
        pair: TextTokens | None,
        tokenizer: Tokenizer,
        limit: TruncationPolicy,
    ) -> list[Item]:
        if pair is None and self.config.symmetric:
            raise DataError(
                "pair: required, since task.symmetric reads pairs in both orders, but not given; an example is "
                '{"text": "…", "pair": "…"}'
            )
        fits = limit.apply(range(len(text.ids) + (0 if pair is None else len(pair.ids))), windows=False)
        if not fits:
            return []
        sequences = self._build_sequences(text, pair, len(fits[0]), tokenizer)
        item: Item = tuple(np.array(tokens.ids, np.int32) for tokens, _ in sequences)
        item = (*item, np.array([second for _, second in sequences if second is not None], np.int32))
        if self.uses_chars:
            item = (*item, *(char_ids(tokens.words or ()) for tokens, _ in sequences))
        if getattr(example, self.kind.label_field) is None:
            return [item]
        return [(*item, self.kind.encode_label(example, self.labels))]

    def _build_sequences(
        self, text: TextTokens, pair: TextTokens | None, room: int, tokenizer: Tokenizer
    ) -> list[tuple[TextTokens, int | None]]:
        """Truncate to `room` and add special tokens, in each order; return also where the second text begins."""
        if pair is None:
            return [add_special_tokens(text.truncate(room), None, tokenizer)]
        first, second = truncate_pair(text, pair, room)
        orders = [(first, second), (second, first)][: self.orders]
        return [add_special_tokens(*order, tokenizer) for order in orders]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join texts into a batch, with segments where there are pairs, and targets where all labels are known.

        With `symmetric`, the other order is the batch's source.
        """
        tokens, *reversed_pairs = (self._tokens_and_segments(items, order) for order in range(self.orders))
        labels = self.known_labels(items)
        targets = None if labels is None else self.kind.targets(labels, len(self.labels))
        return Batch(tokens, targets, {"texts": len(items)}, reversed_pairs[0] if reversed_pairs else None)

    def _tokens_and_segments(self, items: Sequence[Item], order: int) -> Tokens:
        tokens, seconds = self.tokens(items, order), [item[self.orders][order : order + 1] for item in items]
        if not any(map(len, seconds)):
            return tokens
        segments = [_segment_ids(len(item[order]), second) for item, second in zip(items, seconds, strict=True)]
        return replace(tokens, segments=torch.from_numpy(np.concatenate(segments)))

    @property
    def num_special_tokens(self) -> int:
        """One before the texts, one after them, and those between two."""
        return 2 + len(self.tokenizer.pair_separator)

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """Return the tokens of each order, the source's first; None with characters, which have no static shape."""
        return None if self.uses_chars else self.lengths(data)[::-1]

    def head(self, model: Any) -> ClassifyHead:
        """Return the body with a linear layer for the labels, or for one number."""
        size = len(self.labels) if self.kind.has_labels else 1
        return ClassifyHead(model, size, self.config, self.weights(), self.tokenizer.specials.unk)

    def options(self) -> Section:
        """Return the recipe's threshold, with `multiple`."""
        return Threshold(threshold=self.config.threshold) if self.config.multiple else Section()

    def answer(self, example: Any, outputs: list[LabelOutput]) -> Answer:
        """Return the predicted labels and the probability of each; or the number."""
        (output,) = outputs
        return self.kind.answer(output, self.labels)

    def format_answer(self, answer: Answer) -> str:
        """Return the label, several separated by commas, or the number."""
        return " ".join(", ".join(self.kind.names(answer)).splitlines())

    def preview(self, example: ClassifyExample) -> tuple[str, str]:
        """Return the text or pair, and its gold labels or number."""
        return " | ".join(self.texts(example)[0]), ", ".join(self.right(example))

    def teacher_forced(self, items: list[Item], outputs: list[LabelOutput]) -> tuple[list[str], list[str], Batch]:
        """Return the text's batch with the prediction as the target; of a pair's two orders, the given one."""
        (item,), (output,) = items, outputs
        names = [self.tokenizer.token(int(id)) for id in item[0]]
        batch = self.collate(
            [(*item[: self.num_input_arrays], self.kind.encode_prediction(output))], np.random.default_rng(0)
        )
        return names, self.kind.names(self.kind.answer(output, self.labels)), replace(batch, source=None)

    def score(self, answers: Sequence[Answer], examples: Sequence[Any]) -> dict[str, float]:
        """Compute the metrics of labels as in scikit-learn, or of numbers as in scipy."""
        return self.kind.score(answers, examples, self.labels)

    def confusion(self, answers: Sequence[Answer], examples: Sequence[Any]) -> ConfusionMatrix | None:
        """Return the confusion matrix, where a text has one label."""
        return self.kind.confusion(answers, examples, self.labels)

    def report(self, answers: Sequence[Answer], examples: Sequence[Any]) -> ClassificationReport | None:
        """Return the classification report, where there are labels."""
        return self.kind.report(answers, examples, self.labels)

    def errors(self, answers: Sequence[Answer], examples: Sequence[Any]) -> list[WrongAnswer | None]:
        """Return the wrong labels with their probabilities, or the numbers with their distances."""
        return [self.kind.error(answer, example) for answer, example in zip(answers, examples, strict=True)]

    @property
    def positive_label(self) -> str | None:
        """The second of two labels; None where there is no metric `f1`."""
        return self.labels.names[1] if "f1" in self.metrics and len(self.labels) == 2 else None


class _PairCount:
    """Examples, counted as they are iterated: whether all of them are pairs."""

    def __init__(self, examples: Iterable[Any]) -> None:
        self._examples, self._rows, self._pairs = iter(examples), 0, 0

    def __iter__(self) -> Iterator[Any]:
        for example in self._examples:
            self._rows += 1
            self._pairs += example.pair is not None
            yield example

    def all_pairs(self) -> bool:
        """Return whether all examples are pairs; if none was needed before, whether the first is one."""
        if not self._rows:
            next(iter(self), None)
        return 0 < self._rows == self._pairs


def _segment_ids(size: int, second: np.ndarray) -> np.ndarray:
    """Return 0 for the tokens of the text, and 1 for those of the pair."""
    segments = np.zeros(size, np.int64)
    for start in second.tolist():
        segments[start:] = 1
    return segments
