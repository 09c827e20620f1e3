"""Partition of a split's files into parts that worker processes read in parallel.

A plain file of lines (txt, jsonl) is split at line ends or, where documents are separated by blank lines, after a blank
line: no row is split. Other files are not split: compressed files, tables, conll, parquet, one document per file. Small
files share a part. Parallel files and a sample are one part.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from weft.config.schema import Section
from weft.config.sections import Data, Source
from weft.data.readers.examples import resolve_files
from weft.data.readers.lines import FileSlice, unreadable
from weft.data.readers.urls import is_url, open_url, url_status

LARGEST, SMALLEST = 1 << 26, 1 << 20  # bytes of a part
_CHUNK = 1 << 16


class FileRange(Section):
    """A file, or its bytes from `start` to `stop`; `line` is the number of lines before `start`."""

    path: str
    start: int = 0
    stop: int | None = None
    line: int = 0

    @property
    def file_slice(self) -> FileSlice:
        """The path and byte range, as the readers take them."""
        return FileSlice(self.path, self.start, self.stop, self.line)


class CorpusPart(Section):
    """A unit of work: pieces of files or, if there are none, the whole source of the split."""

    pieces: tuple[FileRange, ...] = ()
    size: int  # bytes on disk


class SourceFile(Section):
    """A source file with its size and modification time when it was read."""

    path: str
    size: int
    modified: int  # in ns; of a URL, a number that changes with the file

    @classmethod
    def of(cls, path: str) -> "SourceFile":
        """Return the current size and modification time of a file."""
        if is_url(path):
            size, version = url_status(path)
            return cls(path=path, size=size, modified=version)
        try:
            stat = Path(path).stat()
        except OSError as error:
            raise unreadable(path, error) from None
        return cls(path=path, size=stat.st_size, modified=stat.st_mtime_ns)


def source_files(source: Source | None, data: Data) -> tuple[SourceFile, ...]:
    """Return the source files of a split; a sample has none."""
    if source is None:
        return ()
    return tuple(
        SourceFile.of(path) for path in (source if isinstance(source, list) else resolve_files(source, data)[0])
    )


def partition_source(source: Source | None, data: Data, size: int) -> tuple[CorpusPart, ...]:
    """Return a split as parts of about `size` bytes."""
    if source is None or isinstance(source, list):
        return (CorpusPart(size=sum(file.size for file in source_files(source, data))),)
    return tuple(_group_pieces(_pieces(source, data, size), size))


def part_size(total: int, workers: int) -> int:
    """Return the bytes of a part: large enough for little overhead, small enough to balance the workers."""
    return min(LARGEST, max(SMALLEST, total // (8 * workers)))


def _pieces(source: str, data: Data, size: int) -> Iterator[tuple[FileRange, int]]:
    for path, format in zip(*resolve_files(source, data), strict=True):
        total = SourceFile.of(path).size
        if total > size and _is_splittable(path, format, data):
            yield from split_file(path, size, data.documents == "blank", data.max_line_bytes)
        else:
            yield FileRange(path=path), total


def _is_splittable(path: str, format: str, data: Data) -> bool:
    compressed = path.lower().endswith((".gz", ".zst"))
    return format in ("txt", "jsonl") and not compressed and data.documents != "file"


def _group_pieces(pieces: Iterable[tuple[FileRange, int]], size: int) -> Iterator[CorpusPart]:
    group: list[FileRange] = []
    total = 0
    for piece, piece_size in pieces:
        group.append(piece)
        total += piece_size
        if total >= size:
            yield CorpusPart(pieces=tuple(group), size=total)
            group, total = [], 0
    if group:
        yield CorpusPart(pieces=tuple(group), size=total)


def split_file(path: str, size: int, at_blank: bool, limit: int) -> Iterator[tuple[FileRange, int]]:
    """Yield pieces of a file, split at line ends or after blank lines, with their sizes."""
    total = SourceFile.of(path).size
    start = line = 0
    with _open(path) as file:
        while start < total:
            stop = _seek_line_end(file, start + size - 1) if start + size < total else total
            if at_blank and stop < total:
                stop = _seek_after_blank(file, limit)
            yield FileRange(path=path, start=start, stop=stop, line=line), stop - start
            line += _count_lines(file, start, stop)
            start = stop


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    try:
        with open_url(path) if is_url(path) else open(path, "rb") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error) from None


def _seek_line_end(file: BinaryIO, position: int) -> int:
    """Seek to the end of the line at a position and return it."""
    file.seek(position)
    while (raw := file.readline(_CHUNK)) and not raw.endswith(b"\n"):
        pass
    return file.tell()


def _seek_after_blank(file: BinaryIO, limit: int) -> int:
    """Seek from the start of a line to the end of the next line that every reader takes as blank, and return it."""
    at_line_start = True
    while raw := file.readline(_CHUNK):
        at_line_end = raw.endswith(b"\n")
        if at_line_start and at_line_end and raw.isspace() and len(raw) <= limit:
            break
        at_line_start = at_line_end
    return file.tell()


def _count_lines(file: BinaryIO, start: int, stop: int) -> int:
    file.seek(start)
    lines = 0
    while start < stop and (raw := file.read(min(1 << 22, stop - start))):
        lines += raw.count(b"\n")
        start += len(raw)
    return lines
