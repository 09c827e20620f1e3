"""Attention within a recurrent network, over its own earlier states: the step from recurrence to self-attention.

Cheng, Dong & Lapata 2016 (LSTMN), section 3.1: the state that a step starts from is not the last one alone, but a
mixture of all before it, chosen anew at each step by what it reads:

    q_t = W_x x_t + h~_{t-1}      e_ti = score(q_t, h_i)      α_t = softmax(e_t), i < t                     (eqs. 4, 5)
    [h~_t ; c~_t] = Σ_i α_ti [h_i ; c_i]                      [h_t ; c_t] = cell(x_t, [h~_t ; c~_t])       (eqs. 6 to 9)

Any cell, and any of the six scores but `location`. Theirs are the LSTM and `additive`, there with a W_x that is no
factor of the score's own matrix.
"""

from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.attention.capture import capturing, record
from weft.nn.attention.scores import Dot, attend, make_score
from weft.nn.rnn.cells import Cell, Stage, State, at_last
from weft.nn.rnn.fused.scan import scan_fused, worthwhile
from weft.nn.rnn.fused.self_attention import SelfAttentionSpec
from weft.nn.rnn.fused.trace import NotFusibleError


class LSTMN(nn.Module):
    """A layer that walks like its cell. Its state: a tape of each part (B, t, D), what is empty there, h~ (B, D)."""

    def __init__(self, cell: Cell, score: str, layer: int = 0, place: str = "self") -> None:
        super().__init__()
        self.cell, self.width = cell, cell.width
        self.query = nn.Linear(cell.inputs, cell.width, bias=False)
        self.score = make_score(score, cell.width, 1)
        self.layer, self.place = layer, place  # what its looks go by

    def begin(self, rows: int, like: Tensor) -> State:
        """Return the state before the first step: nothing to look back at."""
        tapes = [like.new_zeros(rows, 0, self.width) for _ in range(self.cell.states)]
        return *tapes, like.new_zeros(rows, 0, dtype=torch.bool), like.new_zeros(rows, self.width)

    def carry(self, state: State) -> State:
        """Keep of a state what the next piece of a long text starts from: its last step."""
        *tapes, empty, mixed = state
        if not empty.shape[1]:
            return state
        places = torch.arange(empty.shape[1], device=empty.device)
        last = torch.where(empty, -1, places).amax(1).clamp(min=0)  # (B,)
        rows = torch.arange(len(empty), device=empty.device)
        return *(tape[rows, last][:, None] for tape in tapes), empty[rows, last][:, None], mixed

    def forward(self, inputs: Tensor, state: State | None = None, real: Tensor | None = None) -> tuple[Tensor, State]:
        """Read inputs (T, B, I); return the output of every step and the state after each row's last real one."""
        known, queries, stages = self.cell.ahead(inputs), self.query(inputs), self.cell.dropped()
        if state is None and real is None and self._fits(known):
            with suppress(NotFusibleError):
                return self._fused(known, queries, stages)
        begun = state or self.begin(inputs.shape[1], inputs)
        *tapes, empty, mixed = begun
        empty = torch.cat([empty, ~real.T if real is not None else empty.new_zeros(inputs.shape[1], len(inputs))], 1)
        past, keys = tapes[0].shape[1], self.score.keys(tapes[0])
        mixes, looks = [], []
        for step in range(len(inputs)):
            seen = past + step
            if seen:
                scores = self.score((queries[step] + mixed)[:, None], keys)
                mixture, weights = attend(scores, torch.cat(tapes, -1), empty[:, :seen])
                old = mixture[:, 0].chunk(len(tapes), -1)
                looks.append(weights[:, 0])
            else:
                old = self.cell.begin(inputs.shape[1], known)
            mixed = old[0]
            new = self.cell.step(known[step], old, stages)
            if real is not None:  # a row with no step at all must find nothing but the zeros that it began from
                new = tuple(part.masked_fill(~real[step][:, None], 0) for part in new)
            tapes = [torch.cat([tape, part[:, None]], 1) for tape, part in zip(tapes, new, strict=True)]
            keys = torch.cat([keys, self.score.keys(new[0][:, None])], 1)
            mixes.append(mixed)
        if capturing(self.layer):
            self._record(looks, past, known)
        outputs = tapes[0][:, past:].transpose(0, 1)
        return outputs, (*tapes, empty, at_last(torch.stack(mixes), begun[-1], real) if mixes else mixed)

    def _fits(self, known: Tensor) -> bool:
        """Say whether the compiled loops can walk: they are the CPU's, know products alone, and keep no weights."""
        on_cpu = known.device.type == "cpu"
        return on_cpu and isinstance(self.score, Dot) and worthwhile(known) and not capturing(self.layer)

    def _fused(self, known: Tensor, queries: Tensor, stages: tuple[Stage, ...]) -> tuple[Tensor, State]:
        assert isinstance(self.score, Dot)
        start = self.cell.begin(known.shape[1], known)
        *walked, mixed = scan_fused(self.cell, known, start, SelfAttentionSpec(queries, self.score.scale), stages)
        empty = known.new_zeros(known.shape[1], len(known), dtype=torch.bool)
        return walked[0], (*(part.transpose(0, 1) for part in walked), empty, mixed)

    def _record(self, looks: list[Tensor], past: int, like: Tensor) -> None:
        """Hand the weights over, (B, T, past + T); a first step has nothing to look at."""
        steps, rows = like.shape[:2]
        seen = looks if past else [like.new_zeros(rows, 0), *looks]
        if steps:
            wide = [F.pad(weights, (0, past + steps - weights.shape[1])) for weights in seen]
            record(self.place, torch.stack(wide, 1), self.layer)
