"""Where the command line starts: Ctrl-C is handled before anything that takes time to import is imported."""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # the exit code of Ctrl-C: 128 + SIGINT


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGINT, _interrupt)
    from weft.cli.main import main as run

    run()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt or, within an import, exit at once: libraries may take it for a failed import."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            sys.stdout.flush()
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
