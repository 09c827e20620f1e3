"""Progress bar with loss, speed and remaining time, on stderr if that is a terminal."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from weft.training.reporting import Eval, Notice, Record, Step


class ProgressBar:
    """A reporter that draws a bar; in a pipe or a file it prints notices alone."""

    def __init__(self, title: str) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=1.0, status="")
        self._metrics = ""

    def __call__(self, record: Record) -> None:
        """Show one record; the first starts the bar, so that an error before it leaves the terminal unchanged."""
        self._bar.start()
        if isinstance(record, Step):
            speed = f"{record.tokens_per_s:,.0f} tokens/s  {100 * record.mfu:.2g}% MFU"
            self._bar.update(
                self._task, completed=record.spent, status=f"loss {record.loss:.3f}  {speed}{self._metrics}"
            )
        elif isinstance(record, Eval):
            metric = next(((name, value) for name, value in record.metrics.items() if name != "loss"), None)
            self._metrics = f"  {metric[0]} {metric[1]:.3g}" if metric else ""
        elif isinstance(record, Notice):
            self._console.print(record.text, highlight=False, markup=False)

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        self._bar.stop()
