"""A split's files, cut into parts that worker processes read side by side.

A plain file of lines (txt, jsonl) is cut where a line ends or, where documents are separated by blank lines, after a
blank line: no row is torn. Other files are whole: compressed ones, tables, conll, parquet, a document a file. Small
files share a part. Parallel files and a sample are one part.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from weft.config.schema import Data, Section
from weft.config.schema import Source as Named
from weft.data.readers.examples import files_of
from weft.data.readers.lines import Stretch, unreadable

LARGEST, SMALLEST = 1 << 26, 1 << 20  # bytes of a part
_CHUNK = 1 << 16


class Piece(Section):
    """A file, or the bytes of it from `start` to `stop`; `line` lines come before these."""

    path: str
    start: int = 0
    stop: int | None = None
    line: int = 0

    @property
    def stretch(self) -> Stretch:
        """What the readers take."""
        return Stretch(self.path, self.start, self.stop, self.line)


class Part(Section):
    """What a worker reads at a time: pieces of files or, where there are none, the split as its recipe names it."""

    pieces: tuple[Piece, ...] = ()
    size: int  # in bytes, on the disk


class Origin(Section):
    """A file as it was when it was read."""

    path: str
    size: int
    modified: int  # in ns

    @classmethod
    def of(cls, path: str) -> "Origin":
        """Look at a file."""
        try:
            found = Path(path).stat()
        except OSError as error:
            raise unreadable(path, error) from None
        return cls(path=path, size=found.st_size, modified=found.st_mtime_ns)


def origins(source: Named | None, data: Data) -> tuple[Origin, ...]:
    """Say what a split is read from; a sample has no files."""
    if source is None:
        return ()
    return tuple(Origin.of(path) for path in (source if isinstance(source, list) else files_of(source, data)[0]))


def cut_source(source: Named | None, data: Data, size: int) -> tuple[Part, ...]:
    """Cut a split into parts of about `size` bytes."""
    if source is None or isinstance(source, list):
        return (Part(size=sum(one.size for one in origins(source, data))),)
    return tuple(_grouped(_pieces(source, data, size), size))


def part_size(total: int, workers: int) -> int:
    """Choose how much to read at a time: so much that little is lost in between, so little that all have work."""
    return min(LARGEST, max(SMALLEST, total // (8 * workers)))


def _pieces(source: str, data: Data, size: int) -> Iterator[tuple[Piece, int]]:
    for path, format in zip(*files_of(source, data), strict=True):
        total = Path(path).stat().st_size
        if total > size and _is_cut(path, format, data):
            yield from cut_file(path, size, data.documents == "blank", data.max_line_bytes)
        else:
            yield Piece(path=path), total


def _is_cut(path: str, format: str, data: Data) -> bool:
    packed = path.lower().endswith((".gz", ".zst"))
    return format in ("txt", "jsonl") and not packed and data.documents != "file"


def _grouped(pieces: Iterable[tuple[Piece, int]], size: int) -> Iterator[Part]:
    held: list[Piece] = []
    weight = 0
    for piece, own in pieces:
        held.append(piece)
        weight += own
        if weight >= size:
            yield Part(pieces=tuple(held), size=weight)
            held, weight = [], 0
    if held:
        yield Part(pieces=tuple(held), size=weight)


def cut_file(path: str, size: int, at_blank: bool, limit: int) -> Iterator[tuple[Piece, int]]:
    """Cut one file at line ends, or after blank lines; each piece comes with its size."""
    total = Path(path).stat().st_size
    start = line = 0
    with _opened(path) as file:
        while start < total:
            stop = _line_end(file, start + size - 1) if start + size < total else total
            if at_blank and stop < total:
                stop = _after_blank(file, limit)
            yield Piece(path=path, start=start, stop=stop, line=line), stop - start
            line += _count_lines(file, start, stop)
            start = stop


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error) from None


def _line_end(file: BinaryIO, place: int) -> int:
    """Go to where the line that has this place ends."""
    file.seek(place)
    while (raw := file.readline(_CHUNK)) and not raw.endswith(b"\n"):
        pass
    return file.tell()


def _after_blank(file: BinaryIO, limit: int) -> int:
    """Go on, from the start of a line, to the end of one that is blank to any reader."""
    begins = True
    while raw := file.readline(_CHUNK):
        ends = raw.endswith(b"\n")
        if begins and ends and raw.isspace() and len(raw) <= limit:
            break
        begins = ends
    return file.tell()


def _count_lines(file: BinaryIO, start: int, stop: int) -> int:
    file.seek(start)
    found = 0
    while start < stop and (raw := file.read(min(1 << 22, stop - start))):
        found += raw.count(b"\n")
        start += len(raw)
    return found
