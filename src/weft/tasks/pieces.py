"""Two texts in one sequence, as `classify` and `choice` lay them."""

from collections.abc import Sequence
from typing import TypeVar

from weft.text.tokenizer import Tokenizer

T = TypeVar("T")
Piece = tuple[int, str]  # a token, and how it is spelt


def cut_pieces(texts: Sequence[str], tokenizer: Tokenizer, spells: bool) -> list[list[Piece]]:
    """Cut texts into tokens, each with how it is spelt there, if the model asks for it."""
    if not spells:
        return [[(id, "") for id in ids] for ids in tokenizer.ids(texts)]
    return [
        [(id, text[start:end].strip()) for id, (start, end) in zip(cut.ids, cut.offsets, strict=True)]
        for text, cut in zip(texts, map(tokenizer.encode, texts), strict=True)
    ]


def trimmed(text: list[T], pair: list[T], room: int) -> tuple[list[T], list[T]]:
    """Cut both to `room` in all, the longer one first (Devlin et al. 2019 do it so)."""
    keep = max(room - len(pair), min(len(text), (room + 1) // 2))
    return text[:keep], pair[: room - len(text[:keep])]


def lay(text: list[Piece], pair: list[Piece] | None, tokenizer: Tokenizer) -> tuple[list[Piece], int | None]:
    """Put a text or a pair between its signs, and say where the pair begins."""
    bos, eos = (tokenizer.specials.bos, ""), (tokenizer.specials.eos, "")
    if pair is None:
        return [bos, *text, eos], None
    first = [bos, *text, *((id, "") for id in tokenizer.between)]
    return [*first, *pair, eos], len(first)
