"""What the trainer says while it runs, and who listens.

The trainer emits `Step`, `Eval` and `Saved`; a reporter writes them to a file, a terminal or TensorBoard. Nothing else
holds the trainer.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from weft.errors import CheckpointError


@dataclass(frozen=True)
class Step:
    """The state of training at a report: the loss is the mean over the steps since the one before."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    mfu: float  # share of what this machine's products could do: see `weft.training.flops`
    epoch: int
    elapsed: float  # seconds of training, evaluation and saving not counted
    spent: float  # share of the budget, 0 to 1
    valid: dict[str, float] = field(default_factory=dict)  # where an evaluation was due

    def row(self) -> dict[str, Any]:
        """Return the row of `metrics.jsonl`."""
        return {key: _finite(value) for key, value in asdict(self).items() if key != "valid" or self.valid}


def _finite(value: Any) -> Any:
    """JSON has no word for what is not a number: it becomes null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Eval:
    """An evaluation is under way or done: `metrics` is empty while it runs."""

    step: int
    metrics: dict[str, float]
    best: bool = False


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written."""

    step: int
    path: Path


@dataclass(frozen=True)
class Notice:
    """Something that the user should know, in one line."""

    text: str


Record = Step | Eval | Saved | Notice


class Reporter(Protocol):
    """Anything that takes records."""

    def __call__(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Write out what is held back."""
        ...


class MetricsFile:
    """`metrics.jsonl`: a row a report."""

    def __init__(self, path: Path, upto: int) -> None:
        """Open for appending; rows beyond the step `upto`, which a resumed run will repeat, are cut off first."""
        self._path = path
        with _written(path):
            if path.exists():
                _cut_back(path, upto)
            self._file = path.open("a", encoding="utf-8")

    def __call__(self, record: Record) -> None:
        """Write a `Step`."""
        if isinstance(record, Step):
            with _written(self._path):
                self._file.write(json.dumps(record.row()) + "\n")
                self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # what could not be flushed was told already
            self._file.close()


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written: {error.strerror}; free some room, then go on with --resume"
        ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of `metrics.jsonl`; a line that a kill cut short, or that is no row, is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _cut_back(path: Path, upto: int) -> None:
    kept = [row for row in read_metrics(path) if row["step"] <= upto]
    beside = path.with_suffix(".tmp")
    beside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    beside.replace(path)


class TensorBoard:
    """Event files beside the metrics, where TensorBoard is installed."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    @staticmethod
    def installed() -> bool:
        """Say whether TensorBoard can be imported."""
        return find_spec("tensorboard") is not None

    def __call__(self, record: Record) -> None:
        """Write a `Step`."""
        if isinstance(record, Step):
            for name in ("loss", "lr", "grad_norm", "tokens_per_s", "mfu"):
                self._writer.add_scalar(f"train/{name}", getattr(record, name), record.step)
            for name, value in record.valid.items():
                self._writer.add_scalar(f"valid/{name}", value, record.step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class Reporters:
    """Several reporters as one."""

    def __init__(self, reporters: Iterable[Reporter]) -> None:
        self._reporters: Sequence[Reporter] = list(reporters)

    def __call__(self, record: Record) -> None:
        """Pass a record on."""
        for reporter in self._reporters:
            reporter(record)

    def close(self) -> None:
        """Close them all."""
        for reporter in self._reporters:
            reporter.close()
