"""Recurrent networks over tokens: a language model, a classifier's body or a tagger's body, by configuration.

    x_t = E w_t            h_t = cell(x_t, h_{t-1}), layer on layer            p(w_{t+1} | w_≤t) = softmax(W_o h_t + b)

`direction: forward` reads from left to right and so scores and generates (Mikolov et al. 2010; Graves 2013). `both`
concatenates a walk from each side (Schuster & Paliwal 1997): it encodes, and fills a place from what stands around it.
`backward` encodes only. `attention` lets each layer look back at its own earlier states (`weft.nn.intra`). `chars` sets
what a word looks like beside what it is, x_t = [E w_t ; CNN(its characters)] (`weft.nn.chars`), so that it can only
encode: nobody could spell a word that is still to be guessed.

A long text is read piece by piece: `read` takes the state that the piece before it left, and `carried` cuts the
gradient there (truncated back-propagation through time, Williams & Peng 1990).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from weft.config import Named
from weft.errors import ConfigError, RoleError
from weft.models.base import Model, Role, matrix_numbers
from weft.nn.chars import CharCNN
from weft.nn.grid import Grid
from weft.nn.intra import Intra
from weft.nn.recurrent import State
from weft.nn.scores import Additive
from weft.nn.stack import Stack
from weft.tokens import PAD, Tokens


class RNNConfig(Named):
    """`width` is that of a layer's states; with both directions, half for each."""

    cell: Literal["elman", "jordan", "lstm", "peephole", "gru"] = "lstm"
    width: int = Field(256, ge=2)
    layers: int = Field(1, ge=1)
    direction: Literal["forward", "backward", "both"] = "forward"
    attention: Literal["none", "cosine", "additive", "general", "dot", "scaled-dot"] = "none"
    embedding: int | None = Field(None, ge=1)  # None: the width
    vectors: str | None = None  # a file of word vectors to start the embeddings from
    chars: int = Field(0, ge=0)  # filters over a word's characters, beside its embedding
    dropout: float = Field(0.0, ge=0, lt=1)
    residual: bool = False  # around each layer that keeps its input's width
    tie: bool = False  # one matrix for embeddings and output (Press & Wolf 2017)

    @model_validator(mode="after")
    def _fits(self) -> "RNNConfig":
        if self.direction == "both" and self.width % 2:
            near = self.width + 1
            raise ValueError(f"model.width must be even, half for each direction: got {self.width}; try {near}")
        if self.tie and self.embedding not in (None, self.width):
            raise ValueError(
                f"model.tie needs model.embedding to be model.width: got {self.embedding} and {self.width}; leave "
                "model.embedding out"
            )
        return self


@dataclass(frozen=True)
class RNNState:
    """Each layer's state."""

    layers: tuple[State, ...]

    def select(self, rows: Tensor) -> "RNNState":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]."""
        return RNNState(tuple(tuple(part[rows] for part in layer) for layer in self.layers))


class RNN(Model):
    """Embeddings, recurrent layers, and, where it scores or fills, an output."""

    Config: ClassVar[type[Named]] = RNNConfig
    output: nn.Linear | None

    def __init__(self, config: RNNConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        size = config.embedding or config.width
        self.width = config.width
        self.embed = nn.Embedding(vocab, size)
        self.chars = CharCNN(config.chars) if config.chars else None
        self.dropout = nn.Dropout(config.dropout)
        self.recurrent = Stack(
            config.cell,
            size + config.chars,
            config.width,
            config.layers,
            config.direction,
            config.dropout,
            config.residual,
            config.attention,
        )
        self.output = nn.Linear(config.width, vocab) if self.roles(config) > {Role.ENCODER} else None
        if config.tie and self.output is not None:
            self.output.weight = self.embed.weight
            nn.init.normal_(self.embed.weight, std=size**-0.5)  # what also scores must not give large scores

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Say what it can do: it depends on which way it reads, and whether it must see words spelt."""
        assert isinstance(config, RNNConfig)
        if config.chars:
            return frozenset({Role.ENCODER})
        by_direction = {"forward": {Role.SCORER, Role.GENERATOR}, "both": {Role.FILLER}, "backward": set()}
        return frozenset({Role.ENCODER, *by_direction[config.direction]})

    @classmethod
    def spells(cls, config: Named) -> bool:
        """Say whether it reads characters."""
        assert isinstance(config, RNNConfig)
        return config.chars > 0

    def keep(self, needs: Collection[Role]) -> None:
        """Drop the output where nothing is scored."""
        if not {Role.SCORER, Role.GENERATOR, Role.FILLER} & set(needs):
            self.output = None

    def operations(self, tokens: Tokens, source: Tokens | None = None) -> int:
        """Count each matrix for each token, filters for each character, and a layer's looks for each earlier state."""
        count, read = super().operations(tokens), int(tokens.lengths.sum())
        if self.chars is not None and tokens.chars is not None:
            count += 2 * matrix_numbers(self.chars) * (int((tokens.chars != PAD).sum()) - read)
        pairs = int((tokens.lengths * (tokens.lengths - 1)).sum()) // 2
        for layer in self.recurrent.ahead:  # where it goes both ways, each is half as wide
            if isinstance(layer, Intra):
                by_token = read if isinstance(layer.score, Additive) else 0  # its v meets pairs, not tokens
                count += 2 * self.width * ((1 + layer.cell.states) * pairs - by_token)
        return count

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the outputs of the chosen layers, (L, N, D); 0 is the embeddings, -1 the last layer."""
        embedded = self._embed(tokens)
        outputs, _ = self.recurrent(embedded, Grid(tokens))
        known, deep = [embedded, *outputs], len(outputs)
        if not all(-deep <= layer + 1 and layer <= deep for layer in layers):
            raise ConfigError(f"layers: an rnn has 0, the embeddings, to {deep} here, but {list(layers)} is asked for")
        chosen: list[Tensor] = [known[layer] for layer in layers]
        if len({one.shape for one in chosen}) > 1 or chosen[0].shape[-1] != self.width:
            raise RoleError(
                f"layers: layer 0, the embeddings, is {embedded.shape[-1]} wide and the others are {self.width}: "
                "they do not go together; leave layer 0 out"
            )
        return torch.stack(chosen)

    def summary(self, tokens: Tokens) -> Tensor:
        """Return one vector a sequence, (B, D): the last layer's last output, in each direction."""
        _, ends = self.recurrent(self._embed(tokens), Grid(tokens))
        last: Tensor = ends[-1]
        return last

    def logits(self, tokens: Tokens, at: Tensor | None = None) -> Tensor:
        """Score what follows each token, or with both directions what stands there: (N, V), or (len(at), V)."""
        outputs, _ = self.recurrent(self._embed(tokens), Grid(tokens))
        return self._score(outputs[-1] if at is None else outputs[-1][at])

    def read(self, tokens: Tokens, state: RNNState | None = None) -> tuple[Tensor, RNNState]:
        """Read sequences that go on from `state`; return the logits (N, V) and the state after each one's last."""
        grid = Grid(tokens)
        walked, after = self._walk(grid.lay(tokens.ids), state, None if grid.full else grid.real)
        return self._score(grid.gather(walked)), after

    def carried(self, state: RNNState) -> RNNState:
        """Return the state for the next piece of the same texts, cut off from the gradient."""
        kept = []
        for layer, old in zip(self.recurrent.ahead, state.layers, strict=True):
            last = layer.carry(old) if isinstance(layer, Intra) else old
            kept.append(tuple(part.detach() for part in last))
        return RNNState(tuple(kept))

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, RNNState]:
        """Read the prompts; return the logits (B, V) of what follows, and the state."""
        grid = Grid(prompt)
        walked, state = self._walk(grid.lay(prompt.ids), None, None if grid.full else grid.real)
        return self._score(grid.last(walked)), state

    def step(self, ids: Tensor, state: RNNState) -> tuple[Tensor, RNNState]:
        """Read one more token a hypothesis."""
        walked, state = self._walk(ids[None], state, None)
        return self._score(walked[0]), state

    def _embed(self, tokens: Tokens) -> Tensor:
        embedded: Tensor = self.embed(tokens.ids)
        if self.chars is not None:
            embedded = torch.cat([embedded, self.chars(tokens)], -1)
        dropped: Tensor = self.dropout(embedded)  # (N, E + F)
        return dropped

    def _walk(self, ids: Tensor, state: RNNState | None, real: Tensor | None) -> tuple[Tensor, RNNState]:
        embedded = self.dropout(self.embed(ids))  # (T, B, E)
        outputs, after = self.recurrent.walk(embedded, state.layers if state else None, real)
        return outputs[-1], RNNState(after)

    def _score(self, outputs: Tensor) -> Tensor:
        assert self.output is not None
        scores: Tensor = self.output(self.dropout(outputs))
        return scores
