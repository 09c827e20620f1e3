"""Readers of tables: tsv, and csv with quoting."""

import csv
from collections import deque
from collections.abc import Iterator

from weft.data.readers.column_mapping import ColumnLayout, Columns, NumberedRows
from weft.data.readers.lines import LINE_OVERHEAD, BadRow, chomp, read_lines

Cells = Iterator[tuple[int, list[str] | BadRow]]


def read_tsv(path: str, columns: Columns, limit: int) -> NumberedRows:
    """Return the rows of a tab-separated file; there is no quoting."""
    return _read_table(path, _tsv_cells(path, limit), columns, by_name=False)


def _tsv_cells(path: str, limit: int) -> Cells:
    for number, line in read_lines(path, limit):
        if isinstance(line, BadRow):
            yield number, line
        elif text := chomp(line):
            yield number, text.split("\t")


def read_csv(path: str, columns: Columns, limit: int) -> NumberedRows:
    """Return the rows of a csv file (RFC 4180): a quoted value may contain commas, newlines and doubled quotes."""
    csv.field_size_limit(max(csv.field_size_limit(), limit))  # global to the process, so it is never lowered
    return _read_table(path, _csv_cells(path, limit), columns, by_name=True)


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


def _csv_cells(path: str, limit: int) -> Cells:
    record = _Record(read_lines(path, limit), limit)
    reader = csv.reader(record, strict=True)
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
        f"{path}:{first}: {problem}: {error}{until}; close the quote, and double one that is inside a quoted value"
    )


def _read_table(path: str, records: Cells, columns: Columns, by_name: bool) -> NumberedRows:
    layout = ColumnLayout(path, columns)
    if columns.has_header(by_name):
        number, names = next(records, (0, []))
        if isinstance(names, BadRow):
            raise names
        if names:
            layout.read_header(number, names, by_name)
    for number, cells in records:
        if isinstance(cells, BadRow):
            yield number, cells
        elif len(cells) != layout.width and (bad := layout.width_error(number, len(cells))):
            yield number, bad
        else:
            yield number, {field: cells[index] for field, index in layout.picks}
