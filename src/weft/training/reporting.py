"""Training records and the reporters that write them.

The trainer emits `Step`, `Eval`, `CheckpointSaved` and `Notice`; a reporter writes them to a file, a terminal or
TensorBoard. The trainer has no other output beside checkpoints.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from weft.data.readers.lines import plural
from weft.errors import CheckpointError, disk_remedy


@dataclass(frozen=True)
class Step:
    """The state of training at a report; the loss is the mean over the steps since the previous report."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    mfu: float  # model FLOPs utilisation, 0 to 1: see `weft.training.flops`
    epoch: int
    elapsed: float  # seconds of training, without evaluation and saving
    spent: float  # share of the budget, 0 to 1
    flops: float = math.nan  # operations of training so far, over all processes
    valid: dict[str, float] = field(default_factory=dict)  # metrics, if an evaluation was due

    def row(self) -> dict[str, Any]:
        """Return the row of `metrics.jsonl`."""
        return {key: _finite(value) for key, value in asdict(self).items() if key != "valid" or self.valid}


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by None, since JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Eval:
    """An evaluation: `metrics` is empty while it runs."""

    step: int
    metrics: dict[str, float]
    best: bool = False


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint was written."""

    step: int
    path: Path


@dataclass(frozen=True)
class Notice:
    """A message for the user, in one line."""

    text: str


Record = Step | Eval | CheckpointSaved | Notice


class Reporter(Protocol):
    """A callable that takes training records."""

    def __call__(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Flush buffers and close files."""
        ...


@dataclass(frozen=True)
class Notices:
    """A reporter that passes on the text of notices alone."""

    tell: Callable[[str], object]

    def __call__(self, record: Record) -> None:
        """Pass on a `Notice`."""
        if isinstance(record, Notice):
            self.tell(record.text)

    def close(self) -> None:
        """Do nothing."""


class MetricsFile:
    """Writer of `metrics.jsonl`: one row per report."""

    def __init__(self, path: Path, upto: int) -> None:
        """Open for appending; first remove rows after step `upto`, which a resumed run will repeat.

        `notice` says what is wrong with the rows of a run that is resumed, "" if nothing is.
        """
        self._path, self.notice = path, ""
        with _write_errors(path):
            if path.exists():
                bad_lines = _truncate_after(path, upto)
                if bad_lines:
                    self.notice = f"{path}: {plural(bad_lines, 'line')} are no rows of metrics, and are left out"
            elif upto > 0:
                self.notice = f"{path}: is missing: it will have no rows of the steps up to {upto:,}"
            self._file = path.open("a", encoding="utf-8")

    def __call__(self, record: Record) -> None:
        """Write a `Step`."""
        if isinstance(record, Step):
            with _write_errors(self._path):
                self._file.write(json.dumps(record.row()) + "\n")
                self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # a failure to flush was reported already
            self._file.close()


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written: {error.strerror}; {disk_remedy(error)}, then go on with --resume"
        ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`; incomplete lines (after a kill) and lines that are no row are left out."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [row for row in map(_parse_row, lines) if row is not None]


def _parse_row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _truncate_after(path: Path, upto: int) -> int:
    """Remove the rows after step `upto`, atomically; return the number of lines, but for a cut last one, without a row.

    A kill cuts a line short only at the end.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    rows = [_parse_row(line) for line in lines]
    temporary = path.with_suffix(".tmp")
    kept = [row for row in rows if row is not None and row["step"] <= upto]
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    temporary.replace(path)
    return sum(row is None and line.endswith("\n") for line, row in zip(lines, rows, strict=True))


class TensorBoard:
    """Writer of TensorBoard event files, if TensorBoard is installed."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    @staticmethod
    def installed() -> bool:
        """Return whether TensorBoard can be imported."""
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
    """A reporter that passes records on to several."""

    def __init__(self, reporters: Iterable[Reporter]) -> None:
        self._reporters: Sequence[Reporter] = list(reporters)

    def __call__(self, record: Record) -> None:
        """Pass a record on to all."""
        for reporter in self._reporters:
            reporter(record)

    def close(self) -> None:
        """Close them all."""
        for reporter in self._reporters:
            reporter.close()
