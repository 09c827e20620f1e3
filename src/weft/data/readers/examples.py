"""Reader of data files: `read_rows` yields dicts, `read_examples` instances of a task's schema, each with its location.

A source is a path, a glob pattern (its files in sorted order), or a list of parallel files, read in lock-step, line by
line. The format is given by `data.format`, by the file's extension, or else by that of `data.train`: txt, tsv, csv,
jsonl, conll (and .conllu), squad (of .json), each also .gz or .zst, and parquet. Where `data.columns` is omitted, csv,
jsonl, squad and parquet map columns by the names of the fields; tsv, conll and parallel files by their order; a line of
txt is the single field (in full: `weft.data.readers.column_mapping`).

All formats but squad are streamed: memory is bounded by `data.max_line_bytes`, however large the file. A bad row raises
a `DataError` that begins with `file:line`, or with `data.on_bad_rows: skip` is skipped and counted. An error of a whole
file (missing, a directory, UTF-16, damaged, empty, parallel files of unequal length) is always raised.
"""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from weft.config.sections import Data
from weft.data.readers.column_mapping import Columns, NumberedRows, Row, join_list_fields
from weft.data.readers.documents import read_documents
from weft.data.readers.formats import FORMAT_READERS, read_parallel
from weft.data.readers.lines import BadRow, FileSlice, Oddities, check_file, plural
from weft.data.readers.urls import expand_url, is_url
from weft.errors import ConfigError, DataError, abbreviate

E = TypeVar("E", bound=BaseModel)
_MAX_REASONS = 5


class Place(NamedTuple):
    """File and first line of a row."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Skipped:
    """Rows skipped by `data.on_bad_rows: skip`: their number, the errors of the first ones; and what is odd."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)
    oddities: Oddities = field(default_factory=Oddities)

    def add(self, error: DataError) -> None:
        """Count one skipped row."""
        self.count += 1
        if len(self.reasons) < _MAX_REASONS:
            self.reasons.append(str(error))

    def __str__(self) -> str:
        if not self.count:
            return str(self.oddities)
        more = ["..."] if self.count > len(self.reasons) else []
        odd = [str(self.oddities)] if self.oddities.counts else []
        return f"skipped {plural(self.count, 'row')}: {'; '.join(self.reasons + more + odd)}"


def read_rows(
    source: str | list[str], data: Data, fields: Sequence[str], skipped: Skipped | None = None
) -> Iterator[tuple[Place, Row]]:
    """Return an iterator of rows as dicts of `fields`, all of which must be in the data."""
    skipped = Skipped() if skipped is None else skipped
    columns = Columns.of(data, fields, frozenset(fields), skipped.oddities)
    return _iter_rows(source, data, columns, skipped)


def read_examples(source: str | list[str], data: Data, schema: type[E], skipped: Skipped) -> Iterator[tuple[Place, E]]:
    """Return an iterator of rows validated by `schema`; fields with a default may be missing from the data."""
    required = frozenset(name for name, info in schema.model_fields.items() if info.is_required())
    columns = Columns.of(data, list(schema.model_fields), required, skipped.oddities)
    return _iter_examples(source, data, columns, schema, skipped)


def _iter_examples(
    source: str | list[str], data: Data, columns: Columns, schema: type[E], skipped: Skipped
) -> Iterator[tuple[Place, E]]:
    validate = schema.__pydantic_validator__.validate_python
    before, empty = skipped.count, True
    for place, row in _iter_rows(source, data, columns, skipped):
        try:
            example = validate(row)
        except ValidationError as error:
            _skip_or_raise(BadRow(f"{place}: {_validation_message(error)}"), data, skipped)
        else:
            empty = False
            yield place, example
    if empty and not isinstance(source, FileSlice):  # other slices of the file may have rows
        raise _no_rows_error(str(source), skipped, before)


def _iter_rows(source: str | list[str], data: Data, columns: Columns, skipped: Skipped) -> Iterator[tuple[Place, Row]]:
    for name, rows in _open_files(source, data, columns):
        before, empty = skipped.count, True
        for line, row in rows:
            if isinstance(row, BadRow):
                _skip_or_raise(row, data, skipped)
            else:
                empty = False
                if columns.lists:
                    row = join_list_fields(row, columns.lists)
                if "" in row.values() and data.documents != "every-line":
                    empty_field = next(field for field, value in row.items() if value == "")
                    skipped.oddities.add(f"with an empty {empty_field}", f"{name}:{line}")
                yield tuple.__new__(Place, (name, line)), row  # Place(name, line), in half the time
        if empty and not (isinstance(name, FileSlice) and not name.whole):
            raise _no_rows_error(name, skipped, before)


def _skip_or_raise(bad: BadRow, data: Data, skipped: Skipped) -> None:
    if data.on_bad_rows == "error":
        raise DataError(f"{bad}; or pass over bad rows with data.on_bad_rows: skip") from None
    skipped.add(bad)


def _no_rows_error(name: str, skipped: Skipped, before: int) -> DataError:
    bad = skipped.count - before
    if not bad:
        return DataError(f"{name}: there are no rows in it; is it the right file?")
    first = f", the first: {skipped.reasons[before]}" if before < len(skipped.reasons) else ""
    return DataError(f"{name}: no good rows in it, {plural(bad, 'row')} skipped as bad{first}")


def _open_files(source: str | list[str], data: Data, columns: Columns) -> Iterator[tuple[str, NumberedRows]]:
    if isinstance(source, list):
        _check_parallel(source, data)
        return iter([(source[0], read_parallel(source, columns, data.max_line_bytes))])
    paths, formats = resolve_files(source, data)
    if data.documents != "lines":
        _check_plain_text(formats, data)
        return ((path, read_documents(path, columns, data)) for path in paths)
    return (
        (path, FORMAT_READERS[format](path, columns, data.max_line_bytes))
        for path, format in zip(paths, formats, strict=True)
    )


def resolve_files(source: str, data: Data) -> tuple[list[str], list[str]]:
    """Return the files that match a path or a glob pattern, and the format of each."""
    paths = expand_glob(source)
    formats = [_file_format(path, data) for path in paths]
    _check_header(formats, data)
    _check_delimiter(formats, data)
    return paths, formats


def expand_glob(source: str) -> list[str]:
    """Return the files that match a path or a glob pattern, sorted; raise if there is none."""
    if is_url(source):
        return expand_url(source)
    if not glob.has_magic(source) or Path(source).exists():
        check_file(source)
        return [source]
    # Not Path.glob, which matches hidden files too, such as the ._* that some systems create for each file.
    paths = sorted(path for path in glob.glob(source, recursive=True) if Path(path).is_file())  # noqa: PTH207
    if not paths:
        raise DataError(f"{source}: no file matches this pattern; a relative one starts at {Path.cwd()}")
    return paths


def file_extension(path: str) -> str:
    """Return the ending of a file's name, before that of its compression, in lower case."""
    return PurePath(path.lower().removesuffix(".gz").removesuffix(".zst")).suffix[1:]


def format_of_extension(extension: str) -> str | None:
    """Return the format that an ending names, if any."""
    format = {"conllu": "conll", "json": "squad"}.get(extension, extension)
    return format if format in FORMAT_READERS else None


def format_by_ending(path: str) -> str | None:
    """Return the format that the ending of a file's name stands for; None if it stands for none."""
    return format_of_extension(file_extension(path))


def own_format(data: Data) -> str | None:
    """Return the format of the recipe's own files: that of a file whose ending names none (emerging.test.annotated).

    It is `data.format`, or that of the first of train, valid and test whose ending names one; None: of a sample.
    """
    sources = [source for source in (data.train, data.valid, data.test) if source]
    formats = ["txt" if isinstance(source, list) else format_by_ending(source) for source in sources]
    return data.format or next((format for format in formats if format), None)


def _file_format(path: str, data: Data) -> str:
    format = data.format or format_by_ending(path) or own_format(data)
    if format is None:
        raise ConfigError(f"{path}: its ending names no format; set data.format to one of {', '.join(FORMAT_READERS)}")
    if format == "parquet" and path.lower().endswith((".gz", ".zst")):
        raise ConfigError(f"{path}: parquet is compressed inside, not as a whole; unpack it")
    return format


def _check_parallel(paths: list[str], data: Data) -> None:
    if not paths:
        raise ConfigError("a list of parallel files must not be empty; give a path, or one file a column")
    for path in paths:
        format = data.format or file_extension(path)
        if format in FORMAT_READERS and format != "txt":
            raise ConfigError(
                f"{path}: a list means parallel files of plain text, line by line, but this is {format}; for files one "
                "after another give a pattern such as part-*.jsonl, or set data.format: txt"
            )
        check_file(path)
    _check_header(["txt"], data)
    _check_delimiter(["txt"], data)


def _check_plain_text(formats: list[str], data: Data) -> None:
    if other := set(formats) - {"txt"}:
        how = data.documents
        raise ConfigError(f"data.documents: {how!r} is for plain text, but this is {min(other)}; leave it out")


def _check_header(formats: list[str], data: Data) -> None:
    if data.header and (other := set(formats) - {"tsv", "csv"}):
        raise ConfigError(f"data.header: must be left out, since {min(other)} has no header line, but is true instead")


def _check_delimiter(formats: list[str], data: Data) -> None:
    if data.delimiter and (other := set(formats) - {"tsv", "csv"}):
        raise ConfigError(
            f"data.delimiter: is for csv and tsv, but this is {min(other)}; leave it out, or set data.format: csv, or "
            "tsv where quotes are ordinary characters"
        )


def _validation_message(error: ValidationError) -> str:
    first, *more = error.errors(include_url=False)
    location = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    actual = f", but is {abbreviate(first['input'], 60)} instead" if first["type"] != "missing" else ""
    others = f" (and {len(more)} more)" if more else ""
    return f"{location + ': ' if location else ''}{message[:1].lower()}{message[1:]}{actual}{others}"
