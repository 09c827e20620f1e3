"""Readers of tables: tsv, and csv with quoting."""

import csv
from collections import deque
from collections.abc import Iterator

from weft.data.readers.column_mapping import ColumnLayout, Columns, NumberedRows
from weft.data.readers.lines import LINE_OVERHEAD, BadRow, chomp, read_lines
from weft.errors import DataError

Cells = Iterator[tuple[int, list[str] | BadRow]]


def read_tsv(path: str, columns: Columns, limit: int) -> NumberedRows:
    """Return the rows of a tab-separated file; there is no quoting."""
    delimiter = columns.delimiter or "\t"
    return _read_table(path, split_lines(path, limit, delimiter), columns, "tsv", delimiter)


def split_lines(path: str, limit: int, delimiter: str = "\t") -> Cells:
    """Yield the cells of each line that is not empty; quotes are ordinary characters."""
    for number, line in read_lines(path, limit):
        if isinstance(line, BadRow):
            yield number, line
        elif text := chomp(line):
            yield number, text.split(delimiter)


def read_csv(path: str, columns: Columns, limit: int) -> NumberedRows:
    """Return the rows of a csv file (RFC 4180): a quoted value may contain commas, newlines and doubled quotes."""
    delimiter = columns.delimiter or ","
    return _read_table(path, parse_records(path, limit, delimiter), columns, "csv", delimiter)


class _Record:
    """The lines of one csv record, as `csv.reader` consumes them: bounded, and pushed back if quotes do not close."""

    def __init__(self, lines: Iterator[tuple[int, str | BadRow]], limit: int) -> None:
        self.lines, self.limit = lines, limit
        self.pushed_back: deque[tuple[int, str | BadRow]] = deque()
        self.start()

    def start(self) -> None:
        self.consumed: list[tuple[int, str | BadRow]] = []
        self.bad: BadRow | None = None
        self.size = 0

    def __iter__(self) -> "_Record":
        return self

    def __next__(self) -> str:
        number, line = self.pushed_back.popleft() if self.pushed_back else next(self.lines)
        self.consumed.append((number, line))
        if isinstance(line, BadRow):
            if line.text is None:
                raise line
            self.bad, line = self.bad or line, line.text
        self.size += len(line) + LINE_OVERHEAD
        if self.size > self.limit and len(self.consumed) > 1:
            raise csv.Error("the record is longer than data.max_line_bytes")
        return line

    def push_back(self) -> None:
        """Restart at the second line of this record: a stray quote costs one row, not all that follow."""
        self.pushed_back.extendleft(reversed(self.consumed[1:]))


def parse_records(path: str, limit: int, delimiter: str = ",") -> Cells:
    """Yield the cells of each csv record that is not empty."""
    csv.field_size_limit(max(csv.field_size_limit(), limit))  # global to the process, so it is never lowered
    record = _Record(read_lines(path, limit), limit)
    reader = csv.reader(record, delimiter=delimiter, strict=True)
    while True:
        record.start()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except BadRow as error:
            yield 0, error
        except csv.Error as error:
            yield 0, _quote_error(path, record.consumed, error)
            record.push_back()
        else:
            if cells:
                yield record.consumed[0][0], record.bad or cells


def _quote_error(path: str, consumed: list[tuple[int, str | BadRow]], error: csv.Error) -> BadRow:
    first, last = consumed[0][0], consumed[-1][0]
    if "new-line character" in str(error):
        return BadRow(f"{path}:{first}: a carriage return outside quotes; put the value in quotes, or drop it")
    problem = "unclosed quote" if last > first or "end of data" in str(error) else "stray quote"
    until = f" by line {last}" if last > first else ""
    return BadRow(
        f"{path}:{first}: {problem}: {error}{until}; close the quote, and double one that is inside a quoted value; "
        "if quotes are ordinary characters here, set data.format: tsv, and data.delimiter"
    )


def _read_table(path: str, records: Cells, columns: Columns, format: str, delimiter: str) -> NumberedRows:
    layout, by_name = ColumnLayout(path, columns), format == "csv"
    if columns.has_header(by_name):
        number, names = next(records, (0, []))
        if isinstance(names, BadRow):
            raise names
        if names:
            try:
                layout.read_header(number, names, by_name)
            except DataError as error:
                raise DataError(f"{error}{delimiter_hint(names, format, delimiter)}") from None
    for number, cells in records:
        if isinstance(cells, BadRow):
            yield number, cells
        elif len(cells) != layout.width and (bad := layout.width_error(number, len(cells))):
            hint = delimiter_hint(cells, format, delimiter)
            yield number, BadRow(f"{bad}{hint}") if hint else bad
        else:
            yield number, {field: cells[index] for field, index in layout.picks}


def delimiter_hint(cells: list[str], format: str, delimiter: str) -> str:
    """Return a hint at another delimiter that is more frequent in a row than the one it was split by, else nothing."""
    text = delimiter.join(cells)
    other = next((mark for mark in "\t;|," if mark != delimiter and text.count(mark) >= len(cells)), None)
    if other == "\t":
        return '; is it tab-separated? set data.format: tsv, or where values are quoted data.delimiter: "\\t"'
    if other == "," and format == "tsv":
        return "; is it comma-separated? set data.format: csv"
    return f'; is {other!r} the separator? set data.delimiter: "{other}"' if other else ""
