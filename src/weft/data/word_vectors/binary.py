"""word2vec's binary format: a line "count width", then each word, a space, and its vector as little-endian float32.

word2vec's own code writes a newline after each vector, gensim does not: a newline before a word is skipped.
"""

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from io import BufferedReader

import numpy as np

from weft.data.readers.lines import open_bytes, plural, unreadable
from weft.errors import DataError

_HEADER = 64  # maximum bytes of the header line


def is_binary(path: str) -> bool:
    """Return whether a file is in the binary format, by its name."""
    name = path.lower()
    return any(name.endswith(f".bin{suffix}") for suffix in ("", ".gz", ".zst"))


def read_header(path: str) -> tuple[int, int]:
    """Return the number of vectors and their width."""
    try:
        with open_bytes(path) as stream:
            return _parse_header(path, stream)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from None


def read_entries(path: str, limit: int) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Yield the words, each with a function that parses its vector; a word has at most `limit` bytes."""
    number = 0
    try:
        with open_bytes(path) as stream:
            expected, width = _parse_header(path, stream)
            for number in range(1, expected + 1):
                word, raw = _read_word(path, number, stream, limit), stream.read(4 * width)
                if len(raw) < 4 * width:
                    raise _truncated_error(path, number, expected)
                yield word, partial(_parse_vector, path, number, word, raw)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error, number) from None


def _parse_header(path: str, stream: BufferedReader) -> tuple[int, int]:
    line = stream.readline(_HEADER)
    parts = line.split()
    if not line.endswith(b"\n") or len(parts) != 2 or not all(part.isdigit() for part in parts) or int(parts[1]) < 1:
        raise DataError(
            f"{path}: word2vec's binary form begins with a line of two numbers, how many vectors and how long each is, "
            f"but this is {line[:40]!r}; if it is text, let its name end in .txt"
        )
    return int(parts[0]), int(parts[1])


def _read_word(path: str, number: int, stream: BufferedReader, limit: int) -> str:
    word = bytearray()
    while (byte := stream.read(1)) != b" ":
        if not byte or len(word) > limit:
            raise DataError(f"{path}: vector {number:,}: its word has no end; is the file damaged, or cut short?")
        if byte != b"\n" or word:
            word += byte
    try:
        return word.decode()
    except UnicodeDecodeError:
        raise DataError(
            f"{path}: vector {number:,}: its word is not UTF-8: {bytes(word[:40])!r}; is the file of that width, and "
            "in word2vec's binary form?"
        ) from None


def _parse_vector(path: str, number: int, word: str, raw: bytes) -> np.ndarray:
    vector = np.frombuffer(raw, "<f4").astype(np.float32)
    if not np.isfinite(vector).all():
        raise DataError(f"{path}: vector {number:,}, of {word!r}: has what is no number; is the file damaged?")
    return vector


def _truncated_error(path: str, number: int, expected: int) -> DataError:
    return DataError(
        f"{path}: its first line promises {plural(expected, 'vector')}, but it ends in number {number:,}; is it cut "
        "short? copy or download it again"
    )
