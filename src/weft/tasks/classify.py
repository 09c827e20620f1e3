"""Classification: one label, or several, for a text or a pair of texts, by any model that encodes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from weft.config import Named, Run, Section
from weft.data.labels import Label
from weft.data.limits import Limit
from weft.errors import ConfigError
from weft.nn.losses import binary_cross_entropy_sum, cross_entropy_sum
from weft.tasks import base
from weft.tasks.base import Answer, Batch, Item, Sums
from weft.tasks.labelling import Labelling, LabellingConfig, LabellingHead
from weft.tasks.metrics import Confusion, Tally, exact_match, macro_f1, mean_f1, tally_labels
from weft.text.tokenizer import Tokenizer
from weft.tokens import spell

HALF = 0.5  # the threshold at which a label is as likely as not

T = TypeVar("T")
Piece = tuple[int, str]  # a token, and how it is spelt
Output = tuple[list[int], list[float]]  # the numbers of the labels chosen, and the probability of every label


class ClassifyConfig(LabellingConfig):
    """`multiple`: a text may have several labels or none; each that is likelier than `threshold` is given."""

    multiple: bool = False
    threshold: float = Field(HALF, gt=0, lt=1)

    @model_validator(mode="after")
    def _of_several(self) -> "ClassifyConfig":
        if self.threshold != HALF and not self.multiple:
            raise ValueError(
                f"task.threshold chooses among several labels a text, but is {self.threshold} for one; "
                "set task.multiple: true, or leave it out"
            )
        return self


class Threshold(Section):
    """What a call may set where a text may have several labels."""

    threshold: float = Field(HALF, gt=0, lt=1)


def _cells(value: object) -> object:
    """Read several labels from one cell of a table: those between commas."""
    if not isinstance(value, str):
        return value
    return [name.strip() for name in value.split(",") if name.strip()]


class ClassifyExample(base.Example):
    """A text or a pair of them, and for training and evaluation what is right: `label`, or with `multiple` `labels`."""

    text: str
    label: Label | None = None
    pair: str | None = None
    labels: Annotated[list[Label] | None, BeforeValidator(_cells)] = None


class ClassifyHead(LabellingHead):
    """Scores on the body's summary: a softmax over the labels, or with `multiple` a sigmoid for each."""

    def __init__(
        self, body: Any, labels: int, config: ClassifyConfig, weights: Tensor | None, unknown: int | None = None
    ) -> None:
        super().__init__(body, labels, config, weights, unknown)
        self.multiple = config.multiple

    def forward(self, batch: Batch, carry: Any = None) -> tuple[Sums, Any]:
        """Sum -log p of what is right over the texts."""
        assert batch.targets is not None
        loss = binary_cross_entropy_sum if self.multiple else cross_entropy_sum
        states = self.summary(self.seen(batch.tokens))
        return {"texts": loss(self.scores(states), batch.targets, *self.bent)}, None

    def predict(self, batch: Batch, options: Section) -> list[Output]:
        """Choose the likeliest label, or those that are likely enough."""
        scores = self.scores(self.summary(batch.tokens)).float()
        if isinstance(options, Threshold):
            likely = scores.sigmoid()
            chosen = [row.nonzero().flatten().tolist() for row in (likely > options.threshold).cpu()]
        else:
            likely = scores.softmax(-1)
            chosen = likely.argmax(-1, keepdim=True).tolist()
        return list(zip(chosen, likely.tolist(), strict=True))


class Classify(Labelling):
    """Items are (bos text eos, or bos text eos pair eos; where the pair begins, if any; spelling; labels, if known)."""

    Config: ClassVar[type[Named]] = ClassifyConfig
    Example = ClassifyExample
    metrics: tuple[str, ...] = ("accuracy", "macro_f1")
    metric = "accuracy"
    taught = ("label",)
    config: ClassifyConfig

    def __init__(self, config: ClassifyConfig) -> None:
        super().__init__(config)
        if config.multiple:
            self.metrics, self.metric = ("micro_f1", "macro_f1", "exact_match"), "micro_f1"
            self.taught, self.fewest = ("labels",), 1

    def check(self, run: Run) -> None:
        """A label of windows would not be the label of the text."""
        super().check(run)
        if run.data.too_long == "window":
            raise ConfigError("data.too_long: task 'classify' cannot use 'window'; try cut, drop or error")

    def right(self, example: ClassifyExample) -> list[str]:
        """The one label, or all."""
        if self.config.multiple:
            return list(dict.fromkeys(example.labels or ()))
        return [] if example.label is None else [example.label]

    def balanced(self, counts: Mapping[str, int], rows: int) -> dict[str, float]:
        """Where a text may have several labels, each is weighed against its own absence."""
        if not self.config.multiple:
            return super().balanced(counts, rows)
        return {label: max(rows - count, 1) / count for label, count in counts.items()}

    def texts(self, example: ClassifyExample) -> tuple[list[str], list[str]]:
        """Both texts train the one tokenizer."""
        return [example.text, *([] if example.pair is None else [example.pair])], []

    def encode(self, example: ClassifyExample, tokenizer: Tokenizer, limit: Limit) -> list[Item]:
        """Encode one text or pair."""
        return self.encode_batch([example], tokenizer, limit)[0]

    def encode_batch(self, examples: Sequence[ClassifyExample], tokenizer: Tokenizer, limit: Limit) -> list[list[Item]]:
        """Encode many with one call of the tokenizer a side."""
        texts = self._cut([example.text for example in examples], tokenizer)
        pairs = self._cut([example.pair or "" for example in examples], tokenizer)
        return [self._items(*one, tokenizer, limit) for one in zip(examples, texts, pairs, strict=True)]

    def _cut(self, texts: Sequence[str], tokenizer: Tokenizer) -> list[list[Piece]]:
        """Cut texts into tokens, each with how it is spelt there, if the model asks for it."""
        if not self.spells:
            return [[(id, "") for id in ids] for ids in tokenizer.ids(texts)]
        return [
            [(id, text[start:end].strip()) for id, (start, end) in zip(cut.ids, cut.offsets, strict=True)]
            for text, cut in zip(texts, map(tokenizer.encode, texts), strict=True)
        ]

    def _items(
        self, example: ClassifyExample, text: list[Piece], pair: list[Piece], tokenizer: Tokenizer, limit: Limit
    ) -> list[Item]:
        fits = limit.apply(range(len(text) + len(pair)), windows=False)
        if not fits:
            return []
        text, pair = _trimmed(text, pair, len(fits[0]))
        bos, eos = (tokenizer.specials.bos, ""), (tokenizer.specials.eos, "")
        pieces, second = [bos, *text, eos], []
        if example.pair is not None:
            second = [len(pieces)]
            pieces += [*pair, eos]
        item: Item = np.array([id for id, _ in pieces], np.int32), np.array(second, np.int32)
        if self.spells:
            item = (*item, spell(word for _, word in pieces))
        if getattr(example, self.taught[0]) is None:
            return [item]
        return [(*item, np.array([self.labels.number(name) for name in self.right(example)], np.int32))]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join texts; there are segments where there are pairs, and targets where all labels are known."""
        tokens, known = self.tokens(items), self.known(items)
        if any(len(item[1]) for item in items):
            tokens = replace(
                tokens, segments=torch.from_numpy(np.concatenate([_segments(*item[:2]) for item in items]))
            )
        return Batch(tokens, None if known is None else self._targets(known), {"texts": len(items)})

    def _targets(self, labels: Sequence[np.ndarray]) -> Tensor:
        if not self.config.multiple:
            return torch.from_numpy(np.concatenate(labels).astype(np.int64))  # (B,)
        known = torch.zeros(len(labels), len(self.labels))  # (B, K)
        for row, numbers in zip(known, labels, strict=True):
            row[numbers.tolist()] = 1
        return known

    def head(self, model: Any) -> ClassifyHead:
        """Put the scores of the labels on a body."""
        return ClassifyHead(model, len(self.labels), self.config, self.weights(), self.tokenizer.specials.unk)

    def options(self) -> Section:
        """The recipe's threshold, where there is one to set."""
        return Threshold(threshold=self.config.threshold) if self.config.multiple else Section()

    def answer(self, example: ClassifyExample, outputs: list[Output]) -> Answer:
        """Name the labels chosen, and give the probability of each, the likeliest first."""
        ((chosen, likely),) = outputs
        order = sorted(range(len(likely)), key=lambda number: -likely[number])
        scores = {self.labels.names[number]: round(likely[number], 6) for number in order}
        if self.config.multiple:
            return {"labels": [name for name in scores if self.labels.number(name) in chosen], "scores": scores}
        return {"label": self.labels.names[chosen[0]], "scores": scores}

    def line(self, answer: Answer) -> str:
        """The label, or several between commas."""
        names = answer["labels"] if self.config.multiple else [answer["label"]]
        return " ".join(", ".join(names).splitlines())

    def shown(self, example: ClassifyExample) -> tuple[str, str]:
        """The text or pair, and what is right."""
        return " | ".join(self.texts(example)[0]), ", ".join(self.right(example))

    def score(self, answers: Sequence[Answer], examples: Sequence[ClassifyExample]) -> dict[str, float]:
        """Accuracy and F1 of labels, each as scikit-learn has it."""
        if not self.config.multiple:
            given, right = [answer["label"] for answer in answers], [example.label or "" for example in examples]
            return {"accuracy": exact_match(given, right), "macro_f1": macro_f1(given, right)}
        sets, targets = [set(answer["labels"]) for answer in answers], [set(self.right(one)) for one in examples]
        tallies = tally_labels(sets, targets, self.labels).values()
        return {
            "micro_f1": sum(tallies, Tally()).f1,
            "macro_f1": mean_f1(tallies),
            "exact_match": exact_match(sets, targets),
        }

    def confusion(self, answers: Sequence[Answer], examples: Sequence[ClassifyExample]) -> Confusion | None:
        """Count which label was taken for which; several a text have no such table."""
        if self.config.multiple:
            return None
        return Confusion.of(
            self.labels.names,
            [(example.label or "", answer["label"]) for example, answer in zip(examples, answers, strict=True)],
        )


def _trimmed(text: list[T], pair: list[T], room: int) -> tuple[list[T], list[T]]:
    """Cut both to `room` in all, the longer one first (Devlin et al. 2019 do it so)."""
    keep = max(room - len(pair), min(len(text), (room + 1) // 2))
    return text[:keep], pair[: room - len(text[:keep])]


def _segments(ids: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Number the tokens of the text 0, and those of the pair 1."""
    found = np.zeros(len(ids), np.int64)
    for start in second.tolist():
        found[start:] = 1
    return found
