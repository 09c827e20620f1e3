"""Validation data that is taken out of the training data (`data.validation_fraction`).

A hash of a row's inputs, never its place or a seed, decides where the row goes: it is the same in every run, with every
seed and on every machine, rows with equal inputs stay together, and a file that is shuffled is split alike. The rows
with the smallest hashes are held out: of each label its share, where a row has one label, and never all of its rows.

One pass over the data finds the largest hash that is held out of each label; it is cached. Of a label with more than
`MAX_HASHES` rows it is not searched for: the fraction of all possible hashes is exact enough.
"""

import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from pydantic import BaseModel

from weft.config.sections import Data
from weft.data.corpus.partition import SourceFile, source_files
from weft.data.readers.examples import Place, Skipped, read_examples
from weft.errors import DataError

MAX_HASHES = 1 << 17  # of a label, held in memory
_HASHES = 2**64
_Label = Any  # the value of the field by which the split is stratified; None without one


@dataclass(frozen=True)
class RowKind:
    """The fields of a task's examples by which they are split."""

    schema: type[BaseModel]
    inputs: tuple[str, ...]
    stratify_by: str | None  # the field of the one label; None: there is none

    def hash(self, example: BaseModel) -> int:
        """Return the hash of an example's inputs."""
        inputs = json.dumps([getattr(example, name) for name in self.inputs], default=str)
        return int.from_bytes(blake2b(inputs.encode(), digest_size=8, person=b"validation").digest(), "big")

    def label(self, example: BaseModel) -> _Label:
        """Return the label by which the split is stratified."""
        return getattr(example, self.stratify_by) if self.stratify_by else None


def read_held_out(data: Data, split: str, kind: RowKind, skipped: Skipped) -> Iterator[tuple[Place, Any]]:
    """Yield the examples of `data.train` that are held out (`valid`), or the others (`train`).

    What is skipped or odd is counted once, with the others.
    """
    assert data.train is not None
    thresholds = _find_thresholds(kind, data.model_dump_json(), source_files(data.train, data))
    counted = skipped if split == "train" else Skipped()
    for place, example in read_examples(data.train, data, kind.schema, counted):
        if (kind.hash(example) < thresholds[kind.label(example)]) == (split == "valid"):
            yield place, example


@lru_cache(maxsize=8)
def _find_thresholds(kind: RowKind, data_json: str, files: tuple[SourceFile, ...]) -> dict[_Label, int]:
    """Return for each label the hash below which a row is held out; `files` is there for the cache alone."""
    data = Data.model_validate_json(data_json)
    assert data.train is not None
    assert data.validation_fraction is not None
    examples = (example for _, example in read_examples(data.train, data, kind.schema, Skipped()))
    hashes, counts = _collect_hashes(examples, kind)
    thresholds = choose_thresholds(hashes, counts, data.validation_fraction)
    if not any(thresholds.values()):
        raise DataError(
            f"data.validation_fraction: {data.validation_fraction:g} of the {sum(counts.values())} rows of "
            f"{data.train} leaves none to evaluate on; raise it, give more rows, or name a file: data.valid"
        )
    return thresholds


def _collect_hashes(examples: Iterable[BaseModel], kind: RowKind) -> tuple[dict[_Label, "array[int]"], Counter[_Label]]:
    """Return the first `MAX_HASHES` hashes of each label, and the number of its rows."""
    hashes: dict[_Label, array[int]] = defaultdict(lambda: array("Q"))
    counts: Counter[_Label] = Counter()
    for example in examples:
        label = kind.label(example)
        counts[label] += 1
        if counts[label] <= MAX_HASHES:
            hashes[label].append(kind.hash(example))
        elif kind.stratify_by is None:
            break  # there are enough for the fraction of all possible hashes
    return hashes, counts


def choose_thresholds(
    hashes: dict[_Label, "array[int]"], counts: Counter[_Label], fraction: float
) -> dict[_Label, int]:
    """Return for each label the hash below which a row is held out: `fraction` of all rows, and nearly so of each."""
    thresholds: dict[_Label, int] = {}
    total = held_out = 0
    for label in sorted(counts, key=str):
        total += counts[label]
        share = round(fraction * total) - held_out  # of the sum, so that many rare labels have their share together
        held_out += share
        if counts[label] > MAX_HASHES:
            thresholds[label] = int(fraction * _HASHES)
        else:
            thresholds[label] = _smallest(hashes[label], share)
    return thresholds


def _smallest(hashes: Collection[int], number: int) -> int:
    """Return the hash below which there are so many hashes, fewer where some are equal, and never all of them."""
    ordered = sorted(hashes)
    threshold = ordered[min(number, len(ordered) - 1)]
    return threshold if threshold > ordered[0] else 0
