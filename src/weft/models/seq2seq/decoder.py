"""The decoder of the recurrent encoder-decoder: what it remembers, how it looks at the source, steps and reads out.

Equations and names are those of `weft.models.seq2seq.model`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.attention.capture import capturing, record
from weft.nn.attention.scores import Additive, attend, make_score
from weft.nn.rnn.cells import Cell, State, at_last, make_cell
from weft.nn.rnn.fused.attention import AttentionSpec, InputFeedingSpec, attend_all, attention_spec
from weft.nn.rnn.fused.scan import scan_fused, worthwhile
from weft.nn.rnn.time_major import Grid

if TYPE_CHECKING:
    from weft.models.seq2seq.model import Seq2SeqConfig


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


class Decoder(nn.Module):
    """The layers of the decoder and, with attention, the look back at the source."""

    def __init__(self, config: "Seq2SeqConfig", embed: nn.Embedding | None, vocab: int) -> None:
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
            return attend_all(queries, at), queries.new_zeros(0)
        scores = self.score(queries.transpose(0, 1), memory.keys)
        context, weights = attend(scores, memory.states, memory.empty)
        return context.transpose(0, 1), weights

    def _sight(self, memory: Memory, into_step: Tensor) -> AttentionSpec | None:
        """Say how the fused walk looks at the memory; None if it cannot, or if someone wants to see the weights."""
        assert self.score is not None
        if capturing():
            return None
        return attention_spec(self.score, memory.states, memory.keys, memory.empty, into_step)

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
                feeding = InputFeedingSpec(at, self.readout.weight, self.readout.bias, state.read)
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
