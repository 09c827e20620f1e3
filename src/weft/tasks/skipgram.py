"""Word vectors: the task of a model that learns by itself which words stand near which (`weft.models.word2vec.model`).

A text is its words, without those that are unknown: word2vec leaves rare words out. Asked for a word, it answers with
the words whose vectors point the most in the same direction; asked for several, with those nearest to their mean.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional as F

from weft.config.schema import Named, Section
from weft.data.batching.packed import pack
from weft.data.truncation import TruncationPolicy
from weft.models.base import Role
from weft.tasks import base
from weft.tasks.base import Answer, Batch, Head, Item, Metrics
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Tokens

Near = list[tuple[int, float]]  # tokens and their cosines, the nearest first


class Neighbours(Section):
    """How many words to answer with."""

    neighbours: int = Field(10, ge=1)


class SkipgramConfig(Named):
    """What calls get that say nothing else."""

    neighbours: int = Field(10, ge=1)


class SkipgramExample(base.Example):
    """A text to learn from, or a word to ask for."""

    text: str


class SkipgramHead(Head):
    """The body alone, and a search among its vectors."""

    def __init__(self, body: Any, hidden: Sequence[int]) -> None:
        super().__init__(body)
        self._hidden = list(hidden)

    def predict(self, batch: Batch, options: Section) -> list[Near]:
        """Find the tokens nearest to the mean of each text's, other than these."""
        assert isinstance(options, Neighbours)
        tokens = batch.tokens
        known = Tokens.pack([[id] for id in range(self.body.vocab)]).to(tokens.device)
        directions = F.normalize(self.body.encode(known)[0].float(), dim=-1)  # (V, D)
        cosines = F.normalize(self.body.summary(tokens).float(), dim=-1) @ directions.T  # (B, V)
        owners = torch.arange(len(tokens)).repeat_interleave(tokens.lengths)
        cosines[owners.to(tokens.device), tokens.ids] = -torch.inf
        cosines[:, self._hidden] = -torch.inf
        best, ids = cosines.topk(min(options.neighbours, self.body.vocab), dim=-1)
        pairs = zip(ids.tolist(), best.tolist(), strict=True)
        return [[(id, cosine) for id, cosine in zip(*one, strict=True) if cosine > -np.inf] for one in pairs]

    def scored(self, options: Section) -> int:
        """The vocabulary, for each text."""
        vocab: int = self.body.vocab
        return vocab


class Skipgram(base.Task):
    """Items are (the words,)."""

    Config: ClassVar[type[Named]] = SkipgramConfig
    Example = SkipgramExample
    Options = Neighbours
    needs = frozenset({Role.ENCODER, Role.SELF_FITTED})
    metrics = ("loss",)
    metric = "loss"
    lower_is_better = True
    supports_fit = True
    config: SkipgramConfig

    def texts(self, example: SkipgramExample) -> tuple[list[str], list[str]]:
        """The text trains the tokenizer."""
        return [example.text], []

    @property
    def special_token_affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """No vector is learnt of marks."""
        return (), ()

    def cut(self, texts: Sequence[str]) -> list[list[int]]:
        """Cut texts into words, without those that are unknown."""
        unknown = self.tokenizer.specials.unk
        return [[id for id in ids if id != unknown] for ids in self.tokenizer.ids(texts)]

    def encode(self, example: SkipgramExample, tokenizer: Tokenizer, limit: TruncationPolicy) -> list[Item]:
        """Encode one text."""
        return self.encode_batch([example], tokenizer, limit)[0]

    def encode_batch(
        self, examples: Sequence[SkipgramExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many texts, each whole: what is learnt from is a window of it, so that none is too long."""
        unknown = tokenizer.specials.unk
        found = (np.array(ids, np.int32) for ids in tokenizer.ids([example.text for example in examples]))
        known = (ids if unknown is None else ids[ids != unknown] for ids in found)
        return [[(ids,)] if len(ids) else [] for ids in known]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Join texts."""
        return Batch(Tokens.pack([item[0] for item in items]))

    def head(self, model: Any) -> SkipgramHead:
        """Put the search on a body."""
        special = self.tokenizer.specials
        named = (special.bos, special.eos, special.unk, special.mask, special.pad)
        return SkipgramHead(model, sorted({id for id in named if id is not None}))

    def options(self) -> Neighbours:
        """The recipe's number of neighbours."""
        return Neighbours(neighbours=self.config.neighbours)

    def answer(self, example: SkipgramExample, outputs: list[Near]) -> Answer:
        """Name the neighbours, the nearest first, with their cosines."""
        return {"neighbours": [[self.tokenizer.token(id), round(cosine, 6)] for id, cosine in outputs[0]]}

    def line(self, answer: Answer) -> str:
        """`word 0.81, word 0.77`."""
        return " ".join(", ".join(f"{word} {cosine:.2f}" for word, cosine in answer["neighbours"]).splitlines())

    def preview(self, example: SkipgramExample) -> tuple[str, str]:
        """The text, which is its own answer."""
        return example.text, ""

    def measure(self, head: Head, examples: Sequence[SkipgramExample], limit: TruncationPolicy) -> Metrics:
        """Judge by the loss of the guesses in texts that were not learnt from."""
        items = [item for one in self.encode_batch(examples, self.tokenizer, limit) for item in one]
        return Metrics({"loss": head.body.loss(pack(items))})
