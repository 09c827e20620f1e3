"""Files of answers: the input's columns and the answer's fields, as csv, tsv, jsonl or parquet."""

import csv
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Any, BinaryIO

from weft.config.json import write_json
from weft.data.readers.column_mapping import Row
from weft.data.readers.records import Record
from weft.errors import ConfigError, did_you_mean

PREFIX = "predicted_"  # of an answer's field whose name an input's column has
_ROW_GROUP = 4096  # rows of parquet that are held at a time


@contextmanager
def atomic_file(out: Path) -> Iterator[BinaryIO]:
    """Open a file under a temporary name, and rename it when it is complete; on an error nothing is left."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    with _writing(out):
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                yield file
            os.replace(temporary, out)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}") from None


class AnswerFile:
    """A context manager that collects answers in a temporary file, and at the end writes them by the file's ending.

    Which columns there are is known at the end alone: rows of JSON may have any keys, and errors come late.
    """

    def __init__(self, out: Path) -> None:
        writers = {".csv": _write_csv, ".tsv": _write_tsv, ".jsonl": _write_jsonl, ".parquet": _write_parquet}
        if out.suffix not in writers:
            endings = ", ".join(writers)
            raise ConfigError(f"--out: {str(out)!r} must end in {endings}; {did_you_mean(out.suffix, writers)}")
        if out.suffix == ".parquet":
            _import_pyarrow()
        self._out, self._write_rows = out, writers[out.suffix]
        self._columns: dict[str, None] = {}
        self._fields: dict[str, None] = {}

    def __enter__(self) -> "AnswerFile":
        with _writing(self._out):
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._spool: IO[str] = TemporaryFile("w+", encoding="utf-8", dir=self._out.parent)
        return self

    def write(self, record: Record, answer: Row) -> None:
        """Add a row: its columns and its answer."""
        columns = {name: _finite_or_none(value) for name, value in record.columns.items()}
        self._columns.update(dict.fromkeys(columns))
        self._fields.update(dict.fromkeys(answer))
        json.dump([columns, answer], self._spool, default=str)
        self._spool.write("\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._spool:
            if error is None:
                names = {field: self._name(field) for field in self._fields}
                with atomic_file(self._out) as file:
                    self._write_rows(file, [*self._columns, *names.values()], lambda: self._rows(names))

    def _name(self, field: str) -> str:
        name = field
        while name in self._columns:
            name = f"{PREFIX}{name}"
        return name

    def _rows(self, names: dict[str, str]) -> Iterator[Row]:
        self._spool.seek(0)
        for line in self._spool:
            columns, answer = json.loads(line)
            yield columns | {names[field]: value for field, value in answer.items()}


def _finite_or_none(value: Any) -> Any:
    """Return a value of a table; a NaN, which stands for a missing number there, as None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


TableRows = Callable[[], Iterable[Row]]  # the rows, from the first again with each call


def _write_jsonl(file: BinaryIO, names: list[str], rows: TableRows) -> None:
    file.writelines(f"{write_json(row)}\n".encode() for row in rows())


def _write_csv(file: BinaryIO, names: list[str], rows: TableRows) -> None:
    text = TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    csv.writer(text, lineterminator="\n").writerows(_table(names, rows))
    text.detach()


def _write_tsv(file: BinaryIO, names: list[str], rows: TableRows) -> None:
    """Write lines of cells between tabs; tabs and line ends inside a cell, which tsv has not, become spaces."""
    for row in _table(names, rows):
        file.write(("\t".join(re.sub(r"[\t\r\n]+", " ", cell) for cell in row) + "\n").encode())


def _table(names: list[str], rows: TableRows) -> Iterator[list[str]]:
    """Yield the header, and the cells of each row as text."""
    yield names
    for row in rows():
        yield [_cell(row.get(name)) for name in names]


def _cell(value: Any) -> str:
    """Return a value as text: what is no text, no number and not missing, as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return write_json(value)


def _import_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("--out: a parquet file needs pyarrow; pip install 'weft[arrow]'") from None
    return pyarrow


def _write_parquet(file: BinaryIO, names: list[str], rows: TableRows) -> None:
    """Write typed columns; one whose values have no common type is written as JSON text."""
    arrow = _import_pyarrow()
    types = {name: arrow.null() for name in names}
    for group in _groups(rows()):
        types = {name: _common_type(arrow, types[name], [row.get(name) for row in group]) for name in names}
    mixed = {name for name in names if types[name] is None}
    schema = arrow.schema([(name, arrow.string() if name in mixed else types[name]) for name in names])
    with arrow.parquet.ParquetWriter(file, schema) as writer:
        for group in _groups(rows()):
            texts = [row | {name: _cell(row[name]) for name in mixed & row.keys()} for row in group]
            writer.write_table(arrow.Table.from_pylist(texts, schema))


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    stream = iter(rows)
    while group := list(islice(stream, _ROW_GROUP)):
        yield group


def _common_type(arrow: Any, type: Any, values: list[Any]) -> Any:
    """Return the type that holds both a type and some values; None if there is none."""
    if type is None:
        return None
    try:
        fields = [arrow.schema([("x", kind)]) for kind in (type, arrow.array(values).type)]
        unified = arrow.unify_schemas(fields, promote_options="permissive")
    except arrow.ArrowException:
        return None
    return unified.field("x").type
