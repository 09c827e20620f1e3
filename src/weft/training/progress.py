"""A progress bar on the terminal: loss, speed, time left. It goes to stderr, and only where that is a terminal."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from weft.training.report import Eval, Notice, Record, Step


class ProgressBar:
    """A reporter that draws; in a pipe or a file it prints the notices alone."""

    def __init__(self, title: str) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=1.0, status="")
        self._metrics = ""
        self._bar.start()

    def __call__(self, record: Record) -> None:
        """Show one record."""
        if isinstance(record, Step):
            status = f"step {record.step:,}  loss {record.loss:.3f}  {record.tokens_per_s:,.0f} tokens/s{self._metrics}"
            self._bar.update(self._task, completed=record.spent, status=status)
        elif isinstance(record, Eval):
            shown = ((name, value) for name, value in record.metrics.items() if name != "loss")
            self._metrics = "".join(f"  {name} {value:.3g}" for name, value in shown)
        elif isinstance(record, Notice):
            self._console.print(record.text, highlight=False, markup=False)

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        self._bar.stop()
