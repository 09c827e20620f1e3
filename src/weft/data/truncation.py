"""What happens to a sequence of more than `data.longest` tokens: nothing is cut silently."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from weft.data.readers.lines import count
from weft.errors import DataError

Ids = TypeVar("Ids", Sequence[int], npt.NDArray[np.integer[Any]])


@dataclass
class TruncationPolicy:
    """`data.longest` and `data.too_long`, and how many sequences each policy touched."""

    longest: int
    policy: Literal["error", "cut", "drop", "window"]
    cut: int = 0
    dropped: int = 0
    windowed: int = 0
    seen: int = 0  # the length of the longest sequence that it was asked about
    notes: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # what else a task did, and how often
    asked: bool = False  # of questions to a model: what is too long is shortened by who asks

    def apply(self, ids: Ids, windows: bool = True) -> list[Ids]:
        """Return the sequences to use in place of `ids`: itself, its start, none, or windows that do not overlap.

        Where a task does not take `windows`, they are not offered either.
        """
        self.seen = max(self.seen, len(ids))
        if len(ids) <= self.longest:
            return [ids]
        if self.policy == "cut":
            self.cut += 1
            return [ids[: self.longest]]
        if self.policy == "drop":
            self.dropped += 1
            return []
        if self.policy == "window":
            self.windowed += 1
            return [ids[start : start + self.longest] for start in range(0, len(ids), self.longest)]
        remedy = f"set data.too_long: {'cut, drop or window' if windows else 'cut or drop'}, or raise data.longest"
        if self.asked:
            remedy = "shorten it" + (", or train with data.too_long: window" if windows else "")
        raise DataError(f"got {len(ids):,} tokens, data.longest is {self.longest:,}; {remedy}")

    def add(self, part: "TruncationPolicy") -> None:
        """Add what another one did with a part of the sequences."""
        self.cut += part.cut
        self.dropped += part.dropped
        self.windowed += part.windowed
        self.seen = max(self.seen, part.seen)
        self.notes.update(part.notes)

    def note(self, verb: str, noun: str, how: str) -> None:
        """Count what a task did that must not go unsaid: "cut 3 questions to 64 tokens" is (cut, question, to 64 …)."""
        self.notes[verb, noun, how] += 1

    def __str__(self) -> str:
        counts = {"cut": self.cut, "dropped": self.dropped, "windowed": self.windowed}
        done = ", ".join(f"{verb} {number:,}" for verb, number in counts.items() if number)
        noun = "sequence" if sum(counts.values()) == 1 else "sequences"
        told = [f"{done} {noun} longer than data.longest={self.longest}"] if done else []
        return "; ".join(told + [f"{verb} {count(n, noun)} {how}" for (verb, noun, how), n in self.notes.items()])
