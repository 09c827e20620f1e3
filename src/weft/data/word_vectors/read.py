"""Word vectors from a file: a word and its numbers a line, as GloVe writes them, or word2vec, fastText and gensim.

These begin with a line "count width"; GloVe's do not. A file whose name ends in .bin (or .bin.gz) is in word2vec's
binary form (`weft.data.word_vectors.binary`). A file is streamed (plain, .gz or .zst) and only the rows that are wanted
are kept. Numbers are read from the right, since GloVe's large files have words with spaces in them.
`weft.data.word_vectors.write` writes all of these.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from weft.data.readers.lines import BadRow, count, read_lines
from weft.data.word_vectors import binary
from weft.errors import DataError

_LINE = 1 << 24  # bytes: the default of data.max_line_bytes
_LARGEST = float(np.finfo(np.float32).max)
# A number behind a word, as no word has it: one more than the other lines have.
_NUMBER_TOO_MANY = re.compile(r" [-+]?\d*\.\d{3,}(e[-+]?\d+)?( |$)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Vectors:
    """A row for each word that was asked for, and whether the file has it; where it has not, the row is zero."""

    rows: np.ndarray  # (len(words), D), float32
    found: np.ndarray  # (len(words),), bool


@dataclass(frozen=True)
class Layout:
    """What a file's first line says: how many numbers a vector has, and, in a header, how many vectors there are."""

    width: int
    promised: int | None


def read_layout(path: str, limit: int = _LINE) -> Layout:
    """Read no more than the first line."""
    if binary.is_binary(path):
        promised, width = binary.read_header(path)
        return Layout(width, promised)
    with closing(_texts(path, limit)) as lines:
        first = next(lines, None)
    if first is None:
        raise DataError(f"{path}: is empty; a file of word vectors has a word and its numbers a line")
    number, text = first
    parts = text.split(" ")
    if len(parts) == 2 and all(part.isascii() and part.isdecimal() for part in parts):
        return Layout(int(parts[1]), int(parts[0]))
    width = 0
    while width < len(parts) - 1 and _is_number(parts[-1 - width]):
        width += 1
    if not width:
        raise DataError(
            f"{path}:{number}: no word vector: a line is a word and its numbers, with one space between, "
            f"but this one is {_short(text)}"
        )
    return Layout(width, None)


def read_words(path: str, limit: int = _LINE) -> Iterator[str]:
    """Stream the words of a file, in its order."""
    for word, _ in _entries(path, read_layout(path, limit), limit):
        yield word


def read_vectors(path: str, words: Sequence[str], limit: int = _LINE) -> Vectors:
    """Read the vectors of `words`: a word is looked up as it is, and where the file has not that, in lower case.

    Every line must have the width of the first; beyond that, a line that is not wanted is not looked into. Of a word
    that stands there twice the first line counts; an empty word is never found.
    """
    layout = read_layout(path, limit)
    wanted, seen = _Wanted(words, layout.width), 0
    for word, numbers in _entries(path, layout, limit):
        seen += 1
        places = wanted.places(word)
        if places:
            wanted.put(places, word, numbers())
    _check_promise(path, layout, seen)
    return Vectors(wanted.rows, wanted.rank > 0)


def read_table(path: str, most: int | None = None, limit: int = _LINE) -> tuple[list[str], np.ndarray]:
    """Read all words and their vectors (V, D), or the first `most`; of a word that stands there twice, the first."""
    layout, rows = read_layout(path, limit), dict[str, np.ndarray]()
    seen = 0
    for word, numbers in islice(_entries(path, layout, limit), most):
        seen += 1
        if word not in rows:
            rows[word] = numbers()
    if most is None:
        _check_promise(path, layout, seen)
    return list(rows), np.array(list(rows.values()), np.float32).reshape(len(rows), layout.width)


def _entries(path: str, layout: Layout, limit: int) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Stream the words, each with a function that reads its numbers."""
    if binary.is_binary(path):
        yield from binary.read_entries(path, limit)
        return
    with closing(_texts(path, limit)) as lines:
        if layout.promised is not None:
            next(lines)
        for number, text in lines:
            yield _word(path, number, text, layout.width), partial(_numbers, path, number, text, layout.width)


def _check_promise(path: str, layout: Layout, seen: int) -> None:
    if seen < (layout.promised or 0):
        raise DataError(
            f"{path}: its first line promises {count(layout.promised or 0, 'vector')}, but it has {seen:,}; "
            "is it cut short? copy or download it again"
        )


class _Wanted:
    """Which rows a word of the file fills."""

    def __init__(self, words: Sequence[str], width: int) -> None:
        self.rows = np.zeros((len(words), width), np.float32)
        self.rank = np.zeros(len(words), np.uint8)  # 0: not found, 1: in lower case, 2: as it is
        self._exact: dict[str, list[int]] = defaultdict(list)
        self._lower: dict[str, list[int]] = defaultdict(list)
        self._words = words
        for place, word in enumerate(words):
            if word:
                self._exact[word].append(place)
            if word.lower() != word:
                self._lower[word.lower()].append(place)

    def places(self, word: str) -> list[int]:
        """Return the rows that have nothing as good yet."""
        exact = [place for place in self._exact.get(word, ()) if self.rank[place] < 2]
        return exact + [place for place in self._lower.get(word, ()) if self.rank[place] < 1]

    def put(self, places: list[int], word: str, numbers: np.ndarray) -> None:
        """Fill rows."""
        self.rows[places] = numbers
        self.rank[places] = [2 if self._words[place] == word else 1 for place in places]


def _texts(path: str, limit: int) -> Generator[tuple[int, str], None, None]:
    """Yield the lines that are not blank, without their ends; word2vec writes a space before a line's end."""
    for number, line in read_lines(path, limit):
        if isinstance(line, BadRow):
            raise DataError(f"{line}; if it is word2vec's binary form, let its name end in .bin")
        text = line.rstrip(" \r\n")
        if text:
            yield number, text


def _word(path: str, number: int, text: str, width: int) -> str:
    """Return all that stands before the numbers, and see that these are as many as they should be."""
    spaces = text.count(" ")
    if spaces == width:  # by far the most lines: no need to cut the rest up
        return text[: text.index(" ")]
    word = text.rsplit(" ", width)[0]
    if spaces < width or _NUMBER_TOO_MANY.search(word):
        raise DataError(
            f"{path}:{number}: {count(_width(text), 'number')}, where the first vector has {width:,}: {_short(text)}; "
            "mend the line, or drop it"
        )
    return word.strip(" ")


def _width(text: str) -> int:
    return sum(map(_is_number, text.split(" ")[1:]))


def _numbers(path: str, number: int, text: str, width: int) -> np.ndarray:
    fields = text.rsplit(" ", width)[1:]
    try:
        with np.errstate(over="ignore"):
            numbers = np.array([float(field) for field in fields]).astype(np.float32)
    except ValueError:
        numbers = np.full(width, np.nan, np.float32)
    if np.isfinite(numbers).all():
        return numbers
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
