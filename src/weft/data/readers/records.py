"""Rows of a file of questions to a trained model: all columns of each, and its fields of the task.

`read_as_recipe` says how any file is read that is given to a trained model: by its ending and by the recipe's own
`data.format`, `data.columns` and `data.header`, so that a file like the training data is understood. Training data has
the labels that a question may lack: `read_records` passes over optional fields without a column, and keeps bad rows as
values, so that every row can have its answer. All formats are streamed, as in `weft.data.readers.examples`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weft.config.sections import Data
from weft.data.readers.column_mapping import ColumnPicks, Columns, ColumnSpec, Row, join_list_fields
from weft.data.readers.examples import file_extension, format_of_extension, own_format, resolve_files
from weft.data.readers.formats import FORMAT_READERS
from weft.data.readers.lines import BadRow, chomp, read_lines
from weft.errors import ConfigError, DataError

_NAMED = frozenset({"csv", "jsonl", "labelled", "squad", "parquet"})  # formats whose columns go by name
_ONLY_NUMBERED = frozenset({"txt", "conll"})
_WHOLE = "\0"  # begins the key of a column that is kept as it is in the file


class Record(NamedTuple):
    """A row: its place, its columns as they are in the file, and its fields, its text or the error in it."""

    place: str
    columns: Row
    request: str | Row | DataError


def read_as_recipe(data: Data, source: str, columns: ColumnSpec | None = None, fields: Sequence[str] = ()) -> Data:
    """Return the `data` section that reads another file than the recipe's.

    The file's ending names its format; where it names none, or one of the recipe's own files has the same, it is the
    recipe's (`own_format`), or plain text where the recipe has no files. The recipe's columns apply by name where
    columns have names, by number in its own format alone. `columns`, by field, override them. Where columns go by name,
    `fields` that neither of them gives have columns of their name.
    """
    own = own_format(data)
    format = _format_of(source, data) or own or "txt"
    same = format == own or own is None
    base = data.columns if _fits(_flatten(data.columns), format, same) else None
    header = data.header if format in ("tsv", "csv") and same else None
    if columns:
        by_name = format in _NAMED or any(isinstance(column, str) for column in _flatten(columns))
        if format == "csv" and base is None and header is None:
            header = True
        own_names = {field: field for field in fields} if by_name and base is None and header is not False else {}
        base = {**own_names, **(base or {}), **columns}
    documents = data.documents if format == "txt" else "lines"
    update = {"format": format, "columns": base, "header": header, "documents": documents}
    return data.model_copy(update=update)


def _format_of(source: str, data: Data) -> str | None:
    """Return the format by a file's ending; `data.format`, where the recipe's own files have the same ending."""
    extension = file_extension(source)
    own = [file_extension(path) for path in (data.train, data.valid, data.test) if isinstance(path, str)]
    return data.format if data.format and extension in own else format_of_extension(extension)


def _flatten(columns: ColumnSpec | None) -> list[int | str]:
    lists = (column if isinstance(column, list) else [column] for column in (columns or {}).values())
    return [column for columns_of_field in lists for column in columns_of_field]


def _fits(columns: Sequence[int | str], format: str | None, same: bool) -> bool:
    """Return whether a recipe's columns can be those of a format; `same`: whether it is the recipe's own."""
    has_names = any(isinstance(column, str) for column in columns)
    has_numbers = any(isinstance(column, int) for column in columns)
    return not (has_names and format in _ONLY_NUMBERED) and not (has_numbers and not same)


class _BadObject(BadRow):
    """The error of a JSON object without a required key, and the object."""

    def __init__(self, message: str, columns: Row) -> None:
        super().__init__(message)
        self.columns = columns


@dataclass(frozen=True)
class RecordColumns(Columns):
    """Columns of rows that are kept whole; an optional field without a column is passed over."""

    def from_header(self, names: Sequence[str], place: str, by_name: bool) -> ColumnPicks:
        """Return the column indices of the fields there are, and of every column by its name."""
        picks = self._present(names).from_header(names, place, by_name)
        return picks + [(f"{_WHOLE}{name}", index) for index, name in enumerate(names)]

    def by_position(self, width: int, place: str) -> ColumnPicks:
        """Return the column indices of the fields there are, and of every column: by its field, or by its number."""
        picks = self._present(range(width)).by_position(width, place)
        names = {index: field for field, index in picks}
        return picks + [(f"{_WHOLE}{names.get(index, f'column_{index}')}", index) for index in range(width)]

    def from_object(self, value: Row, picks: Sequence[tuple[str, str]], place: str) -> Row | BadRow:
        """Return the fields and all keys of a JSON object."""
        row = super().from_object(value, picks, place)
        if isinstance(row, BadRow):
            return _BadObject(str(row), value)
        return row | {f"{_WHOLE}{name}": cell for name, cell in value.items()}

    def _present(self, columns: Sequence[object]) -> Columns:
        """Return the mapping of the required fields, and of those whose column is there."""
        numbers = range(len(columns))
        present = {
            field: column
            for field, column in (self.given or {}).items()
            if field in self.required or column in (numbers if isinstance(column, int) else columns)
        }
        return Columns(
            self.fields, self.required, present or None, self.header, self.lists, self.delimiter, self.oddities
        )


def read_records(
    source: str, data: Data, fields: Sequence[str], required: Collection[str], columns: ColumnSpec | None = None
) -> Iterator[Record]:
    """Yield the rows of a file, with the fields of each that it has; a line of plain text is a text, blank or not."""
    own = {field: column for field, column in (data.columns or {}).items() if field in fields}
    data = read_as_recipe(data.model_copy(update={"columns": own or None}), source, columns, fields)
    if data.format == "txt":
        if columns:
            raise ConfigError(f"data.columns: {source} is plain text, a text a line; end its name in .tsv or .csv")
        yield from _read_texts(source, data)
        return
    mapping = RecordColumns.of(data, fields, frozenset(required))
    for path, format in zip(*resolve_files(source, data), strict=True):
        for line, row in FORMAT_READERS[format](path, mapping, data.max_line_bytes):
            place = f"{path}:{line}"
            if isinstance(row, BadRow):
                yield Record(place, row.columns if isinstance(row, _BadObject) else {}, BadRow(str(row)))
            else:
                yield _split(place, row, mapping.lists)


def _read_texts(source: str, data: Data) -> Iterator[Record]:
    paths, _ = resolve_files(source, data.model_copy(update={"format": "txt", "header": None}))
    for path in paths:
        for number, line in read_lines(path, data.max_line_bytes):
            text = line if isinstance(line, BadRow) else chomp(line)
            yield Record(f"{path}:{number}", {} if isinstance(text, BadRow) else {"text": text}, text)


def _split(place: str, row: Row, lists: Mapping[str, Sequence[str]]) -> Record:
    """Return a row's columns and its fields apart."""
    whole = {key.removeprefix(_WHOLE): value for key, value in row.items() if key.startswith(_WHOLE)}
    request: Row = {key: value for key, value in row.items() if not key.startswith(_WHOLE)}
    return Record(place, whole, _join(request, lists) if lists else request)


def _join(row: Row, lists: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    present = {field: parts for field, parts in lists.items() if any(part in row for part in parts)}
    return join_list_fields(row, present)
