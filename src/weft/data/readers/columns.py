"""Which column of the data becomes which field of an example.

`data.columns` maps fields to columns, by name or by number from 0. Where it is omitted:

| data               | columns                                                                             |
|--------------------|-------------------------------------------------------------------------------------|
| txt                | by position: the line is the one required field, or the first                       |
| csv, jsonl, parquet| by name: a field's column is called what the field is called                        |
| tsv, conll         | by position, in the order of the fields; every column must have its field           |
| parallel files     | by position: file i is column i                                                     |
| csv, header: false | by position                                                                         |

Optional fields may be missing: by name any of them, by position the last of them. A tsv or csv file has a header line
if a column goes by name; `data.header` overrides: `true` passes over the header where columns go by number, `false`
says that there is none. Where `data.columns` is given, what it does not name is not read.

A field may be a list of several columns: `choices: [2, 3, 4, 5]`. Readers see each as a field of its own, `choices.0`
and so on, which are joined when a row is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config.schema import Data
from weft.data.readers.lines import BadRow, count
from weft.errors import ConfigError, DataError, did_you_mean

Row = dict[str, Any]
Rows = Iterator[tuple[int, Row | BadRow]]  # a row, or what is wrong with it, and the line where it starts
Picks = list[tuple[str, int]]  # field, number of its column
Given = Mapping[str, int | str | list[int | str]]  # field, its column, or the columns that make a list


@dataclass(frozen=True)
class Columns:
    """The fields asked for, those of them that must be there, and where the recipe says that they are."""

    fields: Sequence[str]
    required: frozenset[str]
    given: Mapping[str, int | str] | None
    header: bool | None
    lists: Mapping[str, Sequence[str]]  # of a field that has several columns, the fields that these are

    @classmethod
    def of(cls, data: Data, fields: Sequence[str], required: frozenset[str]) -> "Columns":
        """Check `data.columns` against the fields."""
        for field in data.columns or {}:
            if field not in fields:
                raise ConfigError(f"data.columns.{field}: the task has no such field; {did_you_mean(field, fields)}")
        given, lists = spread(data.columns or {})
        for field, column in given.items():
            if isinstance(column, int) and column < 0:
                raise ConfigError(f"data.columns.{field}: must be 0 or more, but is {column} instead")
        missing = [field for field in fields if field in required and field not in (data.columns or fields)]
        if missing:
            raise ConfigError(f"data.columns: the task needs {missing[0]!r} too; add {missing[0]}: <its column>")
        needed = required.union(*(lists[field] for field in lists if field in required)).difference(lists)
        return cls(fields, needed, given or None, data.header, lists)

    def has_header(self, by_name: bool) -> bool:
        """Say whether a table starts with a header; `by_name`: its format's columns go by name where none are given."""
        if self.given is None:
            return by_name if self.header is None else self.header
        named = [field for field, column in self.given.items() if isinstance(column, str)]
        if named and self.header is False:
            raise ConfigError(
                f"data.columns.{named[0]}: data.header is false, so it must be a number, "
                f"but is {self.given[named[0]]!r} instead"
            )
        return bool(named) if self.header is None else self.header

    def in_header(self, names: Sequence[str], place: str, by_name: bool) -> Picks:
        """Find the columns under a header."""
        if self.given is None and not by_name:
            return self.at(len(names), place)
        wanted = self.given or {field: field for field in self.fields if field in self.required or field in names}
        if not wanted:
            raise DataError(
                f"{place}: none of the columns {', '.join(names)} is a field of the task: {', '.join(self.fields)}; "
                "say which is which with data.columns"
            )
        return [(field, self._find(field, column, names, place)) for field, column in wanted.items()]

    def _find(self, field: str, column: int | str, names: Sequence[str], place: str) -> int:
        if isinstance(column, int):
            return self._in_range(field, column, len(names), place)
        if column not in names:
            raise DataError(
                f"{place}: no column {column!r}; {did_you_mean(column, names)}; "
                f"say which one is {field!r} with data.columns.{field}"
            )
        if names.count(column) > 1:
            raise DataError(
                f"{place}: {count(names.count(column), 'column')} are called {column!r}; "
                f"give the number of one, from 0, in data.columns.{field}"
            )
        return names.index(column)

    def at(self, width: int, place: str) -> Picks:
        """Find the columns by number in a row of `width`."""
        if self.given is None:
            return self._in_order(width, place)
        return [(field, self._number(field, column, width, place)) for field, column in self.given.items()]

    def _number(self, field: str, column: int | str, width: int, place: str) -> int:
        if isinstance(column, str):
            raise ConfigError(
                f"data.columns.{field}: {place}: columns have no names here, so it must be a number, "
                f"but is {column!r} instead"
            )
        return self._in_range(field, column, width, place)

    def _in_range(self, field: str, column: int, width: int, place: str) -> int:
        if column >= width:
            raise BadRow(
                f"{place}: {count(width, 'column')}, but data.columns.{field} is {column}; the first column is 0"
            )
        return column

    def _in_order(self, width: int, place: str) -> Picks:
        optional = [field for field in self.fields if field not in self.required]
        spare = width - len(self.required)
        if not 0 <= spare <= len(optional):
            raise BadRow(
                f"{place}: {count(width, 'column')} for {count(len(self.fields), 'field')}, {', '.join(self.fields)}; "
                "say which is which with data.columns"
            )
        chosen = self.required.union(optional[:spare])
        return [(field, number) for number, field in enumerate(field for field in self.fields if field in chosen)]

    def named(self, place: str) -> list[tuple[str, str]]:
        """Return field and name where columns go by name alone (jsonl)."""
        for field, column in (self.given or {}).items():
            if isinstance(column, int):
                raise ConfigError(
                    f"data.columns.{field}: {place}: columns go by name here, so it must be one, "
                    f"but is {column} instead"
                )
        return [(field, str(column)) for field, column in (self.given or {name: name for name in self.fields}).items()]

    def missing(self, row: Row, value: Row, picks: Sequence[tuple[str, str]], place: str) -> BadRow | None:
        """Say which of the keys that must be there an object lacks, if any; `row` is what was picked of it."""
        for field, name in picks:
            if field not in row and (field in self.required or not row):
                known = did_you_mean(name, value) if value else "the object is empty"
                return BadRow(f"{place}: no {name!r}; {known}; say which key is {field!r} with data.columns.{field}")
        return None


def spread(columns: Given) -> tuple[dict[str, int | str], dict[str, list[str]]]:
    """Give each column of a list a field of its own; return all fields, and which of them are a list."""
    given: dict[str, int | str] = {}
    lists: dict[str, list[str]] = {}
    for field, column in columns.items():
        if isinstance(column, list):
            lists[field] = [f"{field}.{number}" for number in range(len(column))]
        given |= zip(lists[field], column, strict=True) if isinstance(column, list) else {field: column}
    return given, lists


def joined(row: Row, lists: Mapping[str, Sequence[str]]) -> Row:
    """Put together again what `spread` took apart; what a row may lack, and does, is left out of its list."""
    parts = {part for several in lists.values() for part in several}
    whole = {field: [row[part] for part in several if part in row] for field, several in lists.items()}
    return {**{field: value for field, value in row.items() if field not in parts}, **whole}


class Layout:
    """The columns of one file, once its header or its first good row has said how many there are."""

    def __init__(self, path: str, columns: Columns) -> None:
        self.path, self.columns = path, columns
        self.picks: Picks = []
        self.width = 0
        self.first = 0  # the line that said so

    def read_header(self, number: int, names: Sequence[str], by_name: bool) -> None:
        """Take the layout from a header."""
        self.picks = self.columns.in_header(names, f"{self.path}:{number}", by_name)
        self.first, self.width = number, len(names)

    def misfit(self, number: int, width: int) -> BadRow | None:
        """Say what is wrong with a row of `width` columns, if anything; the first good one sets the layout."""
        if not self.width:
            try:
                self.picks = self.columns.at(width, f"{self.path}:{number}")
            except BadRow as error:
                return error
            self.first, self.width = number, width
        if width == self.width:
            return None
        return BadRow(
            f"{self.path}:{number}: got {count(width, 'column')}, expected {self.width} as in line {self.first}; "
            "is a separator missing, or inside a value?"
        )
