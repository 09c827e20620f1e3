"""Writer of word vectors: word2vec's text format (also gensim's and fastText's), its binary format, or GloVe's.

Rows are written one at a time, to a temporary file that is renamed when it is complete.
"""

import gzip
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Literal, get_args

import numpy as np

from weft.errors import ConfigError, DataError, did_you_mean

VectorFormat = Literal["word2vec", "binary", "glove"]
_BY_EXTENSION: dict[str, VectorFormat] = {".bin": "binary", ".glove": "glove", ".txt": "word2vec", ".vec": "word2vec"}


def vector_format(path: str, requested: str | None = None) -> VectorFormat:
    """Return the format of a file: as requested, or by its extension."""
    if requested is not None:
        for form in get_args(VectorFormat):
            if requested == form:
                return form  # type: ignore[no-any-return]
        raise ConfigError(f"--format: there is no {requested!r}; {did_you_mean(requested, get_args(VectorFormat))}")
    extension = Path(path.removesuffix(".gz")).suffix.lower()
    if extension not in _BY_EXTENSION:
        raise ConfigError(
            f"{path}: its ending does not say in which form to write; take .txt (word2vec), .bin (binary) or .glove, "
            "or set --format"
        )
    return _BY_EXTENSION[extension]


def write_vectors(path: str, words: Iterable[str], rows: np.ndarray, form: VectorFormat | None = None) -> None:
    """Write a vector (D,) for each word, in a format or that of the file's extension; .gz is compressed.

    Numbers in text have nine significant digits, which preserve float32 exactly.
    """
    form, part = form or vector_format(path), f"{path}.part"
    try:
        with gzip.open(part, "wb", 6) if path.endswith(".gz") else open(part, "wb") as file:
            _write_rows(path, file, words, rows, form)
        os.replace(part, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        Path(part).unlink(missing_ok=True)


def _write_rows(
    path: str, file: IO[bytes] | gzip.GzipFile, words: Iterable[str], rows: np.ndarray, form: VectorFormat
) -> None:
    count, width = rows.shape
    line = " %.9g" * width + "\n"
    if form != "glove":
        file.write(f"{count} {width}\n".encode())
    for number, (word, row) in enumerate(zip(words, rows, strict=True), 1):
        if not word or any(char.isspace() for char in word) or "\0" in word:
            raise DataError(
                f"{path}: word {number:,}, {word!r}, has a space in it or is empty, which no reader could tell from "
                "the next field; leave it out"
            )
        if not np.isfinite(row).all():
            raise DataError(f"{path}: word {number:,}, {word!r}: its vector has what is no number; was it trained?")
        if form == "binary":
            file.write(f"{word} ".encode() + row.astype("<f4").tobytes())
        else:
            file.write((word + line % tuple(row.tolist())).encode())
