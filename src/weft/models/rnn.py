"""Recurrent networks over tokens: a language model, a classifier's body or a tagger's body, by configuration.

    x_t = E w_t            h_t = cell(x_t, h_{t-1}), layer on layer            p(w_{t+1} | w_≤t) = softmax(W_o h_t + b)

`direction: forward` reads from left to right and so scores and generates (Mikolov et al. 2010; Graves 2013). `backward`
reads from the end and scores the word before. `both` concatenates a walk from each side (Schuster & Paliwal 1997): it
encodes, and gives each word from both its sides and never from itself,

    p(w_t | w_<t, w_>t) = softmax(W_o [h→_{t-1} ; h←_{t+1}] + b)            h→_0 = h←_{T+1} = 0

(Mousa & Schuller 2017), if the directions do not meet below the output: with one layer, or with `apart`. `attention`
lets each layer look back at its own earlier states (`weft.nn.rnn.self_attentive`). `chars` sets what a word looks like
beside what it is, x_t = [E w_t ; CNN(its characters)] (`weft.nn.layers.char_cnn`), so that it can only encode: nobody
could spell a word that is still to be guessed.

The dropouts are those of AWD-LSTM (Merity et al. 2018, sections 2 and 4; `weft.nn.layers.dropout`), and so is the last
layer of a tied network, as wide as the embeddings: `{width: 1150, layers: 3, embedding: 400, tie: true}` is
400-1150-1150-400. Left out is the penalty on activations (AR and TAR, section 4.6).

A long text is read piece by piece: `read` takes the state that the piece before it left, and `carried` cuts the
gradient there (truncated back-propagation through time, Williams & Peng 1990).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from weft.config.schema import Named, Pretrained, Share
from weft.errors import ConfigError, RoleError
from weft.models.base import Direction, Model, Role, matrix_numbers
from weft.nn.attention.scores import Additive
from weft.nn.layers.char_cnn import CharCNN
from weft.nn.layers.dropout import SequenceDropout, WordDropout
from weft.nn.rnn.cells import State
from weft.nn.rnn.self_attentive import LSTMN
from weft.nn.rnn.stack import RecurrentStack
from weft.nn.rnn.time_major import Grid
from weft.tokens import PAD, Tokens


class RNNConfig(Pretrained):
    """`width` is that of a layer's states; with both directions, half for each.

    `dropout` stands on what the first layer reads, between layers, and on what the output reads, unless one of these
    has its own; where `variational`, a mask is drawn once a sequence and stays for all its steps.
    """

    cell: Literal["elman", "jordan", "lstm", "peephole", "gru"] = "lstm"
    width: int = Field(256, ge=2)
    layers: int = Field(1, ge=1)
    direction: Literal["forward", "backward", "both"] = "forward"
    apart: bool = False  # both: the directions meet at the output, not after each layer
    attention: Literal["none", "cosine", "additive", "general", "dot", "scaled-dot"] = "none"
    embedding: int | None = Field(None, ge=1)  # None: the width
    vectors: str | None = None  # a file of word vectors to start the embeddings from
    chars: int = Field(0, ge=0)  # filters over a word's characters, beside its embedding
    dropout: Share = 0.0
    dropout_input: Share | None = None  # on what the first layer reads
    dropout_hidden: Share | None = None  # between layers
    dropout_output: Share | None = None  # on what the output reads
    variational: bool = False
    dropout_embed: Share = 0.0  # of whole words
    dropout_recurrent: Share = 0.0  # of the weights from state to state (DropConnect)
    residual: bool = False  # around each layer that keeps its input's width
    tie: bool = False  # one matrix for embeddings and output (Press & Wolf 2017); the last layer is as wide as they are

    @model_validator(mode="after")
    def _fits(self) -> "RNNConfig":
        for key, wide in (("width", self.width), ("embedding", self.last)):
            if self.direction == "both" and wide % 2:
                raise ValueError(f"model.{key} must be even, half for each direction: got {wide}; try {wide + 1}")
        if self.apart and self.direction != "both":
            raise ValueError(f"model.apart is for model.direction=both, but that is {self.direction}; leave it out")
        return self

    @property
    def last(self) -> int:
        """The width of the last layer."""
        return (self.tie and self.embedding) or self.width


@dataclass(frozen=True)
class RNNState:
    """Each layer's state."""

    layers: tuple[State, ...]

    @property
    def parts(self) -> list[Tensor]:
        """All its tensors, layer by layer."""
        return [part for layer in self.layers for part in layer]

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
        self.width = config.last
        self.embed = nn.Embedding(vocab, size)
        self.chars = CharCNN(config.chars) if config.chars else None
        self.drop_embed = WordDropout(config.dropout_embed, vocab)
        self.drop_input, self.drop_output = (
            SequenceDropout(config.dropout if own is None else own, config.variational)
            for own in (config.dropout_input, config.dropout_output)
        )
        self.recurrent = RecurrentStack(
            config.cell,
            size + config.chars,
            config.width,
            config.layers,
            config.direction,
            config.dropout if config.dropout_hidden is None else config.dropout_hidden,
            config.residual,
            config.attention,
            last=config.last,
            apart=config.apart,
            variational=config.variational,
            recurrent=config.dropout_recurrent,
        )
        self.output = nn.Linear(config.last, vocab) if self.roles(config) > {Role.ENCODER} else None
        if config.tie and self.output is not None:
            self.output.weight = self.embed.weight
            nn.init.normal_(self.embed.weight, std=size**-0.5)  # what also scores must not give large scores

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Say what it can do: it depends on which way it reads, and whether it must see words spelt."""
        assert isinstance(config, RNNConfig)
        met = config.direction == "both" and config.layers > 1 and not config.apart
        if config.chars or met:
            return frozenset({Role.ENCODER})
        by_direction = {
            "forward": {Role.LANGUAGE_MODEL, Role.GENERATOR},
            "both": {Role.MASKED_LM},
            "backward": {Role.LANGUAGE_MODEL},
        }
        return frozenset({Role.ENCODER, *by_direction[config.direction]})

    @classmethod
    def directions(cls, config: Named) -> tuple[Direction, ...]:
        """Say from where it sees a word."""
        assert isinstance(config, RNNConfig)
        return (config.direction,)

    @classmethod
    def uses_chars(cls, config: Named) -> bool:
        """Say whether it reads characters."""
        assert isinstance(config, RNNConfig)
        return config.chars > 0

    @property
    def mixable_layers(self) -> tuple[int, ...]:
        """The recurrent layers, as far as they are of the last one's width."""
        same = self.config.layers if self.config.width == self.width else 1  # type: ignore[attr-defined]
        return tuple(range(-same, 0))

    def layer_groups(self) -> list[list[nn.Module]]:
        """The embeddings, then each layer."""
        below = (self.embed, self.chars, self.drop_embed, self.drop_input)
        return [[part for part in below if part is not None], *([layer] for layer in self.recurrent.layers)]

    def keep(self, needs: Collection[Role]) -> None:
        """Drop the output where nothing is scored."""
        if not {Role.LANGUAGE_MODEL, Role.GENERATOR, Role.MASKED_LM} & set(needs):
            self.output = None

    def flops(self, tokens: Tokens, source: Tokens | None = None) -> int:
        """Count each matrix for each token, filters for each character, and a layer's looks for each earlier state."""
        count, read = super().flops(tokens), int(tokens.lengths.sum())
        if self.chars is not None and tokens.chars is not None:
            count += 2 * matrix_numbers(self.chars) * (int((tokens.chars != PAD).sum()) - read)
        pairs = int((tokens.lengths * (tokens.lengths - 1)).sum()) // 2
        for layer in self.recurrent.ahead:
            if isinstance(layer, LSTMN):
                by_token = read if isinstance(layer.score, Additive) else 0  # its v meets pairs, not tokens
                wide = layer.width * len(self.recurrent.ways)
                count += 2 * wide * ((1 + layer.cell.states) * pairs - by_token)
        return count

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the outputs of the chosen layers, (L, N, D); 0 is the embeddings, -1 the last layer."""
        grid = Grid(tokens)
        embedded = self._embed(tokens, grid)
        outputs, _ = self.recurrent(embedded, grid)
        known, deep = [embedded, *outputs], len(outputs)
        if not all(-deep <= layer + 1 and layer <= deep for layer in layers):
            raise ConfigError(f"layers: an rnn has 0, the embeddings, to {deep} here, but {list(layers)} is asked for")
        for layer in layers:
            if known[layer].shape[-1] != self.width:
                raise RoleError(
                    f"layers: layer {layer % (deep + 1)} is {known[layer].shape[-1]} wide and the last is "
                    f"{self.width}: they do not go together; leave it out"
                )
        return torch.stack([known[layer] for layer in layers])

    def summary(self, tokens: Tokens) -> Tensor:
        """Return one vector a sequence, (B, D): the last layer's last output, in each direction."""
        grid = Grid(tokens)
        _, ends = self.recurrent(self._embed(tokens, grid), grid)
        last: Tensor = ends[-1]
        return last

    def logits(self, tokens: Tokens, at: Tensor | None = None, direction: Direction = "forward") -> Tensor:
        """Score what follows each token, what was before it, or what stands there: (N, V), or (len(at), V)."""
        if direction not in self.directions(self.config):
            own = self.directions(self.config)[0]
            raise RoleError(f"direction: this rnn reads {own}, but is asked for {direction}; see model.direction")
        grid = Grid(tokens)
        outputs, _ = self.recurrent(self._embed(tokens, grid), grid)
        seen = outputs[-1]
        if direction == "both":
            ahead, back = seen.chunk(2, -1)
            seen = torch.cat([grid.before(ahead), grid.before(back, reverse=True)], -1)
        seen = self.drop_output(seen, grid)
        return self._score(seen if at is None else seen[at])

    def read(self, tokens: Tokens, state: RNNState | None = None) -> tuple[Tensor, RNNState]:
        """Read sequences that go on from `state`; return the logits (N, V) and the state after each one's last."""
        grid = Grid(tokens)
        walked, after = self._walk(grid.lay(tokens.ids), state, None if grid.full else grid.real)
        return self._score(grid.gather(walked)), after

    def carried(self, state: RNNState) -> RNNState:
        """Return the state for the next piece of the same texts, cut off from the gradient."""
        kept = []
        for layer, old in zip(self.recurrent.ahead, state.layers, strict=True):
            last = layer.carry(old) if isinstance(layer, LSTMN) else old
            kept.append(tuple(part.detach() for part in last))
        return RNNState(tuple(kept))

    def state_of(self, parts: Sequence[Tensor]) -> RNNState:
        """Put a state together from the `parts` of one."""
        each = len(parts) // len(self.recurrent.ahead)
        return RNNState(tuple(tuple(parts[at : at + each]) for at in range(0, len(parts), each)))

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, RNNState]:
        """Read the prompts; return the logits (B, V) of what follows, and the state."""
        grid = Grid(prompt)
        walked, state = self._walk(grid.lay(prompt.ids), None, None if grid.full else grid.real)
        return self._score(grid.last(walked)), state

    def step(self, ids: Tensor, state: RNNState) -> tuple[Tensor, RNNState]:
        """Read one more token a hypothesis."""
        walked, state = self._walk(ids[None], state, None)
        return self._score(walked[0]), state

    def _embed(self, tokens: Tokens, grid: Grid) -> Tensor:
        embedded: Tensor = self.drop_embed(self.embed(tokens.ids), tokens.ids)
        if self.chars is not None:
            embedded = torch.cat([embedded, self.chars(tokens)], -1)
        dropped: Tensor = self.drop_input(embedded, grid)  # (N, E + F)
        return dropped

    def _walk(self, ids: Tensor, state: RNNState | None, real: Tensor | None) -> tuple[Tensor, RNNState]:
        embedded = self.drop_input(self.drop_embed(self.embed(ids), ids))  # (T, B, E)
        outputs, after = self.recurrent.walk(embedded, state.layers if state else None, real)
        return self.drop_output(outputs[-1]), RNNState(after)

    def _score(self, outputs: Tensor) -> Tensor:
        assert self.output is not None
        scores: Tensor = self.output(outputs)
        return scores
