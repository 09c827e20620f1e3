"""Lines to rows, one reader a format: txt, tsv, csv, jsonl, conll, squad, parquet, and parallel files.

A reader yields the number of the line where a row starts, and the row: a dict with the fields that `Columns` picks, or
a `BadRow` in its place. It raises where the file as a whole is wrong. It holds one row at a time (parquet: a batch).
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import PurePath
from typing import Any, NoReturn

from weft.data.readers.columns import Columns, Layout, Row, Rows
from weft.data.readers.lines import LINE_COST, BadRow, chomp, count, read_lines, unreadable
from weft.data.readers.squad import read_squad
from weft.data.readers.tables import read_csv, read_tsv
from weft.errors import DataError


def read_txt(path: str, columns: Columns, limit: int) -> Rows:
    """Read one field a line; blank lines are no rows."""
    picks = columns.at(1, path)
    for number, line in read_lines(path, limit):
        if isinstance(line, BadRow):
            yield number, line
        elif not line.isspace():
            text = chomp(line)
            yield number, {field: text for field, _ in picks}


def read_parallel(paths: Sequence[str], columns: Columns, limit: int) -> Rows:
    """Read files in lock-step: line i of each is row i; a line blank in all of them is passed over."""
    picks = columns.at(len(paths), ", ".join(paths))
    files = [read_lines(path, limit) for path in paths]
    for number, lines in enumerate(zip_longest(*files), 1):
        if None in lines:
            raise _unequal(paths, [number - (line is None) for line in lines], files)
        cells = _abreast(paths, number, [line for _, line in lines])
        if isinstance(cells, BadRow):
            yield number, cells
        elif cells:
            yield number, {field: cells[index] for field, index in picks}


def _abreast(paths: Sequence[str], number: int, lines: list[str | BadRow]) -> list[str] | BadRow:
    cells = []
    for line in lines:
        if isinstance(line, BadRow):
            return line
        cells.append("" if line.isspace() else chomp(line))
    if all(cells) or not any(cells):
        return cells if cells[0] else []
    blank, other = (
        next(path for path, cell in zip(paths, cells, strict=True) if bool(cell) is full) for full in (False, True)
    )
    return BadRow(f"{blank}:{number}: the line is blank, but not in {other}; fill it, or drop it from every file")


def _unequal(paths: Sequence[str], seen: Sequence[int], files: Sequence[Iterator[object]]) -> DataError:
    totals = [lines + sum(1 for _ in rest) for lines, rest in zip(seen, files, strict=True)]
    told = ", ".join(f"{path} has {count(total, 'line')}" for path, total in zip(paths, totals, strict=True))
    return DataError(f"parallel files must be of equal length: {told}; find where they part, and align them again")


def read_jsonl(path: str, columns: Columns, limit: int) -> Rows:
    """Read a JSON object a line; values keep their types."""
    picks = columns.named(path)
    for number, line in read_lines(path, limit):
        if isinstance(line, BadRow):
            yield number, line
        elif text := line.rstrip(" \t\r\n"):
            value = _json_object(path, number, text)
            if isinstance(value, BadRow):
                yield number, value
                continue
            row = {field: value[name] for field, name in picks if name in value}
            if len(row) < len(picks) and (bad := columns.missing(row, value, picks, f"{path}:{number}")):
                yield number, bad
            else:
                yield number, row


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


_JSON = json.JSONDecoder(parse_constant=_not_json)


def _json_object(path: str, number: int, text: str) -> Row | BadRow:
    try:
        value = _parse(text)
        half = _lone_surrogate(text, value) if "\\" in text else None
    except json.JSONDecodeError as error:
        what = f"broken JSON at column {error.colno}: {error.msg}; write one whole object a line"
    except ValueError as error:
        what = f"broken JSON: {error}; write null, or a number"
    except RecursionError:
        what = "broken JSON: nested too deep; flatten it"
    else:
        if isinstance(value, dict) and not half:
            return value
        what = f"must be a JSON object, but is {text[:20]!r} instead; write {{...}} a line"
        if half:
            what = f"{half} is half a character (a lone surrogate); write both halves, or drop it"
    return BadRow(f"{path}:{number}: {what}")


def _parse(text: str) -> Any:
    try:
        value, end = _JSON.raw_decode(text)
    except json.JSONDecodeError:
        end = -1
    return value if end == len(text) else _JSON.decode(text)  # slower, but knows leading spaces and what is wrong where


def _lone_surrogate(text: str, value: object) -> str | None:
    if "\\ud" not in text and "\\uD" not in text:  # the line is sound UTF-8: only an escape can bring one in
        return None
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return None


_RANGE = re.compile(r"[0-9]+[-.][0-9]+")


def read_conll(path: str, columns: Columns, limit: int) -> Rows:
    """Read a token a line and a blank line after each sentence; each field becomes a list.

    Columns go by tabs, or by spaces in a line that has no tab. `-DOCSTART-` lines are passed over; so are, in .conllu
    alone, comments, multiword ranges (`3-4`) and empty nodes (`8.1`): elsewhere `#` is a token like any other.
    """
    layout = Layout(path, columns)
    for start, block in _blocks(path, limit, ".conllu" in PurePath(path.lower()).suffixes):
        if isinstance(block, BadRow):
            yield start, block
        elif bad := next(filter(None, (layout.misfit(number, len(cells)) for number, cells in block)), None):
            yield start, bad
        else:
            yield start, {field: [cells[index] for _, cells in block] for field, index in layout.picks}


def _blocks(path: str, limit: int, conllu: bool) -> Iterator[tuple[int, list[tuple[int, list[str]]] | BadRow]]:
    block: list[tuple[int, list[str]]] = []
    bad: BadRow | None = None
    start = size = 0
    for number, line in chain(read_lines(path, limit), [(0, "\n")]):
        if isinstance(line, BadRow):
            bad, start = bad or line, start or number
        elif line.isspace():
            if start:
                yield start, bad or block
            block, bad, start, size = [], None, 0, 0
        elif not bad and not _aside(cells := _split(line), conllu):
            block.append((number, cells))
            start, size = start or number, size + len(line) + LINE_COST
            if size > limit and len(block) > 1:
                bad = BadRow(
                    f"{path}:{start}: the sentence is longer than data.max_line_bytes; put a blank line after each"
                )
                block.clear()


def _split(line: str) -> list[str]:
    text = chomp(line)
    if "\t" in text:
        return text.split("\t")
    cells = text.split(" ")  # not split(), which would cut a token at a no-break space
    return [cell for cell in cells if cell] if "" in cells else cells


def _aside(cells: list[str], conllu: bool) -> bool:
    if cells[0] == "-DOCSTART-":
        return True
    return conllu and (cells[0].startswith("#") or _RANGE.fullmatch(cells[0]) is not None)


def read_parquet(path: str, columns: Columns, limit: int) -> Rows:
    """Read parquet a batch of rows at a time; a row's line is its number, from 1."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: a parquet file needs pyarrow; pip install 'weft[arrow]'") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20) as file:
            names = file.schema_arrow.names
            picks = columns.in_header(names, path, by_name=True)
            fields = [field for field, _ in picks]
            for batch in file.iter_batches(1024, columns=list({names[index] for _, index in picks})):
                for values in zip(*(batch.column(names[index]).to_pylist() for _, index in picks), strict=True):
                    number += 1
                    yield number, dict(zip(fields, values, strict=True))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise unreadable(path, error, number) from None


READERS: dict[str, Callable[[str, Columns, int], Rows]] = {
    "txt": read_txt,
    "tsv": read_tsv,
    "csv": read_csv,
    "jsonl": read_jsonl,
    "conll": read_conll,
    "squad": read_squad,
    "parquet": read_parquet,
}
