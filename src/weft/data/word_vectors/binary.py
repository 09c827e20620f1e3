"""word2vec's binary form: a line "count width", then each word, a space, and its numbers as little-endian float32.

word2vec's own code puts a line's end after each vector and gensim none: one before a word is passed over.
"""

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from io import BufferedReader

import numpy as np

from weft.data.readers.lines import count, open_bytes, unreadable
from weft.errors import DataError

_HEADER = 64  # bytes: more than two numbers take


def is_binary(path: str) -> bool:
    """Say whether a file is in the binary form, by its name."""
    name = path.lower()
    return any(name.endswith(f".bin{packed}") for packed in ("", ".gz", ".zst"))


def read_header(path: str) -> tuple[int, int]:
    """Read how many vectors there are and how long each is."""
    try:
        with open_bytes(path) as stream:
            return _header(path, stream)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from None


def read_entries(path: str, limit: int) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Stream the words, each with a function that reads its numbers; a word has no more than `limit` bytes."""
    number = 0
    try:
        with open_bytes(path) as stream:
            promised, width = _header(path, stream)
            for number in range(1, promised + 1):
                word, raw = _word(path, number, stream, limit), stream.read(4 * width)
                if len(raw) < 4 * width:
                    raise _cut_short(path, number, promised)
                yield word, partial(_numbers, path, number, word, raw)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error, number) from None


def _header(path: str, stream: BufferedReader) -> tuple[int, int]:
    line = stream.readline(_HEADER)
    parts = line.split()
    if not line.endswith(b"\n") or len(parts) != 2 or not all(part.isdigit() for part in parts) or int(parts[1]) < 1:
        raise DataError(
            f"{path}: word2vec's binary form begins with a line of two numbers, how many vectors and how long each is, "
            f"but this is {line[:40]!r}; if it is text, let its name end in .txt"
        )
    return int(parts[0]), int(parts[1])


def _word(path: str, number: int, stream: BufferedReader, limit: int) -> str:
    word = bytearray()
    while (sign := stream.read(1)) != b" ":
        if not sign or len(word) > limit:
            raise DataError(f"{path}: vector {number:,}: its word has no end; is the file damaged, or cut short?")
        if sign != b"\n" or word:
            word += sign
    try:
        return word.decode()
    except UnicodeDecodeError:
        raise DataError(
            f"{path}: vector {number:,}: its word is not UTF-8: {bytes(word[:40])!r}; is the file of that width, and "
            "in word2vec's binary form?"
        ) from None


def _numbers(path: str, number: int, word: str, raw: bytes) -> np.ndarray:
    found = np.frombuffer(raw, "<f4").astype(np.float32)
    if not np.isfinite(found).all():
        raise DataError(f"{path}: vector {number:,}, of {word!r}: has what is no number; is the file damaged?")
    return found


def _cut_short(path: str, number: int, promised: int) -> DataError:
    return DataError(
        f"{path}: its first line promises {count(promised, 'vector')}, but it ends in number {number:,}; is it cut "
        "short? copy or download it again"
    )
