"""Plain text whose rows are not lines (`data.documents`).

| documents    | a row is                                                                                     |
|--------------|----------------------------------------------------------------------------------------------|
| `lines`      | a line; blank ones are passed over (`weft.data.readers.formats.read_txt`)                             |
| `every-line` | a line, a blank one too: an empty text, as WikiText-2 is counted in the literature           |
| `blank`      | the lines up to the next blank one: a document of one paragraph a line                        |
| `file`       | a whole file                                                                                  |

A document is held whole; `data.max_line_bytes` bounds its lines, as everywhere, and under `blank` the document as well.
"""

from collections.abc import Iterator
from itertools import chain

from weft.config.schema import Data
from weft.data.readers.columns import Columns, Rows
from weft.data.readers.lines import LINE_COST, BadRow, chomp, read_lines

Lines = Iterator[tuple[int, str | BadRow]]


def read_documents(path: str, columns: Columns, data: Data) -> Rows:
    """Read one field a document."""
    picks = columns.at(1, path)
    lines = read_lines(path, data.max_line_bytes)
    cut = {"every-line": _every_line, "blank": _blank, "file": _file}[data.documents]
    for number, text in cut(path, lines, data.max_line_bytes):
        yield number, text if isinstance(text, BadRow) else {field: text for field, _ in picks}


def _every_line(path: str, lines: Lines, limit: int) -> Lines:
    return ((number, line if isinstance(line, BadRow) else chomp(line)) for number, line in lines)


def _blank(path: str, lines: Lines, limit: int) -> Lines:
    held: list[str] = []
    start = size = 0
    bad: BadRow | None = None
    for number, line in chain(lines, [(0, "\n")]):
        if not isinstance(line, BadRow) and line.isspace():
            if start:
                yield start, bad or "\n".join(held)
            held, start, size, bad = [], 0, 0, None
            continue
        start = start or number
        if isinstance(line, BadRow):
            bad = bad or line
        elif bad is None:
            held.append(chomp(line))
            size += len(line) + LINE_COST
            if size > limit:
                bad = BadRow(
                    f"{path}:{start}: the document is longer than data.max_line_bytes={limit:,}; put a blank line "
                    "after each, or raise it"
                )
                held.clear()


def _file(path: str, lines: Lines, limit: int) -> Lines:
    held: list[str] = []
    for number, line in lines:
        if isinstance(line, BadRow):
            yield number, line
            return
        held.append(line)
    if held:
        yield 1, "".join(held)
