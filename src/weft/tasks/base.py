"""Task: the base class of every task, from a row of data to a batch, and from a prediction to an answer and a metric.

row  -> Task.Example -> Task.encode -> Task.collate -> Head -> sums -> Trainer
HTTP -> Task.Example -> Task.encode -> Task.collate -> Head.predict -> Task.answer -> JSON

What only some tasks can do, such as to stream text, is declared by a class of `weft.tasks.capabilities`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from weft.config.json import write_json
from weft.config.run import Run
from weft.config.schema import Named, Section
from weft.data.batching.packed_items import PackedItems
from weft.data.truncation import TruncationPolicy
from weft.errors import DataError
from weft.models.base import Model, Role
from weft.tasks.batch import Batch, Item
from weft.tasks.head import Head, missing_method
from weft.tokenization.trainable import Tokenizer
from weft.tokens import char_ids

Answer = dict[str, Any]  # JSON-ready


class Example(BaseModel):
    """A row of data or the body of a request: strict, frozen, unknown fields forbidden."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TextInput:
    """How the body reads a text by itself, for embeddings: its special tokens, its tokens and their characters."""

    tokenizer: Tokenizer  # set once the run has one

    @property
    def special_token_affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens before and after a text."""
        return (self.tokenizer.specials.bos,), (self.tokenizer.specials.eos,)

    def tokenize(self, texts: Sequence[str], needed: int | None = None) -> list[list[int]]:
        """Return the ids of each text, without the special tokens; with `needed`, as `Tokenizer.ids` does."""
        return self.tokenizer.ids(texts, needed)

    def char_ids(self, texts: Sequence[str], needed: int | None = None) -> list[list[np.ndarray]]:
        """Return the characters of each token, special tokens included: for a model that reads characters."""
        surfaces = [[text[a:b].strip() for a, b in self.tokenizer.encode(text, needed).offsets] for text in texts]
        return [[char_ids([token]) for token in ("", *tokens, "")] for tokens in surfaces]


class Task(TextInput):
    """The base class of all tasks, weft's and users' own."""

    Config: ClassVar[type[Named]] = Named
    Example: type[BaseModel]  # a row's schema; it may depend on the configuration
    Options: ClassVar[type[Section]] = Section  # the options of a call
    required_roles: frozenset[Role] = frozenset({Role.ENCODER})
    metrics: tuple[str, ...] = ()  # the names that `score` returns; a recipe's train.metric must be one of them
    metric: str  # the metric that selects the best model, unless train.metric names another
    lower_is_better: bool = False
    text_field: ClassVar[str] = "text"  # the field that a plain string given to `predict` fills
    json_example: ClassVar[str] = ""  # of the object that a string must be, where one field is not enough
    json_fields: ClassVar[frozenset[str]] = frozenset()  # a string that is a JSON object of exactly these is parsed
    label_fields: tuple[str, ...] = ()  # fields that are optional for prediction, required for training and evaluation
    label_details: tuple[str, ...] = ()  # fields that say more of the labels, and are nothing without them
    stratify_by: str | None = None  # the field of the one label, of which held-out data has its share
    required_optional_fields: tuple[str, ...] = ()  # fields that are optional in a row, but not for this model
    num_token_arrays: int | None = None  # how many of an item's arrays, the first ones, are token ids; None: all
    position_limit: int | None = None  # tokens in a sequence that pretrained weights have positions for; None: no limit
    uses_chars: bool = False  # whether the model reads the characters of tokens: `collate` must then set Tokens.chars

    def __init__(self, config: Named) -> None:
        self.configure(config)

    @property
    def num_special_tokens(self) -> int:
        """The maximum number of special tokens in a sequence; `data.max_length` does not count them."""
        return 1

    @property
    def input_fields(self) -> tuple[str, ...]:
        """The fields that a prediction reads, in the order in which a tuple gives them."""
        return tuple(name for name in self.Example.model_fields if name not in self.label_fields)

    def configure(self, config: Named) -> None:
        """Set the configuration and what depends on it; called again once `resolve_config` has completed it."""
        self.config = config

    def roles_for(self, roles: frozenset[Role]) -> frozenset[Role]:
        """Return the roles that are required of a model which has `roles`, where there are alternatives."""
        return self.required_roles

    def check(self, run: Run) -> None:
        """Raise an error for settings of a recipe that contradict each other, before any data is read."""

    def resolve_config(self, examples: Iterable[Any]) -> Named:
        """Return the recipe's task section with what depends on the training data, such as labels, filled in."""
        return self.config

    def parse_text(self, text: str, place: str) -> Mapping[str, Any]:
        """Parse a plain string into the fields of an example: its text, or JSON where the task takes that."""
        is_json = bool(self.json_example) or (bool(self.json_fields) and text.lstrip().startswith("{"))
        try:
            value = json.loads(text) if is_json else None
        except (ValueError, RecursionError):
            value = None
        if self.json_example and not isinstance(value, dict):
            raise DataError(
                f"{place}: must be JSON, since it has several fields: {self.json_example}; but is {text[:60]!r}"
            )
        return value if isinstance(value, dict) and self._takes(value) else {self.text_field: text}

    def _takes(self, value: Mapping[str, Any]) -> bool:
        """Return whether a JSON object is an example, and not a text that looks like one."""
        return bool(self.json_example) or value.keys() == self.json_fields

    def parse_sequence(self, values: Sequence[Any], place: str) -> Mapping[str, Any]:
        """Return a tuple or list of values as the fields of an example without labels, in their order."""
        fields = self.input_fields
        if len(values) > len(fields):
            raise DataError(
                f"{place}: a tuple holds {', '.join(fields)}, but got {len(values)} values: {str(values)[:60]}; "
                "give the fields of an example by name, as a mapping"
            )
        return dict(zip(fields, values, strict=False))

    def texts(self, example: Any) -> tuple[Iterable[str], Iterable[str]]:
        """Return the texts that train the tokenizer, of the source side and of the target side: the text field."""
        return [getattr(example, self.text_field)], []

    def without_labels(self, example: Any) -> Any:
        """Return an example without its labels, which may be unknown to the model."""
        return example.model_copy(update=dict.fromkeys(self.label_fields))

    def question_fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row without the fields of labels, right or wrong: what a question consists of."""
        return {name: value for name, value in row.items() if name not in (*self.label_fields, *self.label_details)}

    def unavailable_answer(self, example: Any) -> str:
        """Return why an example, valid as a row, cannot be asked of this model; "" if it can."""
        missing = [name for name in self.required_optional_fields if getattr(example, name) is None]
        if not missing:
            return ""
        fields = ", ".join(f'"{name}": …' for name in (self.text_field, *self.required_optional_fields))
        return (
            f"{missing[0]}: required, as every example in training had one, but not given; an example is {{{fields}}}"
        )

    def encode(self, example: Any, tokenizer: Tokenizer, limit: TruncationPolicy) -> list[Item]:
        """Turn an example into items: none if it is dropped, several if it is split into windows."""
        return self.encode_batch([example], tokenizer, limit)[0]

    def encode_batch(self, examples: Sequence[Any], tokenizer: Tokenizer, limit: TruncationPolicy) -> list[list[Item]]:
        """Encode many examples. A task defines this, where the tokenizer is faster on many texts, or `encode`."""
        if type(self).encode is Task.encode:
            raise missing_method(self, "encode")
        return [self.encode(example, tokenizer, limit) for example in examples]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join items into a batch; all randomness, such as masking, is here."""
        raise missing_method(self, "collate")

    def max_sequence_length(self, data: PackedItems) -> int | None:
        """Return the length of the longest sequence in the items; None, the default, where it is not known."""
        return None

    def head(self, model: Model) -> Head:
        """Return the body with the task's layers on top."""
        raise missing_method(self, "head")

    def options(self) -> Section:
        """Return the default options of a call."""
        return self.Options()

    def answer(self, example: Any, outputs: list[Any]) -> Answer:
        """Turn the head's outputs for the items of one example into its answer."""
        raise missing_method(self, "answer")

    def format_answer(self, answer: Answer) -> str:
        """Return an answer as one line of text."""
        return write_json(answer)

    def format_alternatives(self, answer: Answer) -> str:
        """Return an answer as one line of text with the alternatives that the options of a call ask for."""
        return self.format_answer(answer)

    def preview(self, example: Any) -> tuple[str, str]:
        """Return an example's input and its expected answer as text, for tables."""
        labels = (getattr(example, name) for name in self.label_fields)
        return " | ".join(self.texts(example)[0]), ", ".join(str(label) for label in labels if label is not None)

    def score(self, answers: Sequence[Answer], examples: Sequence[Any]) -> dict[str, float]:
        """Compute the metrics of answers against the examples' labels."""
        raise missing_method(self, "score")

    def prefers_lower(self, metric: str) -> bool:
        """Return whether a model is the better, the lower one of its metrics is."""
        return metric == "loss" or self.lower_is_better

    def loss_metrics(self, loss: float) -> dict[str, float]:
        """Return the metrics that follow from the mean loss, such as perplexity; by default there are none."""
        return {}

    def unavailable_metric(self, metric: str, examples: Sequence[Any]) -> str:
        """Return why one of `metrics` cannot be computed on these examples; "", the default, if it can."""
        return ""


def format_candidates(answer: Answer) -> str:
    """Return the texts of all candidates of an answer on one line, with tabs between them."""
    candidates = answer.get("candidates", [answer])
    return "\t".join(" ".join(str(candidate["text"]).split()) for candidate in candidates)
