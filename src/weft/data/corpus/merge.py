"""How a corpus is written: parts, made in any order by several processes, and then joined to one split.

    parts/train/plan.json      which part has which bytes of which files
    parts/train/00007.ids      the tokens of a part
    parts/train/00007.npz      lengths of sequences, sequences of items, items and bytes of documents
    parts/train/00007.json     counts; written last, so a part that has it is whole

Nothing is lost to a kill: a part is whole or is made again, and parts go once the split that was made of them is in the
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
from weft.data.corpus.format import Stored, digest_file
from weft.data.corpus.partition import Origin, Part

Item = tuple[np.ndarray, ...]
NARROW, WIDE, LONG = np.dtype("<u2"), np.dtype("<i4"), np.dtype("<i8")
FLUSH = 1 << 18  # tokens held before they are written
_CHUNK = 1 << 20  # numbers held while parts are joined


class Plan(Section):
    """How a split is cut, and of what."""

    origins: tuple[Origin, ...]
    parts: tuple[Part, ...]


class Made(Section):
    """What a part holds, and what was left out of it."""

    rows: tuple[int, ...]  # documents that were read, of each piece
    documents: int  # of which there is something in it
    items: int
    sequences: int
    tokens: int
    bytes: int
    dtype: str
    skipped: int
    reasons: tuple[str, ...]
    cut: int
    dropped: int
    windowed: int
    seen: int
    notes: tuple[tuple[str, str, str, int], ...] = ()  # what else was done, and how often (`TruncationPolicy.note`)


class TooWide(Exception):  # noqa: N818 (what was written so far is written again)
    """A number does not fit in 16 bits."""


class Lengths:
    """What is held of a part while its tokens go to the disk."""

    def __init__(self) -> None:
        self.sequences, self.items, self.documents, self.bytes = (array("q") for _ in range(4))

    def add(self, size: int, items: Sequence[Item]) -> None:
        """Count a document."""
        self.documents.append(len(items))
        self.bytes.append(size)
        for item in items:
            self.items.append(len(item))
            self.sequences.extend(map(len, item))

    def save(self, stem: Path) -> None:
        """Write them beside the tokens."""
        with replacing(stem.with_suffix(".npz")) as file:
            sequences, items, documents, sizes = map(np.asarray, vars(self).values())
            np.savez(file, sequences=sequences, items=items, documents=documents, bytes=sizes)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes its name once it is whole and on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_tokens(stem: Path, documents: Iterable[tuple[int, list[Item]]], dtype: np.dtype[Any]) -> Lengths:
    """Write the tokens of documents, each given with its bytes of text; one with no items is left out."""
    found, chunk, held = Lengths(), list[np.ndarray](), 0
    with replacing(stem.with_suffix(".ids")) as file:
        for size, items in documents:
            if items:
                found.add(size, items)
            for item in items:
                chunk.extend(item)
                held += sum(map(len, item))
            if held >= FLUSH:
                _flush(chunk, file, dtype)
                held = 0
        _flush(chunk, file, dtype)
    return found


def _flush(chunk: list[np.ndarray], file: IO[bytes], dtype: np.dtype[Any]) -> None:
    flat = np.concatenate([np.zeros(0, np.int32), *chunk])
    if dtype == NARROW and len(flat) and not 0 <= flat.min() <= flat.max() < 1 << 16:
        raise TooWide
    file.write(flat.astype(dtype).data)
    chunk.clear()


def read_made(stem: Path) -> Made | None:
    """Return what a part holds, or None where it is not whole."""
    try:
        made = Made.model_validate_json(stem.with_suffix(".json").read_text(encoding="utf-8"))
        whole = stem.with_suffix(".ids").stat().st_size == made.tokens * np.dtype(made.dtype).itemsize
        return made if whole and stem.with_suffix(".npz").is_file() else None
    except (OSError, ValidationError):
        return None


class _Column:
    """An array that grows on the disk to a length known before."""

    def __init__(self, path: Path, dtype: np.dtype[Any], length: int) -> None:
        self._path, self._dtype, self._last = path, dtype, 0
        self._file = open(path, "wb")  # noqa: SIM115 (closed by `stored`)
        npy.write_array_header_1_0(self._file, {"descr": dtype.str, "fortran_order": False, "shape": (length,)})

    def add(self, values: np.ndarray) -> None:
        self._file.write(values.astype(self._dtype, copy=False).data)

    def add_ends(self, lengths: np.ndarray) -> None:
        """Add where each one ends, given how long it is."""
        ends = self._last + np.cumsum(lengths)
        self._last = int(ends[-1]) if len(ends) else self._last
        self.add(ends)

    def stored(self) -> Stored:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return Stored(size=self._path.stat().st_size, sha256=digest_file(self._path))


def join_parts(stems: Sequence[Path], made: Sequence[Made], into: Path) -> tuple[str, dict[str, Stored]]:
    """Join parts, in order, to the arrays of a split in a fresh folder; return their digest, and what each file is."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    digest, ids = hashlib.sha256(), NARROW if all(one.dtype == NARROW.str for one in made) else WIDE
    total = {name: sum(getattr(one, name) for one in made) for name in ("tokens", "sequences", "items", "documents")}
    tokens = _Column(into / "ids.npy", ids, total["tokens"])
    for stem, one in zip(stems, made, strict=True):
        for chunk in _chunks(np.memmap(stem.with_suffix(".ids"), one.dtype, "r") if one.tokens else np.zeros(0, WIDE)):
            tokens.add(chunk)
            digest.update(chunk.astype(WIDE).data)
    files = {"ids.npy": tokens.stored(), **_join_lengths(stems, total, into)}
    for name in ("starts", "items"):
        for chunk in _chunks(np.load(into / f"{name}.npy", mmap_mode="r")):
            digest.update(np.ascontiguousarray(chunk).data)
    return digest.hexdigest(), files


def _join_lengths(stems: Sequence[Path], total: Mapping[str, int], into: Path) -> dict[str, Stored]:
    bounds = {"starts": "sequences", "items": "items", "documents": "documents"}
    columns = {name: _Column(into / f"{name}.npy", LONG, total[what] + 1) for name, what in bounds.items()}
    sizes = _Column(into / "bytes.npy", LONG, total["documents"])
    for column in columns.values():
        column.add(np.zeros(1, LONG))
    for stem in stems:
        with np.load(stem.with_suffix(".npz")) as lengths:
            for name, what in bounds.items():
                columns[name].add_ends(lengths[what])
            sizes.add(lengths["bytes"])
    return {f"{name}.npy": column.stored() for name, column in {**columns, "bytes": sizes}.items()}


def _chunks(values: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]
