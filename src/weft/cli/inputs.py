"""Examples from a file or a pipe, in chunks: full ones, or smaller ones when the producer pauses."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, BinaryIO

from weft.data.readers.lines import chomp
from weft.errors import DataError

MAX_CHUNK = 1024  # examples
STDIN = 0


def read_input(file: Path | None) -> Iterator[Any]:
    """Yield one example per line of a file or of stdin; the lines of `.jsonl` are objects."""
    try:
        # Not sys.stdin: if a thread waits on it when the program ends, Python aborts with a core dump.
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
        except (ValueError, RecursionError) as error:  # a number that is too long, brackets nested too deep
            raise DataError(f"{name}:{number}: not JSON: {error}") from None


def read_chunks(examples: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield the examples read so far, at least one and at most `MAX_CHUNK`, while a thread reads more."""
    queue: Queue[Any] = Queue(maxsize=4 * MAX_CHUNK)
    end = object()

    def read() -> None:
        try:
            for example in examples:
                queue.put(example)
            queue.put(end)
        except BaseException as error:  # raised by the consumer below
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
        ends = last is end or isinstance(last, BaseException)
        if len(chunk) > ends:
            yield chunk[:-1] if ends else chunk
        if isinstance(last, BaseException):
            raise last
        if ends:
            return
