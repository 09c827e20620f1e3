"""The recurrent encoder-decoder, with and without attention.

Encoder: a deep bidirectional LSTM over the source x_1..x_S; h_j = [h→_j ; h←_j] (Bahdanau et al. 2015, section 3.2).
Its last states, [h→_S ; h←_1] of each layer, are the vector that starts the decoder's layer.

`attention: none`: all that the decoder knows of the source is that one fixed vector (Sutskever, Vinyals & Le 2014):

    s_t = LSTM(E y_{t-1}, s_{t-1})

Otherwise, before each step the decoder looks at the source again (Bahdanau et al. 2015, section 3.1), by one of the six
scores of `weft.nn.scores`, of which theirs is `additive`:

    e_tj = score(s_{t-1}, h_j)      α_t = softmax(e_t)      c_t = Σ_j α_tj h_j                            (eqs. 5, 6)
    s_t = LSTM([E y_{t-1} ; c_t], s_{t-1})

    p(y_t | y_<t, x) = softmax(W_o tanh(W_r [s_t ; c_t ; E y_{t-1}]))     (c_t where there is attention)

Departures: Bahdanau et al. have a GRU, a readout by maxout from s_{t-1}, and start from h←_1 alone; Sutskever et al.
have a one-directional encoder that reads the source reversed. `bridge: true` puts a dense layer with tanh between
encoder and decoder; without it the vector itself is h_0 and c_0. In a deep decoder the first layer attends, and
the layers above it run over all steps at once.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from weft.config import Named
from weft.models.base import Model, Role
from weft.nn.capture import capturing, record
from weft.nn.grid import Grid
from weft.nn.recurrent import Bidirectional, lstm_pointwise, make_lstm
from weft.nn.scores import attend, make_score
from weft.tokens import Tokens


class Seq2SeqConfig(Named):
    """`width` is that of embeddings, of encoder and decoder states, and of the attention's hidden layer."""

    width: int = Field(256, ge=2)
    layers: int = Field(1, ge=1)
    attention: Literal["none", "cosine", "additive", "location", "general", "dot", "scaled-dot"] = "additive"
    locations: int = Field(256, ge=1)  # location: how many positions of a source can be attended to
    dropout: float = Field(0.0, ge=0, lt=1)
    bridge: bool = True
    tie: bool = False  # one matrix for the target's embeddings and the output (Press & Wolf 2017)

    @model_validator(mode="after")
    def _even(self) -> "Seq2SeqConfig":
        if self.width % 2:
            near = self.width + 1
            raise ValueError(f"model.width must be even, half for each direction: got {self.width}; try {near}")
        return self


@dataclass(frozen=True)
class Memory:
    """The encoded source, held once however many hypotheses read it."""

    states: Tensor  # (B, S, D)
    keys: Tensor  # (B, S, A) the states as the score sees them
    empty: Tensor  # (B, S) True where a shorter source has ended

    def rows(self, owner: Tensor) -> "Memory":
        """Read the rows that the hypotheses belong to."""
        return Memory(*(part.index_select(0, owner) for part in (self.states, self.keys, self.empty)))


@dataclass(frozen=True)
class DecoderState:
    """Per hypothesis: the layers' states; and which source it belongs to."""

    hidden: Tensor  # (B, L, D)
    cell: Tensor  # (B, L, D)
    owner: Tensor  # (B,) row of the memory
    memory: Memory | None

    def select(self, rows: Tensor) -> "DecoderState":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]; the memory is not copied."""
        return replace(self, hidden=self.hidden[rows], cell=self.cell[rows], owner=self.owner[rows])


class Encoder(nn.Module):
    """Embeddings and a deep bidirectional LSTM."""

    def __init__(self, config: Seq2SeqConfig, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed = embed
        self.dropout = nn.Dropout(config.dropout)
        self.recurrent = Bidirectional(config.width, config.width, config.layers, config.dropout)

    def forward(self, source: Tokens) -> tuple[Tensor, Tensor, Grid]:
        """Return the states h_j (N, D), each layer's vector (L, B, D), and the grid they lie on."""
        grid = Grid(source)
        states, vector = self.recurrent(self.dropout(self.embed(source.ids)), grid)
        return states, vector, grid


class Decoder(nn.Module):
    """The layers of the decoder, and, with attention, the look back before each step of the first."""

    def __init__(self, config: Seq2SeqConfig, embed: nn.Embedding) -> None:
        super().__init__()
        width, attends = config.width, config.attention != "none"
        self.embed = embed
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            make_lstm(width * (2 if attends and depth == 0 else 1), width) for depth in range(config.layers)
        )
        self.score = make_score(config.attention, width, config.locations) if attends else None
        self.readout = nn.Linear(width * (3 if attends else 2), width)
        self.output = nn.Linear(width, embed.num_embeddings)
        if config.tie:
            self.output.weight = embed.weight

    def remember(self, states: Tensor, grid: Grid) -> Memory | None:
        """Lay the encoder's flat states out for attention, and project the keys once."""
        if self.score is None:
            return None
        laid = grid.lay(states).masked_fill(~grid.real[..., None], 0).transpose(0, 1).contiguous()  # (B, S, D)
        return Memory(laid, self.score.keys(laid), ~grid.real.T)

    def forward(self, ids: Tensor, state: DecoderState, real: Tensor | None = None) -> tuple[Tensor, DecoderState]:
        """Read ids (T, B) from `state` on; return the readout (T, B, D), and the state after each row's `real` steps.

        Without `real` every step is.
        """
        inputs = self.dropout(self.embed(ids))  # (T, B, D)
        first, context, hidden, cell = self._first(inputs, state, real)
        hiddens, cells, top = [hidden], [cell], first
        for depth, layer in enumerate(list(self.layers)[1:], start=1):
            start = (state.hidden[:, depth][None].contiguous(), state.cell[:, depth][None].contiguous())
            top, hidden, cell = self._walk(layer, self.dropout(top), start, real)
            hiddens.append(hidden)
            cells.append(cell)
        parts = [top, context, inputs] if context is not None else [top, inputs]
        read = torch.tanh(self.readout(torch.cat(parts, -1)))
        after = replace(state, hidden=torch.stack(hiddens, 1), cell=torch.stack(cells, 1))
        return self.dropout(read), after

    def logits(self, read: Tensor) -> Tensor:
        """Score the target's vocabulary: (..., D) to (..., V)."""
        scores: Tensor = self.output(read)
        return scores

    def _first(
        self, inputs: Tensor, state: DecoderState, real: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        hidden, cell = state.hidden[:, 0], state.cell[:, 0]
        if state.memory is None:
            top, hidden, cell = self._walk(
                self.layers[0], inputs, (hidden[None].contiguous(), cell[None].contiguous()), real
            )
            return top, None, hidden, cell
        return self._attend_and_step(inputs, hidden, cell, state.memory.rows(state.owner), real)

    def _attend_and_step(
        self, inputs: Tensor, hidden: Tensor, cell: Tensor, memory: Memory, real: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layer = self.layers[0]
        assert self.score is not None
        assert isinstance(layer, nn.LSTM)
        weight_ih, weight_hh, bias_ih, bias_hh = layer.all_weights[0]
        from_input, from_context = weight_ih.chunk(2, 1)
        # What the inputs alone decide is one product for all steps; a step adds what its context and state decide.
        ahead = F.linear(inputs, from_input, bias_ih + bias_hh)  # (T, B, 4D)
        recurrent = torch.cat([from_context, weight_hh], 1).t()
        hiddens, contexts, looks = [], [], []
        for step, known in enumerate(ahead):
            context, weights = attend(self.score(hidden, memory.keys), memory.states, memory.empty)
            gates = torch.addmm(known, torch.cat([context, hidden], 1), recurrent)
            new_hidden, new_cell = lstm_pointwise(gates, cell)
            hiddens.append(new_hidden)
            contexts.append(context)
            looks.append(weights)
            hidden, cell = _keep(real, step, new_hidden, hidden), _keep(real, step, new_cell, cell)
        if capturing():
            record("cross", torch.stack(looks, 1))  # (B, T, S)
        return torch.stack(hiddens), torch.stack(contexts), hidden, cell

    def _walk(
        self, layer: nn.Module, inputs: Tensor, start: tuple[Tensor, Tensor], real: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run one layer over all steps in the fused kernel; ragged prompts, whose end states differ, step by step."""
        if real is None:
            top, (hidden, cell) = layer(inputs, start)
            return top, hidden[0], cell[0]
        hidden, cell, tops = start[0], start[1], []
        for step in range(len(inputs)):
            top, (new_hidden, new_cell) = layer(inputs[step : step + 1], (hidden, cell))
            tops.append(top)
            hidden, cell = _keep(real, step, new_hidden, hidden), _keep(real, step, new_cell, cell)
        return torch.cat(tops), hidden[0], cell[0]


def _keep(real: Tensor | None, step: int, new: Tensor, old: Tensor) -> Tensor:
    """Move on only the rows whose sequence reaches this step."""
    return new if real is None else torch.where(real[step][:, None], new, old)


class Seq2Seq(Model):
    """Encoder, bridge, decoder."""

    Config: ClassVar[type[Named]] = Seq2SeqConfig

    def __init__(self, config: Seq2SeqConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        source = nn.Embedding(vocab, config.width)
        shared = target_vocab is None  # one vocabulary for both sides: one matrix too
        self.encoder = Encoder(config, source)
        self.decoder = Decoder(config, source if shared else nn.Embedding(self.target_vocab, config.width))
        self.bridge = nn.Linear(config.width, 2 * config.width) if config.bridge else None
        # Inputs of unit size teach an LSTM fastest; a matrix that is also the output's must not give large scores.
        if config.tie:
            nn.init.normal_(self.decoder.embed.weight, std=config.width**-0.5)

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Say what it can do: score and generate, given a source."""
        return frozenset({Role.CONDITIONAL, Role.SCORER, Role.GENERATOR})

    def logits(self, tokens: Tokens, source: Tokens, at: Tensor | None = None) -> Tensor:
        """Score what follows each token, given the source: (N, V), or (len(at), V) at the flat positions `at`."""
        grid = Grid(tokens)
        read, _ = self.decoder(grid.lay(tokens.ids), self._begin(source))
        flat = grid.gather(read)
        return self.decoder.logits(flat if at is None else flat[at])

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, DecoderState]:
        """Encode the source and read the prompts; return the logits (B, V) of what follows, and the state."""
        assert source is not None
        grid = Grid(prompt)
        read, state = self.decoder(grid.lay(prompt.ids), self._begin(source), None if grid.full else grid.real)
        return self.decoder.logits(grid.last(read)), state

    def step(self, ids: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Read one more token a hypothesis."""
        read, state = self.decoder(ids[None], state)
        return self.decoder.logits(read[0]), state

    def _begin(self, source: Tokens) -> DecoderState:
        states, vector, grid = self.encoder(source)
        vector = vector.transpose(0, 1)  # (B, L, D)
        hidden, cell = torch.tanh(self.bridge(vector)).chunk(2, -1) if self.bridge else (vector, vector)
        owner = torch.arange(len(source), device=source.device)
        return DecoderState(hidden, cell, owner, self.decoder.remember(states, grid))
