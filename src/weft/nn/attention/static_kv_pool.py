"""Key-value cache of a running batch at fixed addresses, so that a CUDA graph can capture a step of all its hypotheses.

Row b of a `StaticKVPool` belongs to one hypothesis, or to none: its token t is in column t. The number of its tokens is
counted on the device, and a row that is not `active` does not count on: what a step computes for it is written over
its last column, and ignored. Unlike those of `weft.nn.attention.pooled_kv_cache`, rows are not shared, so there are no
beams.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from weft.nn.attention.kv_cache import KVCache, KVIndex, KVStorage
from weft.tokens import to_device


@dataclass(frozen=True)
class StaticKVPool(KVCache):
    """A cache that each step updates in place; columns are counted as in `PooledKVCache`, and `end` is the capacity."""

    active: Tensor  # (R,) int32: 1 where a hypothesis goes on
    last: Tensor  # (R,) int32: tokens of each hypothesis; of a row that was never used, 1
    zero: Tensor  # (R,) int32

    @classmethod
    def make(cls, shapes: Sequence[tuple[int, int]], rows: int, capacity: int, like: Tensor) -> "StaticKVPool":
        """Return an empty pool: each layer has so many heads of a size, in the dtype and on the device of `like`."""
        layers = [like.new_zeros(rows, capacity, 2, *shape) for shape in shapes]
        index = torch.arange(rows * capacity, dtype=torch.int32, device=like.device).view(rows, capacity)
        active, zero = (torch.zeros_like(index[:, 0]) for _ in range(2))
        last, at = torch.ones_like(zero), torch.zeros(1, dtype=torch.int64, device=like.device)
        return cls(KVStorage(layers, capacity), index, -last, capacity, at, active, last, zero)

    def first_rows(self, rows: int) -> "StaticKVPool":
        """Return the pool of the first rows; the memory is the same."""
        views = {name: getattr(self, name)[:rows] for name in ("index", "first", "active", "last", "zero")}
        return replace(self, **views)

    def put(
        self,
        rows: Sequence[int],
        cache: KVCache,
        hypotheses: Sequence[int],
        tokens: Sequence[int],
        source_tokens: Sequence[int] = (),
    ) -> None:
        """Copy hypotheses of another cache, of so many tokens each, into rows of this one."""
        row, hypothesis, column = token_places(rows, hypotheses, tokens, self.index.device)
        slots = cache.index[hypothesis, column + cache.first.long()[hypothesis]].long()
        for layer, other in zip(self.storage.layers, cache.storage.layers, strict=True):
            layer[row, column] = other.flatten(0, 1)[slots].to(layer.dtype)
        number, size = to_device(torch.from_numpy(np.array([rows, tokens])), self.index.device)
        self.last[number] = size.int()

    def copy_from(self, other: "StaticKVPool") -> None:
        """Copy the rows of a smaller pool into the first rows."""
        rows, capacity = other.index.shape
        for layer, other_layer in zip(self.storage.layers, other.storage.layers, strict=True):
            layer[:rows, :capacity] = other_layer
        self.active[:rows] = other.active
        self.last[:rows] = other.last

    def opened(self) -> "StaticKVPool":
        """Add one more column to each active row, in place."""
        self.last.add_(self.active)
        torch.neg(self.last, out=self.first)
        return self

    def write(self, layer: int, kv: Tensor) -> Tensor:
        """Write a layer's keys and values (R, 2, H, d) into each row's last column; return all the layer has."""
        layer_kv = self.storage.layers[layer].flatten(0, 1)
        slot = self.index.gather(1, self.last[:, None].long() - 1)[:, 0]
        return layer_kv.index_copy_(0, slot.long(), kv.to(layer_kv.dtype))

    @property
    def kv_index(self) -> KVIndex:
        """The index of what each hypothesis attends to: all its columns."""
        return KVIndex(self.index, self.zero, self.last)

    @property
    def position(self) -> Tensor:
        """Position of each row's last token within its text, from 0: (R,)."""
        return self.last - 1


def token_places(
    rows: Sequence[int], hypotheses: Sequence[int], sizes: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each token to be copied its row, the hypothesis that has it, and its number there, (N,) each."""
    size = np.array(sizes, np.int64)
    number = np.arange(size.sum()) - np.repeat(size.cumsum() - size, size)
    row, hypothesis = (np.repeat(np.array(values, np.int64), size) for values in (rows, hypotheses))
    return tuple(to_device(torch.from_numpy(np.stack([row, hypothesis, number])), device))
