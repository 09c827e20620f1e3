"""Signal handling: SIGTERM and Ctrl-C stop a training between two steps, with a checkpoint."""

import signal
import threading
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """A signal stopped training, after a checkpoint. The exit code is the shell's for that signal, 128 + number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; saved")
        self.exit_code = 128 + number


class Signals:
    """Context that stores the first SIGTERM or SIGINT in `received`; a second one has its original effect."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._handlers[number])
