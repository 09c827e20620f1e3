"""Multiple choice: which of several texts fits a given text, by any encoder.

Each choice is encoded with the text as `bos text eos choice eos` and gets one logit; the softmax is over the choices of
a question (Devlin et al. 2019, section 4.4, SWAG; Radford et al. 2018, section 3.3, with their delimiter, pooled at the
last token). Questions may have different numbers of choices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from weft.config.run import Run
from weft.config.schema import Named, Section
from weft.data.batching.packed_items import PackedItems
from weft.data.truncation import TruncationPolicy
from weft.errors import ConfigError
from weft.models.base import num_matrix_parameters
from weft.nn.attention.positions import rows_of
from weft.nn.layers.segment_ops import segment_logsumexp
from weft.tasks import base
from weft.tasks.base import Answer
from weft.tasks.batch import Batch, Item
from weft.tasks.capabilities import ErrorAnalysis, TeacherForcing, WrongAnswer
from weft.tasks.head import Head, Sums
from weft.tasks.metrics import exact_match
from weft.tasks.text_pairs import TextTokens, add_special_tokens, tokenize_texts, truncate_pair
from weft.tokenization.trainable import Tokenizer
from weft.tokens import WORD_END, Tokens, char_ids


class ChoiceConfig(Named):
    """The head's regularisation, and how labels count the choices."""

    dropout: float = Field(0.1, ge=0, lt=1)  # on the body's output
    first: Literal[0, 1, "A", "a"] = 0  # what a label calls the first choice


class ChoiceExample(base.Example):
    """A text, which may be empty, its choices, and for training and evaluation the label.

    The label is the index of the right choice, from 0, as an integer or in digits, as in tables; otherwise its text.
    Subclasses count from `first`: a number, or a letter.
    """

    first: ClassVar[int | str] = 0
    text: str
    choices: list[str]
    label: int | str | None = None

    @model_validator(mode="after")
    def _check_label(self) -> "ChoiceExample":
        if len(self.choices) < 2:
            raise ValueError(f"must have choices, two at least, and has {len(self.choices)}")
        if self.label is not None and self.label_index() is None:
            last = len(self.choices) - 1
            last_name = chr(ord(self.first) + last) if isinstance(self.first, str) else self.first + last
            raise ValueError(
                f"label: must be the number of a choice, {self.first} to {last_name}, or its text, but is "
                f"{self.label!r}; task.first says how they count"
            )
        return self

    def label_index(self) -> int | None:
        """Return the index of the right choice, if it is known."""
        label = self.label
        index: int | None = None
        if isinstance(self.first, str):
            index = ord(label) - ord(self.first) if isinstance(label, str) and len(label) == 1 else None
        elif isinstance(label, int) or (isinstance(label, str) and label.isascii() and label.isdigit()):
            index = int(label) - self.first
        if index is not None and 0 <= index < len(self.choices):
            return index
        return self.choices.index(label) if isinstance(label, str) and label in self.choices else None


class ChoiceFromOne(ChoiceExample):
    """A question whose label is 1 for the first choice."""

    first = 1


class ChoiceFromCapitalA(ChoiceExample):
    """A question whose label is A for the first choice."""

    first = "A"


class ChoiceFromSmallA(ChoiceExample):
    """A question whose label is a for the first choice."""

    first = "a"


EXAMPLES = {example.first: example for example in (ChoiceExample, ChoiceFromOne, ChoiceFromCapitalA, ChoiceFromSmallA)}


class ChoiceHead(Head):
    """One logit on the body's pooled output of each choice; `Batch.positions` groups the sequences of a question."""

    def __init__(self, body: Any, config: ChoiceConfig) -> None:
        super().__init__(body)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(body.width, 1)

    def scores(self, tokens: Tokens) -> Tensor:
        """Return the logit of each sequence, (B,), in float32 or wider."""
        logits: Tensor = self.output(self.dropout(self.body.pooled_output(tokens)))[:, 0]
        return logits if logits.dtype.itemsize >= 4 else logits.float()

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Return the sum of -log p of the right choices over the questions."""
        assert batch.targets is not None
        assert batch.positions is not None
        logits = self.scores(batch.tokens)
        log_totals = segment_logsumexp(logits, rows_of(batch.positions), len(batch.positions))
        return {"questions": log_totals.sum() - logits.index_select(0, batch.targets).sum()}, None

    def flops(self, batch: Batch) -> int:
        """Return the FLOPs of the body, and of one logit a choice."""
        return super().flops(batch) + 2 * num_matrix_parameters(self.output) * len(batch.tokens)

    def predict(self, batch: Batch, options: Section) -> list[list[float]]:
        """Return the probabilities of each question's choices."""
        assert batch.positions is not None
        logits = self.scores(batch.tokens).cpu()
        return [question.softmax(0).tolist() for question in batch.positions.split(logits)]


class Choice(TeacherForcing, ErrorAnalysis):
    """Items are (bos text eos choice eos of all choices, concatenated; the length of each; where each choice begins).

    Then come the characters, if the model reads them, and the index of the right choice, if it is known.
    """

    Config: ClassVar[type[Named]] = ChoiceConfig
    Example = ChoiceExample
    metrics: tuple[str, ...] = ("accuracy",)
    metric = "accuracy"
    json_example = '{"text": "…", "choices": ["…", "…"]}'
    label_fields = ("label",)
    num_token_arrays = 1  # all choices are in one array: an item's size is the number of tokens that it adds to a batch
    config: ChoiceConfig

    def configure(self, config: Any) -> None:
        """Set how labels count the choices."""
        super().configure(config)
        self.Example = EXAMPLES[config.first]

    def check(self, run: Run) -> None:
        """Raise an error for `truncation: window`: choices are scored whole."""
        if run.data.truncation == "window":
            raise ConfigError("data.truncation: task 'choice' cannot use 'window'; try cut, drop or error")

    def texts(self, example: ChoiceExample) -> tuple[list[str], list[str]]:
        """Return all texts: they share one tokenizer."""
        return [example.text, *example.choices], []

    def encode_batch(
        self, examples: Sequence[ChoiceExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many questions with one call of the tokenizer."""
        texts = [text for example in examples for text in self.texts(example)[0]]
        encoded = iter(tokenize_texts(texts, tokenizer, self.uses_chars, limit))
        return [self._items(example, encoded, tokenizer, limit) for example in examples]

    def _items(
        self, example: ChoiceExample, encoded: Iterator[TextTokens], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[Item]:
        text, choices = next(encoded), [next(encoded) for _ in example.choices]
        fits = limit.apply(range(len(text.ids) + max(len(choice.ids) for choice in choices)), windows=False)
        if not fits:
            return []
        sequences = [add_special_tokens(*truncate_pair(text, choice, len(fits[0])), tokenizer) for choice in choices]
        arrays: list[Any] = [
            [id for tokens, _ in sequences for id in tokens.ids],
            [len(tokens.ids) for tokens, _ in sequences],
        ]
        arrays.append([second for _, second in sequences])
        if self.uses_chars:
            arrays.append(char_ids(word for tokens, _ in sequences for word in tokens.words or ()))
        if example.label is not None:
            arrays.append([example.label_index()])
        return [tuple(np.array(array, np.int32) for array in arrays)]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join the choices of all questions; targets are the indices of the right sequences, where all are known."""
        ids, sizes, second = (np.concatenate([item[array] for item in items]).astype(np.int64) for array in range(3))
        counts = [len(item[1]) for item in items]
        tokens = Tokens.flat(torch.from_numpy(ids), torch.from_numpy(sizes))
        index = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of each token in its choice
        tokens = replace(tokens, segments=torch.from_numpy((index >= np.repeat(second, sizes)).astype(np.int64)))
        if self.uses_chars:
            tokens = tokens.with_chars([item[3] for item in items])
        positions = Tokens.flat(torch.arange(len(sizes)), torch.tensor(counts))
        labels = [item[-1] for item in items] if all(len(item) > 3 + self.uses_chars for item in items) else None
        offsets = np.cumsum(counts) - counts
        targets = None if labels is None else torch.from_numpy(np.concatenate(labels).astype(np.int64) + offsets)
        return Batch(tokens, targets, {"questions": len(items)}, positions=positions)

    def max_sequence_length(self, data: PackedItems) -> int | None:
        """Return the length of the longest choice: each is a sequence of its own."""
        return max((int(data[index][1].max()) for index in range(len(data))), default=0)

    @property
    def num_special_tokens(self) -> int:
        """One before the texts, one after them, and those between."""
        return 2 + len(self.tokenizer.pair_separator)

    def head(self, model: Any) -> ChoiceHead:
        """Return the body with a linear layer for one logit."""
        return ChoiceHead(model, self.config)

    def answer(self, example: ChoiceExample, outputs: list[list[float]]) -> Answer:
        """Return the index of the most probable choice, its text, and the probability of each."""
        (probabilities,) = outputs
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        return {"choice": best, "text": example.choices[best], "scores": [round(value, 6) for value in probabilities]}

    def format_answer(self, answer: Answer) -> str:
        """Return the text of the choice."""
        return " ".join(str(answer["text"]).split())

    def preview(self, example: ChoiceExample) -> tuple[str, str]:
        """Return the text with its choices, and the right one."""
        label = example.label_index()
        return " | ".join(self.texts(example)[0]), "" if label is None else example.choices[label]

    def score(self, answers: Sequence[Answer], examples: Sequence[ChoiceExample]) -> dict[str, float]:
        """Compute the accuracy over questions."""
        gold = [example.label_index() for example in examples]
        return {"accuracy": exact_match([answer["choice"] for answer in answers], gold)}

    def errors(self, answers: Sequence[Answer], examples: Sequence[ChoiceExample]) -> list[WrongAnswer | None]:
        """Return the wrong choices as text, with their probabilities."""
        return [self._error(*pair) for pair in zip(answers, examples, strict=True)]

    def _error(self, answer: Answer, example: ChoiceExample) -> WrongAnswer | None:
        gold, choice = example.label_index(), answer["choice"]
        if gold is None or choice == gold:
            return None
        return WrongAnswer(example.choices[gold], answer["text"], answer["scores"][choice])

    def teacher_forced(self, items: list[Item], outputs: list[list[float]]) -> tuple[list[str], list[str], Batch]:
        """Return the batch of the predicted choice alone: one sequence is shown, of several."""
        ((ids, sizes, second, *rest),), (probabilities,) = items, outputs
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        start, stop = int(sizes[:best].sum()), int(sizes[: best + 1].sum())
        item: Item = ids[start:stop], sizes[best : best + 1], second[best : best + 1]
        if self.uses_chars:
            ends = [0, *(np.flatnonzero(rest[0] == WORD_END) + 1).tolist()]
            item = (*item, rest[0][ends[start] : ends[stop]])
        names = [self.tokenizer.token(int(id)) for id in item[0]]
        batch = self.collate([(*item, np.zeros(1, np.int32))], np.random.default_rng(0))
        return names, names[int(second[best]) : -1], batch
