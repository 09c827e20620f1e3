"""Linear layers that use weft's own matrix product (`weft.nn.kernels.numba.matmul`) for inference on the CPU.

It needs packed weights. Inside `frozen_weights` each matrix is packed at its first product with many rows, and cached
until the last such scope ends; outside nothing is cached, so that weights may change in any way between two calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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


class _Scopes:
    """The number of open scopes, and the cache of packed matrices, by the ids of the matrices."""

    count = 0
    cache: dict[int, _PackedEntry] = {}  # noqa: RUF012
    lock = Lock()


@contextmanager
def frozen_weights() -> Iterator[None]:
    """Context in which no weight changes, so that matrices are packed once."""
    with _Scopes.lock:
        _Scopes.count += 1
    try:
        yield
    finally:
        with _Scopes.lock:
            _Scopes.count -= 1
            if not _Scopes.count:
                _Scopes.cache = {}


def packed(weight: Tensor, rows: int) -> "PackedWeights | None":
    """Return a matrix packed in this scope; None where a product of so many rows is left to PyTorch."""
    if not _Scopes.count:
        return None
    entry = _Scopes.cache.get(id(weight))
    if entry is not None and entry.version == weight._version:
        return entry.packed
    return _pack(weight) if rows >= dispatch.min_packed_rows() else None


def _pack(weight: Tensor) -> "PackedWeights":
    """Pack a matrix, unless another thread has just done it."""
    pack = dispatch.matmul_module().PackedWeights.floats
    with _Scopes.lock:
        entry = _Scopes.cache.get(id(weight))
        if entry is None or entry.version != weight._version:
            entry = _Scopes.cache[id(weight)] = _PackedEntry(weight, weight._version, pack(weight))
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
