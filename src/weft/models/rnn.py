"""Recurrent neural networks over tokens: language model, masked LM, or encoder, by configuration.

    x_t = E w_t            h_t = cell(x_t, h_{t-1}), stacked                   p(w_{t+1} | w_≤t) = softmax(W_o h_t + b)

`direction: forward` is a left-to-right language model and generates (Mikolov et al. 2010; Graves 2013). `backward`
is a right-to-left one that predicts the previous word. `both` is bidirectional (Schuster & Paliwal 1997): an encoder,
and a model of each word given both of its sides but not itself,

    p(w_t | w_<t, w_>t) = softmax(W_o [h→_{t-1} ; h←_{t+1}] + b)            h→_0 = h←_{T+1} = 0

(Mousa & Schuller 2017), if the directions are not concatenated below the output: with one layer, or with `apart`.
`attention` lets each layer attend to its own earlier states (`weft.nn.rnn.self_attentive`). `chars` concatenates a
character CNN, x_t = [E w_t ; CNN(its characters)] (`weft.nn.layers.char_cnn`); the model is then an encoder only, as
the characters of a word that is still to be predicted are unknown.

The dropouts are those of AWD-LSTM (Merity et al. 2018, sections 2 and 4; `weft.nn.layers.dropout`), and so is the last
layer of a tied network, as wide as the embeddings: `{width: 1150, layers: 3, embedding: 400, tie: true}` is
400-1150-1150-400. The penalty on activations (AR and TAR, section 4.6) is not implemented.

A long text is read in segments: `read` starts from the state after the previous segment, and `carried` detaches it
(truncated back-propagation through time, Williams & Peng 1990).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from weft.config.schema import MAX_SIZE, Layers, Named, Pretrained, Share, Size
from weft.errors import RoleError
from weft.models.base import LMDirection, Model, Role, num_matrix_parameters
from weft.models.word_vectors import Channels, check_channels, keep_static
from weft.nn.attention.scores import Additive
from weft.nn.layers.char_cnn import CharCNN
from weft.nn.layers.dropout import SequenceDropout, WordDropout
from weft.nn.rnn.cells import CellState, join_layers
from weft.nn.rnn.self_attentive import LSTMN
from weft.nn.rnn.stack import RecurrentStack, choose_layers
from weft.nn.rnn.time_major import TimeMajor
from weft.tokens import CHAR_PAD, Tokens


class RNNConfig(Pretrained):
    """`width` is that of a layer's hidden states; with both directions, half for each.

    `dropout` applies to the first layer's input, between layers, and to the output projection's input, unless one of
    these has its own rate; with `variational`, one mask is drawn for each sequence and used at all its steps.
    """

    cell: Literal["elman", "jordan", "lstm", "peephole", "gru"] = "lstm"  # the recurrent cell
    width: int = Field(256, ge=2, le=MAX_SIZE)  # of a layer's hidden states; with both directions, half for each
    layers: Layers = 1  # number of layers
    direction: Literal["forward", "backward", "both"] = "forward"  # in which the text is read
    apart: bool = False  # both: directions are concatenated at the output only, not after each layer
    # over a layer's own earlier states
    attention: Literal["none", "cosine", "additive", "general", "dot", "scaled-dot"] = "none"
    embedding: Size | None = None  # width of the embeddings; None: `width`
    vectors: str | None = None  # a file of word vectors to initialise the embeddings
    channels: Channels = "nonstatic"  # static: vectors are not trained
    chars: int = Field(0, ge=0, le=MAX_SIZE)  # filters of the character CNN beside the word embedding; 0: none
    dropout: Share = 0.0  # on the first input, between layers and on the output
    dropout_input: Share | None = None  # on the first layer's input
    dropout_hidden: Share | None = None  # between layers
    dropout_output: Share | None = None  # on the output projection's input
    variational: bool = False  # one dropout mask for all steps of a sequence
    dropout_embed: Share = 0.0  # of whole words (embedding dropout)
    dropout_recurrent: Share = 0.0  # of the recurrent weights (DropConnect)
    residual: bool = False  # around each layer whose input and output widths are equal
    tie: bool = False  # one matrix for embeddings and output (Press & Wolf 2017); the last layer is as wide as they are

    @model_validator(mode="after")
    def _check(self) -> "RNNConfig":
        check_channels(self.channels, self.vectors)
        for key, width in (("width", self.width), ("embedding", self.last)):
            if self.direction == "both" and width % 2:
                raise ValueError(f"model.{key} must be even, half for each direction: got {width}; try {width + 1}")
        if self.apart and self.direction != "both":
            raise ValueError(f"model.apart is for model.direction=both, but that is {self.direction}; leave it out")
        return self

    @property
    def last(self) -> int:
        """The width of the last layer."""
        return (self.tie and self.embedding) or self.width


@dataclass(frozen=True)
class RNNState:
    """The recurrent states of all layers."""

    layers: tuple[CellState, ...]

    @property
    def parts(self) -> list[Tensor]:
        """All its tensors, in the order of the layers."""
        return [part for layer in self.layers for part in layer]

    def select(self, rows: Tensor) -> "RNNState":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]."""
        return RNNState(tuple(tuple(part[rows] for part in layer) for layer in self.layers))

    def join(self, other: "RNNState") -> "RNNState":
        """Return the state of these hypotheses and, after them, the other's."""
        return RNNState(join_layers(self.layers, other.layers))


class RNN(Model):
    """Embeddings, recurrent layers, and, as a language model or masked LM, the output projection."""

    Config: ClassVar[type[Named]] = RNNConfig
    config: RNNConfig
    output: nn.Linear | None

    def __init__(self, config: RNNConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        size = config.embedding or config.width
        self.width = config.last
        self.embed = nn.Embedding(vocab, size)
        self.chars = CharCNN(config.chars) if config.chars else None
        self.drop_embed = WordDropout(config.dropout_embed, vocab)
        self.drop_input, self.drop_output = (
            SequenceDropout(config.dropout if rate is None else rate, config.variational)
            for rate in (config.dropout_input, config.dropout_output)
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
            nn.init.normal_(self.embed.weight, std=size**-0.5)  # a tied output projection needs small weights
        if config.channels == "static":
            keep_static(self.embed, tied=config.tie and self.output is not None)

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Return its roles, which depend on the direction and on whether it reads characters."""
        assert isinstance(config, RNNConfig)
        mixed = config.direction == "both" and config.layers > 1 and not config.apart
        if config.chars or mixed:
            return frozenset({Role.ENCODER})
        by_direction = {
            "forward": {Role.LANGUAGE_MODEL, Role.GENERATOR},
            "both": {Role.MASKED_LM},
            "backward": {Role.LANGUAGE_MODEL},
        }
        return frozenset({Role.ENCODER, *by_direction[config.direction]})

    @classmethod
    def directions(cls, config: Named) -> tuple[LMDirection, ...]:
        """Return its only direction."""
        assert isinstance(config, RNNConfig)
        return (config.direction,)

    @classmethod
    def uses_chars(cls, config: Named) -> bool:
        """Return whether it has a character CNN."""
        assert isinstance(config, RNNConfig)
        return config.chars > 0

    @property
    def mixable_layers(self) -> tuple[int, ...]:
        """The recurrent layers that are as wide as the last one."""
        count = self.config.layers if self.config.width == self.width else 1
        return tuple(range(-count, 0))

    def layer_groups(self) -> list[list[nn.Module]]:
        """Return the embeddings, then each recurrent layer."""
        embeddings = (self.embed, self.chars, self.drop_embed, self.drop_input)
        return [[module for module in embeddings if module is not None], *([layer] for layer in self.recurrent.layers)]

    def prune_unused(self, needs: Collection[Role]) -> None:
        """Drop the output projection unless a role needs logits."""
        if not {Role.LANGUAGE_MODEL, Role.GENERATOR, Role.MASKED_LM} & set(needs):
            self.output = None

    def flops(self, tokens: Tokens, source: Tokens | None = None) -> int:
        """Return the FLOPs: each matrix for each token, the CNN for each character, attention for each pair."""
        count, length = super().flops(tokens), int(tokens.lengths.sum())
        if self.chars is not None and tokens.chars is not None:
            count += 2 * num_matrix_parameters(self.chars) * (int((tokens.chars != CHAR_PAD).sum()) - length)
        pairs = int((tokens.lengths * (tokens.lengths - 1)).sum()) // 2
        for layer in self.recurrent.ahead:
            if isinstance(layer, LSTMN):
                per_token = length if isinstance(layer.score, Additive) else 0  # its v multiplies pairs, not tokens
                width = layer.width * len(self.recurrent.ways)
                count += 2 * width * ((1 + layer.cell.states) * pairs - per_token)
        return count

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the outputs of the chosen layers, (L, N, D); 0 is the embeddings, -1 the last layer."""
        grid = TimeMajor(tokens)
        embedded = self._embed(tokens, grid)
        outputs, _ = self.recurrent(embedded, grid)
        return choose_layers([embedded, *outputs], layers, "rnn")

    def pooled_output(self, tokens: Tokens) -> Tensor:
        """Return one vector a sequence, (B, D): the last layer's final output in each direction."""
        grid = TimeMajor(tokens)
        _, ends = self.recurrent(self._embed(tokens, grid), grid)
        last: Tensor = ends[-1]
        return last

    def final_states(self, states: Tensor, tokens: Tokens) -> Tensor:
        """Return the final state of each direction, (B, D): forward at the last token, backward at the first."""
        return self.recurrent.final(states, TimeMajor(tokens))

    def logits(self, tokens: Tokens, at: Tensor | None = None, direction: LMDirection = "forward") -> Tensor:
        """Return the logits of the next, the previous, or (both) the token itself: (N, V), or (len(at), V)."""
        if direction not in self.directions(self.config):
            own = self.directions(self.config)[0]
            raise RoleError(f"direction: this rnn reads {own}, but is asked for {direction}; see model.direction")
        grid = TimeMajor(tokens)
        outputs, _ = self.recurrent(self._embed(tokens, grid), grid)
        hidden = outputs[-1]
        if direction == "both":
            forward, backward = hidden.chunk(2, -1)
            hidden = torch.cat([grid.before(forward), grid.before(backward, reverse=True)], -1)
        hidden = self.drop_output(hidden, grid)
        return self._project(hidden if at is None else hidden[at])

    def read(self, tokens: Tokens, state: RNNState | None = None) -> tuple[Tensor, RNNState]:
        """Continue sequences from `state`; return the logits (N, V) and the state after each one's last token."""
        grid = TimeMajor(tokens)
        hidden, last = self._run(grid.pad(tokens.ids), state, None if grid.full else grid.mask)
        return self._project(grid.unpad(hidden)), last

    def carried(self, state: RNNState) -> RNNState:
        """Return the state for the next segment of the same texts, detached from the graph."""
        layers = []
        for layer, last in zip(self.recurrent.ahead, state.layers, strict=True):
            carried = layer.carry(last) if isinstance(layer, LSTMN) else last
            layers.append(tuple(part.detach() for part in carried))
        return RNNState(tuple(layers))

    def state_of(self, parts: Sequence[Tensor]) -> RNNState:
        """Return the state with these `parts`."""
        size = len(parts) // len(self.recurrent.ahead)
        return RNNState(tuple(tuple(parts[start : start + size]) for start in range(0, len(parts), size)))

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, RNNState]:
        """Return the logits (B, V) of the token after each prompt, and the state."""
        grid = TimeMajor(prompt)
        hidden, state = self._run(grid.pad(prompt.ids), None, None if grid.full else grid.mask)
        return self._project(grid.last(hidden)), state

    def step(self, ids: Tensor, state: RNNState) -> tuple[Tensor, RNNState]:
        """Append one token to each hypothesis, ids (B,); return the logits (B, V) of the next one, and the state."""
        hidden, state = self._run(ids[None], state, None)
        return self._project(hidden[0]), state

    def _embed(self, tokens: Tokens, grid: TimeMajor) -> Tensor:
        embedded: Tensor = self.drop_embed(self.embed(tokens.ids), tokens.ids)
        if self.chars is not None:
            embedded = torch.cat([embedded, self.chars(tokens)], -1)
        dropped: Tensor = self.drop_input(embedded, grid)  # (N, E + F)
        return dropped

    def _run(self, ids: Tensor, state: RNNState | None, real: Tensor | None) -> tuple[Tensor, RNNState]:
        embedded = self.drop_input(self.drop_embed(self.embed(ids), ids))  # (T, B, E)
        outputs, last = self.recurrent.run(embedded, state.layers if state else None, real)
        return self.drop_output(outputs[-1]), RNNState(last)

    def _project(self, hidden: Tensor) -> Tensor:
        assert self.output is not None
        logits: Tensor = self.output(hidden)
        return logits
