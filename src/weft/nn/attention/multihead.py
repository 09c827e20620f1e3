"""Multi-head attention over flat tokens (Vaswani et al. 2017, section 3.2).

    Attention(Q, K, V) = softmax(Q Kᵀ / √d) V                                                                  (eq. 1)
    MultiHead = [head_1 ; … ; head_H] W_O,   head_i = Attention(Q W_Qi, K W_Ki, V W_Vi)                 (section 3.2.2)

On CUDA in half precision weft has its own kernels, for self-attention (`weft.nn.kernels.triton.varlen_self_attention`)
and for self- and cross-attention of short sequences (`weft.nn.kernels.triton.short_attention`). For all else `fused`
calls one of PyTorch's: on CUDA in half precision the variable-length kernel, or cuDNN's where all lengths are the same;
elsewhere scaled_dot_product_attention over groups of sequences of similar length. None of them returns the attention
weights. `weights_of` computes these by the equation, from q and k, for the layers and heads that are captured
(`weft.nn.attention.capture`); the output is still the kernel's. There is no dropout of attention weights, as in the
paper (section 5.4).
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
from weft.nn.kernels import dispatch
from weft.nn.kernels.block_schedule import BlockSchedule
from weft.nn.layers.packed_linear import Linear
from weft.tokens import Tokens, to_device

_DENSE_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]  # equal lengths
_LENGTH_BAND = 16  # on the CPU, sequences whose lengths are in the same band of so many tokens are padded into one call


class PaddedGroup(NamedTuple):
    """Sequences that go through one call of a dense kernel, padded to the longest of them."""

    queries: Tensor  # (R·T,) flat positions of the queries
    keys: Tensor  # (R·S,) flat positions of the keys and values
    rows: int
    mask: Tensor | None  # (R, 1, 1, S) True where a key is no padding; None: everywhere


@dataclass(frozen=True)
class AttentionLayout:
    """Which tokens attend to which: sequence b of `queries` to sequence b of `keys`; made once for all layers."""

    queries: Tokens
    keys: Tokens
    schedule: BlockSchedule | None = None  # of the Triton kernels for self-attention

    @classmethod
    def self_attention(cls, tokens: Tokens) -> "AttentionLayout":
        """Return the layout of self-attention: each sequence attends to itself."""
        return cls(tokens, tokens)

    @property
    def equal_lengths(self) -> bool:
        """Return whether all sequences attend to themselves and have one length, without a device synchronisation."""
        return self.queries is self.keys and len(self.queries.ids) == len(self.queries) * self.queries.longest > 0

    def with_schedule(self, x: Tensor, size: int) -> "AttentionLayout":
        """Return the layout with a block schedule, if the kernels for self-attention that need one serve."""
        if self.queries is not self.keys or not len(self.queries):
            return self
        if not dispatch.schedules_self_attention(x, size, self.queries.longest, self.equal_lengths):
            return self
        return replace(self, schedule=BlockSchedule.of(self.queries.starts, len(self.queries.ids)))

    @cached_property
    def groups(self) -> tuple[list[PaddedGroup], Tensor | None]:
        """The padded groups, and each flat token's row in their concatenated outputs; None: in the same order."""
        lengths = torch.stack([self.queries.lengths, self.keys.lengths])  # (2, B)
        bands, band_of = torch.unique((lengths + _LENGTH_BAND - 1) // _LENGTH_BAND, dim=1, return_inverse=True)
        starts = [tokens.lengths.cumsum(0) - tokens.lengths for tokens in (self.queries, self.keys)]
        groups, order, total = [], torch.zeros(len(self.queries.ids), dtype=torch.long), 0
        for band in range(bands.shape[1]):
            rows = (band_of == band).nonzero().squeeze(1)
            queries, is_query = _pad_positions(starts[0][rows], lengths[0, rows])
            keys, is_key = _pad_positions(starts[1][rows], lengths[1, rows])
            if queries.numel():
                order[queries[is_query]] = total + is_query.flatten().nonzero().squeeze(1)
                total += queries.numel()
                mask = None if bool(is_key.all()) else self._move(is_key)[:, None, None]
                groups.append(PaddedGroup(self._move(queries.flatten()), self._move(keys.flatten()), len(rows), mask))
        in_order = len(order) == total and bool((order == torch.arange(total)).all())
        return groups, None if in_order else self._move(order)

    def _move(self, index: Tensor) -> Tensor:
        return to_device(index, self.queries.device)


def _pad_positions(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the flat positions (R, T) of padded sequences, padding repeating the last one, and what is no padding."""
    step = torch.arange(int(lengths.max()))
    return starts[:, None] + torch.minimum(step, (lengths[:, None] - 1).clamp(min=0)), step < lengths[:, None]


def fused(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, causal: bool) -> Tensor:
    """Attend with q (N, H, d) to k and v (M, H, d), each sequence to its own: (N, H, d)."""
    kernel = dispatch.library_attention(q, layout.equal_lengths)
    if kernel == "dense":
        return _equal_length_attention(q, k, v, layout.queries, causal)
    if kernel == "varlen":
        return _varlen_attention(q, k, v, layout, causal)
    groups, order = layout.groups
    if order is None and len(groups) == 1 and groups[0].mask is None and len(groups[0].keys) == len(k):
        return _padded_attention(q, k, v, groups[0], causal)
    outputs = [_group_attention(q, k, v, group, causal) for group in groups]
    output = torch.cat(outputs) if outputs else torch.zeros_like(q)
    return output if order is None else output.index_select(0, order)


def _group_attention(q: Tensor, k: Tensor, v: Tensor, group: PaddedGroup, causal: bool) -> Tensor:
    queries = q.index_select(0, group.queries)
    if not len(group.keys):  # nothing to attend to
        return torch.zeros_like(queries)
    return _padded_attention(queries, k.index_select(0, group.keys), v.index_select(0, group.keys), group, causal)


def _padded_attention(q: Tensor, k: Tensor, v: Tensor, group: PaddedGroup, causal: bool) -> Tensor:
    # The padding of a causal group comes after its sequences' ends, where no real query attends: it needs no mask.
    q, k, v = (x.view(group.rows, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))  # (R, H, T, d)
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=None if causal else group.mask, is_causal=causal)
    return output.transpose(1, 2).flatten(0, 1)


def _equal_length_attention(q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, causal: bool) -> Tensor:
    """Attend within sequences of equal length, which are a dense batch; for training, by cuDNN where it can."""
    q, k, v = (x.unflatten(0, (len(tokens), tokens.longest)).transpose(1, 2) for x in (q, k, v))  # (B, H, T, d)
    # The context costs time of its own: not for inference.
    with sdpa_kernel(_DENSE_BACKENDS, set_priority=True) if torch.is_grad_enabled() else nullcontext():
        output = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return output.transpose(1, 2).flatten(0, 1)


def _varlen_attention(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, causal: bool) -> Tensor:
    varlen_attn, queries, keys = dispatch.library_varlen_attention(), layout.queries, layout.keys
    window: dict[str, Any] = {"window_size": (-1, 0) if causal else (-1, -1)}
    size = q.shape[-1]
    if padding := -size % 8:  # the kernel takes head sizes that are multiples of 8, and scales by the padded size
        q = q * ((size + padding) / size) ** 0.5
        q, k, v = (F.pad(x, (0, padding)) for x in (q, k, v))
    output = varlen_attn(q, k, v, queries.starts, keys.starts, queries.longest, keys.longest, **window)
    assert isinstance(output, Tensor)
    return output[..., :size]


def weights_of(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return softmax(q kᵀ / √d) of one sequence, in float32 at least: q (T, H, d), k (S, H, d) to (H, T, S)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("thd,shd->hts", q.to(dtype), k.to(dtype)) / q.shape[-1] ** 0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return torch.softmax(scores, -1)


class MultiHeadAttention(nn.Module):
    """Self-attention or, at the place "cross", cross-attention, whose keys and values are the source's.

    Pruned heads (`off`) have no parameters: their rows and columns are cut out of the matrices.
    """

    def __init__(
        self, width: int, heads: int, place: str, layer: int, causal: bool = False, off: Collection[int] = ()
    ) -> None:
        super().__init__()
        self.place, self.layer, self.causal, self.size = place, layer, causal, width // heads
        self.heads, self.kept = heads, [head for head in range(heads) if head not in off]
        inner = len(self.kept) * self.size
        self.cross = place == "cross"
        self.in_proj = Linear(width, inner if self.cross else 3 * inner)  # 3: queries, keys and values in one matrix
        self.kv_proj = Linear(width, 2 * inner) if self.cross else None
        self.out_proj = Linear(inner, width)
        for linear in (self.in_proj, self.kv_proj, self.out_proj):
            if linear is not None:
                nn.init.zeros_(linear.bias)
                for weight in linear.weight.split(inner if linear is not self.out_proj else width):
                    nn.init.xavier_uniform_(weight)

    def forward(
        self, x: Tensor, layout: AttentionLayout, memory: Tensor | None = None, keep: list[Tensor] | None = None
    ) -> Tensor:
        """Attend with x (N, D) to itself, or to memory (M, D): (N, D); `keep` collects keys and values (M, 2, H, d)."""
        output: Tensor = self.out_proj(self.concatenated_heads(x, layout, memory, keep))
        return output

    def concatenated_heads(
        self, x: Tensor, layout: AttentionLayout, memory: Tensor | None = None, keep: list[Tensor] | None = None
    ) -> Tensor:
        """Return the concatenated heads, the input of the output projection: (N, H·d)."""
        captured = not torch.compiler.is_compiling() and capturing(self.layer)
        if layout.schedule is not None and memory is None and not captured:
            return self._varlen_self_attention(x, layout, layout.schedule, keep)
        if keep is None and not captured:
            longest = max(layout.queries.longest, layout.keys.longest)
            if short_attention := dispatch.short_attention_kernel(x, self.size, longest):
                return self._short_attention(short_attention, x, layout, memory)
        q, kv = self.project(x, memory)
        k, v = kv.unbind(1)
        if keep is not None:
            keep.append(kv.detach())
        if captured:
            self._record(q, k, layout)
        return fused(q, k, v, layout, self.causal).flatten(1)

    def _varlen_self_attention(
        self, x: Tensor, layout: AttentionLayout, schedule: BlockSchedule, keep: list[Tensor] | None
    ) -> Tensor:
        """Return the heads of self-attention by one kernel, which adds the bias and reads the projection in place."""
        varlen_self_attention = dispatch.varlen_self_attention_kernel()
        qkv, tokens = F.linear(x, self.in_proj.weight).unflatten(-1, (3, -1, self.size)), layout.queries
        heads: Tensor = varlen_self_attention(
            qkv, self.in_proj.bias, tokens.starts, *schedule, tokens.longest, self.causal
        )[0]
        if keep is not None:
            keep.append((qkv + self.in_proj.bias.to(qkv.dtype).view(3, -1, self.size))[:, 1:].detach())
        return heads.flatten(1)

    def _short_attention(
        self, short_attention: dispatch.Kernel, x: Tensor, layout: AttentionLayout, memory: Tensor | None
    ) -> Tensor:
        """Return the same by the kernel for short sequences, which does cross-attention too."""
        qkv, kv = F.linear(x, self.in_proj.weight).unflatten(-1, (1 if self.cross else 3, -1, self.size)), None
        bias: Tensor = self.in_proj.bias
        queries, keys = layout.queries, layout.keys
        if self.kv_proj is not None:
            assert memory is not None
            kv = F.linear(memory, self.kv_proj.weight).unflatten(-1, (2, -1, self.size))
            bias = torch.cat([bias, self.kv_proj.bias])
        longest = max(queries.longest, keys.longest)
        heads: Tensor = short_attention(qkv, kv, bias, queries.starts, keys.starts, longest, self.causal)[0]
        return heads.flatten(1)

    def project(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return queries (N, H, d), and keys and values (M, 2, H, d)."""
        if self.kv_proj is None:
            qkv = self.in_proj(x).unflatten(-1, (3, -1, self.size))
            return qkv[:, 0], qkv[:, 1:]
        assert memory is not None
        return self.queries(x), self.remember(memory)

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries of cross-attention, (N, H, d)."""
        q: Tensor = self.in_proj(x).unflatten(-1, (-1, self.size))
        return q

    def remember(self, memory: Tensor) -> Tensor:
        """Return the keys and values (M, 2, H, d) of a source."""
        assert self.kv_proj is not None
        kv: Tensor = self.kv_proj(memory).unflatten(-1, (2, -1, self.size))
        return kv

    def attend_cached(self, q: Tensor, kv: Tensor, kv_index: KVIndex) -> Tensor:
        """Attend with one query a hypothesis (B, H, d) to the entries of kv (M, 2, H, d) in its index: (B, D)."""
        output: Tensor = self.out_proj(attend_cached(q, kv, kv_index).flatten(1))
        return output

    def _record(self, q: Tensor, k: Tensor, layout: AttentionLayout) -> None:
        """Compute and record the attention weights of the captured heads, sequence by sequence: (B, H, T, S)."""
        heads = [self.kept.index(head) for head in chosen_heads(range(self.heads)) if head in self.kept]
        queries, keys = layout.queries, layout.keys
        weights = q.new_zeros(len(queries), len(heads), queries.longest, keys.longest, dtype=torch.float32)
        for row, (query, key) in enumerate(zip(queries.split(q[:, heads]), keys.split(k[:, heads]), strict=True)):
            if len(query) and len(key):
                weights[row, :, : len(query), : len(key)] = weights_of(query, key, self.causal).float()
        record(self.place, weights, self.layer, [self.kept[head] for head in heads])

    def cut(self, name: str, value: Tensor) -> Tensor:
        """Return a parameter of all heads, such as a checkpoint's, without the pruned heads."""
        parts = {"in_proj": 1 if self.cross else 3, "kv_proj": 2, "out_proj": 1}[name.partition(".")[0]]
        axis = 1 if name == "out_proj.weight" else 0
        if name == "out_proj.bias" or value.ndim <= axis or value.shape[axis] != parts * self.heads * self.size:
            return value
        rows = torch.tensor(_head_rows(self.kept, self.size, self.heads, parts))
        return value.index_select(axis, rows.to(value.device))


def _head_rows(kept: Sequence[int], size: int, heads: int, parts: int) -> list[int]:
    """Return the rows of the kept heads in a matrix of `parts` (query, key, value), each of all heads."""
    return [(part * heads + head) * size + row for part in range(parts) for head in kept for row in range(size)]
