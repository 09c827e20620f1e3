"""Two texts in one sequence, as `classify` and `choice` lay them."""

from collections.abc import Sequence
from typing import NamedTuple

from weft.tokenization.trainable import Tokenizer


class Pieces(NamedTuple):
    """The tokens of a text and, if the model asks for it, how each is spelt there."""

    ids: list[int]
    words: list[str] | None = None

    def upto(self, size: int) -> "Pieces":
        """Return the first ones."""
        return Pieces(self.ids[:size], self.words and self.words[:size])


def cut_pieces(texts: Sequence[str], tokenizer: Tokenizer, spells: bool) -> list[Pieces]:
    """Cut texts into tokens, each with how it is spelt there, if the model asks for it."""
    if not spells:
        return [Pieces(ids) for ids in tokenizer.ids(texts)]
    return [
        Pieces(cut.ids, [text[start:end].strip() for start, end in cut.offsets])
        for text, cut in zip(texts, map(tokenizer.encode, texts), strict=True)
    ]


def trimmed(text: Pieces, pair: Pieces, room: int) -> tuple[Pieces, Pieces]:
    """Cut both to `room` in all, the longer one first (Devlin et al. 2019 do it so)."""
    if len(text.ids) + len(pair.ids) <= room:
        return text, pair
    text = text.upto(max(room - len(pair.ids), min(len(text.ids), (room + 1) // 2)))
    return text, pair.upto(room - len(text.ids))


def lay(text: Pieces, pair: Pieces | None, tokenizer: Tokenizer) -> tuple[Pieces, int | None]:
    """Put a text or a pair between its signs, and say where the pair begins."""
    signs, words = tokenizer.specials, text.words
    if pair is None:
        return Pieces([signs.bos, *text.ids, signs.eos], None if words is None else ["", *words, ""]), None
    between = tokenizer.between
    ids = [signs.bos, *text.ids, *between, *pair.ids, signs.eos]
    if words is not None:
        words = ["", *words, *("" for _ in between), *(pair.words or ()), ""]
    return Pieces(ids, words), 1 + len(text.ids) + len(between)
