"""Progress through rows, on stderr: a live line in a terminal, elsewhere a plain line now and then."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from weft.cli.console import tell

EVERY = 10.0  # seconds between two plain lines

_T = TypeVar("_T")


class RowProgress:
    """A context manager that shows how many rows are done, and how many a second; nothing if `quiet`."""

    def __init__(self, title: str, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self.rows, self._title, self._quiet = 0, title, quiet
        self._started = self._told = time.monotonic()
        console = Console(stderr=True)
        self._is_terminal = console.is_terminal
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._live = Progress(
            *columns, console=console, transient=True, redirect_stdout=False, disable=quiet or not self._is_terminal
        )
        self._line = self._live.add_task(title, total=None)

    def __enter__(self) -> "RowProgress":
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def advance(self, rows: int = 1) -> None:
        """Count rows that are done."""
        self.rows += rows
        if self._is_terminal:
            self._live.update(self._line, description=str(self))
        elif not self._quiet and time.monotonic() - self._told >= EVERY:
            self._told = time.monotonic()
            tell(str(self))

    def track(self, rows: Iterable[_T]) -> Iterator[_T]:
        """Yield rows, and count each."""
        for row in rows:
            yield row
            self.advance()

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        return f"{self._title}: {self.rows:,} rows, {self.rows / seconds:,.0f} rows/s"
