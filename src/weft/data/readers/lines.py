"""Reader of text lines from plain, gzip or zstd files or stdin, streamed, with a limit on the bytes of a line.

Only a newline ends a line (a U+2028 inside a sentence does not split it). A line keeps its newline, since csv needs it.
A UTF-8 byte-order mark is dropped. An error in one line is yielded in its place, as a `BadRow`, so that parallel files
stay aligned; an error of a whole file is raised.
"""

import codecs
import gzip
import io
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

from weft.data.readers.urls import expand_url, is_url, open_url
from weft.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

STDIN = "stdin"  # the name of the standard input in messages
MAX_DISCARDED = 1 << 30  # bytes of a line that is too long, after which its file is refused
_WAIT = 2.0  # seconds after which a pipe that is waited for is named
LINE_OVERHEAD = 100  # bytes of a Python string besides its text: bounds a record of many short lines
_BUFFER = 1 << 18
_HEAD = 4096  # bytes by which a binary file is told from text
_SHORT = 64  # bytes that are too few for that: a NUL byte is then an error of its line
_CONTROL = bytes(code for code in range(32) if chr(code) not in "\t\n\r\f\v\x1b")
_UNPACK = "unpack it, and give the file inside"
_EXPORT = "export the table as csv"
_BINARY_FORMATS = (
    (b"PK\x03\x04", "a zip archive or an Office document", f"{_UNPACK}, or {_EXPORT}"),
    (b"\xd0\xcf\x11\xe0", "an Office document", _EXPORT),
    (b"%PDF-", "a PDF", "extract its text: pdftotext FILE"),
    (b"\x1f\x8b", "gzip", "let its name end with .gz"),
    (b"\x28\xb5\x2f\xfd", "zstd", "let its name end with .zst"),
    (b"\xfd7zXZ", "xz", "unpack it: xz -d FILE"),
    (b"BZh91AY", "bzip2", "unpack it: bzip2 -d FILE"),
    (b"7z\xbc\xaf", "a 7z archive", _UNPACK),
    (b"PAR1\x15", "parquet", "set data.format: parquet"),
    (b"ARROW1\0", "Arrow", "write it as parquet"),
    (b"SQLite format 3", "an SQLite database", _EXPORT),
    (b"\x89HDF", "HDF5", _EXPORT),
    (b"\x93NUMPY", "a NumPy array", "write texts and labels as csv or jsonl"),
)
_BOMS = {  # UTF-32 first: its byte-order mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


class FileSlice(str):
    """A path with a byte range of whole lines to read; `line` is the number of lines before it."""

    def __new__(cls, path: str, start: int = 0, stop: int | None = None, line: int = 0) -> "FileSlice":
        """Return a slice, by default of the whole file."""
        instance = super().__new__(cls, path)
        instance.start, instance.stop, instance.line = start, stop, line
        return instance

    start: int
    stop: int | None
    line: int

    @property
    def whole(self) -> bool:
        """Return whether the slice is the whole file."""
        return self.stop is None


@dataclass
class Oddities:
    """What is odd about rows that are read all the same: for each kind its count, and the place of the first."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, place: str, times: int = 1) -> None:
        """Count rows, the first of them at `place`; `kind` continues `3 rows` as in `3 rows with an empty text`."""
        self.counts[kind] = self.counts.get(kind, 0) + times
        self.first.setdefault(kind, place)

    def __str__(self) -> str:
        parts = (f"{plural(n, 'row')} {kind}, the first: {self.first[kind]}" for kind, n in self.counts.items())
        return "; ".join(parts)


class BadRow(DataError):  # noqa: N818 (yielded as a value in a stream of rows, before it is raised)
    """The error of one row; `data.on_bad_rows: skip` skips it.

    `text` is the line decoded with replacement characters, if possible: csv needs its quotes to find the record's end.
    """

    def __init__(self, message: str, text: str | None = None) -> None:
        super().__init__(message)
        self.text = text


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: `1 column`, `1,200 columns`, `4 batches`."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def chomp(line: str) -> str:
    """Return a line without its newline, `\\n` or `\\r\\n`."""
    return line.removesuffix("\n").removesuffix("\r")


def check_file(path: str) -> None:
    """Raise if `path` is missing, a directory or a device, before anything is read."""
    if is_url(path):
        expand_url(path)
        return
    try:
        status = Path(path).stat()
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise unreadable(path, error) from None
    check_no_device(path, status)


def check_no_device(path: str, status: os.stat_result) -> None:
    """Raise for a device, such as /dev/zero, that may never end; a terminal and /dev/null do."""
    if not (stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)):
        return
    is_terminal = status.st_rdev == _terminal_device()
    if not is_terminal and status.st_rdev != Path(os.devnull).stat().st_rdev:
        raise DataError(f"{path}: is a device, not a file; give a file or a pipe")


def _terminal_device() -> int | None:
    """Return the device number of the terminal that is the standard input, if it is one."""
    try:
        return os.fstat(0).st_rdev if os.isatty(0) else None
    except OSError:  # closed
        return None


def read_lines(path: str, limit: int) -> Iterator[tuple[int, str | BadRow]]:
    """Yield each line with its number, from 1; a line of more than `limit` bytes is a `BadRow` and is not buffered."""
    number = before = path.line if isinstance(path, FileSlice) else 0
    try:
        with _open(path) as stream:
            for number, line in _split_lines(path, stream, limit, before):
                yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error, number) from None


def read_stdin_lines(limit: int) -> Iterator[tuple[int, str | BadRow]]:
    """Yield each line of the standard input, as `read_lines` does of a file."""
    try:
        # Not sys.stdin: if a thread waits on it when the program ends, Python aborts with a core dump.
        with open(0, "rb", closefd=False) as stream:
            check_no_device(STDIN, os.fstat(0))
            yield from _split_lines(STDIN, stream, limit, 0)
    except OSError as error:
        raise DataError(f"{STDIN}: cannot be read: {error.strerror}") from None


def _split_lines(path: str, stream: io.BufferedReader, limit: int, before: int) -> Iterator[tuple[int, str | BadRow]]:
    """Yield the lines of a stream; `before` is the number of the last line before it."""
    number = before
    if not number:
        _skip_bom(path, stream)
        _check_text(path, stream)
    while raw := stream.readline(limit + 2):  # room for \r\n; a longer line is read without its newline
        number += 1
        if len(raw) > limit and len(raw.removesuffix(b"\n").removesuffix(b"\r")) > limit:
            _discard_line(path, number, raw, stream)
            yield number, _too_long_error(path, number, limit)
        else:
            yield number, _decode(path, number, raw)


class _FileRange(io.RawIOBase):
    """A byte range of a file, as a raw stream."""

    def __init__(self, path: str, start: int, stop: int) -> None:
        self._file: Any = open_url(path) if is_url(path) else io.FileIO(path)
        self._remaining = stop - start
        self._file.seek(start)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        size: int = self._file.readinto(memoryview(buffer)[: self._remaining]) or 0
        self._remaining -= size
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def open_bytes(path: str) -> io.BufferedReader:
    """Return a binary stream of a plain, gzip or zstd file; `unreadable` converts its errors."""
    return _open(path)


def _open(path: str) -> io.BufferedReader:
    if isinstance(path, FileSlice) and path.stop is not None:
        return io.BufferedReader(_FileRange(path, path.start, path.stop), _BUFFER)
    if is_url(path):
        return _open_compressed(path)
    status = Path(path).stat()
    check_no_device(path, status)
    if not stat.S_ISFIFO(status.st_mode):
        return _open_compressed(path)
    with waiting_notice(path):
        stream = _open_compressed(path)
        stream.peek(1)
    return stream


@contextmanager
def waiting_notice(path: str) -> Iterator[None]:
    """Say on stderr, if the body takes some seconds, that a named pipe is waited for."""
    notice = f"{path}: is a pipe, and nothing has been written to it yet; waiting. It can be read only once\n"
    timer = Timer(_WAIT, sys.stderr.write, [notice])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _open_compressed(path: str) -> io.BufferedReader:
    remote: Any = open_url(path) if is_url(path) else None
    if path.lower().endswith(".gz"):
        return io.BufferedReader(gzip.open(remote or path, "rb"), _BUFFER)
    if path.lower().endswith(".zst"):
        return io.BufferedReader(_open_zstd(path, remote), _BUFFER)
    return io.BufferedReader(remote or io.FileIO(path), _BUFFER)


def _open_zstd(path: str, remote: Any) -> io.RawIOBase:
    # Not the zstandard package: its stream reader does not detect a truncated file.
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"{path}: a .zst file needs pyarrow; pip install 'weft[arrow]'") from None
    stream: io.RawIOBase = pyarrow.CompressedInputStream(remote or pyarrow.OSFile(path), "zstd")
    return stream


def _skip_bom(path: str, stream: io.BufferedReader) -> None:
    head = stream.peek(4)[:4]
    for bom, name in _BOMS.items():
        if head.startswith(bom):
            raise DataError(f"{path}: is {name}, not UTF-8; convert it: {_iconv(name, path)}")
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))


def _check_text(path: str, stream: io.BufferedReader) -> None:
    """Raise if a file begins as a known binary format does, or with more control characters than text has."""
    head = stream.peek(_HEAD)[:_HEAD]
    for magic, kind, remedy in _BINARY_FORMATS:
        if head.startswith(magic):
            raise DataError(f"{path}: is a binary file, {kind}, not text; {remedy}")
    if len(head) >= _SHORT and _looks_binary(head):
        raise DataError(f"{path}: is a binary file, not text; export it as csv, tsv, jsonl or plain text in UTF-8")


def _looks_binary(head: bytes) -> bool:
    """Return whether there are NUL bytes beside many other control characters, which UTF-16 does not have."""
    nuls = head.count(0)
    controls = len(head) - len(head.translate(None, _CONTROL)) - nuls
    return nuls > 0 and controls > 0.05 * (len(head) - nuls)


def _discard_line(path: str, number: int, raw: bytes, stream: io.BufferedReader) -> None:
    """Read on to the end of a line; raise if it does not come."""
    size = 0
    while raw and not raw.endswith(b"\n"):
        size += len(raw)
        if size > MAX_DISCARDED:
            raise DataError(f"{path}:{number}: the line has more than {MAX_DISCARDED:,} bytes; is this text?")
        raw = stream.readline(_BUFFER)


def _too_long_error(path: str, number: int, limit: int) -> BadRow:
    return BadRow(f"{path}:{number}: the line has more than {limit:,} bytes; split it, or raise data.max_line_bytes")


def _decode(path: str, number: int, raw: bytes) -> str | BadRow:
    if b"\0" in raw:
        utf16 = f"if it is UTF-16, convert it: {_iconv(_utf16_of(raw), path)}"  # which shows in the first line
        remedy = utf16 if number == 1 else "if so, remove it: tr -d '\\000'"
        place = f"{path}:{number}: a NUL byte at offset {raw.index(0):,} of the line"
        return BadRow(f"{place}; is this text? {remedy}", raw.decode(errors="replace"))
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        return BadRow(
            f"{path}:{number}: not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start:,} of the line; "
            f"convert it, from Latin-1 for instance: {_iconv('LATIN1', path)}",
            raw.decode(errors="replace"),
        )


def _utf16_of(raw: bytes) -> str:
    """Return which UTF-16 a first line is in, by the place of the zeros in its ASCII characters."""
    return "UTF-16BE" if raw[::2].count(0) > raw[1::2].count(0) else "UTF-16LE"


def _iconv(encoding: str, path: str) -> str:
    """Return the command that converts a file, or what is piped, to UTF-8."""
    return f"iconv -f {encoding} -t UTF-8" + (f" '{path}' > new" if path != STDIN else "")


def unreadable(path: str, error: Exception, lines: int = 0) -> DataError:
    """Return a `DataError` with a remedy for a system error; `lines` is the number of lines read before it."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return DataError(f"{path}: there is no such file; a relative path starts at {Path.cwd()}")
    if isinstance(error, IsADirectoryError):
        return DataError(f"{path}: is a directory; give a file, or a pattern such as {Path(path) / '*.jsonl'}")
    if isinstance(error, PermissionError):
        return DataError(f"{path}: may not be read; change its permissions: chmod +r '{path}'")
    after = f" after {plural(lines, 'line')}" if lines else ""
    return DataError(f"{path}: cannot be read{after}: {error}; is it damaged or cut short? copy or download it again")
