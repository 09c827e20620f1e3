"""Progress on stderr: on a terminal a bar with loss, speed and remaining time, else a plain line for each report."""

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from weft.training.reporting import Eval, Notice, Record, Step


class ProgressBar:
    """A reporter that draws a bar, or prints lines to a pipe or a file; if `quiet`, it prints notices alone."""

    def __init__(self, title: str, quiet: bool = False) -> None:
        self._console = Console(stderr=True)
        self._title, self._prints_lines = title, not quiet and not self._console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=1.0, status="")
        self._metrics = ""

    def __call__(self, record: Record) -> None:
        """Show one record; the first starts the bar, so that an error before it leaves the terminal unchanged."""
        self._bar.start()
        if isinstance(record, Step):
            self._show_step(record)
        elif isinstance(record, Eval):
            metric = next(((name, value) for name, value in record.metrics.items() if name != "loss"), None)
            self._metrics = f"  {metric[0]} {metric[1]:.3g}" if metric else ""
        elif isinstance(record, Notice):
            plain = not self._console.is_terminal  # a line of a log is not wrapped
            self._console.print(record.text, highlight=False, markup=False, soft_wrap=plain)

    def _show_step(self, step: Step) -> None:
        speed = f"{step.tokens_per_s:,.0f} tokens/s  {100 * step.mfu:.2g}% MFU"
        self._bar.update(self._task, completed=step.spent, status=f"loss {step.loss:.3f}  {speed}{self._metrics}")
        if self._prints_lines:
            sys.stderr.write(f"{self._title}: {format_step(step)}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        self._bar.stop()


def format_step(step: Step) -> str:
    """Return a report in one line: `step 400 (20%), loss 0.51, lr 0.001, 34,567 tokens/s, valid loss 0.62`."""
    parts = [
        f"step {step.step:,} ({step.spent:.0%})",
        f"loss {step.loss:.4g}",
        f"lr {step.lr:.3g}",
        f"{step.tokens_per_s:,.0f} tokens/s",
    ]
    return ", ".join([*parts, *(f"valid {name} {value:.4g}" for name, value in step.valid.items())])
