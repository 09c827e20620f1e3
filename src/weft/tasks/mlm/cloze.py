"""Texts with masks in them: what the model reads, and the text that its choice makes.

A tokenizer takes what spells a special for text like any other, so a question is cut at its masks here, and what stands
between them is encoded by itself. Where tokens have a sign for the space before them, that before a mask is left to
the token which will stand there, as in RoBERTa; and where a tokenizer puts such a sign before every text, the one
after a mask goes on without it, unless there is a space.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer as Engine

from weft.tokenization.trainable import Bytes, Characters, Tokenizer

MASK = "[MASK]"  # how a question may spell the mask of any tokenizer


@dataclass(frozen=True)
class Blanks:
    """Masks as a tokenizer spells them."""

    tokenizer: Tokenizer
    mask: int

    @cached_property
    def spelt(self) -> list[str]:
        """How a mask may be spelt: the tokenizer's own way first."""
        return list(dict.fromkeys([str(self.tokenizer.engine.id_to_token(self.mask)), MASK]))

    @cached_property
    def spaced(self) -> bool:
        """Whether a token may begin with the space before it."""
        plain = isinstance(self.tokenizer, Characters | Bytes)
        return self.tokenizer.model in ("BPE", "Unigram") and not plain

    def cut(self, text: str) -> list[str]:
        """Return what stands around the masks: one piece more than there are masks."""
        return re.split("|".join(map(re.escape, self.spelt)), text)

    def ids(self, text: str) -> list[int]:
        """Encode a text, its masks as masks."""
        first, *others = self._bare(self.cut(text))
        found = self.tokenizer.ids([first])[0]
        for piece in others:
            space = re.search(r"\s|$", piece)
            assert space is not None
            inside, rest = piece[: space.start()], piece[space.start() :]
            found += [self.mask, *self._further.ids([inside])[0], *self.tokenizer.ids([rest])[0]]
        return found

    @cached_property
    def _further(self) -> Tokenizer:
        """The same tokenizer, but one that puts no space before a text."""
        if not self.spaced:
            return self.tokenizer
        spelt = self.tokenizer.engine.to_str()
        for key, never in (("prepend_scheme", '"never"'), ("add_prefix_space", "false")):
            spelt = re.sub(rf'"{key}":("\w+"|true)', f'"{key}":{never}', spelt)
        return type(self.tokenizer)(self.tokenizer.config, Engine.from_str(spelt))

    def _bare(self, pieces: list[str]) -> list[str]:
        """Leave out the space before each mask, where its token will have one."""
        return [*(piece.rstrip() for piece in pieces[:-1]), pieces[-1]] if self.spaced else pieces

    def filled(self, text: str, ids: Sequence[int]) -> str:
        """Put tokens in the place of masks; one with a space of its own, or that goes on a word, takes no other."""
        found, *rest = self._bare(self.cut(text))
        for id, after in zip(ids, rest, strict=True):
            token = self.tokenizer.token(id)
            if self.tokenizer.model == "WordPiece" and token.startswith("##"):
                found, token = found.rstrip(), token[2:]
            found += (token if found else token.lstrip()) + after
        return found
