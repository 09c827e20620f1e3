"""Metrics by the length of the input, for tasks whose answers are no labels: on which texts a model is weak."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.tasks.base import Answer, Task

GROUPS = 4  # of as many examples each, where lengths do not repeat


@dataclass(frozen=True)
class LengthGroup:
    """The metrics of the examples whose inputs have from `shortest` to `longest` words, or characters."""

    shortest: int
    longest: int
    examples: int
    metrics: dict[str, float | None]  # None: not defined for these examples, such as a correlation with a constant


@dataclass(frozen=True)
class LengthReport:
    """The metrics of groups of examples, from short inputs to long ones."""

    groups: list[LengthGroup]
    unit: str = "words"  # characters, where most inputs are one word

    @classmethod
    def of(cls, task: Task, answers: Sequence[Answer], examples: Sequence[Any], groups: int = GROUPS) -> "LengthReport":
        """Return the report in up to so many groups; examples with inputs of one length are in one group."""
        inputs = [_inputs(task, example) for example in examples]
        lengths, unit = [sum(len(text.split()) for text in texts) for texts in inputs], "words"
        if sorted(lengths)[len(lengths) // 2] <= 1:
            lengths, unit = [sum(map(len, texts)) for texts in inputs], "characters"
        ordered = sorted(lengths)
        limits = sorted({ordered[math.ceil(len(ordered) * part / groups) - 1] for part in range(1, groups + 1)})
        reports, shortest = [], 0
        for limit in limits:
            rows = [row for row, length in enumerate(lengths) if shortest <= length <= limit]
            metrics = task.score([answers[row] for row in rows], [examples[row] for row in rows])
            defined = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            reports.append(LengthGroup(min(lengths[row] for row in rows), limit, len(rows), defined))
            shortest = limit + 1
        return cls(reports, unit)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headers and rows, a row a group."""
        names = list(dict.fromkeys(name for group in self.groups for name in group.metrics))
        return [self.unit, "examples", *names], [
            [
                f"{group.shortest:,} to {group.longest:,}",
                f"{group.examples:,}",
                *("–" if (value := group.metrics.get(name)) is None else f"{value:.4f}" for name in names),
            ]
            for group in self.groups
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data for JSON."""
        return asdict(self)


def _inputs(task: Task, example: Any) -> list[str]:
    """Return the texts of all inputs of an example."""
    values = (getattr(example, name, None) for name in task.input_fields)
    texts = (text for value in values for text in ([value] if isinstance(value, str) else value or ()))
    return [text for text in texts if isinstance(text, str)]
