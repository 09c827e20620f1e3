"""Inputs of one text or a text pair: tokenize, truncate, add special tokens; for `classify` and `choice`."""

from collections.abc import Sequence
from typing import NamedTuple

from weft.data.truncation import TruncationPolicy
from weft.tokenization.trainable import Tokenizer


class TextTokens(NamedTuple):
    """The token ids of a text and, if the model reads characters, the surface form of each token."""

    ids: list[int]
    words: list[str] | None = None

    def truncate(self, size: int) -> "TextTokens":
        """Return the first `size` tokens."""
        return TextTokens(self.ids[:size], self.words and self.words[:size])


def tokenize_texts(
    texts: Sequence[str], tokenizer: Tokenizer, with_chars: bool, limit: TruncationPolicy
) -> list[TextTokens]:
    """Tokenize texts as far as their limit needs; with `with_chars`, keep the surface form of each token."""
    if not with_chars:
        return [TextTokens(ids) for ids in tokenizer.ids(texts, limit.needed)]
    return [
        TextTokens(encoding.ids, [text[start:end].strip() for start, end in encoding.offsets])
        for text in texts
        for encoding in [tokenizer.encode(text, limit.needed)]
    ]


def truncate_pair(text: TextTokens, pair: TextTokens, room: int) -> tuple[TextTokens, TextTokens]:
    """Truncate a pair to `room` tokens in all, the longer text first (as in Devlin et al. 2019)."""
    if len(text.ids) + len(pair.ids) <= room:
        return text, pair
    text = text.truncate(max(room - len(pair.ids), min(len(text.ids), (room + 1) // 2)))
    return text, pair.truncate(room - len(text.ids))


def add_special_tokens(
    text: TextTokens, pair: TextTokens | None, tokenizer: Tokenizer
) -> tuple[TextTokens, int | None]:
    """Return a text or a pair with its special tokens, and the position where the second text begins."""
    specials, words = tokenizer.specials, text.words
    if pair is None:
        return TextTokens([specials.bos, *text.ids, specials.eos], None if words is None else ["", *words, ""]), None
    between = tokenizer.pair_separator
    ids = [specials.bos, *text.ids, *between, *pair.ids, specials.eos]
    if words is not None:
        words = ["", *words, *("" for _ in between), *(pair.words or ()), ""]
    return TextTokens(ids, words), 1 + len(text.ids) + len(between)
