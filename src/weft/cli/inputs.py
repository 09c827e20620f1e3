"""Rows from a file, a pipe or the command line, in chunks: full ones, or smaller ones when the producer pauses."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, TypeVar

from weft.config.schema import Data
from weft.data.readers.column_mapping import ColumnSpec
from weft.data.readers.lines import chomp
from weft.data.readers.records import Record, read_records
from weft.errors import ConfigError, DataError, WeftError

MAX_CHUNK = 1024  # rows
STDIN = 0

_E = TypeVar("_E", bound=WeftError)


def text_records(texts: Iterable[str]) -> Iterator[Record]:
    """Yield texts of the command line as rows."""
    return (Record(f"example {number}", {"text": text}, text) for number, text in enumerate(texts, 1))


def read_stdin() -> Iterator[Record]:
    """Yield the lines of stdin, each a text."""
    try:
        # Not sys.stdin: if a thread waits on it when the program ends, Python aborts with a core dump.
        with open(STDIN, "rb", closefd=False) as handle:
            for number, line in enumerate(handle, 1):
                yield _stdin_record(number, line)
    except OSError as error:
        raise DataError(f"stdin: cannot be read: {error.strerror}") from None


def _stdin_record(number: int, line: bytes) -> Record:
    try:
        text = chomp(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        reason = f"not UTF-8: {error.reason} at byte {error.start}; try iconv"
        return Record(f"stdin:{number}", {}, DataError(f"stdin:{number}: {reason}"))
    return Record(f"example {number}", {"text": text}, text)


def read_file(
    file: Path, data: Data, fields: Sequence[str], required: Collection[str], columns: ColumnSpec | None
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
        column: int | str = int(name) if name.isdecimal() else name
        before = columns.get(field)
        columns[field] = column if before is None else [*(before if isinstance(before, list) else [before]), column]
    if columns and file is None:
        raise ConfigError(f"--columns: are those of a file, but none is given with {', '.join(columns)}; name a file")
    return columns or None


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
