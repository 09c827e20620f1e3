"""Tables to rows: tsv, and csv with its quotes."""

import csv
from collections import deque
from collections.abc import Iterator

from weft.data.readers.columns import Columns, Layout, Rows
from weft.data.readers.lines import LINE_COST, BadRow, chomp, read_lines

Cells = Iterator[tuple[int, list[str] | BadRow]]


def read_tsv(path: str, columns: Columns, limit: int) -> Rows:
    """Read columns between tabs; there is no quoting."""
    return _table(path, _tsv_cells(path, limit), columns, by_name=False)


def _tsv_cells(path: str, limit: int) -> Cells:
    for number, line in read_lines(path, limit):
        if isinstance(line, BadRow):
            yield number, line
        elif text := chomp(line):
            yield number, text.split("\t")


def read_csv(path: str, columns: Columns, limit: int) -> Rows:
    """Read RFC 4180: a quoted value may hold commas, line ends and doubled quotes."""
    csv.field_size_limit(max(csv.field_size_limit(), limit))  # one for the whole process, so it is only ever raised
    return _table(path, _csv_cells(path, limit), columns, by_name=True)


class _Record:
    """The lines of one csv record, as `csv.reader` draws them: bounded, and given back where quotes do not close."""

    def __init__(self, lines: Iterator[tuple[int, str | BadRow]], limit: int) -> None:
        self.lines, self.limit = lines, limit
        self.again: deque[tuple[int, str | BadRow]] = deque()
        self.start()

    def start(self) -> None:
        self.drawn: list[tuple[int, str | BadRow]] = []
        self.bad: BadRow | None = None
        self.size = 0

    def __iter__(self) -> "_Record":
        return self

    def __next__(self) -> str:
        number, line = self.again.popleft() if self.again else next(self.lines)
        self.drawn.append((number, line))
        if isinstance(line, BadRow):
            if line.text is None:
                raise line
            self.bad, line = self.bad or line, line.text
        self.size += len(line) + LINE_COST
        if self.size > self.limit and len(self.drawn) > 1:
            raise csv.Error("the record is longer than data.max_line_bytes")
        return line

    def give_back(self) -> None:
        """Let the next record start at this one's second line: a stray quote costs one row, not all that follow."""
        self.again.extendleft(reversed(self.drawn[1:]))


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
            yield 0, _broken_quotes(path, record.drawn, error)
            record.give_back()
        else:
            if cells:
                yield record.drawn[0][0], record.bad or cells


def _broken_quotes(path: str, drawn: list[tuple[int, str | BadRow]], error: csv.Error) -> BadRow:
    first, last = drawn[0][0], drawn[-1][0]
    if "new-line character" in str(error):
        return BadRow(f"{path}:{first}: a carriage return outside quotes; put the value in quotes, or drop it")
    what = "unclosed quote" if last > first or "end of data" in str(error) else "stray quote"
    where = f" by line {last}" if last > first else ""
    return BadRow(
        f"{path}:{first}: {what}: {error}{where}; close the quote, and double one that is inside a quoted value"
    )


def _table(path: str, records: Cells, columns: Columns, by_name: bool) -> Rows:
    layout = Layout(path, columns)
    if columns.has_header(by_name):
        number, names = next(records, (0, []))
        if isinstance(names, BadRow):
            raise names
        if names:
            layout.read_header(number, names, by_name)
    for number, cells in records:
        if isinstance(cells, BadRow):
            yield number, cells
        elif len(cells) != layout.width and (bad := layout.misfit(number, len(cells))):
            yield number, bad
        else:
            yield number, {field: cells[index] for field, index in layout.picks}
