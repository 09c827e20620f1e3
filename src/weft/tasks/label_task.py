"""What `classify` and `tag` share: labels, taken from the training data where the recipe lists none, and their weights.

The weighted loss is Σ_i w[y_i] · -log p(y_i) over the number of texts or words, not over the sum of their weights: so a
label weighs the same whatever else is in its batch, and "balanced" weights, whose mean is 1, keep the loss in its size.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field, field_validator
from torch import Tensor, nn

from weft.config.schema import Named, Run, Section
from weft.data.batching.packed import PackedItems
from weft.data.labels import Label, Labels, balanced, read_label
from weft.data.readers.lines import count
from weft.errors import ConfigError, DataError, did_you_mean
from weft.models.base import Role, matrix_numbers
from weft.nn.attention.positions import rows_of
from weft.nn.layers.scalar_mix import ScalarMix
from weft.registry import resolve
from weft.tasks.base import Batch, Head, Item, Task, undefined
from weft.tokens import Tokens

HEAVIEST = 1e12  # what a label may weigh: more than balanced weights of any data, and well within float32


def _some_layers(layers: object) -> object:
    known = isinstance(layers, list | tuple) and layers and all(type(one) is int for one in layers)
    if not known and layers not in ("last", "mix"):
        raise ValueError("must be last, mix, or a list of layers to mix, such as [1, 2]")
    return layers


Layers = Annotated[Literal["last", "mix"] | tuple[int, ...], BeforeValidator(_some_layers)]


class LabellingConfig(Named):
    """The labels, what each weighs in training, and how the head is kept from learning by heart."""

    labels: tuple[Label, ...] | None = None  # None: those of the training data, in alphabetical order
    weights: Literal["balanced"] | dict[Label, float] | None = None  # of labels in the loss; one not named weighs 1
    smoothing: float = Field(0.0, ge=0, lt=1)
    dropout: float = Field(0.1, ge=0, lt=1)  # on what the body gives to the head
    unknown: float = Field(0.0, ge=0, lt=1)  # share of tokens that are read as the unknown one, in training
    layers: Layers = "last"  # of the body: mix is all of them, a list those named

    @field_validator("labels")
    @classmethod
    def _each_once(cls, labels: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name, times in Counter(labels).items():
            if times > 1:
                raise ValueError(f"must have each label once, and has {name!r} {times} times")
        if labels == ():
            raise ValueError("must have a label, or be left out for those of the training data")
        return labels

    @field_validator("weights", mode="before")
    @classmethod
    def _above_zero(cls, weights: object) -> object:
        if weights is None or weights == "balanced":
            return weights
        each: list[Any] = list(weights.values()) if isinstance(weights, dict) else ["no number"]
        if not isinstance(weights, dict) or not all(type(one) in (int, float) and 0 < one <= HEAVIEST for one in each):
            raise ValueError(
                "must be balanced, or a weight above 0 for each label named, such as {rare: 5.0}, "
                f"and none above {HEAVIEST:g}"
            )
        return {read_label(name): weight for name, weight in weights.items()}


class LabellingHead(Head):
    """Dropout and one linear layer on what an encoder gives; `smoothing` and `weights` are for training alone.

    So is `unknown`: what a word that is not in the vocabulary stands for is to be told from those around it and from
    its spelling, which is learnt by taking a known one for unknown now and then (Dyer et al. 2015: those seen once).
    """

    weights: Tensor | None

    def __init__(
        self, body: Any, labels: int, config: LabellingConfig, weights: Tensor | None, unknown: int | None = None
    ) -> None:
        super().__init__(body)
        self._unknown = (config.unknown, unknown)
        self._layers = body.mixable_layers if config.layers == "mix" else config.layers
        self.mix = None if config.layers == "last" else ScalarMix(len(self._layers))
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(body.width, labels)
        self._smoothing = config.smoothing
        self.register_buffer("weights", weights, persistent=False)

    def seen(self, tokens: Tokens) -> Tokens:
        """Return what the body is to read; in training, now and then a token unknown."""
        share, unknown = self._unknown
        if not (self.training and share) or unknown is None:
            return tokens
        chosen = torch.rand(len(tokens.ids), device=tokens.device) < share
        return replace(tokens, ids=tokens.ids.masked_fill(chosen, unknown))

    def states(self, tokens: Tokens) -> Tensor:
        """Return what the body makes of each token, (N, D): its last layer, or a mixture of several."""
        if self.mix is None:
            last: Tensor = self.body.encode(tokens)[0]
            return last
        mixed: Tensor = self.mix(self.body.encode(tokens, self._layers))
        return mixed

    def summary(self, tokens: Tokens) -> Tensor:
        """Return what the body makes of each text, (B, D): its own summary, or of a mixture the mean of the tokens."""
        if self.mix is None:
            own: Tensor = self.body.summary(tokens)
            return own
        states = self.states(tokens)
        sums = states.new_zeros(len(tokens), states.shape[1]).index_add(0, rows_of(tokens), states)
        return sums / tokens.starts.diff().clamp(min=1)[:, None]

    def flops(self, batch: Batch) -> int:
        """Count the body's, and the scores of the labels wherever there is one to learn."""
        taught = 0 if batch.targets is None else len(batch.targets)
        return super().flops(batch) + 2 * matrix_numbers(self.output) * taught

    def scores(self, states: Tensor) -> Tensor:
        """Score the labels: (..., D) to (..., K)."""
        found: Tensor = self.output(self.dropout(states))
        return found

    @property
    def bent(self) -> tuple[float, Tensor | None]:
        """The smoothing and the weights of the loss; none where it is only measured."""
        return (self._smoothing, self.weights) if self.training else (0.0, None)


class Labelling(Task):
    """A task whose answers are labels, by any model that encodes.

    An item's arrays are its tokens, places among them, their spelling if the model asks for it, the labels if known.
    """

    Config: ClassVar[type[Named]] = LabellingConfig
    Options: ClassVar[type[Section]] = Section
    needs = frozenset({Role.ENCODER})
    num_token_arrays: int = 1
    orders: int = 1  # sequences of tokens in an item: the same text in another order is another
    fewest: int = 2  # labels, or there is nothing to tell apart
    fields: ClassVar[frozenset[str]] = frozenset()  # an object in JSON that has just these is no plain text
    config: LabellingConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.labels = Labels(config.labels or ())

    def read(self, text: str, place: str) -> Mapping[str, Any]:
        """Take a string for a text, unless it is JSON with the fields of what is more than a text."""
        try:
            value = json.loads(text) if text.lstrip().startswith("{") else None
        except (ValueError, RecursionError):
            value = None
        return value if isinstance(value, dict) and value.keys() == self.fields else super().read(text, place)

    def right(self, example: Any) -> Sequence[str]:
        """Return the labels that an example says are right."""
        raise undefined(self, "right")

    def check(self, run: Run) -> None:
        """A weight must be a label's, and to read words as unknown there must be an unknown token."""
        named = run.tokenizer.name
        if self.config.unknown and "unk" not in resolve("tokenizer", named).spell(run.tokenizer):
            raise ConfigError(f"task.unknown: to the tokenizer {named!r} nothing is unknown; leave it out")
        weights = self.config.weights
        for name in weights if isinstance(weights, dict) and self.config.labels else ():
            if name not in self.labels.names:
                raise ConfigError(f"task.weights: {name!r} is no label; {did_you_mean(name, self.labels)}")

    def resolve_config(self, examples: Iterable[Any]) -> LabellingConfig:
        """Fill in the labels, and the weights where they are to be balanced."""
        config = self.config
        if config.labels is not None and config.weights != "balanced":
            return config
        rows, counts = 0, Counter[str]()
        for example in examples:
            rows += 1
            # One that is not listed is reported with its place, or skipped, when its row is encoded.
            counts.update(name for name in self.right(example) if config.labels is None or name in config.labels)
        if config.labels is None and len(counts) < self.fewest:
            raise DataError(
                f"data.train: its labels are {', '.join(map(repr, counts)) or 'none'}, where the least to learn from "
                f"is {count(self.fewest, 'different label')}; see data.columns"
            )
        weights = self.balanced(counts, rows) if config.weights == "balanced" else config.weights
        return config.model_copy(update={"labels": config.labels or Labels.collect(counts).names, "weights": weights})

    def balanced(self, counts: Mapping[str, int], rows: int) -> dict[str, float]:
        """Weigh labels by how rare they are, given how often each is right in how many examples."""
        return balanced(counts)

    def weights(self) -> Tensor | None:
        """Return the weights in the order of the labels."""
        named = self.config.weights
        if not isinstance(named, dict):
            return None
        return torch.tensor([named.get(name, 1.0) for name in self.labels])

    @property
    def num_special_tokens(self) -> int:
        """One before the text, one after it."""
        return 2

    @property
    def question(self) -> int:
        """How many of an item's arrays are the question; one more where the labels are known."""
        return self.orders + 1 + self.orders * self.uses_chars

    def tokens(self, items: Sequence[Item], order: int = 0) -> Tokens:
        """Lay the tokens of items end to end."""
        tokens = Tokens.pack([item[order] for item in items])
        return tokens.spelt([item[self.orders + 1 + order] for item in items]) if self.uses_chars else tokens

    def lengths(self, data: PackedItems) -> np.ndarray:
        """Count the tokens of items, (orders, items)."""
        firsts = data.items[:-1] + np.arange(self.orders)[:, None]
        found: np.ndarray = data.starts[firsts + 1] - data.starts[firsts]
        return found

    def known(self, items: Sequence[Item]) -> list[np.ndarray] | None:
        """Return the labels of items, where those of all are known."""
        return [item[-1] for item in items] if all(len(item) > self.question for item in items) else None

    def teacher_forced(self, items: list[Item], outputs: list[Any]) -> tuple[list[str], list[str], Batch]:
        """Read an example with the labels chosen for it, as if they were right."""
        labels = [np.array(numbers, np.int32) for numbers, _ in outputs]
        chosen = [(*item[: self.question], own) for item, own in zip(items, labels, strict=True)]
        names = [self.tokenizer.token(int(id)) for id in items[0][0]]
        given = [self.labels.names[number] for number in outputs[0][0]]
        return names, given, self.collate(chosen, np.random.default_rng(0))
