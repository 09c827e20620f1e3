"""Base classes of `classify` and `tag`: the label set, class weights, and a linear head on an encoder.

The weighted loss is Σ_i w[y_i] · -log p(y_i), divided by the number of texts or words, not by the sum of their weights.
So a label's weight does not depend on the rest of its batch, and "balanced" weights, whose mean is 1, keep the loss's
scale. Labels are taken from the training data where the recipe lists none.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field, field_validator
from torch import Tensor, nn

from weft.config.run import Run
from weft.config.schema import Named
from weft.data.batching.packed_items import PackedItems
from weft.data.labels import Label, Labels, balanced_class_weights, read_label
from weft.data.readers.lines import plural
from weft.errors import ConfigError, DataError, did_you_mean
from weft.models.base import num_matrix_parameters
from weft.nn.layers.scalar_mix import ScalarMix
from weft.registry import resolve
from weft.tasks.batch import Batch, Item
from weft.tasks.capabilities import TeacherForcing
from weft.tasks.head import missing_method
from weft.tasks.soft_targets import SoftTargetHead
from weft.tokens import Tokens

MAX_WEIGHT = 1e12  # of a label: more than balanced weights of any data, and well within float32


def _check_layers(layers: object) -> object:
    is_list = isinstance(layers, list | tuple) and layers and all(type(layer) is int for layer in layers)
    if not is_list and layers not in ("last", "mix"):
        raise ValueError("must be last, mix, or a list of layers to mix, such as [1, 2]")
    return layers


MixedLayers = Annotated[Literal["last", "mix"] | tuple[int, ...], BeforeValidator(_check_layers)]


class LabelConfig(Named):
    """The labels, their weights in the loss, and the head's regularisation."""

    labels: tuple[Label, ...] | None = None  # None: those of the training data, in alphabetical order
    weights: Literal["balanced"] | dict[Label, float] | None = None  # of labels in the loss; 1 for a label not named
    label_smoothing: float = Field(0.0, ge=0, lt=1)  # probability spread over all labels in the loss
    dropout: float = Field(0.1, ge=0, lt=1)  # on the body's output
    unknown: float = Field(0.0, ge=0, lt=1)  # probability that a token is replaced by the unknown token, in training
    layers: MixedLayers = "last"  # of the body: mix is a weighted sum of all of them, a list of those named

    @field_validator("labels")
    @classmethod
    def _check_unique(cls, labels: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name, times in Counter(labels).items():
            if times > 1:
                raise ValueError(f"must have each label once, and has {name!r} {times} times")
        if labels == ():
            raise ValueError("must have a label, or be left out for those of the training data")
        return labels

    @field_validator("weights", mode="before")
    @classmethod
    def _check_weights(cls, weights: object) -> object:
        if weights is None or weights == "balanced":
            return weights
        values: list[Any] = list(weights.values()) if isinstance(weights, dict) else ["no number"]
        if not isinstance(weights, dict) or not all(
            type(value) in (int, float) and 0 < value <= MAX_WEIGHT for value in values
        ):
            raise ValueError(
                "must be balanced, or a weight above 0 for each label named, such as {rare: 5.0}, "
                f"and none above {MAX_WEIGHT:g}"
            )
        return {read_label(name): weight for name, weight in weights.items()}


class LabelHead(SoftTargetHead):
    """Dropout and a linear layer on an encoder's hidden states; `label_smoothing` and `weights` apply in training only.

    So does `unknown`, the word dropout of Dyer et al. 2015 (there, of words seen once): known tokens are replaced by
    the unknown token at random, so that the model learns to label a word by its context and its characters.
    """

    weights: Tensor | None
    any_tokenizer = True

    def __init__(
        self,
        body: Any,
        labels: int,
        config: LabelConfig,
        weights: Tensor | None,
        unknown: int | None = None,
        widths: int = 1,
    ) -> None:
        super().__init__(body)
        self._word_dropout = (config.unknown, unknown)
        self._layers = body.mixable_layers if config.layers == "mix" else config.layers
        self.mix = None if config.layers == "last" else ScalarMix(len(self._layers))
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(widths * body.width, labels)
        self._label_smoothing = config.label_smoothing
        self.register_buffer("weights", weights, persistent=False)

    def seen(self, tokens: Tokens) -> Tokens:
        """Return the body's input; in training, with tokens replaced by the unknown token at random."""
        probability, unknown = self._word_dropout
        if not (self.training and probability) or unknown is None:
            return tokens
        mask = torch.rand(len(tokens.ids), device=tokens.device) < probability
        return replace(tokens, ids=tokens.ids.masked_fill(mask, unknown))

    def states(self, tokens: Tokens) -> Tensor:
        """Return the hidden state of each token, (N, D): the body's last layer, or a weighted sum of several."""
        if self.mix is None:
            last: Tensor = self.body.encode(tokens)[0]
            return last
        mixed: Tensor = self.mix(self.body.encode(tokens, self._layers))
        return mixed

    def flops(self, batch: Batch) -> int:
        """Return the FLOPs of the body, and of the logits wherever there is a target."""
        num_targets = 0 if batch.targets is None else len(batch.targets)
        return super().flops(batch) + 2 * num_matrix_parameters(self.output) * num_targets

    def scores(self, states: Tensor) -> Tensor:
        """Compute the logits of the labels: (..., D) to (..., K)."""
        logits: Tensor = self.output(self.dropout(states))
        return logits

    @property
    def loss_args(self) -> tuple[float, Tensor | None]:
        """The loss's label smoothing and class weights: those of the recipe in training, none in evaluation."""
        return (self._label_smoothing, self.weights) if self.training else (0.0, None)


class LabelTask(TeacherForcing):
    """A task that predicts labels with any encoder.

    An item's arrays: its token ids, positions among them, their characters if the model reads them, labels if known.
    """

    Config: ClassVar[type[Named]] = LabelConfig
    num_token_arrays: int = 1
    orders: int = 1  # sequences of tokens in an item; two where a pair is read in both orders
    min_labels: int = 2  # fewer leave nothing to learn
    config: LabelConfig

    def configure(self, config: Any) -> None:
        """Set the configuration and its labels."""
        super().configure(config)
        self.labels = Labels(config.labels or ())

    def right(self, example: Any) -> Sequence[str]:
        """Return the gold labels of an example."""
        raise missing_method(self, "right")

    def check(self, run: Run) -> None:
        """Raise an error for a weight of no label, and for `unknown` with a tokenizer that has no unknown token."""
        tokenizer = run.tokenizer.name
        if self.config.unknown and "unk" not in resolve("tokenizer", tokenizer).special_tokens_map(run.tokenizer):
            raise ConfigError(f"task.unknown: to the tokenizer {tokenizer!r} nothing is unknown; leave it out")
        weights = self.config.weights
        for name in weights if isinstance(weights, dict) and self.config.labels else ():
            if name not in self.labels.names:
                raise ConfigError(f"task.weights: {name!r} is no label; {did_you_mean(name, self.labels)}")

    def resolve_config(self, examples: Iterable[Any]) -> LabelConfig:
        """Return the configuration with the labels filled in, and the weights if they are to be balanced."""
        config = self.config
        if config.labels is not None and config.weights != "balanced":
            return config
        rows, counts = 0, Counter[str]()
        for example in examples:
            rows += 1
            # A label that is not listed is reported with its place, or skipped, when its row is encoded.
            counts.update(name for name in self.right(example) if config.labels is None or name in config.labels)
        if config.labels is None and len(counts) < self.min_labels:
            raise DataError(
                f"data.train: its labels are {', '.join(map(repr, counts)) or 'none'}, where the least to learn from "
                f"is {plural(self.min_labels, 'different label')}; see data.columns"
            )
        weights = self.balanced(counts, rows) if config.weights == "balanced" else config.weights
        return config.model_copy(update={"labels": config.labels or Labels.collect(counts).names, "weights": weights})

    def balanced(self, counts: Mapping[str, int], rows: int) -> dict[str, float]:
        """Return label weights by inverse frequency, given how many of `rows` examples have each label."""
        return balanced_class_weights(counts)

    def weights(self) -> Tensor | None:
        """Return the label weights in the order of the labels, (K,)."""
        weights = self.config.weights
        if not isinstance(weights, dict):
            return None
        return torch.tensor([weights.get(name, 1.0) for name in self.labels])

    @property
    def num_special_tokens(self) -> int:
        """One before the text, one after it."""
        return 2

    @property
    def num_input_arrays(self) -> int:
        """The number of an item's arrays without the labels, which come last where they are known."""
        return self.orders + 1 + self.orders * self.uses_chars

    def tokens(self, items: Sequence[Item], order: int = 0) -> Tokens:
        """Return the tokens of items as one flat batch."""
        tokens = Tokens.pack([item[order] for item in items])
        return tokens.with_chars([item[self.orders + 1 + order] for item in items]) if self.uses_chars else tokens

    def lengths(self, data: PackedItems) -> np.ndarray:
        """Return the number of tokens of each item, (orders, items)."""
        firsts = data.items[:-1] + np.arange(self.orders)[:, None]
        lengths: np.ndarray = data.starts[firsts + 1] - data.starts[firsts]
        return lengths

    def known_labels(self, items: Sequence[Item]) -> list[np.ndarray] | None:
        """Return the labels of items, or None unless those of all are known."""
        return [item[-1] for item in items] if all(len(item) > self.num_input_arrays for item in items) else None

    def teacher_forced(self, items: list[Item], outputs: list[Any]) -> tuple[list[str], list[str], Batch]:
        """Return the example's batch with the predicted labels as targets."""
        labels = [np.array(indices, np.int32) for indices, _ in outputs]
        labelled = [(*item[: self.num_input_arrays], label) for item, label in zip(items, labels, strict=True)]
        names = [self.tokenizer.token(int(id)) for id in items[0][0]]
        predicted = [self.labels.names[index] for index in outputs[0][0]]
        return names, predicted, self.collate(labelled, np.random.default_rng(0))
