"""Classification reports: precision, recall, F1 and support of each class and their averages.

They are those of `classification_report` in scikit-learn (of labels) and seqeval (of entities), with zero_division=0.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weft.tasks.metrics import ConfusionMatrix, Tally


@dataclass(frozen=True)
class ClassScores:
    """A row of a report; `support` is the number of gold items."""

    precision: float
    recall: float
    f1: float
    support: int

    @classmethod
    def of(cls, tally: Tally) -> "ClassScores":
        """Return the scores of one class, or of all together, from their counts."""
        return cls(tally.precision, tally.recall, tally.f1, tally.gold)

    @classmethod
    def mean(cls, scores: Collection["ClassScores"], weights: Collection[int], support: int) -> "ClassScores":
        """Return the weighted mean of scores; 0 where all weights are."""
        total = max(sum(weights), 1)
        precision, recall, f1 = (
            sum(getattr(score, name) * weight for score, weight in zip(scores, weights, strict=True)) / total
            for name in ("precision", "recall", "f1")
        )
        return cls(precision, recall, f1, support)


@dataclass(frozen=True)
class ClassificationReport:
    """The scores of each class, and their averages: `micro`, `macro`, `weighted`, and of label sets `samples`.

    `micro` is of the summed counts: where each text has one label, it is the accuracy, and scikit-learn prints it so.
    `macro` is the mean over classes, `weighted` the mean by support, and `samples` the mean over texts.
    """

    classes: dict[str, ClassScores]
    averages: dict[str, ClassScores]
    unit: str = "label"  # what a class is: a label, a tag or an entity

    @classmethod
    def of(
        cls, tallies: Mapping[str, Tally], unit: str = "label", samples: Iterable[Tally] = ()
    ) -> "ClassificationReport":
        """Return the report of each class's counts; `samples` are the counts of each text that may have several."""
        classes = {name: ClassScores.of(tally) for name, tally in tallies.items()}
        micro = ClassScores.of(sum(tallies.values(), Tally()))
        rows, supports = list(classes.values()), [tally.gold for tally in tallies.values()]
        averages = {
            "micro": micro,
            "macro": ClassScores.mean(rows, [1] * len(rows), micro.support),
            "weighted": ClassScores.mean(rows, supports, micro.support),
        }
        if by_text := [ClassScores.of(tally) for tally in samples]:
            averages["samples"] = ClassScores.mean(by_text, [1] * len(by_text), micro.support)
        return cls(classes, averages, unit)

    @classmethod
    def of_confusion(cls, matrix: ConfusionMatrix) -> "ClassificationReport":
        """Return the report of a confusion matrix, of the labels that are gold or predicted anywhere."""
        columns = zip(*matrix.counts, strict=True)
        tallies = {
            label: Tally(row[index], sum(column), sum(row))
            for index, (label, row, column) in enumerate(zip(matrix.labels, matrix.counts, columns, strict=True))
        }
        return cls.of(present(tallies))

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headers and rows: the classes, then the averages."""
        averages = {f"{name} avg": scores for name, scores in self.averages.items()}
        rows = [*self.classes.items(), *averages.items()]
        return [self.unit, "precision", "recall", "f1", "support"], [
            [name, f"{scores.precision:.4f}", f"{scores.recall:.4f}", f"{scores.f1:.4f}", f"{scores.support:,}"]
            for name, scores in rows
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data for JSON."""
        return asdict(self)


def present(tallies: Mapping[str, Tally]) -> dict[str, Tally]:
    """Return the counts of the classes that are gold or predicted anywhere, those that scikit-learn averages over."""
    return {name: tally for name, tally in tallies.items() if tally.predicted or tally.gold}
