"""Minimal pairs: the accuracy of a language model on pairs of an acceptable and an unacceptable sentence.

BLiMP (Warstadt et al. 2020) has 67 paradigms of 1,000 such pairs, a file each. A model is correct on a pair if it gives
the acceptable sentence, as a whole, the higher log-probability; chance is one half.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from weft.data.readers.lines import BadRow, read_lines
from weft.errors import DataError

LogProbs = Callable[[Sequence[str]], Sequence[float]]
_MAX_LINE_BYTES = 1 << 20  # bytes of a line


@dataclass(frozen=True)
class Paradigm:
    """The accuracy on the pairs of one file, and their linguistic phenomenon."""

    name: str
    phenomenon: str
    pairs: int
    accuracy: float


@dataclass(frozen=True)
class MinimalPairsResult:
    """The accuracies on all paradigms of a folder."""

    paradigms: list[Paradigm]

    @property
    def accuracy(self) -> float:
        """The mean over paradigms, as published."""
        return mean(paradigm.accuracy for paradigm in self.paradigms)

    @property
    def phenomena(self) -> dict[str, float]:
        """The mean over the paradigms of each phenomenon, by name."""
        names = sorted({paradigm.phenomenon for paradigm in self.paradigms})
        return {
            name: mean(paradigm.accuracy for paradigm in self.paradigms if paradigm.phenomenon == name)
            for name in names
        }


def evaluate_minimal_pairs(log_probs: LogProbs, folder: Path) -> MinimalPairsResult:
    """Return a model's accuracy on every .jsonl file of a folder; a line has `sentence_good` and `sentence_bad`."""
    if not folder.is_dir():
        raise DataError(f"{folder}: is no folder; give BLiMP's data folder, with a .jsonl file a paradigm")
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise DataError(f"{folder}: there are no .jsonl files of minimal pairs in it; give BLiMP's data folder")
    return MinimalPairsResult([_evaluate_paradigm(log_probs, path) for path in files])


def _evaluate_paradigm(log_probs: LogProbs, path: Path) -> Paradigm:
    rows = [_parse_pair(path, number, line) for number, line in read_lines(str(path), _MAX_LINE_BYTES) if line]
    if not rows:
        raise DataError(f"{path}: there are no pairs in it")
    sentences = [row[field] for row in rows for field in ("sentence_good", "sentence_bad")]
    scores = log_probs(sentences)
    correct = sum(good > bad for good, bad in zip(scores[::2], scores[1::2], strict=True))
    first = rows[0]
    name, phenomenon = first.get("UID", path.stem), first.get("linguistics_term", path.stem)
    return Paradigm(str(name), str(phenomenon), len(rows), correct / len(rows))


def _parse_pair(path: Path, number: int, line: str | BadRow) -> dict[str, Any]:
    if isinstance(line, BadRow):
        raise DataError(str(line))
    try:
        row = json.loads(line)
        if isinstance(row["sentence_good"], str) and isinstance(row["sentence_bad"], str):
            return dict(row)
    except (ValueError, KeyError, TypeError):
        pass
    raise DataError(f"{path}:{number}: must be an object with the texts sentence_good and sentence_bad, as in BLiMP")
