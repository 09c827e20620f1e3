"""Word vectors: the task of word2vec, which is fitted without a head (`weft.models.word2vec.model`).

A text is its words without unknown ones: word2vec leaves rare words out. The answer to a word is the words whose
vectors have the highest cosine with its own; to several words, with the mean of theirs.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional as F

from weft.config.schema import Named, Section
from weft.data.truncation import TruncationPolicy
from weft.models.base import Role
from weft.tasks import base
from weft.tasks.base import Answer
from weft.tasks.batch import Batch, Item
from weft.tasks.capabilities import CustomEvaluation, Metrics, SelfFitting
from weft.tasks.encoding import EvaluationData
from weft.tasks.head import Head
from weft.tokenization.trainable import Tokenizer
from weft.tokens import Tokens

Near = list[tuple[int, float]]  # tokens and their cosines, the nearest first


class Neighbours(Section):
    """Options of a call: the number of neighbours."""

    neighbours: int = Field(10, ge=1)


class SkipgramConfig(Named):
    """`neighbours`: the default of calls."""

    neighbours: int = Field(10, ge=1)  # how many an answer has


class SkipgramExample(base.Example):
    """A text to train on, or a word to find neighbours of."""

    text: str


class SkipgramHead(Head):
    """The body with a nearest-neighbour search among its vectors."""

    def __init__(self, body: Any, excluded: Sequence[int]) -> None:
        super().__init__(body)
        self._excluded = list(excluded)

    def predict(self, batch: Batch, options: Section) -> list[Near]:
        """Return the tokens nearest to the mean vector of each text, without its own tokens."""
        assert isinstance(options, Neighbours)
        tokens = batch.tokens
        vocabulary = Tokens.pack([[id] for id in range(self.body.vocab)]).to(tokens.device)
        vectors = F.normalize(self.body.encode(vocabulary)[0].float(), dim=-1)  # (V, D)
        cosines = F.normalize(self.body.pooled_output(tokens).float(), dim=-1) @ vectors.T  # (B, V)
        owners = torch.arange(len(tokens)).repeat_interleave(tokens.lengths)
        cosines[owners.to(tokens.device), tokens.ids] = -torch.inf
        cosines[:, self._excluded] = -torch.inf
        best, ids = cosines.topk(min(options.neighbours, self.body.vocab), dim=-1)
        pairs = zip(ids.tolist(), best.tolist(), strict=True)
        return [[(id, cosine) for id, cosine in zip(*pair, strict=True) if cosine != -np.inf] for pair in pairs]

    def logits_per_item(self, options: Section) -> int:
        """Return the number of cosines a text: the vocabulary."""
        vocab: int = self.body.vocab
        return vocab


class Skipgram(SelfFitting, CustomEvaluation):
    """Word vectors; an item is (ids of the words,)."""

    Config: ClassVar[type[Named]] = SkipgramConfig
    Example = SkipgramExample
    Options = Neighbours
    required_roles = frozenset({Role.ENCODER, Role.SELF_FITTED})
    metrics = ("loss",)
    metric = "loss"
    lower_is_better = True
    config: SkipgramConfig

    @property
    def special_token_affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None: special tokens have no trained vectors."""
        return (), ()

    def tokenize(self, texts: Sequence[str], needed: int | None = None) -> list[list[int]]:
        """Return the ids of the words of texts, without unknown ones: how many are left of a part is not known."""
        unknown = self.tokenizer.specials.unk
        return [[id for id in ids if id != unknown] for ids in self.tokenizer.ids(texts)]

    def encode_batch(
        self, examples: Sequence[SkipgramExample], tokenizer: Tokenizer, limit: TruncationPolicy
    ) -> list[list[Item]]:
        """Encode many texts, each whole: training reads windows of it, so that none is too long."""
        unknown = tokenizer.specials.unk
        encoded = (np.array(ids, np.int32) for ids in tokenizer.ids([example.text for example in examples]))
        words = (ids if unknown is None else ids[ids != unknown] for ids in encoded)
        return [[(ids,)] if len(ids) else [] for ids in words]

    def collate(self, items: Sequence[Item], rng: np.random.Generator) -> Batch:
        """Return a batch of texts."""
        return Batch(Tokens.pack([item[0] for item in items]))

    def head(self, model: Any) -> SkipgramHead:
        """Return the head, with the search, of a body."""
        specials = self.tokenizer.specials
        special_ids = (specials.bos, specials.eos, specials.unk, specials.mask, specials.pad)
        return SkipgramHead(model, sorted({id for id in special_ids if id is not None}))

    def options(self) -> Neighbours:
        """Return the recipe's number of neighbours."""
        return Neighbours(neighbours=self.config.neighbours)

    def answer(self, example: SkipgramExample, outputs: list[Near]) -> Answer:
        """Return the neighbours with their cosines, nearest first."""
        return {"neighbours": [[self.tokenizer.token(id), round(cosine, 6)] for id, cosine in outputs[0]]}

    def format_answer(self, answer: Answer) -> str:
        """Return a line such as `word 0.81, word 0.77`."""
        return " ".join(", ".join(f"{word} {cosine:.2f}" for word, cosine in answer["neighbours"]).splitlines())

    def evaluate(self, head: Head, data: EvaluationData) -> Metrics:
        """Return the skip-gram or CBOW loss on texts."""
        return Metrics({"loss": head.body.loss(data.items)})
