"""Reader of word vectors: one word and its vector per line, as in GloVe, or in word2vec, fastText and gensim.

The latter begin with a header "count width"; GloVe's do not. A file whose name ends in .bin (or .bin.gz) is in
word2vec's binary format (`weft.data.word_vectors.binary`). A file is streamed (plain, .gz or .zst) and only the
requested rows are kept. Lines are parsed from the right, since GloVe's large files have words with spaces.
`weft.data.word_vectors.write` writes all of these formats.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from weft.data.readers.lines import BadRow, plural, read_lines
from weft.data.word_vectors import binary
from weft.errors import DataError

_LINE = 1 << 24  # bytes: the default of data.max_line_bytes
_LARGEST = float(np.finfo(np.float32).max)
# A decimal number at the end of a word: the line has more numbers than the others.
_EXTRA_NUMBER = re.compile(r" [-+]?\d*\.\d{3,}(e[-+]?\d+)?( |$)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Vectors:
    """A vector for each requested word, and whether the file has it; a missing word has a zero vector."""

    rows: np.ndarray  # (len(words), D), float32
    in_file: np.ndarray  # (len(words),), bool


@dataclass(frozen=True)
class VectorLayout:
    """The vector width of a file, and the number of vectors, if a header gives it."""

    width: int
    num_vectors: int | None


def read_layout(path: str, limit: int = _LINE) -> VectorLayout:
    """Return the layout of a file, from its first line."""
    if binary.is_binary(path):
        num_vectors, width = binary.read_header(path)
        return VectorLayout(width, num_vectors)
    with closing(_read_text_lines(path, limit)) as lines:
        first = next(lines, None)
    if first is None:
        raise DataError(f"{path}: is empty; a file of word vectors has a word and its numbers a line")
    number, text = first
    parts = text.split(" ")
    if len(parts) == 2 and all(part.isascii() and part.isdecimal() for part in parts):
        return VectorLayout(int(parts[1]), int(parts[0]))
    width = 0
    while width < len(parts) - 1 and _is_number(parts[-1 - width]):
        width += 1
    if not width:
        raise DataError(
            f"{path}:{number}: no word vector: a line is a word and its numbers, with one space between, "
            f"but this one is {_short(text)}"
        )
    return VectorLayout(width, None)


def read_vector_words(path: str, limit: int = _LINE) -> Iterator[str]:
    """Yield the words of a file, in order."""
    for word, _ in _read_entries(path, read_layout(path, limit), limit):
        yield word


def read_vectors(path: str, words: Sequence[str], limit: int = _LINE) -> Vectors:
    """Return the vectors of `words`: a word is looked up as is and, if the file does not have it, in lower case.

    Every line must have the width of the first; apart from that, lines of other words are not parsed. Of duplicates the
    first line counts; an empty word is never found.
    """
    layout = read_layout(path, limit)
    requested, num_read = _RequestedRows(words, layout.width), 0
    for word, parse in _read_entries(path, layout, limit):
        num_read += 1
        rows = requested.rows_for(word)
        if rows:
            requested.put(rows, word, parse())
    _check_count(path, layout, num_read)
    return Vectors(requested.vectors, requested.rank > 0)


def read_table(path: str, most: int | None = None, limit: int = _LINE) -> tuple[list[str], np.ndarray]:
    """Return all words and their vectors (V, D), or the first `most`; of duplicates, the first counts."""
    layout, vectors = read_layout(path, limit), dict[str, np.ndarray]()
    num_read = 0
    for word, parse in islice(_read_entries(path, layout, limit), most):
        num_read += 1
        if word not in vectors:
            vectors[word] = parse()
    if most is None:
        _check_count(path, layout, num_read)
    return list(vectors), np.array(list(vectors.values()), np.float32).reshape(len(vectors), layout.width)


def _read_entries(path: str, layout: VectorLayout, limit: int) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Yield the words, each with a function that parses its vector."""
    if binary.is_binary(path):
        yield from binary.read_entries(path, limit)
        return
    with closing(_read_text_lines(path, limit)) as lines:
        if layout.num_vectors is not None:
            next(lines)
        for number, line in lines:
            parse = partial(_parse_vector, path, number, line, layout.width)
            yield _parse_word(path, number, line, layout.width), parse


def _check_count(path: str, layout: VectorLayout, num_read: int) -> None:
    if num_read < (layout.num_vectors or 0):
        raise DataError(
            f"{path}: its first line promises {plural(layout.num_vectors or 0, 'vector')}, but it has {num_read:,}; "
            "is it cut short? copy or download it again"
        )


class _RequestedRows:
    """The output rows that each word of the file fills."""

    def __init__(self, words: Sequence[str], width: int) -> None:
        self.vectors = np.zeros((len(words), width), np.float32)
        self.rank = np.zeros(len(words), np.uint8)  # 0: not found, 1: in lower case, 2: as it is
        self._exact: dict[str, list[int]] = defaultdict(list)
        self._lower: dict[str, list[int]] = defaultdict(list)
        self._words = words
        for row, word in enumerate(words):
            if word:
                self._exact[word].append(row)
            if word.lower() != word:
                self._lower[word.lower()].append(row)

    def rows_for(self, word: str) -> list[int]:
        """Return the rows that this word fills and that have no better match yet."""
        exact = [row for row in self._exact.get(word, ()) if self.rank[row] < 2]
        return exact + [row for row in self._lower.get(word, ()) if self.rank[row] < 1]

    def put(self, rows: list[int], word: str, vector: np.ndarray) -> None:
        """Write a vector to rows."""
        self.vectors[rows] = vector
        self.rank[rows] = [2 if self._words[row] == word else 1 for row in rows]


def _read_text_lines(path: str, limit: int) -> Generator[tuple[int, str], None, None]:
    """Yield the non-blank lines, stripped on the right: word2vec writes a space before the newline."""
    for number, line in read_lines(path, limit):
        if isinstance(line, BadRow):
            raise DataError(f"{line}; if it is word2vec's binary form, let its name end in .bin")
        text = line.rstrip(" \r\n")
        if text:
            yield number, text


def _parse_word(path: str, number: int, text: str, width: int) -> str:
    """Return the word of a line; raise if the line does not have `width` numbers."""
    spaces = text.count(" ")
    if spaces == width:  # nearly all lines: no need to split the rest
        return text[: text.index(" ")]
    word = text.rsplit(" ", width)[0]
    if spaces < width or _EXTRA_NUMBER.search(word):
        raise DataError(
            f"{path}:{number}: {plural(_width(text), 'number')}, where the first vector has {width:,}: {_short(text)}; "
            "mend the line, or drop it"
        )
    return word.strip(" ")


def _width(text: str) -> int:
    return sum(map(_is_number, text.split(" ")[1:]))


def _parse_vector(path: str, number: int, text: str, width: int) -> np.ndarray:
    fields = text.rsplit(" ", width)[1:]
    try:
        with np.errstate(over="ignore"):
            vector = np.array([float(field) for field in fields]).astype(np.float32)
    except ValueError:
        vector = np.full(width, np.nan, np.float32)
    if np.isfinite(vector).all():
        return vector
    wrong = next(field for field in fields if not (_is_number(field) and abs(float(field)) <= _LARGEST))
    raise DataError(f"{path}:{number}: {wrong!r} is no number that float32 has; mend the line, or drop it")


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
