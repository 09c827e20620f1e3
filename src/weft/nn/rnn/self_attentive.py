"""LSTMN: a recurrent layer with self-attention over its own earlier states (Cheng, Dong & Lapata 2016, section 3.1).

A step starts not from the previous state alone, but from an attention-weighted sum of all earlier states:

    q_t = W_x x_t + h~_{t-1}      e_ti = score(q_t, h_i)      α_t = softmax(e_t), i < t                     (eqs. 4, 5)
    [h~_t ; c~_t] = Σ_i α_ti [h_i ; c_i]                      [h_t ; c_t] = cell(x_t, [h~_t ; c~_t])       (eqs. 6 to 9)

Any cell, and any of the six scores but `location`. The paper has the LSTM and `additive`, there with a W_x that is not
multiplied by the score's own matrix.
"""

from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.attention.capture import capturing, record
from weft.nn.attention.scores import Dot, attend, make_score
from weft.nn.kernels import dispatch
from weft.nn.rnn.cells import Cell, CellStage, CellState, at_last
from weft.nn.rnn.fused.scan import scan_fused
from weft.nn.rnn.fused.self_attention import SelfAttentionSpec
from weft.nn.rnn.fused.trace import NotFusibleError


class LSTMN(nn.Module):
    """A layer used like its cell. State: a tape of each part (B, t, D), their padding mask (B, t), h~ (B, D)."""

    def __init__(self, cell: Cell, score: str, layer: int = 0, place: str = "self") -> None:
        super().__init__()
        self.cell, self.width = cell, cell.width
        self.query = nn.Linear(cell.inputs, cell.width, bias=False)
        self.score = make_score(score, cell.width, 1)
        self.layer, self.place = layer, place  # keys of its captured weights

    def begin(self, rows: int, like: Tensor) -> CellState:
        """Return the state before the first step: empty tapes."""
        tapes = [like.new_zeros(rows, 0, self.width) for _ in range(self.cell.states)]
        return *tapes, like.new_zeros(rows, 0, dtype=torch.bool), like.new_zeros(rows, self.width)

    def carry(self, state: CellState) -> CellState:
        """Return the state for the next segment of a long text: the tapes cut to each row's last step."""
        *tapes, padding_mask, mixed = state
        if not padding_mask.shape[1]:
            return state
        positions = torch.arange(padding_mask.shape[1], device=padding_mask.device)
        last = torch.where(padding_mask, -1, positions).amax(1).clamp(min=0)  # (B,)
        rows = torch.arange(len(padding_mask), device=padding_mask.device)
        return *(tape[rows, last][:, None] for tape in tapes), padding_mask[rows, last][:, None], mixed

    def forward(
        self, inputs: Tensor, state: CellState | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, CellState]:
        """Return the outputs (T, B, D) for inputs (T, B, I), and the state after each row's last real step."""
        input_proj, queries, stages = self.cell.ahead(inputs), self.query(inputs), self.cell.dropped()
        if state is None and real is None and self._can_fuse(input_proj):
            with suppress(NotFusibleError):
                return self._forward_fused(input_proj, queries, stages)
        initial = state or self.begin(inputs.shape[1], inputs)
        *tapes, padding_mask, mixed = initial
        new_padding = ~real.T if real is not None else padding_mask.new_zeros(inputs.shape[1], len(inputs))
        padding_mask = torch.cat([padding_mask, new_padding], 1)
        past, keys = tapes[0].shape[1], self.score.keys(tapes[0])
        mixtures, weights_per_step = [], []
        for step in range(len(inputs)):
            length = past + step
            if length:
                scores = self.score((queries[step] + mixed)[:, None], keys)
                mixture, weights = attend(scores, torch.cat(tapes, -1), padding_mask[:, :length])
                old = mixture[:, 0].chunk(len(tapes), -1)
                weights_per_step.append(weights[:, 0])
            else:
                old = self.cell.begin(inputs.shape[1], input_proj)
            mixed = old[0]
            new = self.cell.step(input_proj[step], old, stages)
            if real is not None:  # a row without any step must attend to zeros alone, its initial state
                new = tuple(part.masked_fill(~real[step][:, None], 0) for part in new)
            tapes = [torch.cat([tape, part[:, None]], 1) for tape, part in zip(tapes, new, strict=True)]
            keys = torch.cat([keys, self.score.keys(new[0][:, None])], 1)
            mixtures.append(mixed)
        if capturing(self.layer):
            self._record(weights_per_step, past, input_proj)
        outputs = tapes[0][:, past:].transpose(0, 1)
        last_mixed = at_last(torch.stack(mixtures), initial[-1], real) if mixtures else mixed
        return outputs, (*tapes, padding_mask, last_mixed)

    def _can_fuse(self, input_proj: Tensor) -> bool:
        """Return whether the fused scan applies: CPU only, dot-product scores only, attention weights not captured."""
        return isinstance(self.score, Dot) and dispatch.numba_scan(input_proj) and not capturing(self.layer)

    def _forward_fused(
        self, input_proj: Tensor, queries: Tensor, stages: tuple[CellStage, ...]
    ) -> tuple[Tensor, CellState]:
        assert isinstance(self.score, Dot)
        start = self.cell.begin(input_proj.shape[1], input_proj)
        *states, mixed = scan_fused(self.cell, input_proj, start, SelfAttentionSpec(queries, self.score.scale), stages)
        padding_mask = input_proj.new_zeros(input_proj.shape[1], len(input_proj), dtype=torch.bool)
        return states[0], (*(part.transpose(0, 1) for part in states), padding_mask, mixed)

    def _record(self, weights_per_step: list[Tensor], past: int, like: Tensor) -> None:
        """Record the attention weights, (B, T, past + T); the very first step has none."""
        steps, rows = like.shape[:2]
        all_weights = weights_per_step if past else [like.new_zeros(rows, 0), *weights_per_step]
        if steps:
            padded = [F.pad(weights, (0, past + steps - weights.shape[1])) for weights in all_weights]
            record(self.place, torch.stack(padded, 1), self.layer)
