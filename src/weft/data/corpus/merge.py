"""Writing of a prepared corpus: parts, written in any order by several processes, then merged into one split.

    parts/train/plan.json      the byte ranges of files of each part
    parts/train/00007.ids      the tokens of a part
    parts/train/00007.npz      lengths of sequences, sequences of items, items and bytes of documents
    parts/train/00007.json     counts; written last, so a part that has it is complete

A killed run can be resumed: an incomplete part is written again, and parts are deleted once the merged split is in the
manifest. Memory holds the lengths of one part, and a chunk of tokens.
"""

import hashlib
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from pydantic import ValidationError

from weft.config.schema import Section
from weft.data.corpus.format import StoredFile, digest_file
from weft.data.corpus.partition import CorpusPart, SourceFile

_Item = tuple[np.ndarray, ...]
NARROW, WIDE, LONG = np.dtype("<u2"), np.dtype("<i4"), np.dtype("<i8")
PART_FILES = (".ids", ".npz", ".json")  # of a part, in the order in which they are written
FLUSH = 1 << 18  # tokens buffered before they are written
_CHUNK = 1 << 20  # numbers buffered while parts are merged


class PartitionPlan(Section):
    """The source files of a split and its partition into parts."""

    origins: tuple[SourceFile, ...]
    parts: tuple[CorpusPart, ...]


class PartCounts(Section):
    """The counts of a part, including skipped and truncated documents."""

    rows: tuple[int, ...]  # documents read, per piece
    documents: int  # documents with at least one item
    items: int
    sequences: int
    tokens: int
    bytes: int
    dtype: str
    skipped: int
    reasons: tuple[str, ...]
    oddities: tuple[tuple[str, int, str], ...] = ()  # kind of odd rows, their number, the place of the first
    cut: int
    dropped: int
    windowed: int
    longest_seen: int
    notes: tuple[tuple[str, str, str, int], ...] = ()  # other changes and their counts (`TruncationPolicy.note`)


class TooWide(Exception):  # noqa: N818 (the part is then written again, as int32)
    """Raised if a token id does not fit in 16 bits."""


class Lengths:
    """The lengths of a part, kept in memory while its tokens are written."""

    def __init__(self) -> None:
        self.sequences, self.items, self.documents, self.bytes = (array("q") for _ in range(4))

    def add(self, size: int, items: Sequence[_Item]) -> None:
        """Add the lengths of a document."""
        self.documents.append(len(items))
        self.bytes.append(size)
        for item in items:
            self.items.append(len(item))
            self.sequences.extend(map(len, item))

    def save(self, stem: Path) -> None:
        """Write the lengths next to the tokens."""
        with atomic_write(stem.with_suffix(".npz")) as file:
            sequences, items, documents, sizes = map(np.asarray, vars(self).values())
            np.savez(file, sequences=sequences, items=items, documents=documents, bytes=sizes)


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that is renamed to `path` once it is complete and synced to disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_tokens(stem: Path, documents: Iterable[tuple[int, list[_Item]]], dtype: np.dtype[Any]) -> Lengths:
    """Write the tokens of documents, given as (bytes of text, items); skip empty documents. Return the lengths."""
    lengths, chunk, buffered = Lengths(), list[np.ndarray](), 0
    with atomic_write(stem.with_suffix(".ids")) as file:
        for size, items in documents:
            if items:
                lengths.add(size, items)
            for item in items:
                chunk.extend(item)
                buffered += sum(map(len, item))
            if buffered >= FLUSH:
                _flush(chunk, file, dtype)
                buffered = 0
        _flush(chunk, file, dtype)
    return lengths


def _flush(chunk: list[np.ndarray], file: IO[bytes], dtype: np.dtype[Any]) -> None:
    flat = np.concatenate([np.zeros(0, np.int32), *chunk])
    if dtype == NARROW and len(flat) and not 0 <= flat.min() <= flat.max() < 1 << 16:
        raise TooWide
    file.write(flat.astype(dtype).data)
    chunk.clear()


def read_part_counts(stem: Path) -> PartCounts | None:
    """Return the counts of a part, or None if it is incomplete."""
    try:
        part = PartCounts.model_validate_json(stem.with_suffix(".json").read_text(encoding="utf-8"))
        complete = stem.with_suffix(".ids").stat().st_size == part.tokens * np.dtype(part.dtype).itemsize
        return part if complete and stem.with_suffix(".npz").is_file() else None
    except (OSError, ValidationError):
        return None


class _ArrayWriter:
    """Writer of an .npy array of known length, chunk by chunk."""

    def __init__(self, path: Path, dtype: np.dtype[Any], length: int) -> None:
        self._path, self._dtype, self._last = path, dtype, 0
        self._file = open(path, "wb")  # noqa: SIM115 (closed by `close`)
        npy.write_array_header_1_0(self._file, {"descr": dtype.str, "fortran_order": False, "shape": (length,)})

    def add(self, values: np.ndarray) -> None:
        self._file.write(values.astype(self._dtype, copy=False).data)

    def add_ends(self, lengths: np.ndarray) -> None:
        """Append the cumulative ends of these lengths."""
        ends = self._last + np.cumsum(lengths)
        self._last = int(ends[-1]) if len(ends) else self._last
        self.add(ends)

    def close(self) -> StoredFile:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return StoredFile(size=self._path.stat().st_size, sha256=digest_file(self._path))


def merge_parts(stems: Sequence[Path], parts: Sequence[PartCounts], into: Path) -> tuple[str, dict[str, StoredFile]]:
    """Merge parts, in order, into the arrays of a split in a new folder; return its digest and files."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    digest, dtype = hashlib.sha256(), NARROW if all(part.dtype == NARROW.str for part in parts) else WIDE
    names = ("tokens", "sequences", "items", "documents")
    totals = {name: sum(getattr(part, name) for part in parts) for name in names}
    tokens = _ArrayWriter(into / "ids.npy", dtype, totals["tokens"])
    for stem, part in zip(stems, parts, strict=True):
        ids = np.memmap(stem.with_suffix(".ids"), part.dtype, "r") if part.tokens else np.zeros(0, WIDE)
        for chunk in _chunks(ids):
            tokens.add(chunk)
            digest.update(chunk.astype(WIDE).data)
    files = {"ids.npy": tokens.close(), **_merge_lengths(stems, totals, into)}
    for name in ("starts", "items"):
        for chunk in _chunks(np.load(into / f"{name}.npy", mmap_mode="r")):
            digest.update(np.ascontiguousarray(chunk).data)
    return digest.hexdigest(), files


def _merge_lengths(stems: Sequence[Path], totals: Mapping[str, int], into: Path) -> dict[str, StoredFile]:
    bounds = {"starts": "sequences", "items": "items", "documents": "documents"}
    writers = {name: _ArrayWriter(into / f"{name}.npy", LONG, totals[key] + 1) for name, key in bounds.items()}
    sizes = _ArrayWriter(into / "bytes.npy", LONG, totals["documents"])
    for writer in writers.values():
        writer.add(np.zeros(1, LONG))
    for stem in stems:
        with np.load(stem.with_suffix(".npz")) as lengths:
            for name, key in bounds.items():
                writers[name].add_ends(lengths[key])
            sizes.add(lengths["bytes"])
    return {f"{name}.npy": writer.close() for name, writer in {**writers, "bytes": sizes}.items()}


def _chunks(values: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]
