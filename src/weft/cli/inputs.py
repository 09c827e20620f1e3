"""Examples as they arrive, from a file or a pipe: in full batches, and at once when the producer pauses."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, BinaryIO

from weft.data.readers.lines import chomp
from weft.errors import DataError

MAX_CHUNK = 1024
STDIN = 0


def read_input(file: Path | None) -> Iterator[Any]:
    """Read an example a line, from a file or from stdin; `.jsonl` holds objects."""
    try:
        # Not sys.stdin: a thread that waits on it when the program ends would bring Python down with a core dump.
        with open(STDIN if file is None else file, "rb", closefd=file is not None) as handle:
            objects = file is not None and file.suffix.lower() == ".jsonl"
            yield from _lines(handle, "stdin" if file is None else str(file), objects)
    except OSError as error:
        raise DataError(f"{file or 'stdin'}: cannot be read: {error.strerror}") from None


def _lines(handle: BinaryIO, name: str, objects: bool) -> Iterator[Any]:
    for number, line in enumerate(handle, 1):
        try:
            text = chomp(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            yield json.loads(text) if objects else text
        except UnicodeDecodeError as error:
            raise DataError(f"{name}:{number}: not UTF-8: {error.reason} at byte {error.start}; try iconv") from None
        except json.JSONDecodeError as error:
            raise DataError(f"{name}:{number}: not JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:  # a number too long, brackets too deep
            raise DataError(f"{name}:{number}: not JSON: {error}") from None


def arriving(examples: Iterable[Any]) -> Iterator[list[Any]]:
    """Gather what is there, at least one and at most `CHUNK_SIZE`, while a thread reads on."""
    queue: Queue[Any] = Queue(maxsize=4 * MAX_CHUNK)
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
        while len(chunk) < MAX_CHUNK and chunk[-1] is not end and not isinstance(chunk[-1], BaseException):
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
