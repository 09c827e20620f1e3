"""Decoder of the recurrent encoder-decoder: its state, attention over the source, recurrent layers and readout.

Equations and names are those of `weft.models.seq2seq.model`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.attention.capture import capturing, record
from weft.nn.attention.copying import mix_log_probs
from weft.nn.attention.scores import Additive, attend, make_score
from weft.nn.attention.source_memory import SourceMemory
from weft.nn.kernels import dispatch
from weft.nn.rnn.cells import Cell, CellState, at_last, join_layers, make_cell
from weft.nn.rnn.fused.attention import AttentionSpec, InputFeedingSpec, attend_all, attention_spec
from weft.nn.rnn.fused.scan import scan_fused
from weft.nn.rnn.time_major import TimeMajor

if TYPE_CHECKING:
    from weft.models.seq2seq.model import Seq2SeqConfig


@dataclass(frozen=True)
class DecoderState:
    """Per hypothesis: the layers' states, the last readout, and the index of its source."""

    layers: tuple[CellState, ...]
    read: Tensor  # (B, D) h~_{t-1}, for input feeding
    owner: Tensor  # (B,) row of the memory
    vector: Tensor  # (sources, D) v
    memory: SourceMemory | None

    def select(self, rows: Tensor) -> "DecoderState":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]; the memory is not copied."""
        layers = tuple(tuple(part[rows] for part in layer) for layer in self.layers)
        return replace(self, layers=layers, read=self.read[rows], owner=self.owner[rows])

    def join(self, other: "DecoderState") -> "DecoderState":
        """Return the state of these hypotheses and, after them, the other's; sources without hypotheses are dropped."""
        own, new = self._with_live_sources(), other._with_live_sources()
        memory = None if own.memory is None or new.memory is None else own.memory.join(new.memory)
        return DecoderState(
            join_layers(own.layers, new.layers),
            torch.cat([own.read, new.read]),
            torch.cat([own.owner, new.owner + len(own.vector)]),
            torch.cat([own.vector, new.vector]),
            memory,
        )

    def _with_live_sources(self) -> "DecoderState":
        sources, owner = self.owner.unique(return_inverse=True)
        memory = None if self.memory is None else self.memory.rows(sources)
        return replace(self, owner=owner, vector=self.vector[sources], memory=memory)


class Decoder(nn.Module):
    """Recurrent layers, attention over the source (optional), readout and output projection."""

    def __init__(self, config: "Seq2SeqConfig", embed: nn.Embedding | None, vocab: int) -> None:
        super().__init__()
        width, attends = config.width, config.attention != "none"
        self.before = attends and config.place == "before"
        self.feeds = config.input_feeding
        self.embed = embed
        self.dropout = nn.Dropout(config.dropout)
        self.input_width = width if embed is None else embed.embedding_dim  # of E y, or of v
        first = self.input_width + (width if self.before or self.feeds else 0)
        self.layers = nn.ModuleList(
            make_cell(config.cell, size, width) for size in [first] + [width] * (config.layers - 1)
        )
        self.score = make_score(config.attention, width, config.locations) if attends else None
        read = self.input_width if self.before or not attends else 0  # after the cell, E y is not read
        self.readout = nn.Linear(width * (1 + attends) + read, width)
        self.output = nn.Linear(width, vocab)
        self.copy_gate = nn.Linear(2 * width + self.input_width, 1) if config.copying else None
        if config.tie and embed is not None:
            self.output.weight = embed.weight

    @property
    def first(self) -> Cell:
        """The first layer, which attends where attention comes before the cell."""
        layer = self.layers[0]
        assert isinstance(layer, Cell)
        return layer

    def remember(self, states: Tensor, ids: Tensor, grid: TimeMajor) -> SourceMemory | None:
        """Return the encoder's flat states (N, D) padded for attention, with their keys; None without attention."""
        return None if self.score is None else SourceMemory.of(states, ids, grid, self.score.keys)

    def forward(self, ids: Tensor, state: DecoderState, real: Tensor | None = None) -> tuple[Tensor, DecoderState]:
        """Run ids (T, B) from `state` on; return the readout (T, B, D), and each row's state after its last real step.

        `real` (T, B) is the padding mask; None: all steps are real. A decoder that copies reads out the gate and its
        attention to the source, too: (T, B, D + 1 + S).
        """
        inputs = self._inputs(ids, state)
        if not len(ids):
            return state.read.new_zeros(0, *state.read.shape), state
        memory = state.memory.rows(state.owner) if state.memory else None
        if self.feeds:
            assert memory is not None
            read, queries, after = self._run_input_feeding(inputs, state, memory, real)
            return self._with_copying(read, queries, queries, inputs, memory), after
        if memory is None:
            top, layers = self._run(inputs, state.layers, real)
            parts = [top, inputs]
            queries = top
        elif self.before:
            hidden, context, last = self._attend_and_step(inputs, state.layers[0], memory, real)
            top, upper = self._run(hidden, state.layers[1:], real, depth=1)
            parts, layers = [top, context, inputs], (last, *upper)
            queries = torch.cat([state.layers[0][0][None], hidden[:-1]]) if self.copy_gate else top  # q_t = s_{t-1}
        else:
            top, layers = self._run(inputs, state.layers, real)
            context, weights = self._attend(top, memory)
            record("cross", weights)
            parts = [top, context]
            queries = top
        read = self.dropout(self._read_out(parts))
        return self._with_copying(read, queries, top, inputs, memory), replace(state, layers=layers)

    def logits(self, read: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the logits over the target vocabulary of a readout: (N, D) to (N, V).

        A decoder that copies returns log-probabilities; `ids` (N, S) are the tokens of each row's source.
        """
        if self.copy_gate is None:
            logits: Tensor = self.output(read)
            return logits
        assert ids is not None
        hidden, gate, weights = read.split([self.output.in_features, 1, ids.shape[1]], -1)
        return mix_log_probs(self.output(hidden), gate, weights, ids)

    def _with_copying(
        self, read: Tensor, queries: Tensor, top: Tensor, inputs: Tensor, memory: SourceMemory | None
    ) -> Tensor:
        """Return a readout with the gate and the attention of the queries, all (T, B, D), where the decoder copies."""
        if self.copy_gate is None:
            return read
        assert self.score is not None
        assert memory is not None
        # A fused scan does not return its weights: they are computed again, of all steps at once.
        scores = self.score(queries.transpose(0, 1), memory.keys)
        context, weights = attend(scores, memory.states, memory.empty)
        gate = self.copy_gate(torch.cat([context.transpose(0, 1), top, inputs], -1))
        return torch.cat([read, gate, weights.transpose(0, 1)], -1)

    def _inputs(self, ids: Tensor, state: DecoderState) -> Tensor:
        if self.embed is None:
            vector: Tensor = self.dropout(state.vector.index_select(0, state.owner))
            return vector.expand(len(ids), -1, -1)
        embedded: Tensor = self.dropout(self.embed(ids))
        return embedded  # (T, B, E)

    def _read_out(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.tanh(self.readout(torch.cat(list(parts), -1)))

    def _run(
        self, inputs: Tensor, states: Sequence[CellState], real: Tensor | None, depth: int = 0
    ) -> tuple[Tensor, tuple[CellState, ...]]:
        """Run the layers from `depth` on, each over all steps at once; return the top outputs and the states."""
        last = []
        for number, (layer, state) in enumerate(zip(list(self.layers)[depth:], states, strict=True), start=depth):
            inputs, state = layer(self.dropout(inputs) if number else inputs, state, real)
            last.append(state)
        return inputs, tuple(last)

    def _attend(self, queries: Tensor, memory: SourceMemory) -> tuple[Tensor, Tensor]:
        """Attend with all queries (T, B, D) at once; return the contexts (T, B, D) and, if captured, the weights."""
        assert self.score is not None
        spec = self._attention_spec(memory, memory.states.new_zeros(0, queries.shape[-1]))
        if spec and isinstance(self.score, Additive) and dispatch.numba_scan(queries):
            return attend_all(queries, spec), queries.new_zeros(0)
        scores = self.score(queries.transpose(0, 1), memory.keys)
        context, weights = attend(scores, memory.states, memory.empty)
        return context.transpose(0, 1), weights

    def _attention_spec(self, memory: SourceMemory, into_step: Tensor) -> AttentionSpec | None:
        """Return the fused scan's attention; None if it has no such score, or if attention weights are captured."""
        assert self.score is not None
        if capturing():
            return None
        return attention_spec(self.score, memory.states, memory.keys, memory.empty, into_step)

    def _attend_and_step(
        self, inputs: Tensor, state: CellState, memory: SourceMemory, real: Tensor | None
    ) -> tuple[Tensor, Tensor, CellState]:
        """Run the first layer with attention before each step; return its outputs, the contexts, and its last state."""
        assert self.score is not None
        cell = self.first
        weight, bias = cell.from_input()
        from_input, from_context = weight.split([self.input_width, cell.width], 1)
        # The inputs' share of the gates is one product for all steps; a step adds that of its context and state.
        gates = F.linear(inputs, from_input, bias)  # (T, B, G·D)
        spec = self._attention_spec(memory, from_context)
        if spec and dispatch.fused_scan(gates):
            *parts, context = scan_fused(cell, gates, state, spec)
            return parts[0], context, tuple(at_last(*pair, real) for pair in zip(parts, state, strict=True))
        initial, states, contexts, maps = state, [], [], []
        for gate in gates:
            context, weights = attend(self.score(state[0][:, None], memory.keys), memory.states, memory.empty)
            state = cell.step(gate + F.linear(context[:, 0], from_context), state)
            states.append(state)
            contexts.append(context[:, 0])
            maps.append(weights)
        record("cross", torch.cat(maps, 1))  # (B, T, S)
        parts = [torch.stack(part) for part in zip(*states, strict=True)]
        last = tuple(at_last(part, start, real) for part, start in zip(parts, initial, strict=True))
        return parts[0], torch.stack(contexts), last

    def _run_input_feeding(
        self, inputs: Tensor, state: DecoderState, memory: SourceMemory, real: Tensor | None
    ) -> tuple[Tensor, Tensor, DecoderState]:
        """Run all layers with input feeding: each step attends, and its readout is an input of the next.

        Return the readouts, the last layer's outputs, and the state.
        """
        weight, bias = self.first.from_input()
        from_input, from_read = weight.split([self.input_width, self.first.width], 1)
        spec = self._attention_spec(memory, from_read)
        if spec and len(self.layers) == 1 and not state.read.requires_grad:
            gates = F.linear(inputs, from_input, bias)
            if dispatch.fused_scan(gates):
                feeding = InputFeedingSpec(spec, self.readout.weight, self.readout.bias, state.read)
                *parts, output = scan_fused(self.first, gates, state.layers[0], feeding)
                last = tuple(at_last(*pair, real) for pair in zip(parts, state.layers[0], strict=True))
                after = replace(state, layers=(last,), read=at_last(output, state.read, real))
                return self.dropout(output), parts[0], after
        layers, read, outputs, tops, maps = state.layers, state.read, [], [], []
        for step, embedded in enumerate(inputs):
            top, new = self._run(torch.cat([embedded, read], -1)[None], layers, None)
            context, weights = self._attend(top, memory)
            outputs.append(self._read_out([top, context])[0])
            tops.append(top[0])
            maps.append(weights)
            read = _where_real(real, step, outputs[-1], read)
            layers = tuple(
                tuple(_where_real(real, step, *parts) for parts in zip(*pair, strict=True))
                for pair in zip(new, layers, strict=True)
            )
        record("cross", torch.cat(maps, 1))
        return self.dropout(torch.stack(outputs)), torch.stack(tops), replace(state, layers=layers, read=read)


def _where_real(real: Tensor | None, step: int, new: Tensor, old: Tensor) -> Tensor:
    """Return the new state where the step is real, and the old one where it is padding."""
    return new if real is None else torch.where(real[step][:, None], new, old)
