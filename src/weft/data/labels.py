"""The labels of a task, numbered in a fixed order; one that was never seen is an error, not a new class."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

from pydantic import BeforeValidator

from weft.errors import DataError, did_you_mean


def _name(value: object) -> object:
    return str(value) if type(value) is int else value


Label = Annotated[str, BeforeValidator(_name)]  # data often has numbers for labels: they are names like any other


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
        """Return a label's number; one that was never seen is refused with the nearest that was."""
        try:
            return self._numbers[name]
        except KeyError:
            raise DataError(
                f"the label {name!r} was never seen in training; {did_you_mean(name, self.names)}; "
                "correct it, list it in task.labels, or pass over such rows with data.on_bad_rows: skip"
            ) from None

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)


def balanced(counts: Mapping[str, int]) -> dict[str, float]:
    """Weigh labels so that all have the same say, as scikit-learn does: n / (K n_k) for n_k of n and K labels."""
    total = sum(counts.values())
    return {label: total / (len(counts) * count) for label, count in counts.items()}
