"""Label vocabulary of a task, in a fixed order; an unknown label is an error, not a new class."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

import numpy as np
from pydantic import BeforeValidator

from weft.errors import DataError, abbreviate, did_you_mean

MAX_LABELS = 100_000


def read_label(value: object) -> str:
    """Return the name of a label; integer labels, which are common in data, become their decimal string."""
    if type(value) is int:
        return str(value)
    if isinstance(value, bool | float):
        raise ValueError(f'must be text: put it in quotes, "{json.dumps(value)}"')
    if not isinstance(value, str):
        raise ValueError("must be text, the name of a label")
    if not value.strip():
        raise ValueError("must have a name, and not be blank")
    return value


def parse_number(value: object, message: str) -> float:
    """Parse a number that float32 can hold, also from a cell of a table; `message` says what the value must be."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(message)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(message) from None
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{message}, and a finite one")
    return number


Label = Annotated[str, BeforeValidator(read_label)]


class Labels:
    """Label names and their class indices."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        if len(self.names) > MAX_LABELS:
            raise DataError(
                f"there are {len(self.names):,} labels, such as {abbreviate(self.names[0], 60)}, and at most "
                f"{MAX_LABELS:,} can be told apart; is it the column of labels? if so, join the rare ones"
            )
        self._index = {name: index for index, name in enumerate(self.names)}
        if len(self._index) != len(self.names):
            duplicate = next(name for index, name in enumerate(self.names) if self._index[name] != index)
            raise DataError(f"the label {duplicate!r} is listed twice; list each once")

    @classmethod
    def collect(cls, labels: Iterable[str]) -> "Labels":
        """Return the labels of the training data in alphabetical order, independent of the order of the data."""
        return cls(sorted(set(labels)))

    def index(self, name: str) -> int:
        """Return the class index of a label; the error for an unknown label suggests the nearest one."""
        try:
            return self._index[name]
        except KeyError:
            raise DataError(
                f"the label {name!r} is not in task.labels, which has those of the training data where the recipe "
                f"lists none; {did_you_mean(name, self.names)}; correct it, list it there, or pass over such rows with "
                "data.on_bad_rows: skip"
            ) from None

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)


def balanced_class_weights(counts: Mapping[str, int]) -> dict[str, float]:
    """Return class weights that balance the labels, as in scikit-learn: n / (K n_k) for K labels, n_k of n examples."""
    total = sum(counts.values())
    return {label: total / (len(counts) * count) for label, count in counts.items()}
