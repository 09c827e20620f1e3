"""Linear layers that use weft's own matrix product (`weft.nn.kernels.numba.matmul`) for inference on the CPU.

It needs packed weights. Inside `frozen_weights` each matrix is packed at its first product with many rows, and cached
until that scope ends; outside nothing is cached, so that weights may change in any way between two calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from weft.nn.kernels import dispatch

if TYPE_CHECKING:
    from weft.nn.kernels.numba.matmul import PackedWeights


class _PackedEntry(NamedTuple):
    """A matrix, its version when it was packed, and its panels."""

    weight: Tensor  # held, so that no other tensor gets its id
    version: int
    packed: "PackedWeights"


@dataclass
class _Scope:
    """The packed matrices of a scope, by the ids of the matrices, and how many `frozen_weights` are inside it."""

    cache: dict[int, _PackedEntry] = field(default_factory=dict)
    users: int = 0
    lock: Lock = field(default_factory=Lock)


_scope: ContextVar[_Scope | None] = ContextVar("scope", default=None)


@contextmanager
def frozen_weights() -> Iterator[None]:
    """Context in which no weight changes, so that matrices are packed once; threads in a copy of it share them."""
    scope = _scope.get()
    if scope is None or not scope.users:
        scope = _Scope()
        _scope.set(scope)  # never reset: a generator may end in another context than it began in
    with scope.lock:
        scope.users += 1
    try:
        yield
    finally:
        with scope.lock:
            scope.users -= 1
            if not scope.users:
                scope.cache = {}


def packed(weight: Tensor, rows: int) -> "PackedWeights | None":
    """Return a matrix packed in this scope; None where a product of so many rows is left to PyTorch."""
    scope = _scope.get()
    if scope is None or not scope.users:
        return None
    entry = scope.cache.get(id(weight))
    if entry is not None and entry.version == weight._version:
        return entry.packed
    return _pack(weight, scope) if rows >= dispatch.min_packed_rows() else None


def _pack(weight: Tensor, scope: _Scope) -> "PackedWeights":
    """Pack a matrix, unless another thread has just done it."""
    pack = dispatch.matmul_module().PackedWeights.floats
    with scope.lock:
        entry = scope.cache.get(id(weight))
        if entry is None or entry.version != weight._version:
            entry = scope.cache[id(weight)] = _PackedEntry(weight, weight._version, pack(weight))
    return entry.packed


class Linear(nn.Linear):
    """A linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_features) to (N, out_features)."""
        output = self.product(x, self.bias)
        return super().forward(x) if output is None else output

    def product(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor | None:
        """Return x Wᵀ + bias by weft's own product, in `out` where that is given; None where PyTorch's is used."""
        if not dispatch.packed_matmul(x, self.weight):
            return None
        weights = packed(self.weight, len(x))
        return None if weights is None else weights.multiply(x.contiguous(), bias, out)
