"""context2vec: the vector of a word's place in a sentence, from two LSTMs that read up to it from both ends.

Melamud, Goldberger and Dagan 2016, "context2vec: learning generic context embedding with bidirectional LSTM" (CoNLL,
K16-1006), section 2.2:

    c_i = MLP([→LSTM(w_1 … w_{i-1}) ; ←LSTM(w_n … w_{i+1})])             MLP(x) = L_2 ReLU(L_1 x)
    p(t | context) = softmax(T c_i)

A word in a context has an embedding, a word that is asked for a row of T: a context lies near the words that fit it,
and near other contexts that they fit. Position i never reads its own word; at an end of the text the state is zero.

Departure: the softmax is over all words, where the paper draws ten of them (negative sampling, smoothed by 0.75).
"""

from collections.abc import Collection, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from weft.config.schema import Layers, Named, Pretrained, Share, Size
from weft.errors import ConfigError, RoleError
from weft.models.base import LMDirection, Model, Role
from weft.nn.layers.pooling import pool_tokens
from weft.nn.rnn.stack import RecurrentStack
from weft.nn.rnn.time_major import TimeMajor
from weft.nn.transformer.output_projection import OutputProjection
from weft.tokens import Tokens


class Context2VecConfig(Pretrained):
    """The sizes of the paper by default (table 1); the hidden layer of the MLP is as wide as both LSTMs."""

    width: Size = 600  # of a context and of a word that is asked for
    embedding: Size = 300  # of a word in a context
    cells: Size = 600  # units of an LSTM, in each direction
    layers: Layers = 1  # of LSTMs, in each direction
    dropout: Share = 0.0  # on embeddings, between layers and inside the MLP


class Context2Vec(Model):
    """Embeddings, the LSTMs of both directions, the MLP and, as a masked language model, the matrix T of words."""

    Config: ClassVar[type[Named]] = Context2VecConfig
    config: Context2VecConfig
    output: OutputProjection | None

    def __init__(self, config: Context2VecConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        self.width, both = config.width, 2 * config.cells
        self.embed = nn.Embedding(vocab, config.embedding)
        self.dropout = nn.Dropout(config.dropout)
        self.recurrent = RecurrentStack(
            "lstm", config.embedding, both, config.layers, "both", config.dropout, apart=True
        )
        self.fc1, self.fc2 = nn.Linear(both, both), nn.Linear(both, config.width)
        self.output = OutputProjection(config.width, vocab)

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Return its roles: encoder and masked language model."""
        return frozenset({Role.ENCODER, Role.MASKED_LM})

    @classmethod
    def directions(cls, config: Named) -> tuple[LMDirection, ...]:
        """Return `both`: a word from both its sides, without itself."""
        return ("both",)

    def layer_groups(self) -> list[list[nn.Module]]:
        """Return the embeddings, then each layer; the MLP goes with the last."""
        *rest, last = self.recurrent.layers
        return [[self.embed], *([layer] for layer in rest), [last, self.fc1, self.fc2]]

    def prune_unused(self, needs: Collection[Role]) -> None:
        """Drop T unless a role needs logits."""
        if Role.MASKED_LM not in needs:
            self.output = None

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the context of each token, (L, N, D): the only layer, -1."""
        if set(layers) - {-1}:
            raise ConfigError(f"layers: a context2vec has its contexts alone, -1, but {list(layers)} is asked for")
        return self._contexts(tokens).expand(len(layers), -1, -1)

    def pooled_output(self, tokens: Tokens) -> Tensor:
        """Return the mean of a sequence's contexts, (B, D)."""
        return pool_tokens(self._contexts(tokens), tokens, "mean")

    def logits(self, tokens: Tokens, at: Tensor | None = None, direction: LMDirection = "both") -> Tensor:
        """Return the logits of each token given all others, (N, V), or (len(at), V) at the flat positions `at`."""
        if direction != "both":
            raise RoleError(f"model: a context2vec reads both sides of a word, but {direction!r} is asked for")
        assert self.output is not None
        logits: Tensor = self.output(self._contexts(tokens, at))
        return logits

    def _contexts(self, tokens: Tokens, at: Tensor | None = None) -> Tensor:
        """Return c (N, D), or (len(at), D)."""
        grid = TimeMajor(tokens)
        outputs, _ = self.recurrent(self.dropout(self.embed(tokens.ids)), grid)
        forward, backward = outputs[-1].chunk(2, -1)
        sides = torch.cat([grid.before(forward), grid.before(backward, reverse=True)], -1)
        hidden = self.dropout(torch.relu(self.fc1(sides if at is None else sides[at])))
        contexts: Tensor = self.fc2(hidden)
        return contexts
