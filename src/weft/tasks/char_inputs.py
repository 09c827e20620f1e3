"""Character inputs: the characters of each token, for models with a character CNN (`Tokens.chars`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np

from weft.tokenization.trainable import Tokenizer
from weft.tokens import CHAR_PAD, TEXT_BEGIN, TEXT_END, WORD_BEGIN, WORD_END, char_ids


@dataclass(frozen=True)
class Spelling:
    """The characters of a vocabulary's tokens; a special token has none, an unknown word those of the text."""

    tokenizer: Tokenizer

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Spelling":
        """Return the spelling of a tokenizer's vocabulary, cached."""
        if tokenizer not in _spellings:
            _spellings[tokenizer] = cls(tokenizer)
        return _spellings[tokenizer]

    @cached_property
    def words(self) -> list[np.ndarray]:
        """The characters of each token of the vocabulary."""
        special = set(vars(self.tokenizer.specials).values())
        count = len(self.tokenizer)
        return [char_ids(["" if id in special else self.tokenizer.token(id)]) for id in range(count)]

    @property
    def table(self) -> np.ndarray:
        """The same as one padded array (V, C); bos and eos have characters of their own."""
        table = np.full((len(self.words), max(3, *map(len, self.words))), CHAR_PAD, np.int32)
        for row, word in zip(table, self.words, strict=True):
            row[: len(word)] = word
        for id, char in ((self.tokenizer.specials.eos, TEXT_END), (self.tokenizer.specials.bos, TEXT_BEGIN)):
            table[id, :3] = WORD_BEGIN, char, WORD_END
        return table

    def of_texts(self, texts: Sequence[str], needed: int | None = None) -> list[list[np.ndarray]]:
        """Return the characters of each token of texts, or as `Tokenizer.ids` of those needed, bos and eos included."""
        return [self._of_text(text, needed) for text in texts]

    def _of_text(self, text: str, needed: int | None) -> list[np.ndarray]:
        specials, encoding = self.tokenizer.specials, self.tokenizer.encode(text, needed)
        unknown = {
            index: char_ids([text[start:end]])
            for index, (id, (start, end)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True))
            if id == specials.unk
        }
        words = [unknown.get(index, self.words[id]) for index, id in enumerate(encoding.ids)]
        return [self.words[specials.bos], *words, self.words[specials.eos]]


_spellings: WeakKeyDictionary[Tokenizer, Spelling] = WeakKeyDictionary()
