"""Metrics of labels and numbers in their standard definitions, between 0 and 1; of texts: `weft.tasks.text_metrics`.

A correlation is between -1 and 1, and 0 where it is undefined, since one side is constant.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_CONFUSED = 1000  # labels of a confusion matrix, which has their square of counts

Entity = tuple[str, int, int]  # its type, its first word and the word after its last


@dataclass(frozen=True)
class ConfusionMatrix:
    """The confusion matrix: counts[i][j] is how often label i was predicted as label j."""

    labels: tuple[str, ...]
    counts: list[list[int]]

    @classmethod
    def of(cls, labels: Sequence[str], pairs: Iterable[tuple[str, str]]) -> "ConfusionMatrix":
        """Count (gold, predicted) pairs; a prediction that is not a label is left out.

        Of over `MAX_CONFUSED` labels, there are those that occur most often alone: the matrix has a row for each.
        """
        counts = Counter(pairs)
        if len(labels) > MAX_CONFUSED:
            frequent = Counter[str]()
            for pair, count in counts.items():
                frequent.update(dict.fromkeys(pair, count))
            kept = {label for label, _ in sorted(frequent.items(), key=lambda item: (-item[1], item[0]))[:MAX_CONFUSED]}
            labels = [label for label in labels if label in kept]
        return cls(tuple(labels), [[counts[gold, predicted] for predicted in labels] for gold in labels])

    def mistakes(self) -> list[tuple[str, str, int]]:
        """Return the errors as (gold, predicted, count), the most frequent first."""
        errors = [
            (gold, predicted, count)
            for gold, row in zip(self.labels, self.counts, strict=True)
            for predicted, count in zip(self.labels, row, strict=True)
            if count and gold != predicted
        ]
        return sorted(errors, key=lambda error: -error[2])

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data for JSON."""
        return {"labels": list(self.labels), "counts": self.counts}


@dataclass(frozen=True)
class Tally:
    """Counts for precision, recall and F1: true positives, predictions, and gold items."""

    correct: int = 0
    predicted: int = 0
    gold: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.correct + other.correct, self.predicted + other.predicted, self.gold + other.gold)

    @property
    def precision(self) -> float:
        """The share of predictions that are correct; 0 where there are none."""
        return self.correct / max(self.predicted, 1)

    @property
    def recall(self) -> float:
        """The share of gold items that were predicted; 0 where there are none."""
        return self.correct / max(self.gold, 1)

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall; 0 where there are neither predictions nor gold items."""
        return 2 * self.correct / max(self.predicted + self.gold, 1)


def metric_title(name: str, positive_label: str | None) -> str:
    """Return a metric's name for tables; of a binary F1, with the label that it is of: `f1 (yes)`."""
    return name if positive_label is None or name != "f1" else f"{name} ({positive_label})"


def exact_match(texts: Sequence[object], targets: Sequence[object]) -> float:
    """Return the share of texts that equal their target exactly; for labels, the accuracy."""
    return sum(text == target for text, target in zip(texts, targets, strict=True)) / max(len(targets), 1)


def tally_labels(
    answers: Sequence[Collection[str]], targets: Sequence[Collection[str]], labels: Iterable[str]
) -> dict[str, Tally]:
    """Return the counts of each label over texts that may have several labels."""
    correct, predicted, gold = Counter[str](), Counter[str](), Counter[str]()
    for answer, target in zip(map(set, answers), map(set, targets), strict=True):
        correct.update(answer & target)
        predicted.update(answer)
        gold.update(target)
    return {label: Tally(correct[label], predicted[label], gold[label]) for label in labels}


def macro_f1(answers: Sequence[str], targets: Sequence[str]) -> float:
    """Return the mean F1 over the labels that are predicted or gold anywhere, as in scikit-learn."""
    labels = sorted({*answers, *targets})  # the order of a set, and so of the sum, would differ between processes
    tallies = tally_labels([[answer] for answer in answers], [[target] for target in targets], labels)
    return mean_f1(tallies.values())


def mean_f1(tallies: Collection[Tally]) -> float:
    """Return the mean of the labels' F1, rare and frequent labels weighted equally."""
    return sum(tally.f1 for tally in tallies) / max(len(tallies), 1)


def matthews(answers: Sequence[str], targets: Sequence[str]) -> float:
    """Return the correlation of predictions with labels (Matthews 1975; Gorodkin 2004 for more than two labels).

    A constant prediction scores 0, however frequent that label is.
    """
    size, gold, predicted = len(targets), Counter(targets), Counter(answers)
    correct = sum(answer == target for answer, target in zip(answers, targets, strict=True))
    covariance = size * correct - sum(gold[label] * predicted[label] for label in gold)
    variance = math.prod(size * size - sum(count * count for count in side.values()) for side in (gold, predicted))
    return covariance / math.sqrt(variance) if variance else 0.0


def pearson(answers: Sequence[float], targets: Sequence[float]) -> float:
    """Return the linear correlation of predictions with targets (Pearson 1895)."""
    sides = [np.asarray(side, np.float64) for side in (answers, targets)]
    if any(len(side) < 2 or np.ptp(side) == 0 for side in sides):
        return 0.0
    predicted, gold = ((centred := side - side.mean()) / np.linalg.norm(centred) for side in sides)
    return float(np.clip(predicted @ gold, -1, 1))


def spearman(answers: Sequence[float], targets: Sequence[float]) -> float:
    """Return the rank correlation of predictions with targets (Spearman 1904); equal values share their mean rank."""
    return pearson(_ranks(answers), _ranks(targets))


def _ranks(values: Sequence[float]) -> Any:
    _, inverse, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]


def tally_entities(answers: Sequence[Sequence[str]], targets: Sequence[Sequence[str]]) -> dict[str, Tally]:
    """Return the counts of entities in tagged sentences by type, in alphabetical order.

    An entity is correct if its type, first and last word are.
    """
    correct, predicted, gold = Counter[str](), Counter[str](), Counter[str]()
    for answer, target in zip(answers, targets, strict=True):
        predicted_spans, gold_spans = set(entities(answer)), set(entities(target))
        correct_spans = predicted_spans & gold_spans
        for counts, spans in ((correct, correct_spans), (predicted, predicted_spans), (gold, gold_spans)):
            counts.update(type_name for type_name, _, _ in spans)
    return {name: Tally(correct[name], predicted[name], gold[name]) for name in sorted({*predicted, *gold})}


def entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of BIO, IOB, IOE or IOBES tags, as seqeval does by default, and conlleval before it.

    An entity begins after O, where the type changes, at B and S, and after E and S; so any sequence of tags is valid.
    """
    spans: list[Entity] = []
    previous, previous_type = "O", ""
    for index, tag in enumerate(tags):
        prefix, type_name = tag[:1] or "O", tag[1:].split("-", 1)[-1] or "_"
        if prefix != "O":
            continues = previous not in "OES" and prefix not in "BS" and type_name == previous_type
            first = spans.pop()[1] if continues else index
            spans.append((type_name, first, index + 1))
        previous, previous_type = prefix, type_name
    return spans
