"""The layout of a data file, detected from its first lines: format, delimiter, header line, columns.

What `data.format`, `data.delimiter` and `data.header` say is not questioned. The rest goes by the content, since an
ending misleads: STS-B's `.csv` is tab-separated, CoNLL-2000's `.txt` is a token a line, a `.json` is JSON lines.
"""

import csv
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from weft.config.sections import Data
from weft.data.readers.column_mapping import Columns
from weft.data.readers.examples import expand_glob, format_by_ending
from weft.data.readers.formats import LABELLED, LABELLED_LINE, read_parquet
from weft.data.readers.lines import BadRow, Oddities, chomp, read_lines
from weft.errors import DataError

HEAD_LINES = 300
_CONSISTENT = 0.9  # share of the rows that must have the same number of columns
_SENTENCES = 0.75  # share of the lines that must end as sentences do; the others are headings
_CONLLU_WIDTH = 10
_SQUAD = ["question", "passage", "answers", "starts", "id", "title"]
_DEFAULT_DELIMITERS = {"csv": ",", "tsv": "\t"}
ColumnName = str | int


@dataclass(frozen=True)
class Layout:
    """The format of a file, its delimiter, header line and columns, by name or by number from 0."""

    format: str
    delimiter: str | None  # of csv and tsv
    header: bool
    names: tuple[ColumnName, ...]
    paragraphs: bool = False  # txt: blank lines between groups of several lines
    sentences: bool = False  # of these each a sentence or paragraph a line, as BERT reads it

    def describe(self) -> str:
        """Return the layout in words: `csv, separated by ';', with a header line`."""
        if self.delimiter is None:
            return self.format
        mark = {"\t": "tabs", " ": "spaces"}.get(self.delimiter, repr(self.delimiter))
        return f"{self.format}, separated by {mark}, {'with a' if self.header else 'no'} header line"

    def keys(self, path: str) -> dict[str, object]:
        """Return the keys of the `data` section without which the file would be read in another way."""
        by_ending = format_by_ending(path)
        keys: dict[str, object] = {} if by_ending == self.format else {"format": self.format}
        if self.delimiter is not None and self.delimiter != _DEFAULT_DELIMITERS[self.format]:
            keys["delimiter"] = self.delimiter
        return keys


def detect_layout(source: str | list[str], data: Data) -> Layout:
    """Return the layout of a source's first file."""
    if isinstance(source, list):
        return Layout("parallel files", None, False, tuple(range(len(source))))
    path = expand_glob(source)[0]
    if (data.format or format_by_ending(path)) == "parquet":
        return Layout("parquet", None, False, tuple(_parquet_names(path)))
    lines = [line for _, line in islice(read_lines(path, data.max_line_bytes), HEAD_LINES)]
    head = [line for line in lines if not isinstance(line, BadRow)]
    if not any(line.strip() for line in head):
        bad = next((line for line in lines if isinstance(line, BadRow)), None)
        raise bad or DataError(f"{path}: there are no rows in it; is it the right file?")
    format = data.format or _detect_format(path, head, data)
    if format in _DEFAULT_DELIMITERS:
        return _detect_table(format, head, data)
    paragraphs = format == "txt" and _has_paragraphs(head)
    return Layout(format, None, False, _names(format, head), paragraphs, paragraphs and _has_sentences(head))


def _has_paragraphs(head: Sequence[str]) -> bool:
    """Return whether blank lines part paragraphs or documents of two lines or more, on average."""
    paragraphs = 1 + sum(1 for line, after in pairwise(head[:-1]) if not line.strip() and after.strip())
    return paragraphs > 1 and sum(1 for line in head if line.strip()) >= 2 * paragraphs


def _has_sentences(head: Sequence[str]) -> bool:
    """Return whether most lines end as sentences do."""
    texts = [line.strip() for line in head if line.strip()]
    ended = sum(1 for text in texts if text.rstrip("\"'”’)").endswith((".", "!", "?", "…", "。")))
    return ended >= _SENTENCES * len(texts)


def _parquet_names(path: str) -> list[str]:
    """Return the names of a parquet file's columns; its reader converts the errors."""
    any_column = Columns([], frozenset(), {"first": 0}, None, {}, None, Oddities())
    next(read_parquet(path, any_column, 0), None)
    import pyarrow.parquet

    return list(pyarrow.parquet.read_schema(path).names)


def _names(format: str, head: Sequence[str]) -> tuple[ColumnName, ...]:
    if format in ("squad", "labelled"):
        return tuple(_SQUAD if format == "squad" else LABELLED)
    if format == "jsonl":
        return tuple(dict.fromkeys(key for value in _objects(head) for key in value))
    if format == "conll":
        return tuple(range(_most_frequent([len(_token_columns(line)) for line in head if _is_token(line)])[0]))
    return (0,)


def _detect_format(path: str, head: Sequence[str], data: Data) -> str:
    ending = format_by_ending(path)
    if ending in ("conll", "jsonl"):
        return ending
    if len(_objects(head)) > 0.9 * sum(1 for line in head if line.strip()) and (len(head) > 1 or ending != "squad"):
        return "jsonl"
    if ending == "squad":
        return ending
    if data.delimiter is None and _is_conll(head):
        return "conll"
    quoted = _quotes_enclose(head, data.delimiter)
    if ending in ("csv", "tsv"):
        return "tsv" if ending == "csv" and _best_delimiter(head, data) == "\t" and not quoted else ending
    delimiter = data.delimiter or _best_delimiter(head, data, "\t" if ending == "txt" else "\t;|,")
    if delimiter is None:
        return "labelled" if _is_labelled(head) else "txt"
    return "csv" if quoted or delimiter in ",;" else "tsv"


def _objects(head: Sequence[str]) -> list[dict[str, object]]:
    """Return the lines that are JSON objects."""
    objects = []
    for line in head:
        try:
            value = json.loads(line) if line.lstrip().startswith("{") else None
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects


def _is_token(line: str) -> bool:
    return bool(line.strip()) and not line.startswith(("#", "-DOCSTART-"))


def _token_columns(line: str) -> list[str]:
    text = chomp(line)
    return text.split("\t") if "\t" in text else text.split()


def _is_conll(head: Sequence[str]) -> bool:
    """Return whether there are blank lines, and between them lines of as many columns each, the first a word."""
    tokens = [_token_columns(line) for line in head if _is_token(line)]
    blank = sum(1 for line in head[1:-1] if not line.strip())
    if not blank or len(tokens) < 2 * blank:
        return False
    width, times = _most_frequent([len(cells) for cells in tokens])
    words = sum(1 for cells in tokens if width == _CONLLU_WIDTH or " " not in cells[0].strip())
    return 2 <= width <= 30 and min(times, words) >= _CONSISTENT * len(tokens)


def _is_labelled(head: Sequence[str]) -> bool:
    """Return whether each line is a label, a space and a text, and labels repeat: else they may number the lines."""
    lines = [LABELLED_LINE.fullmatch(chomp(line)) for line in head if line.strip()]
    labels = {match[1] for match in lines if match}
    return all(lines) and 3 * len(labels) <= len(lines)


def _most_frequent(values: Sequence[int]) -> tuple[int, int]:
    return Counter(values).most_common(1)[0] if values else (1, 0)


def _quotes_enclose(head: Sequence[str], delimiter: str | None) -> bool:
    """Return whether quotes enclose values: each that begins with one ends with one, and there are some."""
    marks = [delimiter] if delimiter else list("\t;|,")
    quoted = [line for line in map(chomp, head) if any(line.startswith('"') or f'{mark}"' in line for mark in marks)]
    closed = [line for line in quoted if line.endswith('"') or any(f'"{mark}' in line for mark in marks)]
    try:
        rows = list(csv.reader(head, delimiter=delimiter or _frequent_mark(head), strict=True))
    except csv.Error:
        return False
    return bool(quoted) and len(closed) >= 0.5 * len(quoted) and len(rows) > 0


def _frequent_mark(head: Sequence[str]) -> str:
    return max("\t;|,", key=lambda mark: sum(mark in line for line in head))


def _best_delimiter(head: Sequence[str], data: Data, marks: str = "\t;|,") -> str | None:
    """Return the character that cuts most rows into the same number of columns, at least two; None if there is none."""
    if data.delimiter:
        return data.delimiter
    shares = {}
    for mark in marks:
        formats = ("csv",) if mark in ",;" else ("csv", "tsv")
        shares[mark] = max(_consistency(_records(format, head, mark)) for format in formats)
    best = max(shares, key=lambda mark: shares[mark])  # the first of equals
    return best if shares[best] >= _CONSISTENT else None


def _consistency(rows: Sequence[Sequence[str]]) -> float:
    """Return the share of rows that have the most frequent number of columns, if that is at least two."""
    width, times = _most_frequent([len(row) for row in rows])
    return times / len(rows) if width > 1 and len(rows) > 1 else 0.0


def _records(format: str, head: Sequence[str], delimiter: str) -> list[list[str]]:
    if format == "tsv":
        return [chomp(line).split(delimiter) for line in head if chomp(line)]
    rows = csv.reader(head, delimiter=delimiter)
    records: list[list[str]] = []
    try:
        records.extend(row for row in rows if row)
    except csv.Error:  # a value beyond the limit, or a NUL byte
        return records
    return records[:-1] if len(head) == HEAD_LINES else records  # the last may go on beyond the head


def _detect_table(format: str, head: Sequence[str], data: Data) -> Layout:
    delimiter = data.delimiter or _best_delimiter(head, data) or _DEFAULT_DELIMITERS[format]
    rows = _records(format, head, delimiter) or [[""]]
    named = any(isinstance(column, str) for column in (data.columns or {}).values())
    header = (named or _has_header(rows)) if data.header is None else data.header
    names: Sequence[ColumnName] = range(_most_frequent([len(row) for row in rows])[0])
    if header:  # a name that is empty, as that of pandas' index, or given twice names no column
        names = [name if name and rows[0].count(name) == 1 else number for number, name in enumerate(rows[0])]
    return Layout(format, delimiter, header, tuple(names))


def _has_header(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the first row names columns: short names, of which one is unlike all that stands below it."""
    first, rest = rows[0], [row for row in rows[1:] if len(row) >= len(rows[0])]
    if not rest or len(set(first)) < len(first) or not all(0 < len(cell) <= 40 for cell in first if cell):
        return False
    if any(_is_number(cell) or cell.endswith((".", "!", "?")) or _is_spelt(cell) for cell in first) or not any(first):
        return False
    return any(_names_column(cell, [row[i] for row in rest if row[i]]) for i, cell in enumerate(first) if cell)


def _names_column(name: str, values: Sequence[str]) -> bool:
    """Return whether a cell is the name of a column rather than one of its values."""
    if name.strip().lower() in {"text", "label", "sentence", "id", "source", "target", "class", "category", "review"}:
        return True
    if not values or name in values or len(name.split()) > 3:
        return False
    if all(map(_is_number, values)):
        return True
    repeated = len(set(values)) <= max(2, len(values) // 3)
    lengths = sorted(map(len, values))
    return repeated or (len(values) > 2 and len(name) < 0.4 * lengths[len(lengths) // 10])


def _is_spelt(cell: str) -> bool:
    """Return whether a cell is letters with spaces between, such as the sounds of a word."""
    parts = cell.split()
    return len(parts) > 1 and all(len(part) == 1 for part in parts)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
