"""Mapping of the columns of data files to the fields of examples.

`data.columns` maps fields to columns, by name or by number from 0. Where it is omitted:

| data               | columns                                                                             |
|--------------------|-------------------------------------------------------------------------------------|
| txt                | by position: the line is the single required field, or else the first field         |
| csv, jsonl, parquet| by name: a field's column has the same name                                         |
| tsv, conll         | by position, in the order of the fields; every column must have its field           |
| parallel files     | by position: file i is column i                                                     |
| csv, header: false | by position                                                                         |

Optional fields may be missing: any of them by name, the last of them by position. A tsv or csv file has a header line
if a column is given by name; `data.header` overrides: `true` skips the header where columns are given by number,
`false` means that there is none. Where `data.columns` is given, other columns are not read: a row may have more of them
than the first one (STS-B's rows do), which is counted.

A field may be a list of several columns: `choices: [2, 3, 4, 5]`. Readers treat each as a field of its own, `choices.0`
and so on; they are joined when a row is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config.sections import Data
from weft.data.readers.lines import BadRow, Oddities, plural
from weft.errors import ConfigError, DataError, did_you_mean

Row = dict[str, Any]
NumberedRows = Iterator[tuple[int, Row | BadRow]]  # line number, and the row or its error
ColumnPicks = list[tuple[str, int]]  # field, index of its column
ColumnSpec = Mapping[str, int | str | list[int | str]]  # field -> its column, or the columns of a list


@dataclass(frozen=True)
class Columns:
    """The requested fields, the required ones among them, and their columns in the recipe."""

    fields: Sequence[str]
    required: frozenset[str]
    given: Mapping[str, int | str] | None
    header: bool | None
    lists: Mapping[str, Sequence[str]]  # list field -> the field of each of its columns
    delimiter: str | None  # of tables; None: that of the format
    oddities: Oddities  # counted while reading

    @classmethod
    def of(
        cls, data: Data, fields: Sequence[str], required: frozenset[str], oddities: Oddities | None = None
    ) -> "Columns":
        """Return the columns of a recipe, after checking `data.columns` against the fields."""
        for field in data.columns or {}:
            if field not in fields:
                raise ConfigError(f"data.columns.{field}: the task has no such field; {did_you_mean(field, fields)}")
        given, lists = split_list_columns(data.columns or {})
        for field, column in given.items():
            if isinstance(column, int) and column < 0:
                raise ConfigError(f"data.columns.{field}: must be 0 or more, but is {column} instead")
        missing = [field for field in fields if field in required and field not in (data.columns or fields)]
        if missing:
            raise ConfigError(f"data.columns: the task needs {missing[0]!r} too; add {missing[0]}: <its column>")
        needed = required.union(*(lists[field] for field in lists if field in required)).difference(lists)
        return cls(
            fields,
            needed,
            given or None,
            data.header,
            lists,
            data.delimiter,
            Oddities() if oddities is None else oddities,
        )

    def has_header(self, by_name: bool) -> bool:
        """Return whether a table has a header line; `by_name`: whether its format maps columns by name by default."""
        if self.given is None:
            return by_name if self.header is None else self.header
        named = [field for field, column in self.given.items() if isinstance(column, str)]
        if named and self.header is False:
            raise ConfigError(
                f"data.columns.{named[0]}: data.header is false, so it must be a number, "
                f"but is {self.given[named[0]]!r} instead"
            )
        return bool(named) if self.header is None else self.header

    def from_header(self, names: Sequence[str], place: str, by_name: bool) -> ColumnPicks:
        """Return the column indices of the fields, given a header."""
        if self.given is None and not by_name:
            return self.by_position(len(names), place)
        wanted = self.given or {field: field for field in self.fields if field in self.required or field in names}
        if not wanted:
            raise DataError(
                f"{place}: none of the columns {', '.join(names)} is a field of the task: {', '.join(self.fields)}; "
                "say which is which with data.columns"
            )
        return [(field, self._resolve_column(field, column, names, place)) for field, column in wanted.items()]

    def _resolve_column(self, field: str, column: int | str, names: Sequence[str], place: str) -> int:
        if isinstance(column, int):
            return self._check_range(field, column, len(names), place)
        if column not in names:
            raise DataError(
                f"{place}: no column {column!r}; {did_you_mean(column, names)}; "
                f"say which one is {field!r} with data.columns.{field}"
            )
        if names.count(column) > 1:
            raise DataError(
                f"{place}: {plural(names.count(column), 'column')} are called {column!r}; "
                f"give the number of one, from 0, in data.columns.{field}"
            )
        return names.index(column)

    def by_position(self, width: int, place: str) -> ColumnPicks:
        """Return the column indices of the fields in rows of `width` columns without a header."""
        if self.given is None:
            return self._in_order(width, place)
        return [(field, self._resolve_number(field, column, width, place)) for field, column in self.given.items()]

    def _resolve_number(self, field: str, column: int | str, width: int, place: str) -> int:
        if isinstance(column, str):
            raise ConfigError(
                f"data.columns.{field}: {place}: columns have no names here, so it must be a number, "
                f"but is {column!r} instead"
            )
        return self._check_range(field, column, width, place)

    def _check_range(self, field: str, column: int, width: int, place: str) -> int:
        if column >= width:
            raise BadRow(
                f"{place}: {plural(width, 'column')}, but data.columns.{field} is {column}; the first column is 0"
            )
        return column

    def _in_order(self, width: int, place: str) -> ColumnPicks:
        optional = [field for field in self.fields if field not in self.required]
        spare = width - len(self.required)
        if not 0 <= spare <= len(optional):
            raise BadRow(
                f"{place}: {plural(width, 'column')} for {plural(len(self.fields), 'field')}, "
                f"{', '.join(self.fields)}; say which is which with data.columns"
            )
        chosen = self.required.union(optional[:spare])
        return [(field, number) for number, field in enumerate(field for field in self.fields if field in chosen)]

    def by_name(self, place: str) -> list[tuple[str, str]]:
        """Return (field, column name) pairs for formats with named columns only (jsonl)."""
        for field, column in (self.given or {}).items():
            if isinstance(column, int):
                raise ConfigError(
                    f"data.columns.{field}: {place}: columns go by name here, so it must be one, "
                    f"but is {column} instead"
                )
        return [(field, str(column)) for field, column in (self.given or {name: name for name in self.fields}).items()]

    def from_object(self, value: Row, picks: Sequence[tuple[str, str]], place: str) -> Row | BadRow:
        """Return the fields of a JSON object; `picks` are those of `by_name`."""
        row = {field: value[name] for field, name in picks if name in value}
        return (self._missing_key(row, value, picks, place) if len(row) < len(picks) else None) or row

    def _missing_key(self, row: Row, value: Row, picks: Sequence[tuple[str, str]], place: str) -> BadRow | None:
        """Return the error for the first required key that an object lacks, if any; `row` has the picked fields."""
        for field, name in picks:
            if field not in row and (field in self.required or not row):
                hint = did_you_mean(name, value) if value else "the object is empty"
                return BadRow(f"{place}: no {name!r}; {hint}; say which key is {field!r} with data.columns.{field}")
        return None


def split_list_columns(columns: ColumnSpec) -> tuple[dict[str, int | str], dict[str, list[str]]]:
    """Return columns with each column of a list as a field of its own, and the list fields with their parts."""
    given: dict[str, int | str] = {}
    lists: dict[str, list[str]] = {}
    for field, column in columns.items():
        if isinstance(column, list):
            lists[field] = [f"{field}.{number}" for number in range(len(column))]
        given |= zip(lists[field], column, strict=True) if isinstance(column, list) else {field: column}
    return given, lists


def join_list_fields(row: Row, lists: Mapping[str, Sequence[str]]) -> Row:
    """Return a row with the parts of list fields joined again (`split_list_columns`); missing parts are skipped."""
    parts = {part for names in lists.values() for part in names}
    joined_fields = {field: [row[part] for part in names if part in row] for field, names in lists.items()}
    return {**{field: value for field, value in row.items() if field not in parts}, **joined_fields}


class ColumnLayout:
    """The columns of one file, known from its header or its first valid row."""

    def __init__(self, path: str, columns: Columns) -> None:
        self.path, self.columns = path, columns
        self.picks: ColumnPicks = []
        self.width = 0
        self.first = 0  # the line that set the layout
        self.min_width = 0  # of a row

    def read_header(self, number: int, names: Sequence[str], by_name: bool) -> None:
        """Set the layout from a header."""
        self.picks = self.columns.from_header(names, f"{self.path}:{number}", by_name)
        self.first, self.width = number, len(names)
        self.min_width = self.width

    def width_error(self, number: int, width: int) -> BadRow | None:
        """Return the error for a row of `width` columns, if any; the first valid row sets the layout."""
        if not self.width:
            try:
                self.picks = self.columns.by_position(width, f"{self.path}:{number}")
            except BadRow as error:
                return error
            self.first, self.width = number, width
            self.min_width = width if self.columns.given is None else 1 + max(index for _, index in self.picks)
        if width == self.width:
            return None
        if self.columns.given is not None and width >= self.min_width:
            kind = "more" if width > self.width else "fewer"
            self.columns.oddities.add(f"with {kind} columns than line {self.first}", f"{self.path}:{number}")
            return None
        return BadRow(
            f"{self.path}:{number}: got {plural(width, 'column')}, expected {self.width} as in line {self.first}; "
            "is a separator missing, or inside a value?"
        )
