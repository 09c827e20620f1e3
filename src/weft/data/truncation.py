"""Truncation of sequences longer than `data.max_length` tokens; nothing is truncated silently."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from weft.data.readers.lines import plural
from weft.errors import DataError

COUNTED = 100_000  # tokens of a long text that are counted; what is beyond them need not be tokenized

Ids = TypeVar("Ids", Sequence[int], npt.NDArray[np.integer[Any]])


@dataclass
class TruncationPolicy:
    """`data.max_length` and `data.truncation`, and how many sequences were cut, dropped or windowed."""

    max_length: int
    policy: Literal["error", "cut", "drop", "window"]
    cut: int = 0
    dropped: int = 0
    windowed: int = 0
    longest_seen: int = 0  # the length of the longest sequence seen
    notes: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # other changes by a task, and their counts
    is_largest: bool = False  # whether the model's pretrained weights allow no larger `max_length`
    at_inference: bool = False  # whether the error asks the user to shorten the input, not to change the recipe

    @property
    def needed(self) -> int | None:
        """The number of a text's first tokens that `apply` needs, for `Tokenizer.ids`; None: all."""
        return None if self.policy == "window" else self.max_length + COUNTED

    def apply(self, ids: Ids, windows: bool = True) -> list[Ids]:
        """Return the sequences that replace `ids`: itself, its prefix, none, or non-overlapping windows.

        The error suggests `window` only if the task supports `windows`.
        """
        self.longest_seen = max(self.longest_seen, len(ids))
        if len(ids) <= self.max_length:
            return [ids]
        if self.policy == "cut":
            self.cut += 1
            return [ids[: self.max_length]]
        if self.policy == "drop":
            self.dropped += 1
            return []
        if self.policy == "window":
            self.windowed += 1
            return [ids[start : start + self.max_length] for start in range(0, len(ids), self.max_length)]
        remedy = f"set data.truncation: {'cut, drop or window' if windows else 'cut or drop'}"
        remedy += " (model.weights has no more positions)" if self.is_largest else ", or raise data.max_length"
        if self.at_inference:
            remedy = (
                f"shorten it, or set data.truncation: cut{' or window' if windows else ''} (weft predict --truncation)"
            )
        count = count_tokens(len(ids), self.max_length)
        raise DataError(f"got {count} tokens, data.max_length is {self.max_length:,}; {remedy}")

    def add(self, part: "TruncationPolicy") -> None:
        """Add the counts of another object, for other sequences."""
        self.cut += part.cut
        self.dropped += part.dropped
        self.windowed += part.windowed
        self.longest_seen = max(self.longest_seen, part.longest_seen)
        self.notes.update(part.notes)

    def note(self, verb: str, noun: str, how: str) -> None:
        """Count a change to report: "cut 3 questions to 64 tokens" is (cut, question, to 64 …)."""
        self.notes[verb, noun, how] += 1

    def __str__(self) -> str:
        counts = {"cut": self.cut, "dropped": self.dropped, "windowed": self.windowed}
        summary = ", ".join(f"{verb} {number:,}" for verb, number in counts.items() if number)
        noun = "sequence" if sum(counts.values()) == 1 else "sequences"
        parts = [f"{summary} {noun} longer than data.max_length={self.max_length}"] if summary else []
        return "; ".join(parts + [f"{verb} {plural(n, noun)} {how}" for (verb, noun, how), n in self.notes.items()])


def count_tokens(number: int, max_length: int) -> str:
    """Return a number of tokens for a message: a text may have been tokenized in part (`TruncationPolicy.needed`)."""
    most = max_length + COUNTED
    return f"{number:,}" if number < most else f"{most:,} or more"
