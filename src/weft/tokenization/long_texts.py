"""Pieces of very long texts, and groups of texts, so that the memory of one call of the tokenizer is bounded.

A tokenizer takes some 50 bytes for each character of a text, and ends the process where it gets no more. So a text of
over `MAX_PIECE` characters is tokenized in pieces. A piece ends before a single space between letters or digits, where
every pre-tokenizer splits: the pieces have the same tokens as the whole text. Where there is no such space, it ends
before any whitespace, and in a run of `MAX_PIECE` characters without whitespace after the last of them; there alone a
token may differ.
"""

import re
from collections.abc import Iterator, Sequence

MAX_PIECE = 1 << 20  # characters of a piece
MAX_GROUP = 1 << 22  # characters of the texts that are tokenized at once
_SPACE = re.compile(r"(?<=[^\W_]) (?=[^\W_])")
_WHITESPACE = re.compile(r"(?<=\S)\s")
_TAIL = 1 << 12  # characters at the end of a piece that are searched first


def split_text(text: str) -> Iterator[str]:
    """Yield the pieces of a text, each of `MAX_PIECE` characters at most."""
    start = 0
    while len(text) - start > MAX_PIECE:
        end = _piece_end(text, start)
        yield text[start:end]
        start = end
    yield text[start:]


def _piece_end(text: str, start: int) -> int:
    limit = start + MAX_PIECE
    for pattern in (_SPACE, _WHITESPACE):
        for first in (max(start + 1, limit - _TAIL), start + 1):
            ends = [match.start() for match in pattern.finditer(text, first, limit + 1)]
            if ends:
                return ends[-1]
    return limit


def group_texts(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield texts in groups of `MAX_GROUP` characters at most; one of over `MAX_PIECE` characters is by itself."""
    start = size = 0
    for index, text in enumerate(texts):
        # A long text counts as a whole group, so that none is joined with it.
        own_size = MAX_GROUP if len(text) > MAX_PIECE else max(1, len(text))
        if size + own_size > MAX_GROUP and index > start:
            yield texts[start:index]
            start, size = index, 0
        size += own_size
    if start < len(texts):
        yield texts[start:]
