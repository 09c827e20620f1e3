"""Files to lines of text: plain, gzip or zstd, streamed, with no line ever held past its limit.

A line is what a newline ends, and nothing else (so no U+2028 inside a sentence splits it). It keeps its end, since csv
needs it. A UTF-8 byte-order mark is dropped. What is wrong with one line comes back in the line's place, as a `BadRow`,
so that parallel files stay in step; what is wrong with a whole file is raised.
"""

import codecs
import gzip
import io
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

LINE_COST = 100  # bytes that Python spends on a line beside its text: bounds a record of many short lines
_BUFFER = 1 << 18
_WIDE = {  # the longer mark first: UTF-32's begins with UTF-16's
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


class Stretch(str):
    """A path, and which of its bytes to read, from the start of a line on to the end of one; `line` come before."""

    def __new__(cls, path: str, start: int = 0, stop: int | None = None, line: int = 0) -> "Stretch":
        """Take all of the file where nothing else is said."""
        found = super().__new__(cls, path)
        found.start, found.stop, found.line = start, stop, line
        return found

    start: int
    stop: int | None
    line: int

    @property
    def whole(self) -> bool:
        """Whether it is all of the file."""
        return self.stop is None


class BadRow(DataError):  # noqa: N818 (a value in a stream of rows, before it is an error)
    """What is wrong with one row; `data.on_bad_rows: skip` passes over it.

    `text` is a line's nearest reading, where it has one: csv needs its quotes to find the end of the record.
    """

    def __init__(self, message: str, text: str | None = None) -> None:
        super().__init__(message)
        self.text = text


def count(number: int, noun: str) -> str:
    """Write a number with its noun: `1 column`, `1,200 columns`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def chomp(line: str) -> str:
    """Drop a line's end, `\\n` or `\\r\\n`."""
    return line.removesuffix("\n").removesuffix("\r")


def check_file(path: str) -> None:
    """Raise where `path` is missing or is a directory, before anything is read."""
    try:
        if stat.S_ISDIR(Path(path).stat().st_mode):
            raise IsADirectoryError(path)
    except OSError as error:
        raise unreadable(path, error) from None


def read_lines(path: str, limit: int) -> Iterator[tuple[int, str | BadRow]]:
    """Yield each line with its number, from 1; a line of more than `limit` bytes is bad and is not held."""
    number = first = path.line if isinstance(path, Stretch) else 0
    try:
        with _open(path) as stream:
            if not first:
                _drop_mark(path, stream)
            while raw := stream.readline(limit + 2):  # room for \r\n: past the limit, the line's end is not in sight
                number += 1
                if len(raw) > limit and len(raw.removesuffix(b"\n").removesuffix(b"\r")) > limit:
                    _discard(raw, stream)
                    yield number, _too_long(path, number, limit)
                else:
                    yield number, _decode(path, number, raw)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error, number) from None


class _Between(io.RawIOBase):
    """Some of a file's bytes."""

    def __init__(self, path: str, start: int, stop: int) -> None:
        self._file, self._left = io.FileIO(path), stop - start
        self._file.seek(start)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        size = self._file.readinto(memoryview(buffer)[: self._left]) or 0
        self._left -= size
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def open_bytes(path: str) -> io.BufferedReader:
    """Open a file, plain, gzip or zstd; what then goes wrong in reading it is for `unreadable` to say."""
    return _open(path)


def _open(path: str) -> io.BufferedReader:
    if isinstance(path, Stretch) and path.stop is not None:
        return io.BufferedReader(_Between(path, path.start, path.stop), _BUFFER)
    if path.lower().endswith(".gz"):
        return io.BufferedReader(gzip.open(path, "rb"), _BUFFER)
    if path.lower().endswith(".zst"):
        return io.BufferedReader(_open_zstd(path), _BUFFER)
    return io.BufferedReader(io.FileIO(path), _BUFFER)


def _open_zstd(path: str) -> io.RawIOBase:
    # Not the zstandard package: its stream reader takes a file that is cut short for one that ends there.
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"{path}: a .zst file needs pyarrow; pip install 'weft[arrow]'") from None
    stream: io.RawIOBase = pyarrow.CompressedInputStream(pyarrow.OSFile(path), "zstd")
    return stream


def _drop_mark(path: str, stream: io.BufferedReader) -> None:
    head = stream.peek(4)[:4]
    for mark, name in _WIDE.items():
        if head.startswith(mark):
            raise DataError(f"{path}: is {name}, not UTF-8; convert it: iconv -f {name} -t UTF-8 '{path}' > new")
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))


def _discard(raw: bytes, stream: io.BufferedReader) -> None:
    while raw and not raw.endswith(b"\n"):
        raw = stream.readline(_BUFFER)


def _too_long(path: str, number: int, limit: int) -> BadRow:
    return BadRow(f"{path}:{number}: the line has more than {limit:,} bytes; split it, or raise data.max_line_bytes")


def _decode(path: str, number: int, raw: bytes) -> str | BadRow:
    if b"\0" in raw:
        return BadRow(
            f"{path}:{number}: a NUL byte at offset {raw.index(0):,} of the line; "
            f"is this text? if it is UTF-16, convert it: iconv -f UTF-16LE -t UTF-8 '{path}' > new",
            raw.decode(errors="replace"),
        )
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        return BadRow(
            f"{path}:{number}: not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start:,} of the line; "
            f"convert the file, from Latin-1 for instance: iconv -f LATIN1 -t UTF-8 '{path}' > new",
            raw.decode(errors="replace"),
        )


def unreadable(path: str, error: Exception, lines: int = 0) -> DataError:
    """Turn what the system says of a file into an error with a remedy; `lines` were read before it."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return DataError(f"{path}: there is no such file; a relative path starts at {Path.cwd()}")
    if isinstance(error, IsADirectoryError):
        return DataError(f"{path}: is a directory; give a file, or a pattern such as {Path(path) / '*.jsonl'}")
    if isinstance(error, PermissionError):
        return DataError(f"{path}: may not be read; change its permissions: chmod +r '{path}'")
    after = f" after {count(lines, 'line')}" if lines else ""
    return DataError(f"{path}: cannot be read{after}: {error}; is it damaged or cut short? copy or download it again")
