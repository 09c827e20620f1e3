"""How tokens are spelt, for models that read characters (`Tokens.chars`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np

from weft.tokenization.trainable import Tokenizer
from weft.tokens import BEGIN, END, FIRST, LAST, PAD, spell


@dataclass(frozen=True)
class Spelling:
    """The spellings of a vocabulary; a special token is spelt as nothing, an unknown word as it is written."""

    tokenizer: Tokenizer

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Spelling":
        """Spell a tokenizer's vocabulary, once."""
        if tokenizer not in _known:
            _known[tokenizer] = cls(tokenizer)
        return _known[tokenizer]

    @cached_property
    def words(self) -> list[np.ndarray]:
        """How each token of the vocabulary is spelt."""
        special = set(vars(self.tokenizer.specials).values())
        count = len(self.tokenizer)
        return [spell(["" if id in special else self.tokenizer.token(id)]) for id in range(count)]

    @property
    def table(self) -> np.ndarray:
        """The same as one array (V, C), filled up; what begins a text and what ends it have signs of their own."""
        table = np.full((len(self.words), max(3, *map(len, self.words))), PAD, np.int32)
        for row, word in zip(table, self.words, strict=True):
            row[: len(word)] = word
        for id, sign in ((self.tokenizer.specials.eos, LAST), (self.tokenizer.specials.bos, FIRST)):
            table[id, :3] = BEGIN, sign, END
        return table

    def of_texts(self, texts: Sequence[str]) -> list[list[np.ndarray]]:
        """Spell the tokens of texts, with the signs of beginning and end around them."""
        return [self._of_text(text) for text in texts]

    def _of_text(self, text: str) -> list[np.ndarray]:
        specials, found = self.tokenizer.specials, self.tokenizer.encode(text)
        unknown = {
            place: spell([text[a:b]])
            for place, (id, (a, b)) in enumerate(zip(found.ids, found.offsets, strict=True))
            if id == specials.unk
        }
        inside = [unknown.get(place, self.words[id]) for place, id in enumerate(found.ids)]
        return [self.words[specials.bos], *inside, self.words[specials.eos]]


_known: WeakKeyDictionary[Tokenizer, Spelling] = WeakKeyDictionary()
