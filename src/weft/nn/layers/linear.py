"""Dense layers whose products on the CPU, to answer and not to learn, are weft's own (`weft.nn.kernels.numba.matmul`).

They read packed weights. Inside `frozen_weights` each matrix is packed once, when it first meets many rows, and kept
until the last such scope ends; outside nothing is kept, so that weights may change in any way between two answers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from weft.nn.kernels.numba.matmul import PackedWeights

_MANY = 48  # rows from which on a product with a packed matrix is worth the packing


class _Kept(NamedTuple):
    """A matrix, what it was when it was packed, and its panels."""

    weight: Tensor  # held, so that no other tensor gets its id
    version: int
    packed: "PackedWeights"


class _Scopes:
    """How many scopes are open, and what was packed inside them, by the ids of the matrices."""

    count = 0
    kept: dict[int, _Kept] = {}  # noqa: RUF012
    lock = Lock()


@contextmanager
def frozen_weights() -> Iterator[None]:
    """Promise that no weight changes inside, so that matrices are packed once."""
    with _Scopes.lock:
        _Scopes.count += 1
    try:
        yield
    finally:
        with _Scopes.lock:
            _Scopes.count -= 1
            if not _Scopes.count:
                _Scopes.kept = {}


def packed(weight: Tensor, rows: int) -> "PackedWeights | None":
    """Return a matrix as it was packed in this scope; None where a product of so many rows is the library's."""
    if not _Scopes.count:
        return None
    kept = _Scopes.kept.get(id(weight))
    if kept is not None and kept.version == weight._version:
        return kept.packed
    return _pack(weight) if rows >= _MANY else None


def _pack(weight: Tensor) -> "PackedWeights":
    """Pack a matrix, unless another thread has just done it."""
    from weft.nn.kernels.numba.matmul import PackedWeights

    with _Scopes.lock:
        kept = _Scopes.kept.get(id(weight))
        if kept is None or kept.version != weight._version:
            kept = _Scopes.kept[id(weight)] = _Kept(weight, weight._version, PackedWeights.floats(weight))
    return kept.packed


class Linear(nn.Linear):
    """A dense layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_features) to (N, out_features)."""
        found = self.product(x, self.bias)
        return super().forward(x) if found is None else found

    def product(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor | None:
        """Return x Wᵀ + bias by weft's own product, in `out` where that is given; None where the library's serves."""
        if torch.is_grad_enabled() or x.dtype is not torch.float32 or x.device.type != "cpu" or x.ndim != 2:
            return None
        if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling() or self.weight.is_inference():
            return None
        matrix = packed(self.weight, len(x))
        return None if matrix is None else matrix.multiply(x.contiguous(), bias, out)
