"""Format of a prepared corpus: a folder of token arrays that training memory-maps without a copy.

    corpus.json                the manifest: recipe, source files, counts, size and SHA-256 of every array
    tokenizer.json             the tokenizer of the ids (and tokenizer.target.json, where the target side has its own)
    train/ids.npy              all tokens, concatenated: uint16 where they fit, else int32
    train/starts.npy           the start of each sequence in ids
    train/items.npy            the index of the first sequence of each item
    train/documents.npy        the index of the first item of each document: one split into windows has several
    train/bytes.npy            the UTF-8 bytes of the text of each document
    parts/train/               during preparation: see weft.data.corpus.merge

A split is in the manifest once it is complete. The arrays are plain .npy files, the first three those of `PackedItems`,
with the same digest: training is the same whether or not its data was prepared in advance.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from weft.config.schema import Section
from weft.config.small_files import read_small_text
from weft.data.batching.packed_items import PackedItems
from weft.data.corpus.partition import SourceFile
from weft.errors import DataError

FORMAT = 2
CORPUS_MANIFEST = "corpus.json"
ARRAYS = ("ids", "starts", "items", "documents", "bytes")
VERIFY_LIMIT = 1 << 28  # bytes of a split up to which its SHA-256 is verified at every opening
_AGAIN = "delete the folder and prepare it again"


class StoredFile(Section):
    """Size and checksum of a file of a split."""

    size: int
    sha256: str


class SplitManifest(Section):
    """The manifest's entry of a complete split."""

    documents: int
    items: int
    tokens: int  # length of ids, including labels
    bytes: int  # of text
    digest: str  # of the content, as in `PackedItems`
    files: dict[str, StoredFile]
    origins: tuple[SourceFile, ...]
    notice: str  # report of skipped rows and truncation
    longest: int  # length of the longest sequence before truncation

    @property
    def size(self) -> int:
        """The bytes on disk."""
        return sum(file.size for file in self.files.values())


class EncodedExample(Section):
    """An example and its encoded items."""

    example: str  # in JSON
    items: list[list[list[int]]]


class CorpusManifest(Section):
    """The manifest of a prepared corpus."""

    format: int
    task: dict[str, Any]  # the sections of the recipe
    data: dict[str, Any]
    tokenizer: dict[str, Any]
    resolved_task: dict[str, Any]  # the task config, with values resolved from the data
    vocabulary: str  # the digest of the tokenizer
    probes: tuple[EncodedExample, ...]  # a recipe must encode these in the same way to reuse the corpus
    splits: dict[str, SplitManifest]


class CorpusSplit(PackedItems):
    """The packed items of a prepared split, with its documents and the size of their texts."""

    documents: np.ndarray  # (documents + 1,) the first item of each
    bytes: np.ndarray  # (documents,)


def find_corpus(source: object) -> Path | None:
    """Return the prepared corpus that a recipe's source names, or None."""
    is_corpus = isinstance(source, str) and (Path(source) / CORPUS_MANIFEST).is_file()
    return Path(str(source)) if is_corpus else None


def read_manifest(folder: Path) -> CorpusManifest:
    """Return the manifest of a prepared corpus."""
    path = folder / CORPUS_MANIFEST
    try:
        raw = json.loads(read_small_text(path))
        if isinstance(raw, dict) and raw.get("format", FORMAT) != FORMAT:
            raise DataError(
                f"{folder}: its format is {raw['format']!r}, and this weft reads {FORMAT}; prepare it again, elsewhere"
            )
        return CorpusManifest.model_validate(raw)
    except (OSError, ValueError) as error:  # also what pydantic raises
        message = _first_error(error) if isinstance(error, ValidationError) else error
        raise DataError(f"{path}: cannot be read: {message}; {_AGAIN}") from None


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def open_split(folder: Path, split: str, num_token_arrays: int | None = None) -> CorpusSplit:
    """Return a memory-mapped split; raise if it is damaged: sizes are always checked, contents of small splits."""
    info = read_manifest(folder).splits.get(split)
    if info is None:
        raise missing_split(folder, split)
    verify_split(folder, split, info, info.size <= VERIFY_LIMIT)
    arrays = {name: _load_mapped(folder / split / f"{name}.npy") for name in ARRAYS}
    items = CorpusSplit(arrays["ids"], arrays["starts"], arrays["items"], info.digest, num_token_arrays)
    items.documents, items.bytes = arrays["documents"], arrays["bytes"]
    return items


def missing_split(folder: Path, split: str) -> DataError:
    """Return the error for a split that is missing or not finished."""
    if (folder / "parts" / split).is_dir():
        return DataError(f"{folder}: its split {split!r} is not finished; run weft data prepare again: it goes on")
    existing = ", ".join(read_manifest(folder).splits) or "none yet"
    return DataError(f"{folder}: has no split {split!r}, but: {existing}; run weft data prepare with --split {split}")


def _load_mapped(path: Path) -> np.ndarray:
    try:
        return np.asarray(np.load(path, mmap_mode="r"))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}; {_AGAIN}") from None


def verify_split(folder: Path, split: str, info: SplitManifest, content: bool) -> None:
    """Raise if a file of a split has another size than was written or, with `content`, another SHA-256."""
    for name, stored in info.files.items():
        path = folder / split / name
        try:
            size = path.stat().st_size
            if size != stored.size:
                raise DataError(f"{path}: is damaged: must have {stored.size:,} bytes, but has {size:,}; {_AGAIN}")
            if content and digest_file(path) != stored.sha256:
                raise DataError(f"{path}: is damaged: its SHA-256 is not that of what was written; {_AGAIN}")
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}; {_AGAIN}") from None


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json_atomically(path: Path, value: BaseModel) -> None:
    """Write a JSON file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(value.model_dump_json(indent=1))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
