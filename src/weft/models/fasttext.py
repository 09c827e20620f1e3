"""fastText: Joulin et al. 2017, "Bag of tricks for efficient text classification".

Section 2: a text is the mean of the embeddings of its words and of its n-grams of words, and a linear classifier reads
it. With G the words of a text and its n-grams of 2 to `ngrams` words, and A their embeddings:

    x̄ = 1/|G| Σ_{g ∈ G} A_g                                          softmax(B x̄) belongs to the task

A word has an embedding of its own. N-grams share `buckets` embeddings, chosen by a hash of their words (section 2.2:
the hashing trick, Weinberger et al. 2009), so that the size does not depend on the data. Two n-grams in one bucket
disturb each other, and one that was never seen gets another's embedding: have three times as many buckets as different
n-grams in the training data.

`encode` returns the sum of what ends at each position, h_i = Σ_{g ends at i} A_g, so that x̄ = Σ_i h_i / |G|.
`dropout` leaves out words and n-grams at random, each occurrence by itself: the word dropout of the deep averaging
network (Iyyer et al. 2015, section 4).

Departures: a text has special tokens around it, so that its first and its last word are in a bigram of their own; the
softmax is full, not hierarchical; `buckets` are fewer than the 2,000,000 of fastText's own code, since all of them have
optimizer states here.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from weft.config.schema import Named
from weft.errors import ConfigError
from weft.models.base import Model, Role
from weft.models.word_vectors import Channels, check_channels, keep_static
from weft.nn.attention.positions import positions_of, rows_of
from weft.tokens import Tokens

_MULTIPLIER = 116_049_371  # that of the hash in fastText's own code


class FastTextConfig(Named):
    """`ngrams` is the number of words in the longest n-gram; with 1 there are words alone, and no buckets."""

    width: int = Field(16, ge=1)  # of the embeddings
    ngrams: int = Field(2, ge=1, le=10)  # the number of words in the longest n-gram; 1: words alone
    buckets: int = Field(250_000, ge=1)  # embeddings that all n-grams share, by a hash of their words
    vectors: str | None = None  # a file of word vectors to initialise the embeddings of words
    channels: Channels = "nonstatic"  # static: vectors are not trained
    dropout: float = Field(0.0, ge=0, lt=1)  # of words and n-grams, each occurrence by itself

    @model_validator(mode="after")
    def _check(self) -> "FastTextConfig":
        check_channels(self.channels, self.vectors)
        return self


class FastText(Model):
    """Embeddings of words and of n-grams, and their mean."""

    Config: ClassVar[type[Named]] = FastTextConfig
    config: FastTextConfig

    def __init__(self, config: FastTextConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        self.width = config.width
        self.embed = nn.Embedding(vocab, config.width)
        self.ngrams = nn.Embedding(config.buckets, config.width) if config.ngrams > 1 else None
        for table in (self.embed, self.ngrams):
            if table is not None:
                nn.init.uniform_(table.weight, -1 / config.width, 1 / config.width)  # as in fastText's own code
        if config.channels == "static":
            keep_static(self.embed)

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Return its only role: encoder."""
        return frozenset({Role.ENCODER})

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the sum of the word and the n-grams that end at each position, (L, N, D), its only layer."""
        if not set(layers) <= {0, -1}:
            raise ConfigError(f"layers: fasttext has one, 0 or -1, but {list(layers)} is asked for")
        states = self._drop(self.embed(tokens.ids))
        for buckets, ends in self._hash_ngrams(tokens):
            assert self.ngrams is not None
            states = states.index_add(0, ends, self._drop(self.ngrams(buckets)))
        return states.expand(len(layers), *states.shape)

    def pooled_output(self, tokens: Tokens) -> Tensor:
        """Return the mean over the words and n-grams of each sequence, (B, D); zero for an empty one."""
        states, lengths = self.encode(tokens)[0], tokens.starts.diff()
        sums = states.new_zeros(len(tokens), self.width).index_add(0, rows_of(tokens), states)
        count = sum((lengths - size).clamp(min=0) for size in range(self.config.ngrams))  # of n-grams of size + 1 words
        return sums / torch.as_tensor(count).clamp(min=1)[:, None]

    def _drop(self, embedded: Tensor) -> Tensor:
        """Drop whole embeddings (M, D)."""
        if not (self.training and self.config.dropout):
            return embedded
        return embedded * F.dropout(embedded.new_ones(len(embedded), 1), self.config.dropout)

    def _hash_ngrams(self, tokens: Tokens) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the buckets of the n-grams of each size from 2, (M,), and the flat positions that they end at, (M,)."""
        positions, hashed = positions_of(tokens), tokens.ids
        for size in range(2, self.config.ngrams + 1):
            hashed = F.pad(hashed[:-1], (1, 0)) * _MULTIPLIER + tokens.ids  # wraps around at 2^63
            ends = (positions >= size - 1).nonzero()[:, 0]
            yield hashed[ends] % self.config.buckets, ends
