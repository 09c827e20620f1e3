"""What a task is: how a row becomes items, items a batch, a batch a loss or an answer, and answers a score.

row  -> Task.Example -> Task.encode -> Task.collate -> Head -> sums -> Trainer
HTTP -> Task.Example -> Task.encode -> Task.collate -> Head.predict -> Task.answer -> JSON
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.nn import functional as F

from weft.config import Named, Run, Section
from weft.data.frame import Frame
from weft.data.limits import Limit
from weft.data.packed import Packed
from weft.data.shards import Shards
from weft.data.streams import Reading
from weft.errors import ConfigError, RoleError
from weft.models.base import Model, Role
from weft.tasks.metrics import Confusion
from weft.text.tokenizer import Tokenizer
from weft.tokens import Tokens

Item = tuple[np.ndarray, ...]  # integer sequences that must share a batch; the task knows their meaning
Answer = dict[str, Any]  # JSON-ready
Sums = dict[str, Tensor]  # for each part of the loss, its sum over the batch
UNREAD = -100  # the target of what only fills a batch up: torch's losses leave it out


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
    bare: "Batch | None" = None  # of one that was filled up: what it was before, on the CPU
    rows: Sequence[int] = ()  # each sequence's number in the caller's order: what is sampled for it hangs on this alone

    @property
    def size(self) -> int:
        """The number of real tokens."""
        real = self.bare or self
        return len(real.tokens.ids) + (len(real.source.ids) if real.source else 0)

    def numbered(self, rows: Sequence[int]) -> "Batch":
        """Say which of the caller's sequences these are."""
        return replace(self, rows=rows)

    def framed(self, frame: Frame) -> "Batch":
        """Bring it to the shape of all batches; what fills it up has no target, and counts for nothing."""
        rows, sides = frame.rows + frame.fillers, [self.tokens] if self.source is None else [self.source, self.tokens]
        shapes = list(zip(sides, frame.sizes, frame.longest, strict=True))
        fillers = max(-(-(size - len(side.ids)) // longest) for side, size, longest in shapes)  # as few as can be
        *source, tokens = (side.filled(size, longest, fillers, rows) for side, size, longest in shapes)
        targets = self.targets
        if targets is not None:
            targets = F.pad(targets, (0, len(tokens.ids) - len(self.tokens.ids)), value=UNREAD)
        return replace(self, tokens=tokens, targets=targets, source=source[0] if source else None, bare=self)

    def to(self, device: torch.device | str) -> "Batch":
        """Move to a device."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            targets=None if self.targets is None else self.targets.to(device, non_blocking=True),
            source=None if self.source is None else self.source.to(device),
            at=None if self.at is None else self.at.to(device),
        )

    def pin_memory(self) -> "Batch":
        """Copy into page-locked memory; the loader's workers call it for a GPU."""
        return replace(
            self,
            tokens=self.tokens.pin_memory(),
            targets=None if self.targets is None else self.targets.pin_memory(),
            source=None if self.source is None else self.source.pin_memory(),
            at=None if self.at is None else self.at.pin_memory(),
        )


@dataclass(frozen=True)
class Measured:
    """Metrics, the loss among them, and what a reader of them should know."""

    metrics: dict[str, float]
    note: str = ""


def undefined(owner: object, method: str) -> ConfigError:
    """What a user's own task or head meets where it leaves out a part."""
    return ConfigError(f"task.name: {type(owner).__name__} does not define {method}(), which weft needs of it here")


class Head(nn.Module):
    """The trained unit: a body and what the task adds to it."""

    body: Any  # a Model; what it can do, its roles have said

    def __init__(self, body: Model) -> None:
        super().__init__()
        self.body = body

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Return a sum for each part of the loss, and what the next batch of the same streams carries on from."""
        raise undefined(self, "forward")

    def carry_parts(self, carry: Any) -> list[Tensor]:
        """Take what `forward` carries on apart, for a checkpoint; nothing where nothing is carried."""
        return []

    def carry_of(self, parts: Sequence[Tensor]) -> Any:
        """Put it together again."""
        return None

    def operations(self, batch: Batch) -> int:
        """Count the useful operations of one forward pass, from the batch's lengths: see `Model.operations`."""
        counted: int = self.body.operations(batch.tokens, batch.source)
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
    Example: ClassVar[type[BaseModel]]
    Options: ClassVar[type[Section]]  # what a call may set
    needs: frozenset[Role]
    metrics: tuple[str, ...] = ()  # what `score` gives, for a recipe's train.metric to be checked by
    metric: str  # what makes a model the best, unless train.metric says otherwise
    lower_is_better: ClassVar[bool] = False
    asks: ClassVar[str] = "text"  # the field that a plain string given to `predict` fills
    fits: ClassVar[bool] = False  # whether a model that learns by itself is left to, not trained by gradient
    taught: tuple[str, ...] = ()  # the fields that are optional in a question, but not to learn or judge from
    counted: ClassVar[int | None] = None  # how many of an item's sequences, the first ones, are tokens; None: all

    reads_itself: ClassVar[bool] = False  # whether a text is looked at as it is read, with no answer to it

    tokenizer: Tokenizer  # set once the run has one
    spells: bool = False  # whether the run's model reads how tokens are spelt: `collate` must then give Tokens.chars

    def __init__(self, config: Named) -> None:
        self.config = config

    @property
    def end(self) -> int | None:
        """What ends each item, where the items leave it out."""
        return None

    def needed(self, roles: frozenset[Role]) -> frozenset[Role]:
        """Say what it needs of a model that can do this much, where it can do with one thing or another."""
        return self.needs

    def check(self, run: Run) -> None:
        """Refuse what does not go together in a recipe, before any data is read."""

    def settled(self, examples: Iterable[Any]) -> Named:
        """Return the section of the recipe with what it leaves to the training data, such as labels, filled in."""
        return self.config

    def texts(self, example: Any) -> tuple[Iterable[str], Iterable[str]]:
        """Return the texts that train the tokenizer: the source side's and the target side's."""
        raise undefined(self, "texts")

    def encode(self, example: Any, tokenizer: Tokenizer, limit: Limit) -> list[Item]:
        """Turn an example into items: none if it is dropped, several if it is cut into windows."""
        raise undefined(self, "encode")

    def encode_batch(self, examples: Sequence[Any], tokenizer: Tokenizer, limit: Limit) -> list[list[Item]]:
        """Encode many examples; a task overrides it where the tokenizer is faster on many texts at once."""
        return [self.encode(example, tokenizer, limit) for example in examples]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join items to a batch; all randomness, such as masks, is here."""
        raise undefined(self, "collate")

    def sides(self, data: Packed) -> np.ndarray | None:
        """Say how many tokens each item brings to a batch: (1, items), with a source before it (2, items).

        None, as here, is a task whose batches cannot be brought to one shape, so that nothing is compiled.
        """
        return None

    def reading(self, data: Packed, run: Run, world: int) -> Reading | None:
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

    def reread(self, items: list[Item], outputs: list[Any]) -> tuple[list[str], list[str], Batch]:
        """Return the tokens on both sides, and the batch in which the model reads the output that it chose."""
        raise RoleError(f"task: {self.config.name!r} has no output to read again")

    def stream(self, head: Head, example: Any, limit: Limit, options: Section, row: int = 0) -> Iterator[str]:
        """Yield the answer's text piece by piece; a sample is the one that number `row` of a list would get."""
        raise RoleError(f"task: {self.config.name!r} does not generate text, so it cannot be streamed")

    def line(self, answer: Answer) -> str:
        """Return an answer as one line of text."""
        return json.dumps(answer, ensure_ascii=False)

    def shown(self, example: Any) -> tuple[str, str]:
        """Return what an example asks and what its answer should be, for tables."""
        raise undefined(self, "shown")

    def withheld(self, metric: str, examples: Sequence[Any]) -> str:
        """Say why one of `metrics` will not be given for these examples; nothing, as here, if it will."""
        return ""

    def measure(self, head: Head, examples: Sequence[Any], limit: Limit) -> Measured | None:
        """Judge a head by what it makes of the examples themselves; None, as here: by its answers to them."""
        return None

    def measure_prepared(self, head: Head, data: Shards) -> Measured | None:
        """Do the same with a prepared corpus, of which the texts are not kept; None, as here, if they are needed."""
        return None

    def score(self, answers: Sequence[Answer], examples: Sequence[Any]) -> dict[str, float]:
        """Judge answers by what the examples say they should be."""
        raise undefined(self, "score")

    def confusion(self, answers: Sequence[Answer], examples: Sequence[Any]) -> Confusion | None:
        """Count which label was given for which, where the answers are labels."""
        return None
