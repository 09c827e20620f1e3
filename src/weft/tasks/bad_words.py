"""Bad words: the token sequences of texts that a search must not write."""

from collections.abc import Sequence
from dataclasses import dataclass

from weft.decoding.config import DecodingConfig
from weft.errors import ConfigError
from weft.tokenization.trainable import Tokenizer

PUNCTUATION = "("  # stands before a word without a space


@dataclass(frozen=True)
class BadWords:
    """A function from texts to the token sequences that spell them: first in a text, after a space, after punctuation.

    These are the tokens that the tokenizer gives. Other tokens that spell the same, such as its letters one by one, are
    not found.
    """

    tokenizer: Tokenizer

    def __call__(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the distinct token sequences of all texts; one with an unknown token cannot be written anyway."""
        spellings = dict.fromkeys(tuple(ids) for text in texts for ids in self._spellings(text))
        return [ids for ids in spellings if self.tokenizer.specials.unk not in ids]

    def _spellings(self, text: str) -> list[list[int]]:
        punctuation, first, after_space, after_punctuation = self.tokenizer.ids(
            [PUNCTUATION, text, f" {text}", f"{PUNCTUATION}{text}"]
        )
        if not first:
            raise ConfigError(f"bad_words: {text!r} has no tokens, so it cannot be avoided; leave it out")
        if after_punctuation[: len(punctuation)] != punctuation or len(after_punctuation) == len(punctuation):
            return [first, after_space]
        return [first, after_space, after_punctuation[len(punctuation) :]]


def bad_word_ids(bad_words: BadWords | None, options: DecodingConfig) -> list[tuple[int, ...]]:
    """Return the token sequences of the bad words of a call."""
    if not options.bad_words:
        return []
    if bad_words is None:
        raise ConfigError("bad_words: this head has no tokenizer to turn them into tokens; leave bad_words out")
    return bad_words(options.bad_words)
