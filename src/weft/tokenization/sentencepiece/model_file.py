"""Reader of SentencePiece model files (.spm, spiece.model) without its library (Kudo & Richardson 2018).

A file is a protocol buffer, a sequence of fields: a varint with field number and wire type, then the value. Of the
message ModelProto only the pieces, the model type and the normalizer_spec are read.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weft.config.small_files import read_small_file
from weft.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # SentencePiece.Type
LARGEST = 16 << 20  # bytes of a file: one of 250,000 pieces has 5 MB
LONGEST_REPLACEMENT = 64  # bytes: the longest of Unicode's, of U+FDFA, has 33
_KINDS: dict[int, Literal["unigram", "bpe"]] = {1: "unigram", 2: "bpe"}
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5  # wire types


@dataclass(frozen=True)
class SentencePieceModel:
    """A parsed model file; the id of a piece is its index."""

    raw: bytes  # the content of the file
    kind: Literal["unigram", "bpe"]
    pieces: tuple[str, ...]
    scores: tuple[float, ...]  # log-probabilities; of BPE, lower for later merges
    types: tuple[int, ...]
    unk: int  # the id of the unknown piece
    charsmap: bytes = b""  # precompiled normalization rules: see `split_charsmap`
    add_dummy_prefix: bool = True  # add a space before the text
    remove_extra_whitespaces: bool = True  # strip both ends and merge runs of spaces
    escape_whitespaces: bool = True  # replace a space by "▁"


def read_spm(path: Path) -> SentencePieceModel:
    """Return the model of a unigram or BPE model file."""
    try:
        if path.stat().st_size > LARGEST:
            raise CheckpointError(f"{path}: has more than {LARGEST >> 20} MB, which no SentencePiece model has")
        raw = read_small_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    return parse_spm(raw, str(path))


def parse_spm(raw: bytes, place: str) -> SentencePieceModel:
    """Return the model of a file's bytes; `place` names the file in errors."""
    try:
        return _parse_model(raw)
    except (ValueError, struct.error) as error:
        raise CheckpointError(f"{place}: cannot be read as a SentencePiece model: {error}") from None


def split_charsmap(charsmap: bytes) -> tuple[bytes, bytes]:
    """Split precompiled rules into a double-array trie (Darts) and the replacement strings.

    The trie maps an input string to the offset of its replacement. A replacement ends in a zero byte.
    """
    if not charsmap:
        return b"", b""
    (size,) = struct.unpack_from("<I", charsmap.ljust(4, b"\0"))
    if size % 4 or not 4 <= size <= len(charsmap) - 5 or charsmap[-1]:
        raise ValueError("its rules for characters are damaged")
    replacements = charsmap[4 + size :]
    if max(map(len, replacements.split(b"\0"))) > LONGEST_REPLACEMENT:
        raise ValueError(f"its rules replace a character by more than {LONGEST_REPLACEMENT} bytes")
    return charsmap[4 : 4 + size], replacements


def _parse_model(raw: bytes) -> SentencePieceModel:
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _read_fields(raw):
        if number == 1:
            pieces.append(_parse_piece(value))
        elif number in (2, 3):
            (trainer if number == 2 else normalizer).update(_read_fields(_expect_bytes(value)))
    unknown = [id for id, (_, _, kind) in enumerate(pieces) if kind == UNKNOWN]
    if len(unknown) != 1:
        raise ValueError(f"it must have one piece for the unknown, but has {len(unknown)} in {len(pieces)} pieces")
    names, scores, types = zip(*pieces, strict=True)
    if len(set(names)) < len(names):
        raise ValueError("it has a piece twice")
    charsmap = _expect_bytes(normalizer.get(2, b""))
    split_charsmap(charsmap)
    flags = [bool(normalizer.get(number, 1)) for number in (3, 4, 5)]
    return SentencePieceModel(raw, _parse_kind(trainer, types), names, scores, types, unknown[0], charsmap, *flags)


def _parse_kind(trainer: dict[int, Any], types: tuple[int, ...]) -> Literal["unigram", "bpe"]:
    kind = trainer.get(3, 1)
    if kind not in _KINDS:
        raise ValueError(f"its model_type is {kind}, and only unigram (1) and bpe (2) can be read")
    if trainer.get(35) or BYTE in types:
        raise ValueError("it falls back to bytes (byte_fallback), which weft does not do")
    if trainer.get(24):
        raise ValueError("its spaces end words (treat_whitespace_as_suffix), which weft does not do")
    if _KINDS[kind] == "bpe" and UNUSED in types:
        raise ValueError("it has merges that are not used, which weft does not do")
    return _KINDS[kind]


def _parse_piece(value: Any) -> tuple[str, float, int]:
    fields = dict(_read_fields(_expect_bytes(value)))
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    name, piece_type = _expect_bytes(fields.get(1, b"")).decode("utf-8"), fields.get(3, NORMAL)
    if not name or not math.isfinite(score) or piece_type not in range(NORMAL, BYTE + 1):
        raise ValueError(f"the piece {name!r} with score {score} and type {piece_type} is none")
    return name, score, piece_type


def _read_fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message, number and value: varints as int, all others as bytes."""
    position = 0
    while position < len(raw):
        key, position = _read_varint(raw, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, position = _read_varint(raw, position)
            yield number, value
            continue
        if wire_type not in (_FIXED64, _LENGTH_DELIMITED, _FIXED32):
            raise ValueError(f"field {number} is written in a way ({wire_type}) that is not known")
        size = {_FIXED64: 8, _FIXED32: 4}.get(wire_type, -1)
        if size < 0:
            size, position = _read_varint(raw, position)
        if size > len(raw) - position:
            raise ValueError(f"field {number} ends after the file does")
        yield number, raw[position : position + size]
        position += size


def _read_varint(raw: bytes, position: int) -> tuple[int, int]:
    """Return the varint at a position (seven bits per byte, least significant first) and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(raw):
            raise ValueError("it ends in the middle of a number")
        value |= (raw[position] & 0x7F) << shift
        position += 1
        if raw[position - 1] < 0x80:
            return value, position
    raise ValueError("it has a number of more than ten bytes")


def _expect_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"a number ({value}) stands where text must")
    return value
