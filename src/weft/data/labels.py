"""The labels of a task, numbered in a fixed order; one that is not among them is an error, not a new class."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

from pydantic import BeforeValidator

from weft.errors import DataError, did_you_mean


def read_label(value: object) -> str:
    """Read the name of a label: data often has whole numbers for labels, and they are names like any other."""
    if type(value) is int:
        return str(value)
    if isinstance(value, bool | float):
        raise ValueError(f'must be text: put it in quotes, "{json.dumps(value)}"')
    if not isinstance(value, str):
        raise ValueError("must be text, the name of a label")
    if not value.strip():
        raise ValueError("must have a name, and not be blank")
    return value


Label = Annotated[str, BeforeValidator(read_label)]


class Labels:
    """Names to numbers and back."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        if len(self._numbers) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise DataError(f"the label {twice!r} is listed twice; list each once")

    @classmethod
    def collect(cls, seen: Iterable[str]) -> "Labels":
        """Number the labels of the training data, in alphabetical order, whatever order they came in."""
        return cls(sorted(set(seen)))

    def number(self, name: str) -> int:
        """Return a label's number; one that there is not is refused with the nearest that there is."""
        try:
            return self._numbers[name]
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


def balanced(counts: Mapping[str, int]) -> dict[str, float]:
    """Weigh labels so that all have the same say, as scikit-learn does: n / (K n_k) for n_k of n and K labels."""
    total = sum(counts.values())
    return {label: total / (len(counts) * count) for label, count in counts.items()}
