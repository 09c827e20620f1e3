"""Recurrent encoder-decoder (seq2seq), with and without attention.

Encoder: deep and bidirectional over the source x_1..x_S; h_j = [h→_j ; h←_j] (Bahdanau et al. 2015, section 3.2). Its
final outputs, [h→_S ; h←_1] of each layer, are the vector v that initialises the decoder's layer. Both sides use one of
the five cells of `weft.nn.rnn.cells`.

`attention: none`: the decoder is conditioned on that one fixed vector alone (Sutskever, Vinyals & Le 2014):

    s_t = cell(E y_{t-1}, s_{t-1})                  p(y_t | y_<t, x) = softmax(W_o tanh(W_r [s_t ; E y_{t-1}]))

Otherwise the decoder attends to the source at each step, with one of the six scores of `weft.nn.attention.scores`:

    e_tj = score(q_t, h_j)      α_t = softmax(e_t)      c_t = Σ_j α_tj h_j

`place: before` the cell (Bahdanau et al. 2015, section 3.1, eqs. 4 to 6; theirs is `additive`):

    q_t = s_{t-1}    s_t = cell([E y_{t-1} ; c_t], s_{t-1})    p(y_t) = softmax(W_o tanh(W_r [s_t ; c_t ; E y_{t-1}]))

`place: after` the cell (Luong et al. 2015, section 3, eqs. 5 and 6), where all steps attend in one batched product:

    s_t = cell(E y_{t-1}, s_{t-1})      q_t = s_t      h~_t = tanh(W_c [s_t ; c_t])      p(y_t) = softmax(W_o h~_t)

and with `input_feeding` (section 3.3) s_t = cell([E y_{t-1} ; h~_{t-1}], s_{t-1}), which is sequential again.

`copying: true` writes tokens of the source with the attention's weights, too (See, Liu & Manning 2017, eqs. 8 and 9;
`weft.nn.attention.copying`). Theirs has two linear layers before the softmax and, as an option, coverage.

`feedback: false` is the decoder of the Keras course listing: its input at every step is v, and never its own output.

Departures: Bahdanau et al. have a GRU, a maxout readout from s_{t-1}, and an initial state from h←_1 alone; Sutskever
et al. have a unidirectional encoder that reads the source reversed. `bridge: true` puts a dense layer with tanh between
encoder and decoder; without it v itself is each part of the initial state. In a deep decoder the query is the first
layer's state with `place: before`, and the last layer's with `place: after`.
"""

from collections.abc import Collection, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from weft.config.schema import MAX_SIZE, Layers, Named, Pretrained, Size
from weft.models.base import Model, Role, check_copying, num_matrix_parameters
from weft.models.seq2seq.decoder import Decoder, DecoderState
from weft.models.word_vectors import Channels, check_channels, keep_static
from weft.nn.attention.scores import Additive, General, Location
from weft.nn.rnn.stack import RecurrentStack, choose_layers
from weft.nn.rnn.time_major import TimeMajor
from weft.tokens import Tokens


class Seq2SeqConfig(Pretrained):
    """`width` is that of the encoder and decoder states, the attention's hidden layer and, by default, the embeddings.

    With one vocabulary for both sides `vectors` initialises the embeddings of both; with two, those of the source.
    """

    cell: Literal["elman", "jordan", "lstm", "peephole", "gru"] = "lstm"  # of encoder and decoder
    width: int = Field(256, ge=2, le=MAX_SIZE)  # of embeddings and states; it is even
    layers: Layers = 1  # of the encoder, and of the decoder
    embedding: Size | None = None  # width of the embeddings; None: `width`
    vectors: str | None = None  # a file of word vectors to initialise the embeddings
    target_vectors: str | None = None  # the same for the target's own vocabulary
    channels: Channels = "nonstatic"  # static: vectors are not trained
    # the score function; none: one fixed vector
    attention: Literal["none", "cosine", "additive", "location", "general", "dot", "scaled-dot"] = "additive"
    place: Literal["before", "after"] = "before"  # of the attention, relative to the cell
    input_feeding: bool = False  # place: after; the readout h~ is an input of the next step
    locations: Size = 256  # location: how many source positions it can attend to
    feedback: bool = True  # False: the decoder's input is v at every step, not its own output
    dropout: float = Field(0.0, ge=0, lt=1)  # on embeddings, between layers and on the readout
    bridge: bool = True  # a dense layer between encoder and decoder
    tie: bool = False  # one matrix for the target's embeddings and the output (Press & Wolf 2017)
    copying: bool = False  # write tokens of the source, too (See et al. 2017); source and target have one vocabulary

    @model_validator(mode="after")
    def _check(self) -> "Seq2SeqConfig":
        if self.width % 2:
            near = self.width + 1
            raise ValueError(f"model.width must be even, half for each direction: got {self.width}; try {near}")
        if self.input_feeding and (self.attention == "none" or self.place == "before"):
            score = "model.attention to a score and " if self.attention == "none" else ""
            raise ValueError(
                "model.input_feeding feeds what attention after the cell reads out: got "
                f"model.attention {self.attention!r} and model.place {self.place!r}; set {score}model.place to 'after'"
            )
        if self.copying and self.attention == "none":
            raise ValueError(
                "model.copying copies what model.attention looks at, but that is 'none'; set it to a score"
            )
        if self.tie and not self.feedback:
            raise ValueError("model.tie ties the output to the embeddings that model.feedback: false leaves out")
        if self.tie and self.embedding not in (None, self.width):
            raise ValueError(
                f"model.tie makes the embeddings the output's weights, which are as wide as the states: got "
                f"model.embedding {self.embedding} and model.width {self.width}; set them equal, or model.tie: false"
            )
        if self.target_vectors and not self.feedback:
            raise ValueError("model.target_vectors fills the embeddings that model.feedback: false leaves out")
        check_channels(self.channels, self.vectors, self.target_vectors)
        return self


class Encoder(nn.Module):
    """Embeddings and stacked bidirectional layers."""

    def __init__(self, config: Seq2SeqConfig, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed = embed
        self.dropout = nn.Dropout(config.dropout)
        width = config.width
        self.recurrent = RecurrentStack(config.cell, embed.embedding_dim, width, config.layers, "both", config.dropout)

    def forward(self, source: Tokens) -> tuple[list[Tensor], list[Tensor], TimeMajor]:
        """Return the embeddings and each layer's states, (N, D) each; each layer's vector v (B, D); and the layout.

        The last layer's states are h_j.
        """
        grid, embedded = TimeMajor(source), self.dropout(self.embed(source.ids))
        outputs, vectors = self.recurrent(embedded, grid)
        return [embedded, *outputs], vectors, grid


class Seq2Seq(Model):
    """Encoder, bridge, decoder."""

    Config: ClassVar[type[Named]] = Seq2SeqConfig
    config: Seq2SeqConfig

    def __init__(self, config: Seq2SeqConfig, vocab: int, target_vocab: int | None = None) -> None:
        super().__init__(config, vocab, target_vocab)
        check_copying(config.copying, target_vocab)
        self.width, size = config.width, config.embedding or config.width
        source = nn.Embedding(vocab, size)
        shared = target_vocab is None  # one vocabulary for both sides: shared embeddings
        self.encoder = Encoder(config, source)
        target = source if shared else nn.Embedding(self.target_vocab, size)
        self.decoder = Decoder(config, target if config.feedback else None, self.target_vocab)
        self.states = self.decoder.first.states
        self.bridge = nn.Linear(config.width, self.states * config.width) if config.bridge else None
        # Unit-variance embeddings train a recurrent net fastest; as a tied output projection they need small weights.
        if config.tie:
            nn.init.normal_(target.weight, std=config.width**-0.5)
        if config.channels == "static" and config.vectors:
            keep_static(source, tied=config.tie and shared)
        if config.channels == "static" and config.target_vectors:
            keep_static(target, tied=config.tie)

    def word_embeddings(self) -> dict[str, list[nn.Embedding]]:
        """Return the source's table, which with one vocabulary is the target's too, and the target's own."""
        source, decoder = self.encoder.embed, getattr(self, "decoder", None)  # an encoder alone has none
        target = None if decoder is None else decoder.embed
        return {"vectors": [source], **({"target_vectors": [target]} if target not in (None, source) else {})}

    @classmethod
    def roles(cls, config: Named) -> frozenset[Role]:
        """Return its roles: a sequence-to-sequence language model that generates; its encoder alone encodes."""
        return frozenset({Role.ENCODER, Role.SEQ2SEQ, Role.LANGUAGE_MODEL, Role.GENERATOR})

    @property
    def mixable_layers(self) -> tuple[int, ...]:
        """All layers of the encoder, with the embeddings if they are as wide."""
        first = 0 if self.encoder.embed.embedding_dim == self.width else 1
        return tuple(range(first, self.config.layers + 1))

    def prune_unused(self, needs: Collection[Role]) -> None:
        """Drop the decoder, unless a role reads or writes a target: what is left is the encoder of a translator."""
        if {Role.SEQ2SEQ, Role.LANGUAGE_MODEL, Role.GENERATOR} & set(needs):
            return
        del self.decoder, self.bridge

    def layer_groups(self) -> list[list[nn.Module]]:
        """Return the embeddings, each layer of the encoder, then the bridge and the decoder, where there is one."""
        groups: list[list[nn.Module]] = [[self.encoder.embed, self.encoder.dropout]]
        groups += [[layer] for layer in self.encoder.recurrent.layers]
        if (decoder := getattr(self, "decoder", None)) is None:
            return groups
        parts = (self.bridge, *decoder.layers, decoder.score, decoder.readout)
        groups[0] += [] if decoder.embed is None else [decoder.embed]
        return [*groups, [part for part in parts if part is not None]]

    def encode(self, tokens: Tokens, layers: Sequence[int] = (-1,)) -> Tensor:
        """Return the chosen layers of the encoder for these sources, (L, N, D); 0 is the embeddings, -1 the last: h."""
        return choose_layers(self.encoder(tokens)[0], layers, "seq2seq's encoder")

    def pooled_output(self, tokens: Tokens) -> Tensor:
        """Return v of the last layer, [h→_S ; h←_1], for each source: (B, D)."""
        vector: Tensor = self.encoder(tokens)[1][-1]
        return vector

    def final_states(self, states: Tensor, tokens: Tokens) -> Tensor:
        """Return v, (B, D): forward at the last token, backward at the first."""
        return self.encoder.recurrent.final(states, TimeMajor(tokens))

    def flops(self, tokens: Tokens, source: Tokens | None = None) -> int:
        """Return the FLOPs: matrices for the tokens of their side, the bridge for each v, attention for each pair.

        Without a source the tokens are the source, and only the encoder reads them.
        """
        if source is None:
            return 2 * num_matrix_parameters(self.encoder) * int(tokens.lengths.sum())
        decoder, score, attended = self.decoder, self.decoder.score, source.lengths
        keys = (
            num_matrix_parameters(score.key) if isinstance(score, Additive | General) else 0
        )  # applied to source tokens
        energy = (
            num_matrix_parameters(score.energy) if isinstance(score, Additive) else 0
        )  # v multiplies pairs, not tokens
        if isinstance(score, Location):  # W has a row for each position
            energy, attended = num_matrix_parameters(score.place), attended.clamp(max=score.place.out_features)
        by_target = (num_matrix_parameters(decoder) - keys - energy) * int(tokens.lengths.sum())
        by_source = (num_matrix_parameters(self.encoder) + keys) * int(source.lengths.sum())
        bridge = num_matrix_parameters(self.bridge) * len(decoder.layers) * len(source) if self.bridge else 0
        attention = 2 * decoder.output.in_features * int((tokens.lengths * attended).sum()) if score else 0
        return 2 * (by_target + by_source + bridge + attention)

    def logits(self, tokens: Tokens, source: Tokens, at: Tensor | None = None) -> Tensor:
        """Return the logits of the next tokens, given the source: (N, V), or (len(at), V) at positions `at`."""
        grid, state = TimeMajor(tokens), self._initial_state(source)
        output, _ = self.decoder(grid.pad(tokens.ids), state)
        flat, row = grid.unpad(output), grid.row
        return self._logits(flat, row, state) if at is None else self._logits(flat[at], row[at], state)

    def _logits(self, read: Tensor, owner: Tensor, state: DecoderState) -> Tensor:
        """Return the logits of flat readouts (N, ...); `owner` (N,) is the source of each."""
        ids = state.memory.ids[owner] if self.config.copying and state.memory else None
        return self.decoder.logits(read, ids)

    def start(self, prompt: Tokens, source: Tokens | None = None) -> tuple[Tensor, DecoderState]:
        """Encode the sources; return the logits (B, V) of the token after each prompt, and the decoding state."""
        assert source is not None
        grid = TimeMajor(prompt)
        real = None if grid.full else grid.mask
        output, state = self.decoder(grid.pad(prompt.ids), self._initial_state(source), real)
        return self._logits(grid.last(output), state.owner, state), state

    def step(self, ids: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Append one token to each hypothesis, ids (B,); return the logits (B, V) of the next one, and the state."""
        output, state = self.decoder(ids[None], state)
        return self._logits(output[0], state.owner, state), state

    def _initial_state(self, source: Tokens) -> DecoderState:
        states, finals, grid = self.encoder(source)
        vectors = torch.stack(finals)  # (L, B, D)
        parts = torch.tanh(self.bridge(vectors)).chunk(self.states, -1) if self.bridge else [vectors] * self.states
        owner = torch.arange(len(source), device=source.device)
        layers = tuple(zip(*(part.unbind() for part in parts), strict=True))
        memory = self.decoder.remember(states[-1], source.ids, grid)
        return DecoderState(layers, torch.zeros_like(vectors[0]), owner, vectors[-1], memory)
