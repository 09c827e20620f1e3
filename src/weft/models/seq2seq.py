"""The recurrent encoder-decoder, with and without attention.

Encoder: deep and bidirectional over the source x_1..x_S; h_j = [h→_j ; h←_j] (Bahdanau et al. 2015, section 3.2). Its
last outputs, [h→_S ; h←_1] of each layer, are the vector v that starts the decoder's layer. Both sides are made of one
of the five cells of `weft.nn.recurrent`.

`attention: none`: all that the decoder knows of the source is that one fixed vector (Sutskever, Vinyals & Le 2014):

    s_t = cell(E y_{t-1}, s_{t-1})                  p(y_t | y_<t, x) = softmax(W_o tanh(W_r [s_t ; E y_{t-1}]))

Otherwise the decoder looks at the source again at each step, by one of the six scores of `weft.nn.scores`:

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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from weft.config import Named
from weft.models.base import Model, Role, matrix_numbers
from weft.nn.capture import capturing, record
from weft.nn.grid import Grid
from weft.nn.looks import Feeding, Sight, look_all, sight
from weft.nn.recurrent import Cell, State, at_last, make_cell
from weft.nn.scan import scan_fused, worthwhile
from weft.nn.scores import Additive, General, Location, attend, make_score
from weft.nn.stack import Stack
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
    """Per hypothesis: the layers' states, what was last read out, and which source it belongs to."""

    layers: tuple[State, ...]
    read: Tensor  # (B, D) for input feeding
    owner: Tensor  # (B,) row of the memory
    vector: Tensor  # (sources, D)
    memory: Memory | None

    def select(self, rows: Tensor) -> "DecoderState":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]; the memory is not copied."""
        layers = tuple(tuple(part[rows] for part in layer) for layer in self.layers)
        return replace(self, layers=layers, read=self.read[rows], owner=self.owner[rows])


class Encoder(nn.Module):
    """Embeddings and deep bidirectional layers."""

    def __init__(self, config: Seq2SeqConfig, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed = embed
        self.dropout = nn.Dropout(config.dropout)
        width = config.width
        self.recurrent = Stack(config.cell, width, width, config.layers, "both", config.dropout)

    def forward(self, source: Tokens) -> tuple[Tensor, Tensor, Grid]:
        """Return the states h_j (N, D), each layer's vector (L, B, D), and the grid they lie on."""
        grid = Grid(source)
        outputs, vectors = self.recurrent(self.dropout(self.embed(source.ids)), grid)
        return outputs[-1], vectors, grid


class Decoder(nn.Module):
    """The layers of the decoder and, with attention, the look back at the source."""

    def __init__(self, config: Seq2SeqConfig, embed: nn.Embedding | None, vocab: int) -> None:
        super().__init__()
        width, attends = config.width, config.attention != "none"
        self.before = attends and config.place == "before"
        self.feeds = config.input_feeding
        self.embed = embed
        self.dropout = nn.Dropout(config.dropout)
        first = width * (2 if self.before or self.feeds else 1)
        self.layers = nn.ModuleList(
            make_cell(config.cell, size, width) for size in [first] + [width] * (config.layers - 1)
        )
        self.score = make_score(config.attention, width, config.locations) if attends else None
        parts = 3 if self.before else 2
        self.readout = nn.Linear(width * parts, width)
        self.output = nn.Linear(width, vocab)
        if config.tie and embed is not None:
            self.output.weight = embed.weight

    @property
    def first(self) -> Cell:
        """The layer that attends, where attention stands before the cell."""
        layer = self.layers[0]
        assert isinstance(layer, Cell)
        return layer

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
        inputs = self._inputs(ids, state)
        if not len(ids):
            return inputs, state
        memory = state.memory.rows(state.owner) if state.memory else None
        if self.feeds:
            assert memory is not None
            return self._fed(inputs, state, memory, real)
        if memory is None:
            top, layers = self._walk(inputs, state.layers, real)
            parts = [top, inputs]
        elif self.before:
            first, context, after = self._attend_and_step(inputs, state.layers[0], memory, real)
            top, above = self._walk(first, state.layers[1:], real, depth=1)
            parts, layers = [top, context, inputs], (after, *above)
        else:
            top, layers = self._walk(inputs, state.layers, real)
            context, weights = self._look(top, memory)
            record("cross", weights)
            parts = [top, context]
        return self.dropout(self._read(parts)), replace(state, layers=layers)

    def logits(self, read: Tensor) -> Tensor:
        """Score the target's vocabulary: (..., D) to (..., V)."""
        scores: Tensor = self.output(read)
        return scores

    def _inputs(self, ids: Tensor, state: DecoderState) -> Tensor:
        if self.embed is None:
            vector: Tensor = self.dropout(state.vector.index_select(0, state.owner))
            return vector.expand(len(ids), -1, -1)
        embedded: Tensor = self.dropout(self.embed(ids))
        return embedded  # (T, B, D)

    def _read(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.tanh(self.readout(torch.cat(list(parts), -1)))

    def _walk(
        self, inputs: Tensor, states: Sequence[State], real: Tensor | None, depth: int = 0
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Run the layers from `depth` on, each over all steps at once."""
        after = []
        for number, (layer, state) in enumerate(zip(list(self.layers)[depth:], states, strict=True), start=depth):
            inputs, state = layer(self.dropout(inputs) if number else inputs, state, real)
            after.append(state)
        return inputs, tuple(after)

    def _look(self, queries: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Attend with all queries (T, B, D) at once: the contexts (T, B, D) and, where they are looked at, weights."""
        assert self.score is not None
        at = self._sight(memory, memory.states.new_zeros(0, queries.shape[-1]))
        if at and isinstance(self.score, Additive) and not queries.is_cuda and worthwhile(queries):
            return look_all(queries, at), queries.new_zeros(0)
        scores = self.score(queries.transpose(0, 1), memory.keys)
        context, weights = attend(scores, memory.states, memory.empty)
        return context.transpose(0, 1), weights

    def _sight(self, memory: Memory, into_step: Tensor) -> Sight | None:
        """Say how the fused walk looks at the memory; None if it cannot, or if someone wants to see the weights."""
        assert self.score is not None
        if capturing():
            return None
        return sight(self.score, memory.states, memory.keys, memory.empty, into_step)

    def _attend_and_step(
        self, inputs: Tensor, state: State, memory: Memory, real: Tensor | None
    ) -> tuple[Tensor, Tensor, State]:
        """Look, then step, with the first layer; return its outputs, the contexts, and its state."""
        assert self.score is not None
        cell = self.first
        weight, bias = cell.from_input()
        from_input, from_context = weight.chunk(2, 1)
        # What the inputs alone decide is one product for all steps; a step adds what its context and state decide.
        ahead = F.linear(inputs, from_input, bias)  # (T, B, G·D)
        at = self._sight(memory, from_context)
        if at and worthwhile(ahead):
            *parts, context = scan_fused(cell, ahead, state, at)
            return parts[0], context, tuple(at_last(*pair, real) for pair in zip(parts, state, strict=True))
        begun, walked, contexts, looks = state, [], [], []
        for known in ahead:
            context, weights = attend(self.score(state[0][:, None], memory.keys), memory.states, memory.empty)
            state = cell.step(known + F.linear(context[:, 0], from_context), state)
            walked.append(state)
            contexts.append(context[:, 0])
            looks.append(weights)
        record("cross", torch.cat(looks, 1))  # (B, T, S)
        parts = [torch.stack(part) for part in zip(*walked, strict=True)]
        after = tuple(at_last(part, start, real) for part, start in zip(parts, begun, strict=True))
        return parts[0], torch.stack(contexts), after

    def _fed(
        self, inputs: Tensor, state: DecoderState, memory: Memory, real: Tensor | None
    ) -> tuple[Tensor, DecoderState]:
        """Step through all layers, look, read out, and feed that into the next step."""
        weight, bias = self.first.from_input()
        from_input, from_read = weight.chunk(2, 1)
        at = self._sight(memory, from_read)
        if at and len(self.layers) == 1 and not state.read.requires_grad:
            ahead = F.linear(inputs, from_input, bias)
            if worthwhile(ahead):
                feeding = Feeding(at, self.readout.weight, self.readout.bias, state.read)
                *parts, walked = scan_fused(self.first, ahead, state.layers[0], feeding)
                after = tuple(at_last(*pair, real) for pair in zip(parts, state.layers[0], strict=True))
                return self.dropout(walked), replace(state, layers=(after,), read=at_last(walked, state.read, real))
        layers, read, reads, looks = state.layers, state.read, [], []
        for step, embedded in enumerate(inputs):
            top, new = self._walk(torch.cat([embedded, read], -1)[None], layers, None)
            context, weights = self._look(top, memory)
            reads.append(self._read([top, context])[0])
            looks.append(weights)
            read = _moved(real, step, reads[-1], read)
            layers = tuple(
                tuple(_moved(real, step, *parts) for parts in zip(*pair, strict=True))
                for pair in zip(new, layers, strict=True)
            )
        record("cross", torch.cat(looks, 1))
        return self.dropout(torch.stack(reads)), replace(state, layers=layers, read=read)


def _moved(real: Tensor | None, step: int, new: Tensor, old: Tensor) -> Tensor:
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
        return frozenset({Role.CONDITIONAL, Role.SCORER, Role.GENERATOR})

    def operations(self, tokens: Tokens, source: Tokens | None = None) -> int:
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
