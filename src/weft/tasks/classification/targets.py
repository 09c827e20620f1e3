"""What can be said of a text: one label, several, or a number; and how that is learnt, answered and judged."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, BeforeValidator, Field
from torch import Tensor

from weft.config.schema import Section
from weft.data.labels import Label, Labels, balanced
from weft.nn.layers.losses import binary_cross_entropy_sum, cross_entropy_sum, squared_error_sum
from weft.tasks import base
from weft.tasks.base import Answer
from weft.tasks.metrics import (
    Confusion,
    Tally,
    exact_match,
    macro_f1,
    matthews,
    mean_f1,
    pearson,
    spearman,
    tally_labels,
)

HALF = 0.5  # the threshold at which a label is as likely as not

Output = tuple[list[int], list[float]]  # the numbers of the labels chosen, and what each label has; or none, and one


class Threshold(Section):
    """What a call may set where a text may have several labels."""

    threshold: float = Field(HALF, gt=0, lt=1)


def _cells(value: object) -> object:
    """Read several labels from one cell of a table: those between commas."""
    if not isinstance(value, str):
        return value
    return [name.strip() for name in value.split(",") if name.strip()]


def read_number(value: object) -> float:
    """Read a number, from a cell of a table too."""
    told = "must be a number, since task.regression is true"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(told)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(told) from None
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{told}, and a finite one")
    return number


class ClassifyExample(base.Example):
    """A text or a pair of them, and for training and evaluation what is right: `label`, or with `multiple` `labels`."""

    text: str
    label: Label | None = None
    pair: str | None = None
    labels: Annotated[list[Label] | None, BeforeValidator(_cells)] = None


class RatedExample(base.Example):
    """A text or a pair of them, and for training and evaluation its number."""

    text: str
    label: Annotated[float, BeforeValidator(read_number)] | None = None
    pair: str | None = None


class SingleLabel:
    """One label a text, by a softmax over all of them; the other kinds say what is different with them."""

    Example: type[BaseModel] = ClassifyExample
    label_fields: str = "label"
    fewest: int = 2  # labels, or there is nothing to tell apart
    metrics: tuple[str, ...] = ("accuracy", "macro_f1", "matthews", "f1")
    metric: str = "accuracy"
    labelled: bool = True

    def metrics_of(self, labels: int) -> tuple[str, ...]:
        """Name what `score` gives; while the labels are not known (0), all that it might."""
        return self.metrics if labels in (0, 2) else self.metrics[:-1]

    def right(self, example: Any) -> list[str]:
        """Return the labels that an example says are right."""
        return [] if example.label is None else [example.label]

    def weighed(self, counts: Mapping[str, int], rows: int) -> dict[str, float]:
        """Weigh labels by how rare they are, given how often each is right in how many examples."""
        return balanced(counts)

    def kept(self, example: Any, labels: Labels) -> np.ndarray:
        """Return what is right as an item holds it: integers."""
        return np.array([labels.number(name) for name in self.right(example)], np.int32)

    def chosen(self, output: Output) -> np.ndarray:
        """Return what was answered as an item holds it."""
        return np.array(output[0], np.int32)

    def targets(self, kept: Sequence[np.ndarray], labels: int) -> Tensor:
        """Join what is right of each text to the loss's targets, a row a text."""
        return torch.from_numpy(np.concatenate(kept).astype(np.int64))  # (B,)

    def loss(self, scores: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
        """Sum over the texts how wrong the scores (B, K) are."""
        return cross_entropy_sum(scores, targets, smoothing, weights)

    def outputs(self, scores: Tensor, options: Section) -> list[Output]:
        """Choose by the scores."""
        likely = scores.softmax(-1)
        return list(zip(likely.argmax(-1, keepdim=True).tolist(), likely.tolist(), strict=True))

    def answer(self, output: Output, labels: Labels) -> Answer:
        """Name the label chosen, and give the probability of each, the likeliest first."""
        return {"label": labels.names[output[0][0]], "scores": _scores(output, labels)}

    def names(self, answer: Answer) -> list[str]:
        """What was answered, in words."""
        return [answer["label"]]

    def score(self, answers: Sequence[Answer], examples: Sequence[Any], labels: Labels) -> dict[str, float]:
        """Judge labels, by each metric as scikit-learn has it; F1 is that of the second of two."""
        given, right = [answer["label"] for answer in answers], [example.label or "" for example in examples]
        found = {
            "accuracy": exact_match(given, right),
            "macro_f1": macro_f1(given, right),
            "matthews": matthews(given, right),
        }
        if len(labels) == 2:
            found["f1"] = tally_labels([[one] for one in given], [[one] for one in right], labels)[labels.names[1]].f1
        return found

    def confusion(self, answers: Sequence[Answer], examples: Sequence[Any], labels: Labels) -> Confusion | None:
        """Count which label was taken for which."""
        pairs = zip(examples, answers, strict=True)
        return Confusion.of(labels.names, [(example.label or "", answer["label"]) for example, answer in pairs])


class MultiLabel(SingleLabel):
    """Any number of labels a text, each a question of its own: those likelier than a threshold are given."""

    label_fields = "labels"
    fewest = 1
    metrics = ("micro_f1", "macro_f1", "exact_match")
    metric = "micro_f1"

    def metrics_of(self, labels: int) -> tuple[str, ...]:
        """The same for any number of labels."""
        return self.metrics

    def right(self, example: Any) -> list[str]:
        """All labels, each once."""
        return list(dict.fromkeys(example.labels or ()))

    def weighed(self, counts: Mapping[str, int], rows: int) -> dict[str, float]:
        """Weigh each label against its own absence."""
        return {label: max(rows - count, 1) / count for label, count in counts.items()}

    def targets(self, kept: Sequence[np.ndarray], labels: int) -> Tensor:
        """Say of each label whether it is right: (B, K)."""
        known = torch.zeros(len(kept), labels)
        for row, numbers in zip(known, kept, strict=True):
            row[numbers.tolist()] = 1
        return known

    def loss(self, scores: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
        """Sum over the texts and their questions."""
        return binary_cross_entropy_sum(scores, targets, smoothing, weights)

    def outputs(self, scores: Tensor, options: Section) -> list[Output]:
        """Choose those that are likely enough."""
        assert isinstance(options, Threshold)
        likely = scores.sigmoid()
        chosen = [row.nonzero().flatten().tolist() for row in (likely > options.threshold).cpu()]
        return list(zip(chosen, likely.tolist(), strict=True))

    def answer(self, output: Output, labels: Labels) -> Answer:
        """Name the labels chosen, and give the probability of each, the likeliest first."""
        scores = _scores(output, labels)
        return {"labels": [name for name in scores if labels.number(name) in output[0]], "scores": scores}

    def names(self, answer: Answer) -> list[str]:
        """The labels."""
        return list(answer["labels"])

    def score(self, answers: Sequence[Answer], examples: Sequence[Any], labels: Labels) -> dict[str, float]:
        """Judge sets of labels, by each metric as scikit-learn has it."""
        given, right = [set(answer["labels"]) for answer in answers], [set(self.right(one)) for one in examples]
        tallies = tally_labels(given, right, labels).values()
        return {
            "micro_f1": sum(tallies, Tally()).f1,
            "macro_f1": mean_f1(tallies),
            "exact_match": exact_match(given, right),
        }

    def confusion(self, answers: Sequence[Answer], examples: Sequence[Any], labels: Labels) -> Confusion | None:
        """Several a text have no such table."""
        return None


class Regression(SingleLabel):
    """A number a text, such as how alike two sentences are (STS-B): one output, and the squared error."""

    Example = RatedExample
    metrics = ("spearman", "pearson")
    metric = "spearman"
    labelled = False

    def metrics_of(self, labels: int) -> tuple[str, ...]:
        """There are no labels."""
        return self.metrics

    def right(self, example: Any) -> list[str]:
        """The number, in words."""
        return [] if example.label is None else [f"{example.label:g}"]

    def kept(self, example: Any, labels: Labels) -> np.ndarray:
        """An item holds integers: the bits of the number."""
        return np.array([example.label], np.float32).view(np.int32)

    def chosen(self, output: Output) -> np.ndarray:
        """The bits of the number answered."""
        return np.array(output[1], np.float32).view(np.int32)

    def targets(self, kept: Sequence[np.ndarray], labels: int) -> Tensor:
        """The numbers, (B,)."""
        return torch.from_numpy(np.concatenate(kept).astype(np.int32, copy=False).view(np.float32).copy())

    def loss(self, scores: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
        """Sum the squared error over the texts."""
        return squared_error_sum(scores[:, 0], targets)

    def outputs(self, scores: Tensor, options: Section) -> list[Output]:
        """The number is the score."""
        return [([], row) for row in scores.tolist()]

    def answer(self, output: Output, labels: Labels) -> Answer:
        """Give the number."""
        return {"score": round(output[1][0], 6)}

    def names(self, answer: Answer) -> list[str]:
        """The number."""
        return [json.dumps(answer["score"])]

    def score(self, answers: Sequence[Answer], examples: Sequence[Any], labels: Labels) -> dict[str, float]:
        """Correlate the numbers, as scipy does."""
        given, right = [answer["score"] for answer in answers], [example.label for example in examples]
        return {"spearman": spearman(given, right), "pearson": pearson(given, right)}

    def confusion(self, answers: Sequence[Answer], examples: Sequence[Any], labels: Labels) -> Confusion | None:
        """Numbers have no such table."""
        return None


def _scores(output: Output, labels: Labels) -> dict[str, float]:
    likely = output[1]
    order = sorted(range(len(likely)), key=lambda number: -likely[number])
    return {labels.names[number]: round(likely[number], 6) for number in order}
