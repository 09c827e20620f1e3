"""Examples as they arrive, from a file or a pipe: in full batches, and at once when the producer pauses."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, BinaryIO

from weft.errors import DataError

AT_ONCE = 1024


def read_input(file: Path | None) -> Iterator[Any]:
    """Read an example a line, from a file or from stdin; `.jsonl` holds objects."""
    if file is None:
        yield from _lines(sys.stdin.buffer, "stdin", objects=False)
        return
    try:
        with file.open("rb") as handle:
            yield from _lines(handle, str(file), objects=file.suffix == ".jsonl")
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None


def _lines(handle: BinaryIO, name: str, objects: bool) -> Iterator[Any]:
    for number, line in enumerate(handle, 1):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
            yield json.loads(text) if objects else text
        except UnicodeDecodeError as error:
            raise DataError(f"{name}:{number}: not UTF-8: {error.reason} at byte {error.start}; try iconv") from None
        except json.JSONDecodeError as error:
            raise DataError(f"{name}:{number}: not JSON: {error.msg} at column {error.colno}") from None


def arriving(examples: Iterable[Any]) -> Iterator[list[Any]]:
    """Gather what is there, at least one and at most `AT_ONCE`, while a thread reads on."""
    queue: Queue[Any] = Queue(maxsize=4 * AT_ONCE)
    end = object()

    def read() -> None:
        try:
            for example in examples:
                queue.put(example)
            queue.put(end)
        except BaseException as error:  # handed to the thread that waits for it
            queue.put(error)

    Thread(target=read, daemon=True).start()
    while (first := queue.get()) is not end:
        chunk = [first]
        while len(chunk) < AT_ONCE and chunk[-1] is not end and not isinstance(chunk[-1], BaseException):
            try:
                chunk.append(queue.get_nowait())
            except Empty:
                break
        last = chunk[-1]
        closing = last is end or isinstance(last, BaseException)
        if len(chunk) > closing:
            yield chunk[:-1] if closing else chunk
        if isinstance(last, BaseException):
            raise last
        if closing:
            return
