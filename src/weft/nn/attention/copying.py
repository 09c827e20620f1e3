"""Copying from the source: the pointer-generator of See, Liu & Manning 2017, section 2.2.

    p_gen = σ(w · [h*_t ; s_t ; x_t] + b)                         eq. 8
    P(y)  = p_gen P_vocab(y) + (1 - p_gen) Σ_{j: x_j = y} a_tj    eq. 9

a_t is attention over the source's tokens, h*_t = Σ_j a_tj h_j its context (eq. 3), s_t the decoder's state and x_t its
input. Source and target have one vocabulary: a token of the source has an id to be written.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.attention.scores import Dot, attend
from weft.nn.attention.source_memory import SourceMemory
from weft.nn.rnn.time_major import TimeMajor
from weft.tokens import Tokens


def mix_log_probs(logits: Tensor, gate: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Return log P (N, V) by eq. 9, in float32 at least; `gate` (N, 1) is p_gen before the sigmoid.

    `weights` (N, S) are the attention to tokens with `ids` (N, S); padding has none. Since the probabilities sum to 1,
    the result is its own log-softmax, and takes the place of the logits (N, V) everywhere.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    gate, weights = gate.to(dtype), weights.to(dtype)
    copied = weights.new_zeros(logits.shape).scatter_add(1, ids, weights)
    copied = copied.clamp(min=torch.finfo(dtype).tiny).log()  # not log 0, whose gradient is no number
    return torch.logaddexp(F.logsigmoid(gate) + logits.log_softmax(-1, dtype=dtype), F.logsigmoid(-gate) + copied)


class CopyAttention(nn.Module):
    """One head of attention from a decoder's last states to an encoder's, and the gate of eq. 8."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(3 * width, 1)
        self.score = Dot(width**-0.5)
        for layer in (self.query, self.key, self.gate):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(self.gate.bias)

    def remember(self, states: Tensor, source: Tokens) -> SourceMemory:
        """Return the memory of the encoder's states (N, D)."""
        return SourceMemory.of(states, source.ids, TimeMajor(source), self.key)

    def forward(self, hidden: Tensor, inputs: Tensor, memory: SourceMemory) -> tuple[Tensor, Tensor]:
        """Return the gate (B, T, 1) and the weights (B, T, S) of the decoder's states and inputs (B, T, D)."""
        context, weights = attend(self.score(self.query(hidden), memory.keys), memory.states, memory.empty)
        return self.gate(torch.cat([context, hidden, inputs], -1)), weights


@dataclass(frozen=True)
class CopyState:
    """What a decoding state holds to copy from: the sources, and which of them each hypothesis has."""

    memory: SourceMemory
    owner: Tensor  # (B,) row of the memory

    def select(self, rows: Tensor) -> "CopyState":
        """Return the state whose hypothesis b continues the old hypothesis rows[b]."""
        return replace(self, owner=self.owner[rows])

    def join(self, other: "CopyState") -> "CopyState":
        """Return the state of these hypotheses and, after them, the other's; sources without hypotheses are dropped."""
        own, new = self._with_live_sources(), other._with_live_sources()
        return CopyState(own.memory.join(new.memory), torch.cat([own.owner, new.owner + len(own.memory.ids)]))

    def _with_live_sources(self) -> "CopyState":
        sources, owner = self.owner.unique(return_inverse=True)
        return CopyState(self.memory.rows(sources), owner)
