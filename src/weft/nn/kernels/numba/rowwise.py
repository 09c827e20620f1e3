"""What a Transformer does with one token at a time, in compiled loops: the CPU's way to answer.

One loop over the rows of a product does all that comes before the next product, so that a row stays in the nearest
cache: the activation, or the sum and the norm. Where the next product is of integers, the loop rounds the row to them,
too, as `weft.nn.layers.quantization` says.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.kernels.numba.matmul import FLOAT32, Format, Integers
from weft.nn.rnn.fused.codegen_numba import keeper, tanh_of
from weft.nn.transformer.blocks import gelu_tanh

_KINDS: dict[Any, int] = {F.relu: 0, F.gelu: 1, gelu_tanh: 2, F.silu: 3}
_tanh = tanh_of(torch.float32)
_ONE, _HALF, _FAR = np.float32(1), np.float32(0.5), np.float32(4)
_ROOT_HALF, _ROOT, _CUBIC = map(np.float32, [math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715])
_A0, _A1, _A2 = map(np.float32, [-1.60960333262415e-2, -2.95459980854025e-3, -7.34990630326855e-4])
_A3, _A4 = map(np.float32, [-5.69250639462346e-5, -2.10102402082508e-6])
_A5, _A6 = map(np.float32, [2.77068142495902e-8, -2.72614225801306e-10])
_B0, _B1, _B2 = map(np.float32, [-1.42647390514189e-2, -7.37332916720468e-3, -1.68282697438203e-3])
_B3, _B4 = map(np.float32, [-2.13374055278905e-4, -1.45660718464996e-5])


class Rows(NamedTuple):
    """Tokens as the next product reads them: float32 (N, D), and in an integer format, where it is one of integers."""

    values: Tensor
    integers: Integers | None = None


def _arrays(integers: Integers | None, form: Format) -> tuple[Any, ...]:
    """What loops write integers to: nothing, where the product is of float32."""
    if integers is None:
        return _EMPTY
    return *(each.numpy() for each in integers), form.steps


_EMPTY = (np.empty((0, 1), np.uint8), np.empty(0, np.float32), np.empty(0, np.int32), 0)


def _allocate(values: Tensor, form: Format) -> Integers | None:
    count, width = values.shape
    if form is FLOAT32:
        return None
    padded = torch.empty(count, width + -width % form.group, dtype=form.dtype)
    return Integers(padded, torch.empty(count), torch.empty(count, dtype=torch.int32))


def quantize_rows(x: Tensor, form: Format) -> Rows:
    """Round tokens (N, D) to integers, each by its own scale and zero; float32 is left as it is."""
    values = x.contiguous()
    integers = _allocate(values, form)
    if integers is not None:
        _quantize_all(values.numpy(), *_arrays(integers, form))
    return Rows(values, integers)


def activate(activation: Callable[..., Tensor], values: Tensor, form: Format) -> Rows:
    """Return act(values), in place."""
    integers = _allocate(values, form)
    _activate(_KINDS[activation], values.numpy(), *_arrays(integers, form))
    return Rows(values, integers)


def add_norm(x: Tensor, y: Tensor, norm: nn.LayerNorm, form: Format) -> Rows:
    """Return norm(x + y); the sum itself takes the place of y (N, D)."""
    values = torch.empty_like(x)
    integers = _allocate(values, form)
    known = (each.detach().numpy() for each in (x, y, norm.weight, norm.bias))
    _add_norm(*known, np.float32(norm.eps), values.numpy(), *_arrays(integers, form))
    return Rows(values, integers)


@keeper()
def _ordered(bits):  # type: ignore[no-untyped-def]
    """Map the bits of a float to an integer of the same order, and back: vectors can find the least of integers."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@keeper()
def quantize_row(row, values, integers, scale, zero, steps):  # type: ignore[no-untyped-def]
    """Write round(x / scale) + zero, with the scale for which min(x, 0) is 0 and max(x, 0) is `steps`; NaN spreads."""
    least = most = np.int32(0)
    for place in range(values.shape[1]):
        key = _ordered(np.float32(values[row, place]).view(np.int32))
        least, most = min(least, key), max(most, key)
    low, high = np.int32(_ordered(least)).view(np.float32), np.int32(_ordered(most)).view(np.float32)
    unit = max((high - low) / np.float32(steps), np.float32(1e-30))
    up = np.float32(1) / unit
    shift = np.int32(np.float32(0.5) - low * up)
    scale[row], zero[row] = unit, shift
    half = np.float32(shift) + np.float32(0.5)
    for place in range(values.shape[1]):
        integers[row, place] = min(np.int32(values[row, place] * up + half), np.int32(steps))


@keeper()
def _quantize_all(values, integers, scale, zero, steps):  # type: ignore[no-untyped-def]
    for row in range(values.shape[0]):
        quantize_row(row, values, integers, scale, zero, steps)


@keeper(sums=True)
def _add_norm(x, y, weight, bias, eps, values, integers, scale, zero, steps):  # type: ignore[no-untyped-def]
    width = np.float32(x.shape[1])
    for row in range(x.shape[0]):
        total, spread = np.float32(0), np.float32(0)
        for place in range(x.shape[1]):
            y[row, place] = x[row, place] + y[row, place]
            total += y[row, place]
        mean = total / width
        for place in range(x.shape[1]):
            spread += (y[row, place] - mean) * (y[row, place] - mean)
        sharp = _ONE / math.sqrt(spread / width + eps)
        for place in range(x.shape[1]):
            values[row, place] = (y[row, place] - mean) * sharp * weight[place] + bias[place]
        if integers.shape[0]:
            quantize_row(row, values, integers, scale, zero, steps)


@keeper()
def _gelu(x):  # type: ignore[no-untyped-def]
    """x · Φ(x), with Eigen's rational function for erf, which is right to a few units in the last place."""
    z = x * _ROOT_HALF
    z = _FAR if z > _FAR else z
    z = -_FAR if z < -_FAR else z
    y = z * z
    p = z * (_A0 + y * (_A1 + y * (_A2 + y * (_A3 + y * (_A4 + y * (_A5 + y * _A6))))))
    return _HALF * x * (_ONE + p / (_B0 + y * (_B1 + y * (_B2 + y * (_B3 + y * _B4)))))


@keeper()
def _activate(kind, values, integers, scale, zero, steps):  # type: ignore[no-untyped-def]
    for row in range(values.shape[0]):
        if kind == 0:
            for place in range(values.shape[1]):
                values[row, place] = max(values[row, place], np.float32(0))
        elif kind == 1:
            for place in range(values.shape[1]):
                values[row, place] = _gelu(values[row, place])
        elif kind == 2:
            for place in range(values.shape[1]):
                x = values[row, place]
                values[row, place] = _HALF * x * (_ONE + _tanh(_ROOT * (x + _CUBIC * x * x * x)))
        else:
            for place in range(values.shape[1]):
                x = values[row, place]
                values[row, place] = x * (_HALF * _tanh(_HALF * x) + _HALF)
        if integers.shape[0]:
            quantize_row(row, values, integers, scale, zero, steps)
