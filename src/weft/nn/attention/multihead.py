"""Multi-head attention over flat tokens (Vaswani et al. 2017, section 3.2).

    Attention(Q, K, V) = softmax(Q Kᵀ / √d) V                                                                  (eq. 1)
    MultiHead = [head_1 ; … ; head_H] W_O,   head_i = Attention(Q W_Qi, K W_Ki, V W_Vi)                 (section 3.2.2)

On CUDA in half precision weft has kernels of its own, for sequences that look at themselves
(`weft.nn.kernels.triton.varlen_self_attention`) and, where they are short, at others
(`weft.nn.kernels.triton.short_attention`). For the rest `fused` calls one: on CUDA in half precision the library's
variable-length one, or cuDNN's where all lengths are the same, elsewhere its fused attention over groups of sequences
of like length. None makes the weights. `weights_of` makes them by the equation, from q and k, for the layers and heads
that someone looks at (`weft.nn.attention.capture`); the output stays that of the kernel. No kernel drops weights out,
and the paper does not either (section 5.4).
"""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.nn.attention.capture import capturing, chosen_heads, record
from weft.nn.attention.kv_cache import KVIndex, attend_cached
from weft.nn.kernels.block_schedule import BlockSchedule
from weft.nn.layers.linear import Linear
from weft.nn.rnn.fused.codegen_triton import ampere, trusted
from weft.tokens import Tokens

_SHORT, _NARROW = 256, 64  # tokens, and numbers a head, up to which a kernel for short sequences is the better one
_RAGGED, _SIZES = 512, (16, 32, 64)  # the same of the kernels for sequences that look at themselves
_DENSE = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]  # of sequences of one length
_LIKE = 16  # on the CPU, sequences whose lengths are in one band of so many tokens go through one call


class Group(NamedTuple):
    """Sequences that one call of a dense kernel serves, padded to the longest of them."""

    asks: Tensor  # (R·T,) the flat positions that look
    holds: Tensor  # (R·S,) the flat positions that are looked at
    rows: int
    real: Tensor | None  # (R, 1, 1, S) where there is something to look at; None: everywhere


@dataclass(frozen=True)
class AttentionLayout:
    """Which tokens look at which: sequence b of `at` at sequence b of `over`; made once for all layers."""

    at: Tokens
    over: Tokens
    work: BlockSchedule | None = None  # for the kernels that serve sequences which look at themselves

    @classmethod
    def itself(cls, tokens: Tokens) -> "AttentionLayout":
        """Each sequence looks at itself."""
        return cls(tokens, tokens)

    @property
    def even(self) -> bool:
        """Whether all sequences look at themselves and are of one length: known with no look at the lengths."""
        return self.at is self.over and len(self.at.ids) == len(self.at) * self.at.longest > 0

    def planned(self, x: Tensor, size: int) -> "AttentionLayout":
        """Plan the work of the kernels for such heads, if they serve: long sequences of one length have better ones."""
        longest = self.at.longest
        ragged = longest <= (_SHORT if self.even else _RAGGED) and size in _SIZES and len(self.at) > 0
        if self.at is not self.over or not ragged or not trusted(x):
            return self
        return replace(self, work=BlockSchedule.of(self.at.starts, len(self.at.ids)))

    @cached_property
    def groups(self) -> tuple[list[Group], Tensor | None]:
        """The groups, and where each flat token's answer is among all of theirs; None: in the same order."""
        lengths = torch.stack([self.at.lengths, self.over.lengths])  # (2, B)
        kinds, kind = torch.unique((lengths + _LIKE - 1) // _LIKE, dim=1, return_inverse=True)
        firsts = [one.lengths.cumsum(0) - one.lengths for one in (self.at, self.over)]
        found, order, done = [], torch.zeros(len(self.at.ids), dtype=torch.long), 0
        for number in range(kinds.shape[1]):
            rows = (kind == number).nonzero().squeeze(1)
            asks, real = _laid(firsts[0][rows], lengths[0, rows])
            holds, seen = _laid(firsts[1][rows], lengths[1, rows])
            if asks.numel():
                order[asks[real]] = done + real.flatten().nonzero().squeeze(1)
                done += asks.numel()
                mask = None if bool(seen.all()) else self._move(seen)[:, None, None]
                found.append(Group(self._move(asks.flatten()), self._move(holds.flatten()), len(rows), mask))
        same = len(order) == done and bool((order == torch.arange(done)).all())
        return found, None if same else self._move(order)

    def _move(self, index: Tensor) -> Tensor:
        return index.to(self.at.device, non_blocking=True)


def _laid(first: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Lay sequences out as rows: their flat positions (R, T), the last one repeated, and which of them are real."""
    step = torch.arange(int(lengths.max()))
    return first[:, None] + torch.minimum(step, (lengths[:, None] - 1).clamp(min=0)), step < lengths[:, None]


def short(x: Tensor, layout: AttentionLayout, size: int) -> bool:
    """Say whether the kernel for short sequences serves: forward alone, the library's is the faster one for others."""
    longest = max(layout.at.longest, layout.over.longest)
    return trusted(x) and size <= _NARROW and longest <= (_SHORT if torch.is_grad_enabled() else _SHORT // 2)


def fused(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, causal: bool) -> Tensor:
    """Attend with q (N, H, d) to k and v (M, H, d), each sequence to its own: (N, H, d)."""
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and ampere(q.device):
        return _even(q, k, v, layout.at, causal) if layout.even else _varlen(q, k, v, layout, causal)
    groups, order = layout.groups
    if order is None and len(groups) == 1 and groups[0].real is None and len(groups[0].holds) == len(k):
        return _dense(q, k, v, groups[0], causal)
    found = [_grouped(q, k, v, group, causal) for group in groups]
    whole = torch.cat(found) if found else torch.zeros_like(q)
    return whole if order is None else whole.index_select(0, order)


def _grouped(q: Tensor, k: Tensor, v: Tensor, group: Group, causal: bool) -> Tensor:
    asks = q.index_select(0, group.asks)
    if not len(group.holds):  # nothing to look at
        return torch.zeros_like(asks)
    return _dense(asks, k.index_select(0, group.holds), v.index_select(0, group.holds), group, causal)


def _dense(q: Tensor, k: Tensor, v: Tensor, group: Group, causal: bool) -> Tensor:
    # What fills up a causal group stands after its sequences' ends, where nothing real looks: it needs no mask.
    q, k, v = (one.view(group.rows, -1, *one.shape[1:]).transpose(1, 2) for one in (q, k, v))  # (R, H, T, d)
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=None if causal else group.real, is_causal=causal)
    return found.transpose(1, 2).flatten(0, 1)


def _even(q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, causal: bool) -> Tensor:
    """Attend in sequences of one length, which are a dense batch; to learn, by cuDNN where it can."""
    q, k, v = (one.unflatten(0, (len(tokens), tokens.longest)).transpose(1, 2) for one in (q, k, v))  # (B, H, T, d)
    with sdpa_kernel(_DENSE, set_priority=True) if torch.is_grad_enabled() else nullcontext():  # it takes its time
        found = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return found.transpose(1, 2).flatten(0, 1)


def _varlen(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # which brings half of the compiler along

    at, over = layout.at, layout.over
    how: dict[str, Any] = {"window_size": (-1, 0) if causal else (-1, -1)}
    size = q.shape[-1]
    if spare := -size % 8:  # the kernel's heads are multiples of 8, and its scale is that of what it is given
        q = q * ((size + spare) / size) ** 0.5
        q, k, v = (F.pad(one, (0, spare)) for one in (q, k, v))
    found = varlen_attn(q, k, v, at.starts, over.starts, at.longest, over.longest, **how)
    assert isinstance(found, Tensor)
    return found[..., :size]


def weights_of(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Make the weights of one sequence by the equation, in float32 at least: q (T, H, d), k (S, H, d) to (H, T, S)."""
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("thd,shd->hts", q.to(exact), k.to(exact)) / q.shape[-1] ** 0.5
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
    return torch.softmax(scores, -1)


class MultiHeadAttention(nn.Module):
    """Queries from one sequence; keys and values from the same one or, at the place "cross", from the source.

    Heads that are `off` are not there at all: their rows and columns are cut out of the matrices.
    """

    def __init__(
        self, width: int, heads: int, place: str, layer: int, causal: bool = False, off: Collection[int] = ()
    ) -> None:
        super().__init__()
        self.place, self.layer, self.causal, self.size = place, layer, causal, width // heads
        self.heads, self.kept = heads, [head for head in range(heads) if head not in off]
        inner = len(self.kept) * self.size
        self.cross = place == "cross"
        self.in_proj = Linear(width, inner if self.cross else 3 * inner)  # of itself: keys and values too, in one
        self.kv_proj = Linear(width, 2 * inner) if self.cross else None
        self.out_proj = Linear(inner, width)
        for part in (self.in_proj, self.kv_proj, self.out_proj):
            if part is not None:
                nn.init.zeros_(part.bias)
                for weight in part.weight.split(inner if part is not self.out_proj else width):
                    nn.init.xavier_uniform_(weight)

    def forward(
        self, x: Tensor, layout: AttentionLayout, memory: Tensor | None = None, keep: list[Tensor] | None = None
    ) -> Tensor:
        """Let x (N, D) look at itself, or at memory (M, D): (N, D); `keep` collects keys and values (M, 2, H, d)."""
        found: Tensor = self.out_proj(self.gathered(x, layout, memory, keep))
        return found

    def gathered(
        self, x: Tensor, layout: AttentionLayout, memory: Tensor | None = None, keep: list[Tensor] | None = None
    ) -> Tensor:
        """Return what the heads found, side by side, as the output layer reads it: (N, H·d)."""
        watched = not torch.compiler.is_compiling() and capturing(self.layer)
        if keep is None and not watched and layout.work is not None and memory is None:
            return self._itself(x, layout, layout.work)
        if keep is None and not watched and short(x, layout, self.size):
            return self._short(x, layout, memory)
        q, kv = self.project(x, memory)
        k, v = kv.unbind(1)
        if keep is not None:
            keep.append(kv.detach())
        if watched:
            self._record(q, k, layout)
        return fused(q, k, v, layout, self.causal).flatten(1)

    def _itself(self, x: Tensor, layout: AttentionLayout, work: BlockSchedule) -> Tensor:
        """Do it in one kernel, which shifts what the matrix alone has made, and reads all of it where it is."""
        from weft.nn.kernels.triton.varlen_self_attention import attend_itself

        own, at = F.linear(x, self.in_proj.weight).unflatten(-1, (3, -1, self.size)), layout.at
        found: Tensor = attend_itself(own, self.in_proj.bias, at.starts, *work, at.longest, self.causal)[0]
        return found.flatten(1)

    def _short(self, x: Tensor, layout: AttentionLayout, memory: Tensor | None) -> Tensor:
        """Do the same, also for sequences that look at others."""
        from weft.nn.kernels.triton.short_attention import attend

        own, other = F.linear(x, self.in_proj.weight).unflatten(-1, (1 if self.cross else 3, -1, self.size)), None
        shift: Tensor = self.in_proj.bias
        longest = max(layout.at.longest, layout.over.longest)
        if self.kv_proj is not None:
            assert memory is not None
            other = F.linear(memory, self.kv_proj.weight).unflatten(-1, (2, -1, self.size))
            shift = torch.cat([shift, self.kv_proj.bias])
        found: Tensor = attend(own, other, shift, layout.at.starts, layout.over.starts, longest, self.causal)[0]
        return found.flatten(1)

    def project(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return queries (N, H, d), and keys and values (M, 2, H, d)."""
        if self.kv_proj is None:
            whole = self.in_proj(x).unflatten(-1, (3, -1, self.size))
            return whole[:, 0], whole[:, 1:]
        assert memory is not None
        return self.queries(x), self.remember(memory)

    def queries(self, x: Tensor) -> Tensor:
        """Return what asks a source, (N, H, d)."""
        q: Tensor = self.in_proj(x).unflatten(-1, (-1, self.size))
        return q

    def remember(self, memory: Tensor) -> Tensor:
        """Return the keys and values (M, 2, H, d) of a source."""
        assert self.kv_proj is not None
        kv: Tensor = self.kv_proj(memory).unflatten(-1, (2, -1, self.size))
        return kv

    def look(self, q: Tensor, kv: Tensor, reach: KVIndex) -> Tensor:
        """Let one query a hypothesis (B, H, d) look at what it reaches of kv (M, 2, H, d): (B, D)."""
        found: Tensor = self.out_proj(attend_cached(q, kv, reach).flatten(1))
        return found

    def _record(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> None:
        """Make the weights of the heads that are asked for, sequence by sequence: (B, H, T, S)."""
        own = [self.kept.index(head) for head in chosen_heads(range(self.heads)) if head in self.kept]
        at, over = layout.at, layout.over
        wide = q.new_zeros(len(at), len(own), at.longest, over.longest, dtype=torch.float32)
        for row, (asks, holds) in enumerate(zip(at.split(q[:, own]), over.split(k[:, own]), strict=True)):
            if len(asks) and len(holds):
                wide[row, :, : len(asks), : len(holds)] = weights_of(asks, holds, self.causal).float()
        record(self.place, wide, self.layer, [self.kept[head] for head in own])

    def cut(self, name: str, value: Tensor) -> Tensor:
        """Take the heads that are kept out of a parameter of all heads, such as one that was trained with them."""
        parts = {"in_proj": 1 if self.cross else 3, "kv_proj": 2, "out_proj": 1}[name.partition(".")[0]]
        axis = 1 if name == "out_proj.weight" else 0
        if name == "out_proj.bias" or value.shape[axis] != parts * self.heads * self.size:
            return value
        wanted = torch.tensor(_places(self.kept, self.size, self.heads, parts))
        return value.index_select(axis, wanted.to(value.device))


def _places(kept: Sequence[int], size: int, heads: int, parts: int) -> list[int]:
    """Number the rows of the kept heads in a matrix of so many parts (query, key, value), each of all heads."""
    return [(part * heads + head) * size + place for part in range(parts) for head in kept for place in range(size)]
