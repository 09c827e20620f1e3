"""Minimal pairs: of two sentences that differ in one thing, is the right one the likelier?

BLiMP (Warstadt et al. 2020) has 67 paradigms of 1,000 such pairs, a file each. A model is right about a pair where it
gives the good sentence the higher log-probability, whole, from its beginning to its end; chance is one half.
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
_MOST = 1 << 20  # bytes of a line


@dataclass(frozen=True)
class Paradigm:
    """How often a model was right about the pairs of one file, and which phenomenon they are of."""

    name: str
    phenomenon: str
    pairs: int
    accuracy: float


@dataclass(frozen=True)
class Judged:
    """All paradigms of a folder."""

    paradigms: list[Paradigm]

    @property
    def accuracy(self) -> float:
        """The mean over paradigms, as it is published."""
        return mean(one.accuracy for one in self.paradigms)

    @property
    def phenomena(self) -> dict[str, float]:
        """The mean over the paradigms of each phenomenon, by name."""
        names = sorted({one.phenomenon for one in self.paradigms})
        return {name: mean(one.accuracy for one in self.paradigms if one.phenomenon == name) for name in names}


def judge_pairs(log_probs: LogProbs, folder: Path) -> Judged:
    """Judge a model by every .jsonl file of a folder; a line has `sentence_good` and `sentence_bad`."""
    if not folder.is_dir():
        raise DataError(f"{folder}: is no folder; give BLiMP's data folder, with a .jsonl file a paradigm")
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise DataError(f"{folder}: there are no .jsonl files of minimal pairs in it; give BLiMP's data folder")
    return Judged([_judge(log_probs, path) for path in files])


def _judge(log_probs: LogProbs, path: Path) -> Paradigm:
    rows = [_row(path, number, line) for number, line in read_lines(str(path), _MOST) if line]
    if not rows:
        raise DataError(f"{path}: there are no pairs in it")
    sentences = [row[which] for row in rows for which in ("sentence_good", "sentence_bad")]
    found = log_probs(sentences)
    right = sum(good > bad for good, bad in zip(found[::2], found[1::2], strict=True))
    first = rows[0]
    name, phenomenon = first.get("UID", path.stem), first.get("linguistics_term", path.stem)
    return Paradigm(str(name), str(phenomenon), len(rows), right / len(rows))


def _row(path: Path, number: int, line: str | BadRow) -> dict[str, Any]:
    if isinstance(line, BadRow):
        raise DataError(str(line))
    try:
        row = json.loads(line)
        if isinstance(row["sentence_good"], str) and isinstance(row["sentence_bad"], str):
            return dict(row)
    except (ValueError, KeyError, TypeError):
        pass
    raise DataError(f"{path}:{number}: must be an object with the texts sentence_good and sentence_bad, as in BLiMP")
