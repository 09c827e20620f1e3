"""SIGTERM and Ctrl-C end a training between two steps, with a checkpoint."""

import signal
import threading
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """A signal asked the training to stop, and it was saved. Its exit code is the shell's own for that signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; saved")
        self.exit_code = 128 + number


class Signals:
    """Inside, the first SIGTERM or SIGINT is noted in `got`; a second one acts at once, as it would have."""

    def __init__(self) -> None:
        self.got: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.got = number
        signal.signal(number, self._before[number])
