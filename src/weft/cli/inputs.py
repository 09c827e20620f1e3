"""Rows from a file, a pipe or the command line, in chunks: full ones, or smaller ones when the producer pauses."""

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, TypeVar

from weft.cli.console import tell
from weft.config.sections import Data
from weft.data.readers.column_mapping import ColumnSpec
from weft.data.readers.lines import STDIN, BadRow, chomp, read_stdin_lines
from weft.data.readers.records import Record, read_records
from weft.errors import ConfigError, DataError, WeftError

MAX_CHUNK = 1024  # rows
ROW_SIZE = 1 << 12  # characters that count as one row, so that a chunk of long rows has few

_E = TypeVar("_E", bound=WeftError)


def text_records(texts: Iterable[str]) -> Iterator[Record]:
    """Yield texts of the command line as rows."""
    return (Record(f"example {number}", {"text": text}, text) for number, text in enumerate(texts, 1))


def read_stdin(limit: int) -> Iterator[Record]:
    """Yield the lines of stdin, each a text; one of more than `limit` bytes is a row with its error."""
    if sys.stdin is not None and sys.stdin.isatty():
        tell("reading texts from the terminal, one a line; Ctrl-D ends them")
    for number, line in read_stdin_lines(limit):
        if isinstance(line, BadRow):
            yield Record(f"{STDIN}:{number}", {}, DataError(str(line)))
        else:
            text = chomp(line)
            yield Record(f"example {number}", {"text": text}, text)


def read_file(
    file: str | Path, data: Data, fields: Sequence[str], required: Collection[str], columns: ColumnSpec | None
) -> Iterator[Record]:
    """Yield the rows of a file, read as the recipe's own (`read_records`); errors name the option for columns."""
    try:
        for record in read_records(str(file), data, fields, required, columns):
            error = record.request
            yield record._replace(request=_name_option(error)) if isinstance(error, DataError) else record
    except WeftError as error:
        raise _name_option(error) from None


def _name_option(error: _E) -> _E:
    return type(error)(f"{error} (command line: --columns FIELD=COLUMN)") if "data.columns" in str(error) else error


def parse_columns(pairs: Iterable[str] | None, file: object) -> dict[str, int | str | list[int | str]] | None:
    """Parse `--columns`: `text=review`, `text=2`, several separated by commas; a field given twice is a list."""
    columns: dict[str, int | str | list[int | str]] = {}
    for pair in (part for text in pairs or () for part in text.split(",")):
        field, _, name = (part.strip() for part in pair.partition("="))
        if not (field and name):
            raise ConfigError(f"--columns: must be FIELD=COLUMN, such as text=review or text=2, but is {pair!r}")
        column: int | str = int(name) if name.isdecimal() and len(name) < 10 else name
        before = columns.get(field)
        columns[field] = column if before is None else [*(before if isinstance(before, list) else [before]), column]
    if columns and file is None:
        raise ConfigError(f"--columns: are those of a file, but none is given with {', '.join(columns)}; name a file")
    return columns or None


def row_size(example: Any) -> int:
    """Return for how many rows an example, a text or a `Record`, counts."""
    values = example.columns.values() if isinstance(example, Record) else [example]
    return 1 + sum(len(value if isinstance(value, str) else repr(value)) for value in values) // ROW_SIZE


def cut_rows(
    records: Iterable[Record], rows: int, size: int, size_of: Callable[[Record], int]
) -> Iterator[list[Record]]:
    """Yield chunks of so many rows; one ends earlier when the sizes of its rows reach `size`."""
    chunk, total = list[Record](), 0
    for record in records:
        chunk.append(record)
        total += size_of(record)
        if len(chunk) == rows or total >= size:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


class _RowQueue(Queue[Any]):
    """A queue that is full by the sizes of the examples in it, not by their number."""

    def _init(self, maxsize: int) -> None:
        self._examples: deque[Any] = deque()
        self._size = 0

    def _qsize(self) -> int:
        return self._size

    def _put(self, item: Any) -> None:
        self._examples.append(item)
        self._size += row_size(item)

    def _get(self) -> Any:
        item = self._examples.popleft()
        self._size -= row_size(item)
        return item


def read_chunks(examples: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield the examples read so far, at least one and at most `MAX_CHUNK`, while a thread reads more.

    A long example counts as many, so that memory is bounded by the characters, too.
    """
    queue, end = _RowQueue(4 * MAX_CHUNK), object()

    def read() -> None:
        try:
            for example in examples:
                queue.put(example)
            queue.put(end)
        except BaseException as error:  # raised by the consumer below
            queue.put(error)

    Thread(target=read, daemon=True).start()
    while (first := queue.get()) is not end:
        chunk, size = [first], row_size(first)
        while size < MAX_CHUNK and chunk[-1] is not end and not isinstance(chunk[-1], BaseException):
            try:
                chunk.append(queue.get_nowait())
                size += row_size(chunk[-1])
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
