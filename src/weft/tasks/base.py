"""Task, Head and Batch: the base classes of every task, from a row of data to a loss, a prediction and a metric.

row  -> Task.Example -> Task.encode -> Task.collate -> Head -> sums -> Trainer
HTTP -> Task.Example -> Task.encode -> Task.collate -> Head.predict -> Task.answer -> JSON
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.nn import functional as F

from weft.config.schema import Named, Run, Section
from weft.data.batching.lm_stream import Reading
from weft.data.batching.packed_items import PackedItems
from weft.data.batching.static_shape import StaticShape
from weft.data.corpus.format import Shards
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError, RoleError
from weft.models.base import Model, Role
from weft.tasks.metrics import ConfusionMatrix
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Tokens, spell

Item = tuple[np.ndarray, ...]  # integer arrays of one sequence or more; the task defines their meaning
Answer = dict[str, Any]  # JSON-ready
Sums = dict[str, Tensor]  # for each part of the loss, its sum over the batch
IGNORE_INDEX = -100  # the target of padding, which torch's losses ignore


class Example(BaseModel):
    """A row of data or the body of a request: strict, frozen, unknown fields forbidden."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@dataclass(frozen=True)
class Batch:
    """The input of a head: tokens, targets, and the number of terms in each part of the loss."""

    tokens: Tokens
    targets: Tensor | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    source: Tokens | None = None
    at: Tokens | None = None  # flat positions that a head reads, such as the first token of each word, by sequence
    labels: Tensor | None = None  # (B,) a label for each sequence, where the targets are of tokens
    unpadded: "Batch | None" = None  # of a batch padded to a static shape: the batch before padding, on the CPU
    rows: Sequence[int] = ()  # each sequence's index in the caller's order; it alone seeds what is sampled for it

    @property
    def size(self) -> int:
        """The number of tokens, without padding."""
        unpadded = self.unpadded or self
        return len(unpadded.tokens.ids) + (len(unpadded.source.ids) if unpadded.source else 0)

    def numbered(self, rows: Sequence[int]) -> "Batch":
        """Return the batch with the index that each sequence has in the caller's order."""
        return replace(self, rows=rows)

    def to_static_shape(self, frame: StaticShape, places: int | None = None) -> "Batch":
        """Pad to the shape of all batches; padding has no target and adds nothing to the loss.

        `places` is the number of positions in `at`, the same in every batch; None: as many as there are tokens.
        """
        rows, sides = frame.rows + frame.fillers, [self.tokens] if self.source is None else [self.source, self.tokens]
        shapes = list(zip(sides, frame.sizes, frame.longest, strict=True))
        fillers = max(-(-(size - len(side.ids)) // longest) for side, size, longest in shapes)  # as few as possible
        *source, tokens = (side.filled(size, longest, fillers, rows) for side, size, longest in shapes)
        at = None if self.at is None else self._pad_positions(places or len(tokens.ids), rows)
        return replace(
            self,
            tokens=tokens,
            targets=_pad_targets(self.targets, self._num_targets(tokens, at)),
            source=source[0] if source else None,
            at=at,
            labels=_pad_targets(self.labels, rows),
            unpadded=self,
        )

    def _pad_positions(self, size: int, rows: int) -> Tokens:
        """Pad `at` to `size` positions; padding points at the first token, and has no target there."""
        assert self.at is not None
        return self.at.filled(size, size, min(1, size - len(self.at.ids)), rows + 1)

    def _num_targets(self, tokens: Tokens, at: Tokens | None) -> int:
        """Return the number of targets in a static shape: one a position of `at`, a token, or a sequence."""
        if at is not None:
            return len(at.ids)
        per_token = self.targets is not None and len(self.targets) == len(self.tokens.ids)
        return len(tokens.ids) if per_token else len(tokens)

    def to(self, device: torch.device | str) -> "Batch":
        """Move to a device."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            targets=None if self.targets is None else self.targets.to(device, non_blocking=True),
            source=None if self.source is None else self.source.to(device),
            at=None if self.at is None else self.at.to(device),
            labels=None if self.labels is None else self.labels.to(device, non_blocking=True),
        )

    def pin_memory(self) -> "Batch":
        """Copy into page-locked memory; the loader's workers call it for a GPU."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            targets=None if self.targets is None else self.targets.pin_memory(),
            source=None if self.source is None else self.source.pin_memory(),
            at=None if self.at is None else self.at.pin_memory(),
            labels=None if self.labels is None else self.labels.pin_memory(),
        )


def _pad_targets(targets: Tensor | None, size: int) -> Tensor | None:
    """Pad targets (M, ...) to (size, ...): integers with IGNORE_INDEX, floats with NaN, which losses ignore too."""
    if targets is None:
        return None
    padding = math.nan if targets.is_floating_point() else IGNORE_INDEX
    return F.pad(targets, (0, 0) * (targets.ndim - 1) + (0, size - len(targets)), value=padding)


@dataclass(frozen=True)
class Metrics:
    """Metrics, the loss among them, and a note on how to read them."""

    metrics: dict[str, float]
    note: str = ""


def missing_method(owner: object, method: str) -> ConfigError:
    """Return the error for a user's own task or head that does not define a method."""
    return ConfigError(f"task.name: {type(owner).__name__} does not define {method}(), which weft needs of it here")


class Head(nn.Module):
    """The module that is trained: a body (a Model) and the layers that the task adds to it."""

    body: Any  # a Model; its roles declare its methods
    frozen: tuple[nn.Module, ...] = ()  # submodules that are not trained, and stay in eval mode

    def __init__(self, body: Model) -> None:
        super().__init__()
        self.body = body

    def train(self, mode: bool = True) -> "Head":
        """Set training mode, or evaluation mode with `mode=False`; frozen parts stay in evaluation mode: no dropout."""
        super().train(mode)
        for module in self.frozen:
            module.eval()
        return self

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Return the sum of each part of the loss, and the state from which the same streams' next batch starts."""
        raise missing_method(self, "forward")

    def carry_parts(self, carry: Any) -> list[Tensor]:
        """Return the tensors of the state that `forward` carries over, for a checkpoint; [] for a stateless head."""
        return []

    def carry_of(self, parts: Sequence[Tensor]) -> Any:
        """Return the carried state that `carry_parts` took apart."""
        return None

    def flops(self, batch: Batch) -> int:
        """Return the FLOPs of one forward pass over the tokens, without padding: see `Model.flops`."""
        flops: int = self.body.flops(batch.tokens, batch.source)
        return flops

    def predict(self, batch: Batch, options: Section) -> list[Any]:
        """Return one output for each item, for `Task.answer`."""
        raise missing_method(self, "predict")

    def scored(self, options: Section) -> int:
        """Return how many scores `predict` holds in memory for each sequence, such as logits; 0 where they are few."""
        return 0


class Task:
    """The base class of all tasks, weft's and users' own."""

    Config: ClassVar[type[Named]]
    Example: type[BaseModel]  # a row's schema; it may depend on the configuration
    Options: ClassVar[type[Section]]  # the options of a call
    needs: frozenset[Role]
    metrics: tuple[str, ...] = ()  # the names that `score` returns; a recipe's train.metric must be one of them
    metric: str  # the metric that selects the best model, unless train.metric names another
    lower_is_better: bool = False
    asks: ClassVar[str] = "text"  # the field that a plain string given to `predict` fills
    form: ClassVar[str] = ""  # an example of the JSON object that a string must be, where one field is not enough
    supports_fit: ClassVar[bool] = False  # whether a model with its own fit() is trained by that, without gradients
    label_fields: tuple[str, ...] = ()  # fields that are optional for prediction, required for training and evaluation
    num_token_arrays: int | None = None  # how many of an item's arrays, the first ones, are token ids; None: all

    reads_itself: ClassVar[bool] = False  # whether a text is analysed as given, without a prediction for it

    tokenizer: Tokenizer  # set once the run has one
    uses_chars: bool = False  # whether the model reads the characters of tokens: `collate` must then set Tokens.chars

    def __init__(self, config: Named) -> None:
        self.config = config

    @property
    def num_special_tokens(self) -> int:
        """The maximum number of special tokens in a sequence; `data.max_length` does not count them."""
        return 1

    @property
    def end(self) -> int | None:
        """The token that ends each item, where items are stored without it."""
        return None

    def needed(self, roles: frozenset[Role]) -> frozenset[Role]:
        """Return the roles that the task needs of a model with these roles, where alternatives are possible."""
        return self.needs

    def check(self, run: Run) -> None:
        """Raise an error for settings of a recipe that contradict each other, before any data is read."""

    def resolve_config(self, examples: Iterable[Any]) -> Named:
        """Return the recipe's task section with what depends on the training data, such as labels, filled in."""
        return self.config

    def read(self, text: str, place: str) -> Mapping[str, Any]:
        """Parse a plain string into the fields of an example."""
        if not self.form:
            return {self.asks: text}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise DataError(f"{place}: must be JSON, since it has several fields: {self.form}; but is {text[:60]!r}")
        return value

    def texts(self, example: Any) -> tuple[Iterable[str], Iterable[str]]:
        """Return the texts that train the tokenizer: those of the source side and those of the target side."""
        raise missing_method(self, "texts")

    @property
    def special_token_affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens before and after a text that the body encodes by itself."""
        return (self.tokenizer.specials.bos,), (self.tokenizer.specials.eos,)

    def cut(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts into the ids that the body reads between the special tokens."""
        return self.tokenizer.ids(texts)

    def spelt(self, texts: Sequence[str]) -> list[list[np.ndarray]]:
        """Return the characters of each token, special tokens included: for a model that reads characters."""
        surfaces = [[text[a:b].strip() for a, b in self.tokenizer.encode(text).offsets] for text in texts]
        return [[spell([token]) for token in ("", *tokens, "")] for tokens in surfaces]

    def without_labels(self, example: Any) -> Any:
        """Return an example without its labels, which may be unknown to the model."""
        return example.model_copy(update=dict.fromkeys(self.label_fields))

    def has_question(self, example: Any) -> bool:
        """Return whether an example asks for a prediction; a text may be only analysed (`reads_itself`)."""
        return not self.reads_itself

    def encode(self, example: Any, tokenizer: Tokenizer, limit: TruncationPolicy) -> list[Item]:
        """Turn an example into items: none if it is dropped, several if it is split into windows."""
        raise missing_method(self, "encode")

    def encode_batch(self, examples: Sequence[Any], tokenizer: Tokenizer, limit: TruncationPolicy) -> list[list[Item]]:
        """Encode many examples; a task overrides it where the tokenizer is faster on many texts at once."""
        return [self.encode(example, tokenizer, limit) for example in examples]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join items into a batch; all randomness, such as masking, is here."""
        raise missing_method(self, "collate")

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """Return the number of tokens that each item adds to a batch: (1, items), or (2, items) with the source first.

        None, the default, is for a task whose batches have no static shape, so that nothing is compiled.
        """
        return None

    def longest_of(self, data: PackedItems) -> int | None:
        """Return the length of the longest sequence in the items; None where it depends on how they are read."""
        lengths = self.sequence_lengths(data)
        return None if lengths is None else int(lengths.max(initial=0))

    def places(self, frame: StaticShape) -> int:
        """Return the maximum number of positions in `Batch.at` for a static shape; by default, every token."""
        return frame.sizes[-1]

    def reading(self, data: PackedItems, run: Run, world: int) -> Reading | None:
        """Return how the data is read as one continuous stream; None, the default: item by item."""
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

    def teacher_forced(self, items: list[Item], outputs: list[Any]) -> tuple[list[str], list[str], Batch]:
        """Return the tokens on both sides, and the batch that feeds the predicted output back to the model."""
        raise RoleError(f"task: {self.config.name!r} has no output to read again")

    def stream(
        self, head: Head, example: Any, limit: TruncationPolicy, options: Section, row: int = 0
    ) -> Iterator[str]:
        """Yield the answer's text in increments; sampling is seeded as for example number `row` of a list."""
        raise RoleError(f"task: {self.config.name!r} does not generate text, so it cannot be streamed")

    def line(self, answer: Answer) -> str:
        """Return an answer as one line of text."""
        return json.dumps(answer, ensure_ascii=False)

    def preview(self, example: Any) -> tuple[str, str]:
        """Return an example's input and its expected answer as text, for tables."""
        raise missing_method(self, "preview")

    def unavailable_metric(self, metric: str, examples: Sequence[Any]) -> str:
        """Return why one of `metrics` cannot be computed on these examples; "", the default, if it can."""
        return ""

    def measure(self, head: Head, examples: Sequence[Any], limit: TruncationPolicy) -> Metrics | None:
        """Evaluate a head on the examples directly, as by perplexity; None, the default: by its answers to them."""
        return None

    def measure_prepared(self, head: Head, data: Shards) -> Metrics | None:
        """Evaluate a head on a prepared corpus, which has no texts; None, the default, if texts are needed."""
        return None

    def score(self, answers: Sequence[Answer], examples: Sequence[Any]) -> dict[str, float]:
        """Compute the metrics of answers against the examples' labels."""
        raise missing_method(self, "score")

    def confusion(self, answers: Sequence[Answer], examples: Sequence[Any]) -> ConfusionMatrix | None:
        """Return the confusion matrix, where the answers are labels."""
        return None
