"""Scores that people can cite. Shares are between 0 and 1; BLEU is between 0 and 100, as sacreBLEU has it.

A correlation is between -1 and 1, and 0 where there is none to speak of, since one side is always the same.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Entity = tuple[str, int, int]  # its type, its first word and the word after its last


@dataclass(frozen=True)
class Confusion:
    """How often each label (a row) was answered with each (a column)."""

    labels: tuple[str, ...]
    counts: list[list[int]]

    @classmethod
    def of(cls, labels: Sequence[str], pairs: Iterable[tuple[str, str]]) -> "Confusion":
        """Count pairs of what is right and what was answered; an answer that is no label is left out."""
        seen = Counter(pairs)
        return cls(tuple(labels), [[seen[right, given] for given in labels] for right in labels])

    def mistakes(self) -> list[tuple[str, str, int]]:
        """List what is right, what was answered in its place and how often, the most frequent first."""
        found = [
            (right, given, times)
            for right, row in zip(self.labels, self.counts, strict=True)
            for given, times in zip(self.labels, row, strict=True)
            if times and right != given
        ]
        return sorted(found, key=lambda mistake: -mistake[2])

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data for JSON."""
        return {"labels": list(self.labels), "counts": self.counts}


@dataclass(frozen=True)
class Tally:
    """How much was right of what was answered and of what was there to find."""

    right: int = 0
    given: int = 0
    there: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.right + other.right, self.given + other.given, self.there + other.there)

    @property
    def precision(self) -> float:
        """The share of what was answered that is right; 0 where nothing was."""
        return self.right / max(self.given, 1)

    @property
    def recall(self) -> float:
        """The share of what was there that was found; 0 where nothing was."""
        return self.right / max(self.there, 1)

    @property
    def f1(self) -> float:
        """The harmonic mean of both; 0 where nothing was answered and nothing was there."""
        return 2 * self.right / max(self.given + self.there, 1)


def exact_match(texts: Sequence[object], targets: Sequence[object]) -> float:
    """The share of texts that are their target, letter for letter; of labels, it is the accuracy."""
    return sum(text == target for text, target in zip(texts, targets, strict=True)) / max(len(targets), 1)


def bleu(texts: Sequence[str], targets: Sequence[str]) -> float:
    """Corpus BLEU (Papineni et al. 2002) by sacreBLEU with its standard settings (13a, exponential smoothing)."""
    if not targets:
        return 0.0
    from sacrebleu.metrics import BLEU

    return float(BLEU().corpus_score(list(texts), [list(targets)]).score)


def tally_labels(
    answers: Sequence[Collection[str]], targets: Sequence[Collection[str]], labels: Iterable[str]
) -> dict[str, Tally]:
    """Tally each label over texts that may have several."""
    right, given, there = Counter[str](), Counter[str](), Counter[str]()
    for answer, target in zip(map(set, answers), map(set, targets), strict=True):
        right.update(answer & target)
        given.update(answer)
        there.update(target)
    return {label: Tally(right[label], given[label], there[label]) for label in labels}


def macro_f1(answers: Sequence[str], targets: Sequence[str]) -> float:
    """The mean F1 of the labels that are answered or right anywhere, as scikit-learn has it."""
    tallies = tally_labels([[answer] for answer in answers], [[target] for target in targets], {*answers, *targets})
    return mean_f1(tallies.values())


def mean_f1(tallies: Collection[Tally]) -> float:
    """The mean of the labels' F1, a rare one counting as much as a frequent one."""
    return sum(tally.f1 for tally in tallies) / max(len(tallies), 1)


def matthews(answers: Sequence[str], targets: Sequence[str]) -> float:
    """The correlation of answers with what is right (Matthews 1975; Gorodkin 2004 for more than two labels).

    Answering always the same is worth 0, however frequent that label is.
    """
    size, right, given = len(targets), Counter(targets), Counter(answers)
    hits = sum(answer == target for answer, target in zip(answers, targets, strict=True))
    together = size * hits - sum(right[label] * given[label] for label in right)
    spread = math.prod(size * size - sum(count * count for count in side.values()) for side in (right, given))
    return together / math.sqrt(spread) if spread else 0.0


def pearson(answers: Sequence[float], targets: Sequence[float]) -> float:
    """How near numbers lie to a straight line over what is right (Pearson 1895)."""
    sides = [np.asarray(side, np.float64) for side in (answers, targets)]
    if any(len(side) < 2 or np.ptp(side) == 0 for side in sides):
        return 0.0
    given, right = ((apart := side - side.mean()) / np.linalg.norm(apart) for side in sides)
    return float(np.clip(given @ right, -1, 1))


def spearman(answers: Sequence[float], targets: Sequence[float]) -> float:
    """How near numbers come to the order of what is right (Spearman 1904): what is equal has the mean of its ranks."""
    return pearson(_ranks(answers), _ranks(targets))


def _ranks(values: Sequence[float]) -> Any:
    _, which, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[which]


def tally_entities(answers: Sequence[Sequence[str]], targets: Sequence[Sequence[str]]) -> Tally:
    """Tally the entities of tagged sentences: right is one with the same type, first and last word."""
    total = Tally()
    for answer, target in zip(answers, targets, strict=True):
        given, there = set(entities(answer)), set(entities(target))
        total += Tally(len(given & there), len(given), len(there))
    return total


def entities(tags: Sequence[str]) -> list[Entity]:
    """Read the entities off BIO, IOB, IOE or IOBES tags, as seqeval does by default, and conlleval before it.

    An entity begins where none was, where the type changes, at B and S, and after E and S; so no sequence is wrong.
    """
    found: list[Entity] = []
    before, kind = "O", ""
    for place, tag in enumerate(tags):
        letter, name = tag[:1] or "O", tag[1:].split("-", 1)[-1] or "_"
        if letter != "O":
            goes_on = before not in "OES" and letter not in "BS" and name == kind
            first = found.pop()[1] if goes_on else place
            found.append((name, first, place + 1))
        before, kind = letter, name
    return found
