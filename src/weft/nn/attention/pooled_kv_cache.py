"""Key-value cache of a running batch, which hypotheses join and leave step by step (continuous batching).

A `PooledKVCache` has a pool of rows, and each hypothesis its own length: its token t is in column t. A hypothesis that
joins is copied into free rows; one that leaves gives them back; the others are not touched. In a beam search several
hypotheses continue one: they are a family, and share its rows as in `weft.nn.attention.kv_cache`, by an index, without
copies. All hypotheses of a family have the same length, so that a row that one of them no longer writes to has its next
column free for another. A family's rows return to the pool when its last hypothesis leaves.

A `PooledSources` holds the keys and values of sources end to end. Those of sources that are gone are dropped when their
room is needed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from weft.nn.attention.kv_cache import INITIAL_COLUMNS, KVCache, KVIndex, KVStorage, moved_index

MIN_ROWS = 8  # of a pool


@dataclass
class RowPool:
    """Which rows of a storage are free, and which a family of hypotheses owns."""

    free: list[int] = field(default_factory=list)
    owned: dict[int, list[int]] = field(default_factory=dict)  # by family
    families: int = 0  # given out so far

    def take(self, family: int) -> int:
        """Return a free row, which then belongs to the family."""
        row = self.free.pop()
        self.owned.setdefault(family, []).append(row)
        return row

    def release(self, family: int) -> None:
        """Give back all rows of a family."""
        self.free += self.owned.pop(family)


@dataclass(frozen=True)
class PooledKVCache(KVCache):
    """The cache of a running batch; it is updated in place, so that only the newest one may be used.

    Columns are counted from the end of each hypothesis: `at` is 0, and one of n tokens begins at `first` = -n.
    """

    pool: RowPool = field(default_factory=RowPool)
    rows: tuple[int, ...] = ()  # the row that each hypothesis writes to
    families: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()  # tokens of each hypothesis

    @classmethod
    def like(cls, cache: KVCache) -> "PooledKVCache":
        """Return an empty cache, with the layers of another one."""
        storage = KVStorage(
            [layer.new_zeros(0, INITIAL_COLUMNS, *layer.shape[2:]) for layer in cache.storage.layers], 0
        )
        index = cache.index.new_zeros(0, INITIAL_COLUMNS)
        return cls(storage, index, cache.first[:0], 0, torch.zeros_like(cache.at))

    def join(self, other: KVCache) -> "PooledKVCache":
        """Return the cache of these hypotheses and, after them, copies of the other's."""
        sizes = (other.end - other.first).tolist()
        cache = self._with_columns(max(sizes, default=0))
        cache._reserve(len(sizes))
        families = range(cache.pool.families, cache.pool.families + len(sizes))
        cache.pool.families += len(sizes)
        rows = [cache.pool.take(family) for family in families]
        cache._copy(other, rows, sizes)
        new_rows = torch.tensor(rows, dtype=torch.int32, device=cache.index.device)[:, None]
        columns = torch.arange(cache.storage.capacity, dtype=torch.int32, device=cache.index.device)
        return replace(
            cache,
            index=torch.cat([cache.index, new_rows * cache.storage.capacity + columns]),
            first=torch.cat([cache.first, other.first - other.end]),
            end=max(cache.end, *sizes, 0),
            rows=(*cache.rows, *rows),
            families=(*cache.families, *families),
            sizes=(*cache.sizes, *sizes),
        )

    def _copy(self, other: KVCache, rows: Sequence[int], sizes: Sequence[int]) -> None:
        """Copy the keys and values of the other cache's hypotheses into rows, from column 0 on."""
        device = self.index.device
        length = torch.tensor(sizes, device=device)
        row = torch.repeat_interleave(torch.tensor(rows, device=device), length)
        hypothesis = torch.repeat_interleave(torch.arange(len(sizes), device=device), length)
        column = torch.arange(len(row), device=device) - (length.cumsum(0) - length)[hypothesis]
        sources = other.index[hypothesis, column + other.first.long()[hypothesis]].long()
        for layer, other_layer in zip(self.storage.layers, other.storage.layers, strict=True):
            layer[row, column] = other_layer.flatten(0, 1)[sources]

    def select(self, rows: Tensor) -> "PooledKVCache":
        """Return the cache whose hypothesis b continues hypothesis rows[b]; keys and values stay where they are."""
        kept = rows.tolist()
        if kept == list(range(len(self.rows))):
            return self
        families = tuple(self.families[row] for row in kept)
        for family in set(self.families) - set(families):
            self.pool.release(family)
        needed = sum(
            (Counter(families) - Counter({family: len(own) for family, own in self.pool.owned.items()})).values()
        )
        self._reserve(needed)
        sizes = tuple(self.sizes[row] for row in kept)
        return replace(
            self,
            index=self.index.index_select(0, rows),
            first=self.first.index_select(0, rows),
            end=max(sizes, default=0),
            rows=self._assign_rows(kept, families),
            families=families,
            sizes=sizes,
        )

    def _assign_rows(self, kept: Sequence[int], families: Sequence[int]) -> tuple[int, ...]:
        """Return a row for each hypothesis: its own for the first that continues it, for others a row of the family."""
        kept_rows = {self.rows[row] for row in kept}
        spare = {family: [row for row in self.pool.owned[family] if row not in kept_rows] for family in set(families)}
        rows = []
        for row, family in zip(kept, families, strict=True):
            if self.rows[row] in kept_rows:
                kept_rows.remove(self.rows[row])
                rows.append(self.rows[row])
            else:
                rows.append(spare[family].pop() if spare[family] else self.pool.take(family))
        return tuple(rows)

    def opened(self) -> "PooledKVCache":
        """Return the cache with one more column for each hypothesis, not yet written."""
        cache = self._with_columns(self.end + 1)
        rows = torch.tensor(self.rows, dtype=torch.int32, device=cache.index.device)
        column = -cache.first[:, None].long()
        cache.index.scatter_(1, column, rows[:, None] * cache.storage.capacity + column.int())
        sizes = tuple(size + 1 for size in self.sizes)
        return replace(cache, first=cache.first - 1, end=self.end + 1, sizes=sizes)

    def write(self, layer: int, kv: Tensor) -> Tensor:
        """Write a layer's keys and values (B, 2, H, d) into each hypothesis's last column; return all it has."""
        layer_kv = self.storage.layers[layer].flatten(0, 1)
        last = (-self.first - 1)[:, None].long()
        layer_kv[self.index.gather(1, last)[:, 0].long()] = kv.to(layer_kv.dtype)
        return layer_kv

    @cached_property
    def kv_index(self) -> KVIndex:
        """The index of what each hypothesis attends to: all its columns. It is the same for every layer."""
        return KVIndex(self.index[:, : self.end].contiguous(), torch.zeros_like(self.first), -self.first)

    def _with_columns(self, columns: int) -> "PooledKVCache":
        """Return the cache with at least so many columns."""
        before = self.storage.capacity
        if columns <= before:
            return self
        enlarged = self.storage.enlarged(self.storage.rows, columns - 1, before)
        self.storage.layers = enlarged.layers
        return replace(self, index=moved_index(self.index, before, self.storage.capacity))

    def _reserve(self, rows: int) -> None:
        """Make sure that so many rows are free."""
        missing = rows - len(self.pool.free)
        if missing <= 0:
            return
        before = self.storage.rows
        after = max(before + missing, 2 * before, MIN_ROWS)
        self.storage.layers = [
            torch.cat([layer, layer.new_zeros(after - before, *layer.shape[1:])]) for layer in self.storage.layers
        ]
        self.pool.free += range(before, after)


@dataclass(frozen=True)
class PooledSources:
    """Keys and values of the sources of a running batch, (M, 2, H, d) for each layer, with room for more."""

    layers: tuple[Tensor, ...]
    index: KVIndex
    filled: int

    @classmethod
    def of(cls, layers: tuple[Tensor, ...], index: KVIndex) -> "PooledSources":
        """Return the sources of a batch as it was started."""
        return cls(layers, index, len(layers[0]) if layers else 0)

    def join(self, other: "PooledSources") -> "PooledSources":
        """Return these sources and, after them, those of the other."""
        sources = self._with_room(other.filled)
        for layer, new in zip(sources.layers, other.layers, strict=True):
            layer[sources.filled : sources.filled + other.filled] = new[: other.filled]
        slots = _stack(sources.index.slots, other.index.slots + sources.filled)
        first, last = (torch.cat(pair) for pair in list(zip(sources.index, other.index, strict=True))[1:])
        return PooledSources(sources.layers, KVIndex(slots, first, last), sources.filled + other.filled)

    def _with_room(self, count: int) -> "PooledSources":
        """Return the sources with room for `count` more; those that nobody attends to are dropped if it is short."""
        capacity = len(self.layers[0]) if self.layers else 0
        if self.filled + count <= capacity:
            return self
        slots, first, last = self.index
        step = torch.arange(slots.shape[1], device=slots.device)
        real = (step >= first[:, None]) & (step < last[:, None])
        kept, place = slots[real].long().unique(return_inverse=True)
        moved = torch.zeros_like(slots)
        moved[real] = place.int()
        capacity = max(capacity, 2 * (len(kept) + count))
        layers = []
        for layer in self.layers:
            layers.append(layer.new_zeros(capacity, *layer.shape[1:]))
            layers[-1][: len(kept)] = layer[kept]
        longest = int(last.max()) if len(last) else 0
        return PooledSources(tuple(layers), KVIndex(moved[:, :longest].contiguous(), first, last), len(kept))


def _stack(slots: Tensor, others: Tensor) -> Tensor:
    """Return two indices (B, T) one above the other, with zeros after the shorter rows."""
    stacked = slots.new_zeros(len(slots) + len(others), max(slots.shape[1], others.shape[1]))
    stacked[: len(slots), : slots.shape[1]] = slots
    stacked[len(slots) :, : others.shape[1]] = others
    return stacked
