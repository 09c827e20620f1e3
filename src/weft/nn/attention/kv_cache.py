"""Key-value cache for generation: keys and values are written once and never moved.

A `KVStorage` has, for each layer, (rows, columns) slots for keys and values. A step writes those of its token into the
next column, hypothesis b into row b. An index for each hypothesis names the row of every earlier column, and that index
is all that a beam search reorders: no key or value is ever copied for it.

A `KVCache` is immutable: of two steps from one cache, the second finds its column taken and writes into a copy of the
storage. A `StaticKVCache` is updated in place, at fixed addresses, so that a CUDA graph can capture a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from weft.nn.attention.positions import rows_of
from weft.nn.kernels import dispatch
from weft.tokens import Tokens

INITIAL_COLUMNS = 64  # columns at first; doubled where a text outgrows them


class KVIndex(NamedTuple):
    """Which cached keys and values hypothesis b attends to: the slots[b, first[b]:last[b]]."""

    slots: Tensor  # (B, T) int32
    first: Tensor  # (B,) int32
    last: Tensor  # (B,) int32

    @classmethod
    def of(cls, tokens: Tokens) -> "KVIndex":
        """Return the index of sequences stored end to end: each attends to its own tokens."""
        step = torch.arange(max(tokens.longest, 1), dtype=torch.int32, device=tokens.device)
        slots = (tokens.starts[:-1, None] + step).clamp(max=max(len(tokens.ids) - 1, 0))
        return cls(slots, torch.zeros_like(tokens.starts[1:]), tokens.starts.diff())

    def select(self, rows: Tensor) -> "KVIndex":
        """Return the index of hypotheses rows[b], for each b."""
        return KVIndex(*(field.index_select(0, rows) for field in self))


@dataclass
class KVStorage:
    """Keys and values of all layers, (R, columns, 2, H, d) each, and the number of columns written."""

    layers: list[Tensor]
    filled: int

    @property
    def rows(self) -> int:
        """Number of hypotheses there is room for."""
        return self.layers[0].shape[0]

    @property
    def capacity(self) -> int:
        """Number of columns."""
        return self.layers[0].shape[1]

    def enlarged(self, rows: int, filled: int, kept: int | None = None) -> "KVStorage":
        """Return a larger copy: at least so many rows, and room for a column after `filled` ones.

        The first `kept` columns are copied, by default those that are filled.
        """
        capacity, kept = self.capacity, filled if kept is None else kept
        while capacity <= filled:
            capacity *= 2
        layers = []
        for old in self.layers:
            new = old.new_empty(max(rows, self.rows), capacity, *old.shape[2:])
            new[: self.rows, :kept] = old[:, :kept]
            layers.append(new)
        return KVStorage(layers, filled)


@dataclass(frozen=True)
class KVCache:
    """The key-value cache of a batch of hypotheses: the storage, and the index of each hypothesis into it."""

    storage: KVStorage
    index: Tensor  # (B, columns) int32: the slot of each column, row · columns + column
    first: Tensor  # (B,) int32: the first column; prompts end at the same column, so a shorter one begins later
    end: int  # number of columns written
    at: Tensor  # (1,) int64: the same, on the device

    @classmethod
    def of(cls, prompt: Tokens, layers: Sequence[Tensor]) -> "KVCache":
        """Return the cache of prompts, from each layer's keys and values (N, 2, H, d)."""
        rows, end, device = len(prompt), prompt.longest, prompt.device
        capacity = INITIAL_COLUMNS * (end // INITIAL_COLUMNS + 1)
        lengths = prompt.starts.diff()
        first = end - lengths
        step = torch.arange(len(prompt.ids), device=device)
        row = torch.bucketize(step, prompt.starts[1:], right=True)
        slot = row * capacity + step - prompt.starts[row] + first[row]  # prompts end at the same column
        storage = KVStorage(
            [kv.new_empty(rows * capacity, *kv.shape[1:]).index_copy_(0, slot, kv) for kv in layers], end
        )
        storage.layers = [layer.unflatten(0, (rows, capacity)) for layer in storage.layers]
        index = torch.arange(rows * capacity, dtype=torch.int32, device=device).view(rows, capacity)
        return cls(storage, index, first, end, torch.full((1,), end, device=device))

    def select(self, rows: Tensor) -> "KVCache":
        """Return the cache whose hypothesis b continues hypothesis rows[b]; keys and values stay where they are."""
        return replace(self, index=self.index.index_select(0, rows), first=self.first.index_select(0, rows))

    def join(self, other: "KVCache") -> "KVCache":
        """Return the cache of these hypotheses and, after them, the other's: a pool, which is updated in place."""
        from weft.nn.attention.pooled_kv_cache import PooledKVCache

        return PooledKVCache.like(self).join(self).join(other)

    def opened(self) -> "KVCache":
        """Return the cache with one more column, not yet written."""
        rows, storage, index = len(self.first), self.storage, self.index
        if rows > storage.rows or self.end >= storage.capacity or storage.filled != self.end:
            storage = storage.enlarged(rows, self.end)
            index = moved_index(index, self.storage.capacity, storage.capacity)
        storage.filled = self.end + 1
        own_slots = torch.arange(rows, dtype=torch.int32, device=index.device) * storage.capacity
        index = index.index_copy(1, self.at, (own_slots + self.at.int())[:, None])
        return KVCache(storage, index, self.first, self.end + 1, self.at + 1)

    def write(self, layer: int, kv: Tensor) -> Tensor:
        """Write a layer's keys and values (B, 2, H, d) into the last column; return all the layer has, (M, 2, H, d)."""
        layer_kv = self.storage.layers[layer]
        layer_kv[: len(kv), self.end - 1] = kv
        return layer_kv.flatten(0, 1)

    @property
    def kv_index(self) -> KVIndex:
        """The index of what each hypothesis attends to: all columns from its first one on."""
        return KVIndex(self.index, self.first, self.at.int().expand(len(self.first)))

    @property
    def position(self) -> Tensor:
        """Position of the token in the last column within its text, from 0: (B,)."""
        return self.at - 1 - self.first


@dataclass(frozen=True)
class StaticKVCache(KVCache):
    """A cache at fixed addresses, updated in place by each step; `end` is the number of columns there are.

    `select` lets a hypothesis continue another one of the same prompt; it takes effect in the next step.
    """

    rows: Tensor | None = None  # (B,) the hypothesis that each one continues; None: itself

    @property
    def capacity(self) -> int:
        """Number of tokens that fit for each hypothesis."""
        return self.end

    @classmethod
    def like(cls, other: KVCache, rows: int, capacity: int) -> "StaticKVCache":
        """Return an empty cache for so many hypotheses and columns."""
        storage = KVStorage(
            [layer.new_zeros(rows, capacity, *layer.shape[2:]) for layer in other.storage.layers], capacity
        )
        index, first, at = (other.first.new_zeros(size) for size in ((rows, capacity), rows, 1))
        return cls(storage, index, first, capacity, at)

    def copy_from(self, other: KVCache, rows: Tensor) -> None:
        """Copy the hypotheses `rows` of the other cache, with their keys and values, into this one."""
        columns = min(other.end, self.end)
        slots = other.index[rows, :columns].long()
        for layer, other_layer in zip(self.storage.layers, other.storage.layers, strict=True):
            layer[:, :columns] = other_layer.flatten(0, 1)[slots]
        own = torch.arange(self.index.numel(), dtype=torch.int32, device=rows.device)
        self.index.copy_(own.view_as(self.index))
        self.first.copy_(other.first[rows])
        self.at.copy_(other.at)

    def select(self, rows: Tensor) -> "StaticKVCache":
        """Return the cache whose hypothesis b continues hypothesis rows[b] in the next step."""
        return replace(self, rows=rows)

    def opened(self) -> "StaticKVCache":
        """Add one more column, in place."""
        rows = torch.arange(len(self.first), device=self.at.device) if self.rows is None else self.rows
        if advance := dispatch.cache_advance_kernel(self.storage.layers[0]):
            advance(self.index, rows, self.at)
        else:
            self.index.copy_(self.index.index_select(0, rows))
            own_slots = torch.arange(len(rows), dtype=torch.int32, device=rows.device) * self.storage.capacity + self.at
            self.index.index_copy_(1, self.at.long(), own_slots[:, None])
        self.at.add_(1)
        return replace(self, rows=None)

    def write(self, layer: int, kv: Tensor) -> Tensor:
        """Write a layer's keys and values into the last column, in place."""
        layer_kv = self.storage.layers[layer]
        layer_kv.index_copy_(1, self.at.long() - 1, kv[:, None].to(layer_kv.dtype))
        return layer_kv.flatten(0, 1)


def without_last_tokens(prompt: Tokens) -> Tokens:
    """Return the prompts without their last tokens."""
    lengths = prompt.lengths - 1
    if prompt.longest <= 1:  # no transfer to the device, so that a CUDA graph can capture this
        return replace(prompt, ids=prompt.ids[:0], starts=torch.zeros_like(prompt.starts), lengths=lengths, longest=0)
    # On the device, without waiting for it: before a token there is one that is dropped for each earlier sequence.
    starts = prompt.starts - torch.arange(len(prompt) + 1, dtype=torch.int32, device=prompt.device)
    row = rows_of(Tokens(prompt.ids[: int(lengths.sum())], starts, lengths, prompt.longest - 1))
    kept = torch.arange(len(row), device=prompt.device) + row
    return Tokens(prompt.ids[kept], starts, lengths, prompt.longest - 1)


def moved_index(index: Tensor, before: int, after: int) -> Tensor:
    """Return the index for a storage whose number of columns has grown from `before` to `after`."""
    if before == after:
        return index
    reindexed = index.new_zeros(len(index), after)
    reindexed[:, :before] = index // before * after + index % before
    return reindexed


def attend_cached(q: Tensor, kv: Tensor, kv_index: KVIndex) -> Tensor:
    """Attend with one query a hypothesis, q (B, H, d), to the keys and values in its index: (B, H, d)."""
    if not len(kv):  # nothing to attend to
        return torch.zeros_like(q)
    if kernel := dispatch.cached_attention_kernel(q):
        output: Tensor = kernel(q, kv, kv_index)
        return output
    step = torch.arange(kv_index.slots.shape[1], device=q.device)
    padding = (step < kv_index.first[:, None]) | (step >= kv_index.last[:, None])  # (B, T)
    padded = kv[kv_index.slots.long()].masked_fill(padding[..., None, None, None], 0.0)  # (B, T, 2, H, d)
    k, v = padded.unbind(2)  # unwritten slots may hold NaN, and 0 · NaN is NaN
    scores = torch.einsum("bhd,bthd->bht", q, k) / q.shape[-1] ** 0.5
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)).masked_fill(padding[:, None], float("-inf"))
    weights = torch.softmax(scores, -1).masked_fill(padding[:, None], 0.0)  # of an empty sequence: 0, not 0/0
    return torch.einsum("bht,bthd->bhd", weights.to(v.dtype), v)
