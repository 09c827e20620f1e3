"""Multiple choice: which of several texts goes with a text, by any model that encodes.

Each choice is read by itself with the text, `bos text eos choice eos`, and gets one score; the softmax is over the
choices of a question (Devlin et al. 2019, section 4.4, SWAG; Radford et al. 2018, section 3.3, with their delimiter and
the state of the last token as the summary). Questions may have different numbers of choices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from weft.config.schema import Named, Run, Section
from weft.data.batching.packed import PackedItems
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError
from weft.models.base import Role, matrix_numbers
from weft.nn.attention.positions import rows_of
from weft.nn.layers.segment_ops import segment_logsumexp
from weft.tasks import base
from weft.tasks.base import Answer, Batch, Item, Sums
from weft.tasks.metrics import exact_match
from weft.tasks.text_pairs import Pieces, cut_pieces, lay, trimmed
from weft.tokenization.trainable import Tokenizer
from weft.tokens import END, Tokens, spell


class ChoiceConfig(Named):
    """How the head is kept from learning by heart."""

    dropout: float = Field(0.1, ge=0, lt=1)  # on what the body gives to the head


class ChoiceExample(base.Example):
    """A text, which may be empty, what to choose from, and for training and evaluation which is right.

    That is its number, from 0, also in digits, as tables have it; or, where it is no such number, its text.
    """

    text: str
    choices: list[str]
    label: int | str | None = None

    @model_validator(mode="after")
    def _one_is_right(self) -> "ChoiceExample":
        if len(self.choices) < 2:
            raise ValueError(f"must have choices, two at least, and has {len(self.choices)}")
        if self.label is not None and self.right() is None:
            last = len(self.choices) - 1
            raise ValueError(f"label: must be the number of a choice, 0 to {last}, or its text, but is {self.label!r}")
        return self

    def right(self) -> int | None:
        """Return the number of the right choice, if it is known."""
        label = self.label
        number = int(label) if isinstance(label, str) and label.isascii() and label.isdigit() else label
        if isinstance(number, int) and 0 <= number < len(self.choices):
            return number
        return self.choices.index(label) if isinstance(label, str) and label in self.choices else None


class ChoiceHead(base.Head):
    """One score on the body's summary of each choice; `Batch.at` says which sequences are the choices of a question."""

    def __init__(self, body: Any, config: ChoiceConfig) -> None:
        super().__init__(body)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(body.width, 1)

    def scores(self, tokens: Tokens) -> Tensor:
        """Score each sequence: (B,), in float32 at least."""
        found: Tensor = self.output(self.dropout(self.body.summary(tokens)))[:, 0]
        return found if found.dtype.itemsize >= 4 else found.float()

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Sum -log p of the right choices over the questions."""
        assert batch.targets is not None
        assert batch.at is not None
        scores = self.scores(batch.tokens)
        totals = segment_logsumexp(scores, rows_of(batch.at), len(batch.at))
        return {"questions": totals.sum() - scores.index_select(0, batch.targets).sum()}, None

    def flops(self, batch: Batch) -> int:
        """Count the body's, and a score a choice."""
        return super().flops(batch) + 2 * matrix_numbers(self.output) * len(batch.tokens)

    def predict(self, batch: Batch, options: Section) -> list[list[float]]:
        """Return the probability of each choice."""
        assert batch.at is not None
        scores = self.scores(batch.tokens).cpu()
        return [one.softmax(0).tolist() for one in batch.at.split(scores)]


class Choice(base.Task):
    """Items are (bos text eos choice eos of all choices, end to end; the size of each; where each choice begins).

    Then comes their spelling, if the model asks for it, and the number of the right one, if it is known.
    """

    Config: ClassVar[type[Named]] = ChoiceConfig
    Example = ChoiceExample
    Options: ClassVar[type[Section]] = Section
    needs = frozenset({Role.ENCODER})
    metrics: tuple[str, ...] = ("accuracy",)
    metric = "accuracy"
    form = '{"text": "…", "choices": ["…", "…"]}'
    label_fields = ("label",)
    num_token_arrays = 1  # all choices are in one array: the size of an item is that of all that it brings to a batch
    config: ChoiceConfig

    def check(self, run: Run) -> None:
        """A score of windows would not be the score of a choice."""
        if run.data.too_long == "window":
            raise ConfigError("data.too_long: task 'choice' cannot use 'window'; try cut, drop or error")

    def texts(self, example: ChoiceExample) -> tuple[list[str], list[str]]:
        """All texts train the one tokenizer."""
        return [example.text, *example.choices], []

    def encode(self, example: ChoiceExample, tokenizer: Tokenizer, limit: TruncationPolicy) -> list[Item]:
        """Encode one question."""
        return self.encode_batch([example], tokenizer, limit)[0]

    def encode_batch(
        self, examples: Sequence[ChoiceExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many with one call of the tokenizer."""
        pieces = iter(cut_pieces([text for one in examples for text in self.texts(one)[0]], tokenizer, self.uses_chars))
        return [self._items(one, pieces, tokenizer, limit) for one in examples]

    def _items(
        self, example: ChoiceExample, pieces: Iterator[Pieces], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[Item]:
        text, choices = next(pieces), [next(pieces) for _ in example.choices]
        fits = limit.apply(range(len(text.ids) + max(len(choice.ids) for choice in choices)), windows=False)
        if not fits:
            return []
        laid = [lay(*trimmed(text, choice, len(fits[0])), tokenizer) for choice in choices]
        parts: list[Any] = [[id for one, _ in laid for id in one.ids], [len(one.ids) for one, _ in laid]]
        parts.append([begins for _, begins in laid])
        if self.uses_chars:
            parts.append(spell(word for one, _ in laid for word in one.words or ()))
        if example.label is not None:
            parts.append([example.right()])
        return [tuple(np.array(part, np.int32) for part in parts)]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join the choices of all questions; there are targets, the right sequences, where all are known."""
        ids, sizes, second = (np.concatenate([item[part] for item in items]).astype(np.int64) for part in range(3))
        counts = [len(item[1]) for item in items]
        tokens = Tokens.flat(torch.from_numpy(ids), torch.from_numpy(sizes))
        places = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        tokens = replace(tokens, segments=torch.from_numpy((places >= np.repeat(second, sizes)).astype(np.int64)))
        if self.uses_chars:
            tokens = tokens.spelt([item[3] for item in items])
        at = Tokens.flat(torch.arange(len(sizes)), torch.tensor(counts))
        right = [item[-1] for item in items] if all(len(item) > 3 + self.uses_chars for item in items) else None
        firsts = np.cumsum(counts) - counts
        targets = None if right is None else torch.from_numpy(np.concatenate(right).astype(np.int64) + firsts)
        return Batch(tokens, targets, {"questions": len(items)}, at=at)

    def longest_of(self, data: PackedItems) -> int | None:
        """A choice is a sequence of its own."""
        return max((int(data[number][1].max()) for number in range(len(data))), default=0)

    @property
    def num_special_tokens(self) -> int:
        """One before the texts, one after them, and what stands between."""
        return 2 + len(self.tokenizer.between)

    def head(self, model: Any) -> ChoiceHead:
        """Put a score on a body."""
        return ChoiceHead(model, self.config)

    def answer(self, example: ChoiceExample, outputs: list[list[float]]) -> Answer:
        """Give the number of the likeliest choice, its text, and the probability of each."""
        (likely,) = outputs
        chosen = max(range(len(likely)), key=likely.__getitem__)
        return {"choice": chosen, "text": example.choices[chosen], "scores": [round(one, 6) for one in likely]}

    def line(self, answer: Answer) -> str:
        """The text of the choice."""
        return " ".join(str(answer["text"]).split())

    def preview(self, example: ChoiceExample) -> tuple[str, str]:
        """The text with its choices, and the right one."""
        right = example.right()
        return " | ".join(self.texts(example)[0]), "" if right is None else example.choices[right]

    def score(self, answers: Sequence[Answer], examples: Sequence[ChoiceExample]) -> dict[str, float]:
        """The share of questions for which the right choice was given."""
        return {"accuracy": exact_match([one["choice"] for one in answers], [one.right() for one in examples])}

    def teacher_forced(self, items: list[Item], outputs: list[list[float]]) -> tuple[list[str], list[str], Batch]:
        """Read the choice that was made, as if it were the only one: of several, one is looked at."""
        ((ids, sizes, second, *rest),), (likely,) = items, outputs
        chosen = max(range(len(likely)), key=likely.__getitem__)
        start, stop = int(sizes[:chosen].sum()), int(sizes[: chosen + 1].sum())
        item: Item = ids[start:stop], sizes[chosen : chosen + 1], second[chosen : chosen + 1]
        if self.uses_chars:
            ends = [0, *(np.flatnonzero(rest[0] == END) + 1).tolist()]
            item = (*item, rest[0][ends[start] : ends[stop]])
        names = [self.tokenizer.token(int(id)) for id in item[0]]
        batch = self.collate([(*item, np.zeros(1, np.int32))], np.random.default_rng(0))
        return names, names[int(second[chosen]) : -1], batch
