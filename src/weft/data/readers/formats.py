"""Readers of rows, one per format: txt, tsv, csv, jsonl, conll, labelled, squad, parquet, and parallel files.

A reader yields the line number where a row starts, and the row: a dict with the fields that `Columns` selects, or a
`BadRow`. It raises if the file as a whole is invalid. It holds one row in memory at a time (parquet: a batch).
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import PurePath
from typing import Any, NoReturn

from weft.data.readers.column_mapping import ColumnLayout, Columns, NumberedRows, Row
from weft.data.readers.lines import LINE_OVERHEAD, BadRow, chomp, plural, read_lines, unreadable
from weft.data.readers.squad import read_squad
from weft.data.readers.tables import read_csv, read_tsv
from weft.data.readers.urls import is_url, open_url
from weft.errors import DataError, abbreviate

LABELLED = ("label", "text")  # the columns of `read_labelled`
LABELLED_LINE = re.compile(r"(?:__label__(?=\S))?((?<=__label__)\S+|\d+) +(?!__label__)(\S.*?) *")


def read_txt(path: str, columns: Columns, limit: int) -> NumberedRows:
    """Yield one row with one field per line; blank lines are skipped."""
    picks = columns.by_position(1, path)
    for number, line in read_lines(path, limit):
        if isinstance(line, BadRow):
            yield number, line
        elif not line.isspace():
            text = chomp(line)
            yield number, {field: text for field, _ in picks}


def read_labelled(path: str, columns: Columns, limit: int) -> NumberedRows:
    """Yield a label and a text per line, with a space between; the prefix of fastText's labels is left out.

    Any other word at the start is an error: a file of texts alone would lose the first word of each.
    """
    picks = columns.from_header(LABELLED, path, by_name=True)
    for number, line in read_lines(path, limit):
        if isinstance(line, BadRow):
            yield number, line
        elif match := LABELLED_LINE.fullmatch(chomp(line)):
            yield number, {field: match[1 + index] for field, index in picks}
        elif not line.isspace():
            got = abbreviate(line, 40)
            yield (
                number,
                BadRow(
                    f"{path}:{number}: must be a number or __label__NAME, a space and a text, but is {got}; texts "
                    "alone are read from another format, such as jsonl"
                ),
            )


def read_parallel(paths: Sequence[str], columns: Columns, limit: int) -> NumberedRows:
    """Yield rows of files read in lock-step: line i of each is row i; a line that is blank in all files is skipped."""
    picks = columns.by_position(len(paths), ", ".join(paths))
    files = [read_lines(path, limit) for path in paths]
    for number, lines in enumerate(zip_longest(*files), 1):
        if None in lines:
            raise _unequal_lengths_error(paths, [number - (line is None) for line in lines], files)
        cells = _parallel_cells(paths, number, [line for _, line in lines])
        if isinstance(cells, BadRow):
            yield number, cells
        elif cells:
            yield number, {field: cells[index] for field, index in picks}


def _parallel_cells(paths: Sequence[str], number: int, lines: list[str | BadRow]) -> list[str] | BadRow:
    cells = []
    for line in lines:
        if isinstance(line, BadRow):
            return line
        cells.append("" if line.isspace() else chomp(line))
    if all(cells) or not any(cells):
        return cells if cells[0] else []
    blank, other = (
        next(path for path, cell in zip(paths, cells, strict=True) if bool(cell) is filled) for filled in (False, True)
    )
    return BadRow(f"{blank}:{number}: the line is blank, but not in {other}; fill it, or drop it from every file")


def _unequal_lengths_error(
    paths: Sequence[str], lines_read: Sequence[int], files: Sequence[Iterator[object]]
) -> DataError:
    totals = [lines + sum(1 for _ in rest) for lines, rest in zip(lines_read, files, strict=True)]
    lengths = ", ".join(f"{path} has {plural(total, 'line')}" for path, total in zip(paths, totals, strict=True))
    return DataError(f"parallel files must be of equal length: {lengths}; find where they part, and align them again")


def read_jsonl(path: str, columns: Columns, limit: int) -> NumberedRows:
    """Yield one row per line, a JSON object; values keep their types."""
    picks = columns.by_name(path)
    for number, line in read_lines(path, limit):
        if isinstance(line, BadRow):
            yield number, line
        elif text := line.rstrip(" \t\r\n"):
            value = _parse_object(path, number, text)
            if not isinstance(value, BadRow):
                value = columns.from_object(value, picks, f"{path}:{number}")
            yield number, value


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


_JSON = json.JSONDecoder(parse_constant=_reject_constant)


def _parse_object(path: str, number: int, text: str) -> Row | BadRow:
    try:
        value = _parse_json(text)
        surrogate = _lone_surrogate(text, value) if "\\" in text else None
    except json.JSONDecodeError as error:
        message = f"broken JSON at column {error.colno}: {error.msg}; write one whole object a line"
    except ValueError as error:
        message = f"broken JSON: {error}; write null, or a number"
    except RecursionError:
        message = "broken JSON: nested too deep; flatten it"
    else:
        if isinstance(value, dict) and not surrogate:
            return value
        message = f"must be a JSON object, but is {text[:20]!r} instead; write {{...}} a line"
        if surrogate:
            message = f"{surrogate} is half a character (a lone surrogate); write both halves, or drop it"
    return BadRow(f"{path}:{number}: {message}")


def _parse_json(text: str) -> Any:
    try:
        value, end = _JSON.raw_decode(text)
    except json.JSONDecodeError:
        end = -1
    return value if end == len(text) else _JSON.decode(text)  # slower, but accepts leading spaces and locates errors


def _lone_surrogate(text: str, value: object) -> str | None:
    if "\\ud" not in text and "\\uD" not in text:  # the line is valid UTF-8: only an escape can contain one
        return None
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return None


_RANGE = re.compile(r"[0-9]+[-.][0-9]+")


def read_conll(path: str, columns: Columns, limit: int) -> NumberedRows:
    """Yield one row per sentence: one token per line, a blank line after each sentence; each field is a list.

    Columns are separated by tabs, or by spaces in a line without tabs. `-DOCSTART-` lines are skipped; so are, in
    .conllu only, comments, multiword ranges (`3-4`) and empty nodes (`8.1`): elsewhere `#` is an ordinary token.
    """
    layout = ColumnLayout(path, columns)
    for start, tokens in _read_sentences(path, limit, ".conllu" in PurePath(path.lower()).suffixes):
        if isinstance(tokens, BadRow):
            yield start, tokens
        elif bad := next(filter(None, (layout.width_error(number, len(cells)) for number, cells in tokens)), None):
            yield start, bad
        else:
            yield start, {field: [cells[index] for _, cells in tokens] for field, index in layout.picks}


def _read_sentences(path: str, limit: int, conllu: bool) -> Iterator[tuple[int, list[tuple[int, list[str]]] | BadRow]]:
    tokens: list[tuple[int, list[str]]] = []
    bad: BadRow | None = None
    start = size = 0
    for number, line in chain(read_lines(path, limit), [(0, "\n")]):
        if isinstance(line, BadRow):
            bad, start = bad or line, start or number
        elif line.isspace():
            if start:
                yield start, bad or tokens
            tokens, bad, start, size = [], None, 0, 0
        elif not bad and not _is_skipped(cells := _split_columns(line), conllu):
            tokens.append((number, cells))
            start, size = start or number, size + len(line) + LINE_OVERHEAD
            if size > limit and len(tokens) > 1:
                bad = BadRow(
                    f"{path}:{start}: the sentence is longer than data.max_line_bytes; put a blank line after each"
                )
                tokens.clear()


def _split_columns(line: str) -> list[str]:
    text = chomp(line)
    if "\t" in text:
        return text.split("\t")
    cells = text.split(" ")  # not split(), which would split a token at a no-break space
    return [cell for cell in cells if cell] if "" in cells else cells


def _is_skipped(cells: list[str], conllu: bool) -> bool:
    if cells[0] == "-DOCSTART-":
        return True
    return conllu and (cells[0].startswith("#") or _RANGE.fullmatch(cells[0]) is not None)


def read_parquet(path: str, columns: Columns, limit: int) -> NumberedRows:
    """Yield the rows of a parquet file, read in batches; a row's line is its number, from 1."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: a parquet file needs pyarrow; pip install 'weft[arrow]'") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(open_url(path) if is_url(path) else path, buffer_size=1 << 20) as file:
            names = file.schema_arrow.names
            picks = columns.from_header(names, path, by_name=True)
            fields = [field for field, _ in picks]
            for batch in file.iter_batches(1024, columns=list({names[index] for _, index in picks})):
                for values in zip(*(batch.column(names[index]).to_pylist() for _, index in picks), strict=True):
                    number += 1
                    yield number, dict(zip(fields, values, strict=True))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise unreadable(path, error, number) from None


FORMAT_READERS: dict[str, Callable[[str, Columns, int], NumberedRows]] = {
    "txt": read_txt,
    "tsv": read_tsv,
    "csv": read_csv,
    "jsonl": read_jsonl,
    "conll": read_conll,
    "labelled": read_labelled,
    "squad": read_squad,
    "parquet": read_parquet,
}
