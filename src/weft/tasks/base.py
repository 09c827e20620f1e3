"""What a task is: how a row becomes items, items a batch, a batch a loss or an answer, and answers a score.

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
from weft.data.batching.packed import PackedItems
from weft.data.batching.static_shape import StaticShape
from weft.data.corpus.format import Shards
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError, DataError, RoleError
from weft.models.base import Model, Role
from weft.tasks.metrics import Confusion
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Tokens, spell

Item = tuple[np.ndarray, ...]  # integer sequences that must share a batch; the task knows their meaning
Answer = dict[str, Any]  # JSON-ready
Sums = dict[str, Tensor]  # for each part of the loss, its sum over the batch
IGNORE_INDEX = -100  # the target of what only fills a batch up: torch's losses leave it out


class Example(BaseModel):
    """A row of data or the body of a request: strict, frozen, closed to unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@dataclass(frozen=True)
class Batch:
    """What a head reads: tokens, what they should become, and how many of each part there are."""

    tokens: Tokens
    targets: Tensor | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    source: Tokens | None = None
    at: Tokens | None = None  # the flat positions that a head reads, such as where words begin, sequence by sequence
    labels: Tensor | None = None  # (B,) what is right of each sequence, where the targets are of tokens
    unpadded: "Batch | None" = None  # of one that was filled up: what it was before, on the CPU
    rows: Sequence[int] = ()  # each sequence's number in the caller's order: what is sampled for it hangs on this alone

    @property
    def size(self) -> int:
        """The number of real tokens."""
        real = self.unpadded or self
        return len(real.tokens.ids) + (len(real.source.ids) if real.source else 0)

    def numbered(self, rows: Sequence[int]) -> "Batch":
        """Say which of the caller's sequences these are."""
        return replace(self, rows=rows)

    def to_static_shape(self, frame: StaticShape, places: int | None = None) -> "Batch":
        """Bring it to the shape of all batches; what fills it up has no target, and counts for nothing.

        `places` says how many of them are read (`at`) in every batch; None: as many as there are tokens.
        """
        rows, sides = frame.rows + frame.fillers, [self.tokens] if self.source is None else [self.source, self.tokens]
        shapes = list(zip(sides, frame.sizes, frame.longest, strict=True))
        fillers = max(-(-(size - len(side.ids)) // longest) for side, size, longest in shapes)  # as few as can be
        *source, tokens = (side.filled(size, longest, fillers, rows) for side, size, longest in shapes)
        at = None if self.at is None else self._placed(places or len(tokens.ids), rows)
        return replace(
            self,
            tokens=tokens,
            targets=_lengthened(self.targets, self._targeted(tokens, at)),
            source=source[0] if source else None,
            at=at,
            labels=_lengthened(self.labels, rows),
            unpadded=self,
        )

    def _placed(self, places: int, rows: int) -> Tokens:
        """Read so many places: what fills them up is the first token, which has no target there."""
        assert self.at is not None
        return self.at.filled(places, places, min(1, places - len(self.at.ids)), rows + 1)

    def _targeted(self, tokens: Tokens, at: Tokens | None) -> int:
        """Say how many targets there are in a frame: one for each place that is read, each token, or each sequence."""
        if at is not None:
            return len(at.ids)
        each = self.targets is not None and len(self.targets) == len(self.tokens.ids)
        return len(tokens.ids) if each else len(tokens)

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


def _lengthened(targets: Tensor | None, size: int) -> Tensor | None:
    """Bring targets (M, ...) to a size: with UNREAD or, where any number could be right, with what is not a number."""
    if targets is None:
        return None
    unread = math.nan if targets.is_floating_point() else IGNORE_INDEX
    return F.pad(targets, (0, 0) * (targets.ndim - 1) + (0, size - len(targets)), value=unread)


@dataclass(frozen=True)
class Metrics:
    """Metrics, the loss among them, and what a reader of them should know."""

    metrics: dict[str, float]
    note: str = ""


def undefined(owner: object, method: str) -> ConfigError:
    """What a user's own task or head meets where it leaves out a part."""
    return ConfigError(f"task.name: {type(owner).__name__} does not define {method}(), which weft needs of it here")


class Head(nn.Module):
    """The trained unit: a body and what the task adds to it."""

    body: Any  # a Model; what it can do, its roles have said
    frozen: tuple[nn.Module, ...] = ()  # parts that do not learn: what they make of a text is always the same

    def __init__(self, body: Model) -> None:
        super().__init__()
        self.body = body

    def train(self, mode: bool = True) -> "Head":
        """Train, or with `eval` do not; nothing is dropped out in what is frozen."""
        super().train(mode)
        for part in self.frozen:
            part.eval()
        return self

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Return a sum for each part of the loss, and what the next batch of the same streams carries on from."""
        raise undefined(self, "forward")

    def carry_parts(self, carry: Any) -> list[Tensor]:
        """Take what `forward` carries on apart, for a checkpoint; nothing where nothing is carried."""
        return []

    def carry_of(self, parts: Sequence[Tensor]) -> Any:
        """Put it together again."""
        return None

    def flops(self, batch: Batch) -> int:
        """Count the useful operations of one forward pass, from the batch's lengths: see `Model.flops`."""
        counted: int = self.body.flops(batch.tokens, batch.source)
        return counted

    def predict(self, batch: Batch, options: Section) -> list[Any]:
        """Return one output an item, for `Task.answer`."""
        raise undefined(self, "predict")

    def scored(self, options: Section) -> int:
        """Say how many numbers `predict` holds at once for each sequence, where these are many; else 0."""
        return 0


class Task:
    """The root of all tasks, weft's and users' own."""

    Config: ClassVar[type[Named]]
    Example: type[BaseModel]  # what a row has may hang on the configuration
    Options: ClassVar[type[Section]]  # what a call may set
    needs: frozenset[Role]
    metrics: tuple[str, ...] = ()  # what `score` gives, for a recipe's train.metric to be checked by
    metric: str  # what makes a model the best, unless train.metric says otherwise
    lower_is_better: bool = False
    asks: ClassVar[str] = "text"  # the field that a plain string given to `predict` fills
    form: ClassVar[str] = ""  # what such a string must be like where one field is not enough: an object in JSON
    supports_fit: ClassVar[bool] = False  # whether a model that learns by itself is left to, not trained by gradient
    label_fields: tuple[str, ...] = ()  # the fields that are optional in a question, but not to learn or judge from
    num_token_arrays: int | None = None  # how many of an item's sequences, the first ones, are tokens; None: all

    reads_itself: ClassVar[bool] = False  # whether a text is looked at as it is read, with no answer to it

    tokenizer: Tokenizer  # set once the run has one
    uses_chars: bool = (
        False  # whether the run's model reads how tokens are spelt: `collate` must then give Tokens.chars
    )

    def __init__(self, config: Named) -> None:
        self.config = config

    @property
    def num_special_tokens(self) -> int:
        """How many special tokens a sequence may have that `data.longest` does not count."""
        return 1

    @property
    def end(self) -> int | None:
        """What ends each item, where the items leave it out."""
        return None

    def needed(self, roles: frozenset[Role]) -> frozenset[Role]:
        """Say what it needs of a model that can do this much, where it can do with one thing or another."""
        return self.needs

    def check(self, run: Run) -> None:
        """Refuse what does not go together in a recipe, before any data is read."""

    def resolve_config(self, examples: Iterable[Any]) -> Named:
        """Return the section of the recipe with what it leaves to the training data, such as labels, filled in."""
        return self.config

    def read(self, text: str, place: str) -> Mapping[str, Any]:
        """Make of a plain string the fields of an example."""
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
        """Return the texts that train the tokenizer: the source side's and the target side's."""
        raise undefined(self, "texts")

    @property
    def special_token_affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Say what the body reads before a text and after it, where it reads one by itself."""
        return (self.tokenizer.specials.bos,), (self.tokenizer.specials.eos,)

    def cut(self, texts: Sequence[str]) -> list[list[int]]:
        """Cut texts into the tokens that the body reads between the marks."""
        return self.tokenizer.ids(texts)

    def spelt(self, texts: Sequence[str]) -> list[list[np.ndarray]]:
        """Spell these tokens, and the marks around them, one by one: for a model that reads how they are spelt."""
        found = [[text[a:b].strip() for a, b in self.tokenizer.encode(text).offsets] for text in texts]
        return [[spell([word]) for word in ("", *words, "")] for words in found]

    def asked(self, example: Any) -> Any:
        """Return an example as a question, without what is right: that need not be known to the model."""
        return example.model_copy(update=dict.fromkeys(self.label_fields))

    def has_question(self, example: Any) -> bool:
        """Whether an example asks for an answer, or, as a text may, is only to be read (`reads_itself`)."""
        return not self.reads_itself

    def encode(self, example: Any, tokenizer: Tokenizer, limit: TruncationPolicy) -> list[Item]:
        """Turn an example into items: none if it is dropped, several if it is cut into windows."""
        raise undefined(self, "encode")

    def encode_batch(self, examples: Sequence[Any], tokenizer: Tokenizer, limit: TruncationPolicy) -> list[list[Item]]:
        """Encode many examples; a task overrides it where the tokenizer is faster on many texts at once."""
        return [self.encode(example, tokenizer, limit) for example in examples]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join items to a batch; all randomness, such as masks, is here."""
        raise undefined(self, "collate")

    def sequence_lengths(self, data: PackedItems) -> np.ndarray | None:
        """Say how many tokens each item brings to a batch: (1, items), with a source before it (2, items).

        None, as here, is a task whose batches cannot be brought to one shape, so that nothing is compiled.
        """
        return None

    def longest_of(self, data: PackedItems) -> int | None:
        """Say how many tokens the longest sequence of the items has; None where that hangs on how they are read."""
        sides = self.sequence_lengths(data)
        return None if sides is None else int(sides.max(initial=0))

    def places(self, frame: StaticShape) -> int:
        """Say how many places a head reads (`Batch.at`) in a batch of one shape at most; here, every token."""
        return frame.sizes[-1]

    def reading(self, data: PackedItems, run: Run, world: int) -> Reading | None:
        """Say how the data is read where it is one long stream; None, as here: item by item."""
        return None

    def head(self, model: Model) -> Head:
        """Put what the task adds on top of a body."""
        raise undefined(self, "head")

    def options(self) -> Section:
        """Return what calls get that set no options of their own."""
        return self.Options()

    def answer(self, example: Any, outputs: list[Any]) -> Answer:
        """Turn the head's outputs for the items of one example into its answer."""
        raise undefined(self, "answer")

    def teacher_forced(self, items: list[Item], outputs: list[Any]) -> tuple[list[str], list[str], Batch]:
        """Return the tokens on both sides, and the batch in which the model reads the output that it chose."""
        raise RoleError(f"task: {self.config.name!r} has no output to read again")

    def stream(
        self, head: Head, example: Any, limit: TruncationPolicy, options: Section, row: int = 0
    ) -> Iterator[str]:
        """Yield the answer's text piece by piece; a sample is the one that number `row` of a list would get."""
        raise RoleError(f"task: {self.config.name!r} does not generate text, so it cannot be streamed")

    def line(self, answer: Answer) -> str:
        """Return an answer as one line of text."""
        return json.dumps(answer, ensure_ascii=False)

    def preview(self, example: Any) -> tuple[str, str]:
        """Return what an example asks and what its answer should be, for tables."""
        raise undefined(self, "shown")

    def unavailable_metric(self, metric: str, examples: Sequence[Any]) -> str:
        """Say why one of `metrics` will not be given for these examples; nothing, as here, if it will."""
        return ""

    def measure(self, head: Head, examples: Sequence[Any], limit: TruncationPolicy) -> Metrics | None:
        """Judge a head by what it makes of the examples themselves; None, as here: by its answers to them."""
        return None

    def measure_prepared(self, head: Head, data: Shards) -> Metrics | None:
        """Do the same with a prepared corpus, of which the texts are not kept; None, as here, if they are needed."""
        return None

    def score(self, answers: Sequence[Answer], examples: Sequence[Any]) -> dict[str, float]:
        """Judge answers by what the examples say they should be."""
        raise undefined(self, "score")

    def confusion(self, answers: Sequence[Answer], examples: Sequence[Any]) -> Confusion | None:
        """Count which label was given for which, where the answers are labels."""
        return None
