"""The recurrent encoder-decoder, with and without attention.

Encoder: deep and bidirectional over the source x_1..x_S; h_j = [h→_j ; h←_j] (Bahdanau et al. 2015, section 3.2). Its
last outputs, [h→_S ; h←_1] of each layer, are the vector v that starts the decoder's layer. Both sides are made of one
of the five cells of `weft.nn.rnn.cells`.

`attention: none`: all that the decoder knows of the source is that one fixed vector (Sutskever, Vinyals & Le 2014):

    s_t = cell(E y_{t-1}, s_{t-1})                  p(y_t | y_<t, x) = softmax(W_o tanh(W_r [s_t ; E y_{t-1}]))

Otherwise the decoder looks at the source again at each step, by one of the six scores of `weft.nn.attention.scores`:

    e_tj = score(q_t, h_j)      α_t = softmax(e_t)      c_t = Σ_j α_tj h_j

`place: before` the cell (Bahdanau et al. 2015, section 3.1, eqs. 4 to 6; theirs is `additive`):

    q_t = s_{t-1}    s_t = cell([E y_{t-1} ; c_t], s_{t-1})    p(y_t) = softmax(W_o tanh(W_r [s_t ; c_t ; E y_{t-1}]))

`place: after` the cell (Luong et al. 2015, section 3, eqs. 5 and 6), where all steps attend in one product:

    s_t = cell(E y_{t-1}, s_{t-1})      q_t = s_t      h~_t = tanh(W_c [s_t ; c_t])      p(y_t) = softmax(W_o h~_t)

and with `input_feeding` (section 3.3) s_t = cell([E y_{t-1} ; h~_{t-1}], s_{t-1}), which must go step by step again.

`feedback: false` is the decoder of the Keras course listing: it reads v at every step, and none of its own output.

Departures: Bahdanau et al. have a GRU, a readout by maxout from s_{t-1}, and start from h←_1 alone; Sutskever et al.
have a one-directional encoder that reads the source reversed. `bridge: true` puts a dense layer with tanh between
encoder and decoder; without it the vector itself is each part of the first state. In a deep decoder the query is the
first layer's state before the cell, and the last layer's after it.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from weft.config.schema import Named
from weft.models.base import Model, Role, matrix_numbers
from weft.models.seq2seq.decoder import Decoder, DecoderState
from weft.nn.attention.scores import Additive, General, Location
from weft.nn.rnn.stack import RecurrentStack
from weft.nn.rnn.time_major import Grid
from weft.tokens import Tokens


class Seq2SeqConfig(Named):
    """`width` is that of embeddings, of encoder and decoder states, and of the attention's hidden layer."""

    cell: Literal["elman", "jordan", "lstm", "peephole", "gru"] = "lstm"
    width: int = Field(256, ge=2)
    layers: int = Field(1, ge=1)
    attention: Literal["none", "cosine", "additive", "location", "general", "dot", "scaled-dot"] = "additive"
    place: Literal["before", "after"] = "before"  # of attention: before the cell or after it
    input_feeding: bool = False  # after the cell: what was read out goes into the next step
    locations: int = Field(256, ge=1)  # location: how many positions of a source can be attended to
    feedback: bool = True  # False: the decoder reads the source's vector at every step, and not its own output
    dropout: float = Field(0.0, ge=0, lt=1)
    bridge: bool = True
    tie: bool = False  # one matrix for the target's embeddings and the output (Press & Wolf 2017)

    @model_validator(mode="after")
    def _fits(self) -> "Seq2SeqConfig":
        if self.width % 2:
            near = self.width + 1
            raise ValueError(f"model.width must be even, half for each direction: got {self.width}; try {near}")
        if self.input_feeding and (self.attention == "none" or self.place == "before"):
            score = "model.attention to a score and " if self.attention == "none" else ""
            raise ValueError(
                "model.input_feeding feeds what attention after the cell reads out: got "
                f"model.attention {self.attention!r} and model.place {self.place!r}; set {score}model.place to 'after'"
            )
        if self.tie and not self.feedback:
            raise ValueError("model.tie ties the output to the embeddings that model.feedback: false leaves out")
        return self


class Encoder(nn.Module):
    """Embeddings and deep bidirectional layers."""

    def __init__(self, config: Seq2SeqConfig, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed = embed
        self.dropout = nn.Dropout(config.dropout)
        width = config.width
        self.recurrent = RecurrentStack(config.cell, width, width, config.layers, "both", config.dropout)

    def forward(self, source: Tokens) -> tuple[Tensor, Tensor, Grid]:
        """Return the states h_j (N, D), each layer's vector (L, B, D), and the grid they lie on."""
        grid = Grid(source)
        outputs, vectors = self.recurrent(self.dropout(self.embed(source.ids)), grid)
        return outputs[-1], torch.stack(vectors), grid


class Seq2Seq(Model):
    """Encoder, bridge, decoder."""

    Config: ClassVar[type[Named]] = Seq2SeqConfig

    def __init__(self, config: Seq2SeqConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        source = nn.Embedding(vocab, config.width)
        shared = target_vocab is None  # one vocabulary for both sides: one matrix too
        self.encoder = Encoder(config, source)
        target = source if shared else nn.Embedding(self.target_vocab, config.width)
        self.decoder = Decoder(config, target if config.feedback else None, self.target_vocab)
        self.states = self.decoder.first.states
        self.bridge = nn.Linear(config.width, self.states * config.width) if config.bridge else None
        # Inputs of unit size teach a recurrent net fastest; a matrix that is also the output's must not score high.
        if config.tie:
            nn.init.normal_(target.weight, std=config.width**-0.5)

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Say what it can do: score and generate, given a source."""
        return frozenset({Role.SEQ2SEQ, Role.LANGUAGE_MODEL, Role.GENERATOR})

    def flops(self, tokens: Tokens, source: Tokens | None = None) -> int:
        """Count matrices for the tokens of their side, the bridge for each vector, two products for each look."""
        assert source is not None
        decoder, score, seen = self.decoder, self.decoder.score, source.lengths
        keys = matrix_numbers(score.key) if isinstance(score, Additive | General) else 0  # these are of the source
        paired = matrix_numbers(score.energy) if isinstance(score, Additive) else 0  # v meets pairs, not tokens
        if isinstance(score, Location):  # of W a row for each place that there is
            paired, seen = matrix_numbers(score.place), seen.clamp(max=score.place.out_features)
        by_target = (matrix_numbers(decoder) - keys - paired) * int(tokens.lengths.sum())
        by_source = (matrix_numbers(self.encoder) + keys) * int(source.lengths.sum())
        bridged = matrix_numbers(self.bridge) * len(decoder.layers) * len(source) if self.bridge else 0
        looks = 2 * decoder.output.in_features * int((tokens.lengths * seen).sum()) if score else 0
        return 2 * (by_target + by_source + bridged + looks)

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
        states, vectors, grid = self.encoder(source)
        starts = torch.tanh(self.bridge(vectors)).chunk(self.states, -1) if self.bridge else [vectors] * self.states
        owner = torch.arange(len(source), device=source.device)
        layers = tuple(zip(*(part.unbind() for part in starts), strict=True))
        return DecoderState(
            layers, torch.zeros_like(vectors[0]), owner, vectors[-1], self.decoder.remember(states, grid)
        )
