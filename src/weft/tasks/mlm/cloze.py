"""Cloze texts: encode a text with masks, and fill the predicted tokens in.

A tokenizer encodes the string of a special token like any other text, so a question is split at its masks here, and the
segments between them are encoded separately. If tokens include the space before them, the space before a mask belongs
to the token that fills it, as in RoBERTa; and if a tokenizer adds a prefix space to every text, the segment after a
mask is encoded without it, unless it begins with a space.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer as Engine

from weft.tokenization.trainable import Bytes, Characters, Tokenizer

MASK = "[MASK]"  # a question may write the mask of any tokenizer so


@dataclass(frozen=True)
class Blanks:
    """The masks of a tokenizer in text."""

    tokenizer: Tokenizer
    mask: int

    @cached_property
    def mask_strings(self) -> list[str]:
        """The strings that stand for a mask: the tokenizer's own first."""
        return list(dict.fromkeys([str(self.tokenizer.engine.id_to_token(self.mask)), MASK]))

    @cached_property
    def spaced(self) -> bool:
        """Return whether a token may include the space before it."""
        plain = isinstance(self.tokenizer, Characters | Bytes)
        return self.tokenizer.model in ("BPE", "Unigram") and not plain

    def cut(self, text: str) -> list[str]:
        """Split a text at its masks: one segment more than there are masks."""
        return re.split("|".join(map(re.escape, self.mask_strings)), text)

    def ids(self, text: str, needed: int | None = None) -> list[int]:
        """Return the ids of a text, with the mask's id for its masks; with `needed`, as `Tokenizer.ids` does."""
        head_text, *rest = self._strip_space(self.cut(text))
        ids = self.tokenizer.ids([head_text], needed)[0]
        for segment in rest:
            if needed is not None and len(ids) >= needed:
                break
            space = re.search(r"\s|$", segment)
            assert space is not None
            word, after = segment[: space.start()], segment[space.start() :]
            ids += [self.mask, *self._without_prefix_space.ids([word], needed)[0]]
            ids += self.tokenizer.ids([after], needed)[0]
        return ids

    @cached_property
    def _without_prefix_space(self) -> Tokenizer:
        """The same tokenizer without the prefix space."""
        if not self.spaced:
            return self.tokenizer
        serialized = self.tokenizer.engine.to_str()
        for key, never in (("prepend_scheme", '"never"'), ("add_prefix_space", "false")):
            serialized = re.sub(rf'"{key}":("\w+"|true)', f'"{key}":{never}', serialized)
        return type(self.tokenizer)(self.tokenizer.config, Engine.from_str(serialized))

    def _strip_space(self, segments: list[str]) -> list[str]:
        """Strip the space before each mask, if the token that fills it will have one."""
        return [*(segment.rstrip() for segment in segments[:-1]), segments[-1]] if self.spaced else segments

    def filled(self, text: str, ids: Sequence[int]) -> str:
        """Return the text with tokens for its masks; one with a space of its own, or within a word, gets no other."""
        filled_text, *rest = self._strip_space(self.cut(text))
        for id, after in zip(ids, rest, strict=True):
            token = self.tokenizer.token(id)
            if self.tokenizer.model == "WordPiece" and token.startswith("##"):
                filled_text, token = filled_text.rstrip(), token[2:]
            filled_text += (token if filled_text else token.lstrip()) + after
        return filled_text
