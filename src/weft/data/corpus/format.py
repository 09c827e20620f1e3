"""A corpus that was prepared before: a folder of token arrays that training maps into memory, with no copy.

    corpus.json                the manifest: the recipe, what was read, counts, the size and SHA-256 of every array
    tokenizer.json             what made the ids (and tokenizer.target.json, where the target side has its own)
    train/ids.npy              all tokens end to end: uint16 where they fit, else int32
    train/starts.npy           where each sequence begins in ids
    train/items.npy            which sequence each item begins with
    train/documents.npy        which item each document begins with: one that was cut into windows has several
    train/bytes.npy            how many bytes of UTF-8 the text of each document has
    parts/train/               while it is being made: see weft.data.corpus.merge

A split is in the manifest once it is whole. The arrays are plain .npy files, the first three those of `PackedItems`,
whose digest they share: it does not matter to a run whether its data was prepared before.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from weft.config.schema import Section
from weft.data.batching.packed import PackedItems
from weft.data.corpus.partition import Origin
from weft.errors import DataError

FORMAT = 1
MANIFEST = "corpus.json"
ARRAYS = ("ids", "starts", "items", "documents", "bytes")
CHECKED = 1 << 28  # bytes of a split up to which its content is verified whenever it is opened
_AGAIN = "delete the folder and prepare it again"


class Stored(Section):
    """A file of a split."""

    size: int
    sha256: str


class Split(Section):
    """What is known of a whole split."""

    documents: int
    items: int
    tokens: int  # all that is in ids: labels and the like too
    bytes: int  # of text
    digest: str  # of the content, as `PackedItems` has it
    files: dict[str, Stored]
    origins: tuple[Origin, ...]
    told: str  # what was skipped or cut
    longest: int  # the longest sequence that the limit of lengths was asked about

    @property
    def size(self) -> int:
        """The bytes on the disk."""
        return sum(file.size for file in self.files.values())


class Probe(Section):
    """An example, and what was made of it."""

    example: str  # in JSON
    items: list[list[list[int]]]


class Manifest(Section):
    """What a prepared folder holds."""

    format: int
    task: dict[str, Any]  # the sections of the recipe
    data: dict[str, Any]
    tokenizer: dict[str, Any]
    settled: dict[str, Any]  # the task, with what the recipe left to the data
    vocabulary: str  # the digest of the tokenizer
    probes: tuple[Probe, ...]  # a recipe that makes something else of these is another
    splits: dict[str, Split]


class Shards(PackedItems):
    """The items of a prepared split, and beside them its documents and how much text each was."""

    documents: np.ndarray  # (documents + 1,) which item each begins with
    bytes: np.ndarray  # (documents,)


def find_corpus(source: object) -> Path | None:
    """Return the prepared folder that a recipe's source names, if it names one."""
    found = isinstance(source, str) and (Path(source) / MANIFEST).is_file()
    return Path(str(source)) if found else None


def read_manifest(folder: Path) -> Manifest:
    """Read what a prepared folder says of itself."""
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(raw, dict) and raw.get("format", FORMAT) != FORMAT:
            raise DataError(
                f"{folder}: its format is {raw['format']!r}, and this weft reads {FORMAT}; prepare it again, elsewhere"
            )
        return Manifest.model_validate(raw)
    except (OSError, ValueError) as error:  # also what pydantic raises
        told = _first(error) if isinstance(error, ValidationError) else error
        raise DataError(f"{path}: cannot be read: {told}; {_AGAIN}") from None


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def open_shards(folder: Path, split: str, num_token_arrays: int | None = None) -> Shards:
    """Map a whole split into memory; what is damaged is refused: by size always, by content where that is quick."""
    found = read_manifest(folder).splits.get(split)
    if found is None:
        raise missing_split(folder, split)
    verify(folder, split, found, found.size <= CHECKED)
    arrays = {name: _mapped(folder / split / f"{name}.npy") for name in ARRAYS}
    shards = Shards(arrays["ids"], arrays["starts"], arrays["items"], found.digest, num_token_arrays)
    shards.documents, shards.bytes = arrays["documents"], arrays["bytes"]
    return shards


def missing_split(folder: Path, split: str) -> DataError:
    """Say that a split is not there, or not yet."""
    if (folder / "parts" / split).is_dir():
        return DataError(f"{folder}: its split {split!r} is not finished; run weft data prepare again: it goes on")
    there = ", ".join(read_manifest(folder).splits) or "none yet"
    return DataError(f"{folder}: has no split {split!r}, but: {there}; run weft data prepare with --split {split}")


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.asarray(np.load(path, mmap_mode="r"))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}; {_AGAIN}") from None


def verify(folder: Path, split: str, found: Split, content: bool) -> None:
    """Refuse a split whose files are not what was written: of another size or, where asked, of other content."""
    for name, stored in found.files.items():
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


def write_json(path: Path, value: BaseModel) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(value.model_dump_json(indent=1))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
