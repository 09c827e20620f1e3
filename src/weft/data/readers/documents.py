"""Readers of plain text by `data.documents`: lines including blank ones, blank-separated documents, whole files.

| documents    | row                                                                                          |
|--------------|----------------------------------------------------------------------------------------------|
| `lines`      | a line; blank lines are skipped (`weft.data.readers.formats.read_txt`)                       |
| `every-line` | a line; a blank line is an empty text, as in published counts of WikiText-2                  |
| `blank`      | the lines up to the next blank line: a document with one paragraph per line                  |
| `file`       | a whole file                                                                                 |

A document is held in memory; `data.max_line_bytes` bounds its lines, as everywhere, and with `blank` the document
too, and with `file` the document to 64 times that.
"""

from collections.abc import Iterator
from itertools import chain

from weft.config.sections import Data
from weft.data.readers.column_mapping import Columns, NumberedRows
from weft.data.readers.lines import LINE_OVERHEAD, BadRow, chomp, read_lines

MAX_LINES_OF_FILE = 64  # times `data.max_line_bytes`: the size of a document that is a file
Lines = Iterator[tuple[int, str | BadRow]]


def read_documents(path: str, columns: Columns, data: Data) -> NumberedRows:
    """Yield one row with one field per document."""
    picks = columns.by_position(1, path)
    lines = read_lines(path, data.max_line_bytes)
    split = {"every-line": _split_lines, "blank": _split_at_blank_lines, "file": _join_file}[data.documents]
    for number, text in split(path, lines, data.max_line_bytes):
        yield number, text if isinstance(text, BadRow) else {field: text for field, _ in picks}


def _split_lines(path: str, lines: Lines, limit: int) -> Lines:
    return ((number, line if isinstance(line, BadRow) else chomp(line)) for number, line in lines)


def _split_at_blank_lines(path: str, lines: Lines, limit: int) -> Lines:
    texts: list[str] = []
    start = size = 0
    bad: BadRow | None = None
    for number, line in chain(lines, [(0, "\n")]):
        if not isinstance(line, BadRow) and line.isspace():
            if start:
                yield start, bad or "\n".join(texts)
            texts, start, size, bad = [], 0, 0, None
            continue
        start = start or number
        if isinstance(line, BadRow):
            bad = bad or line
        elif bad is None:
            texts.append(chomp(line))
            size += len(line) + LINE_OVERHEAD
            if size > limit:
                bad = BadRow(
                    f"{path}:{start}: the document is longer than data.max_line_bytes={limit:,}; put a blank line "
                    "after each, or raise it"
                )
                texts.clear()


def _join_file(path: str, lines: Lines, limit: int) -> Lines:
    texts: list[str] = []
    size = 0
    for number, line in lines:
        size += len(line) + LINE_OVERHEAD if isinstance(line, str) else 0
        if size > MAX_LINES_OF_FILE * limit:
            line = BadRow(f"{path}: has more than {MAX_LINES_OF_FILE} times data.max_line_bytes={limit:,}; raise it")
        if isinstance(line, BadRow):
            yield number, line
            return
        texts.append(line)
    if texts:
        yield 1, "".join(texts)
