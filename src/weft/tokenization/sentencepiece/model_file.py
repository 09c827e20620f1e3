"""SentencePiece's model files (.spm, spiece.model), read without its library (Kudo & Richardson 2018).

A file is a protocol buffer, which is fields one after the other: a number that has the field's own number and how it is
written, then the value. Of the message ModelProto the pieces, and of how texts are prepared the rules, are all we need.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weft.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # what a piece can be
LARGEST = 256 << 20  # bytes of a file: those of 250,000 pieces have 5 MB
_KINDS: dict[int, Literal["unigram", "bpe"]] = {1: "unigram", 2: "bpe"}
_VARINT, _WIDE, _BYTES, _NARROW = 0, 1, 2, 5  # how a value is written


@dataclass(frozen=True)
class Spm:
    """What a model file says; the id of a piece is its place."""

    raw: bytes  # the file as it is
    kind: Literal["unigram", "bpe"]
    pieces: tuple[str, ...]
    scores: tuple[float, ...]  # log-probabilities; of byte-pair encoding, the later merged the less
    types: tuple[int, ...]
    unk: int  # the id of what stands for the unknown
    charsmap: bytes = b""  # the rules of how characters are normalised: see `rules_of`
    prefix: bool = True  # whether a space is put before a text
    squeeze: bool = True  # whether spaces are taken off both ends, and are one where they are several
    escape: bool = True  # whether a space is written "▁"


def read_spm(path: Path) -> Spm:
    """Read a model file of unigrams or of byte-pair encoding."""
    try:
        if path.stat().st_size > LARGEST:
            raise CheckpointError(f"{path}: has more than {LARGEST >> 20} MB, which no SentencePiece model has")
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    return parse_spm(raw, str(path))


def parse_spm(raw: bytes, place: str) -> Spm:
    """Read the bytes of a model file; `place` is what an error calls it."""
    try:
        return _model(raw)
    except (ValueError, struct.error) as error:
        raise CheckpointError(f"{place}: cannot be read as a SentencePiece model: {error}") from None


def rules_of(charsmap: bytes) -> tuple[bytes, bytes]:
    """Take rules apart: a double-array trie (Darts) from what is read to where its normal form begins, and the forms.

    A form ends in a zero byte.
    """
    if not charsmap:
        return b"", b""
    (size,) = struct.unpack_from("<I", charsmap)
    if size % 4 or not 4 <= size <= len(charsmap) - 5 or charsmap[-1]:
        raise ValueError("its rules for characters are damaged")
    return charsmap[4 : 4 + size], charsmap[4 + size :]


def _model(raw: bytes) -> Spm:
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(raw):
        if number == 1:
            pieces.append(_piece(value))
        elif number in (2, 3):
            (trainer if number == 2 else normalizer).update(_fields(_bytes(value)))
    unknown = [id for id, (_, _, kind) in enumerate(pieces) if kind == UNKNOWN]
    if len(unknown) != 1:
        raise ValueError(f"it must have one piece for the unknown, but has {len(unknown)} in {len(pieces)} pieces")
    names, scores, types = zip(*pieces, strict=True)
    if len(set(names)) < len(names):
        raise ValueError("it has a piece twice")
    charsmap = _bytes(normalizer.get(2, b""))
    rules_of(charsmap)
    flags = [bool(normalizer.get(number, 1)) for number in (3, 4, 5)]
    return Spm(raw, _kind(trainer, types), names, scores, types, unknown[0], charsmap, *flags)


def _kind(trainer: dict[int, Any], types: tuple[int, ...]) -> Literal["unigram", "bpe"]:
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


def _piece(value: Any) -> tuple[str, float, int]:
    found = dict(_fields(_bytes(value)))
    (score,) = struct.unpack("<f", found.get(2, bytes(4)))
    name, kind = _bytes(found.get(1, b"")).decode("utf-8"), found.get(3, NORMAL)
    if not name or score != score or kind not in range(NORMAL, BYTE + 1):
        raise ValueError(f"the piece {name!r} with score {score} and type {kind} is none")
    return name, score, kind


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message: their numbers and values, those that are no whole number as bytes."""
    place = 0
    while place < len(raw):
        key, place = _varint(raw, place)
        number, how = key >> 3, key & 7
        if how == _VARINT:
            value, place = _varint(raw, place)
            yield number, value
            continue
        if how not in (_WIDE, _BYTES, _NARROW):
            raise ValueError(f"field {number} is written in a way ({how}) that is not known")
        size = {_WIDE: 8, _NARROW: 4}.get(how, -1)
        if size < 0:
            size, place = _varint(raw, place)
        if size > len(raw) - place:
            raise ValueError(f"field {number} ends after the file does")
        yield number, raw[place : place + size]
        place += size


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    """Read a whole number, seven bits a byte, the lowest first; return it and where the next thing begins."""
    found = 0
    for shift in range(0, 70, 7):
        if place >= len(raw):
            raise ValueError("it ends in the middle of a number")
        found |= (raw[place] & 0x7F) << shift
        place += 1
        if raw[place - 1] < 0x80:
            return found, place
    raise ValueError("it has a number of more than ten bytes")


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"a number ({value}) stands where text must")
    return value
