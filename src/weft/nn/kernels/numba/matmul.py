"""Matrix products with packed weights on the CPU: y = x Wᵀ, compiled by LLVM for the instructions of this machine.

W (N, K) is packed once into panels of a few columns of Wᵀ, so that a product reads it in order (Goto and van de Geijn
2008, *Anatomy of high-performance matrix multiplication*). `weft.nn.kernels.numba.microkernel` multiplies some rows
of x with one panel. Each step of its loop over K loads one row of the panel, and for each row of x one value.

| format    | x       | W       | a step of a 32-bit lane                                                             |
|-----------|---------|---------|-------------------------------------------------------------------------------------|
| `FLOAT32` | float32 | float32 | 1 product: a fused multiply-add, where the machine has it                           |
| `UINT8`   | uint8   | int8    | 4 products: VNNI's `vpdpbusd`, or `vpmaddubsw` and `vpmaddwd` on older x86          |
| `INT16`   | int16   | int8    | 2 products, on other machines                                                       |

All sums of integers are exact. `vpmaddubsw` adds two products in 16 bits, which saturate at 32,767: where it is used,
`quantize_weight` keeps every pair of weights small enough that they never do.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.nn.kernels.numba.microkernel import COLUMNS, FEW_ROWS, ROWS, VNNI, cpu_features, has_vnni, multiply_panel
from weft.nn.rnn.fused.codegen_numba import cached_njit

_L2_BYTES = 1 << 19  # of x whose products with all panels are computed before the next rows: an L2 cache
_MIN_PARALLEL = 1 << 24  # products from which on it pays to use several threads


class Format(NamedTuple):
    """Format of x: q = round(x / scale) + zero, 0 ≤ q ≤ steps, with a scale and a zero point a row; or float32."""

    dtype: torch.dtype
    group: int  # values in 32 bits
    steps: int = 0


FLOAT32 = Format(torch.float32, 1)
UINT8 = Format(torch.uint8, 4, 255)
INT16 = Format(torch.int16, 2, 1023)

WIDEST = (2**31 - 1) // (127 * INT16.steps)  # columns of W up to which no sum of products overflows
_MAX_PAIR = 128  # sum of two weights: 255 times as much fits in 16 bits


@cache
def integer_format() -> Format | None:
    """Return the integer format whose products are exact on this machine, by a self-test; None if there is none."""
    forms = (UINT8, INT16) if "ssse3" in cpu_features() else (INT16,)
    return next((form for form in forms if is_exact(form)), None)


def is_exact(form: Format) -> bool:
    """Return whether integer products are exact in the hardest case: all values at either end of their range."""
    q = torch.tensor([0, form.steps])[torch.arange(13 * 72).view(13, 72) // 5 % 2]  # 13 rows: a tile, and a part of one
    weight, _ = quantize_weight(torch.tensor([-1.0, 1.0, 1.0])[torch.arange(41 * 72).view(41, 72) // 7 % 3])
    zero = torch.arange(13, dtype=torch.int32) * (form.steps // 12)
    x = Integers(q.to(form.dtype), torch.ones(13), zero)
    y = PackedWeights.integers(weight, torch.ones(41), form).multiply(x)
    return torch.equal(y, ((q - zero[:, None]) @ weight.long().t()).float())


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix (N, K) to int8, with a scale for each row, so that no sum saturates on this machine."""
    magnitude = weight.abs()
    max_scale = magnitude.amax(1) / 127
    if not has_vnni():
        pairs = torch.nn.functional.pad(magnitude, (0, magnitude.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2)
        max_scale = torch.maximum(
            max_scale, pairs.amax(1) / (_MAX_PAIR - 1)
        )  # each of the two may be rounded up by a half
    scale = max_scale.clamp(min=1e-12)
    return torch.round(weight / scale[:, None]).to(torch.int8), scale


class Integers(NamedTuple):
    """A matrix x (M, K) in an integer format."""

    values: Tensor  # (M, K), padded to whole groups
    scale: Tensor  # (M,) float32
    zero: Tensor  # (M,) int32


@dataclass(frozen=True)
class PackedWeights:
    """A matrix (N, K) as panels (N / columns, K / group, columns), and vectors (N,), padded to whole panels."""

    panels: Tensor  # 32-bit groups: float32, or int32 that hold several integers
    scale: Tensor  # float32, of quantized weights
    sums: Tensor  # int32: of each row of W, to be multiplied by the zero point of x
    rows: int  # N

    @classmethod
    def floats(cls, weight: Tensor) -> "PackedWeights":
        """Pack a float32 matrix."""
        panels = np.empty((-(-len(weight) // COLUMNS), weight.shape[1], COLUMNS), np.float32)  # in huge pages
        _pack(weight.detach().numpy(), panels)
        return cls(torch.from_numpy(panels), torch.empty(0), torch.empty(0, dtype=torch.int32), len(weight))

    @classmethod
    def integers(cls, weight: Tensor, scale: Tensor, form: Format) -> "PackedWeights":
        """Pack the result of `quantize_weight`, for products with x in a format."""
        sums = weight.sum(1, dtype=torch.int32)
        return cls(_integer_panels(weight, form), pad_to_panels(scale), pad_to_panels(sums), len(weight))

    def multiply(self, x: Tensor | Integers, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + bias, float32 (M, N). A row's result does not depend on the other rows, to the last bit."""
        if isinstance(x, Tensor):
            x = Integers(x, _NO_SCALE, _NO_ZERO)
        if out is None:
            out = torch.empty(len(x.values), self.rows)
        if not len(x.values):
            return out
        bias = pad_to_panels(torch.zeros(self.rows) if bias is None else bias.detach())
        arrays = [tensor.numpy() for tensor in (*x, self.panels, self.scale, self.sums, bias, out)]
        count, threads = len(self.panels), torch.get_num_threads()
        if not uses_threads(len(x.values) * self.panels.numel()):
            multiply_panels(0, count, *arrays)
        else:
            bounds = [count * part // threads for part in range(threads + 1)]
            list(_pool(threads).map(lambda bound: multiply_panels(*bound, *arrays), pairwise(bounds)))
        return out


def uses_threads(products: int) -> bool:
    """Return whether so many products are shared by several threads."""
    return torch.get_num_threads() > 1 and products >= _MIN_PARALLEL


_NO_SCALE, _NO_ZERO = torch.empty(0), torch.empty(0, dtype=torch.int32)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "weft-matmul")


os.register_at_fork(after_in_child=_pool.cache_clear)


def pad_to_panels(vector: Tensor) -> Tensor:
    """Pad a vector to whole panels."""
    return (
        vector.contiguous()
        if len(vector) % COLUMNS == 0
        else torch.nn.functional.pad(vector, (0, -len(vector) % COLUMNS))
    )


def _integer_panels(weight: Tensor, form: Format) -> Tensor:
    """Return int8 (N, K) as int32 panels (N / columns, K / group, columns), padded with zeros."""
    group = form.group
    converted = weight if form is UINT8 else weight.to(form.dtype)
    padded = torch.nn.functional.pad(converted, (0, -converted.shape[1] % group, 0, -len(converted) % COLUMNS))
    panels = padded.view(-1, COLUMNS, padded.shape[1] // group, group).transpose(1, 2).contiguous()
    return panels.view(torch.int32).squeeze(3)


@cached_njit()
def _pack(weight, panels):  # type: ignore[no-untyped-def]
    rows, columns = weight.shape[0], panels.shape[2]
    for panel in range(panels.shape[0]):
        first = panel * columns
        for k in range(weight.shape[1]):
            for column in range(min(columns, rows - first)):
                panels[panel, k, column] = weight[first + column, k]
            for column in range(rows - first, columns):
                panels[panel, k, column] = 0


@cached_njit()
def multiply_panels(low, high, x, x_scale, x_zero, panels, scale, sums, bias, out):  # type: ignore[no-untyped-def]
    """Multiply with the panels low … high."""
    steps, M = panels.shape[1], x.shape[0]
    block = max(1, _L2_BYTES // (4 * steps) // ROWS) * ROWS
    rows = ROWS if x.itemsize == 4 or VNNI else FEW_ROWS  # other formats need registers for products, too
    for first in range(0, M, block):
        for panel in range(low, high):
            column = 4 * panel * COLUMNS
            multiply_panel(
                x,
                rows,
                min(block, M - first),
                x.ctypes.data + first * x.strides[0],
                x.strides[0],
                4,
                x_scale.ctypes.data + 4 * first,
                x_zero.ctypes.data + 4 * first,
                panels.ctypes.data + column * steps,
                4 * COLUMNS,
                steps,
                scale.ctypes.data + column,
                sums.ctypes.data + column,
                bias.ctypes.data + column,
                out.ctypes.data + first * out.strides[0] + column,
                out.strides[0],
                out.shape[1] - panel * COLUMNS,
            )
