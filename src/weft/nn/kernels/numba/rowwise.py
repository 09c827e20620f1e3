"""Row-wise operations of a Transformer in numba, for inference on the CPU: activation, residual sum and layer norm.

One loop over the rows of a product does all that comes before the next product, the activation or the sum and the norm,
so that a row stays in the L1 cache. Where the next product is an integer one, the loop quantizes the row, too, as
`weft.nn.layers.quantization` describes.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.kernels.numba.matmul import FLOAT32, Format, Integers
from weft.nn.layers.activations import gelu_tanh
from weft.nn.rnn.fused.codegen_numba import cached_njit, tanh_of

_ACTIVATION_CODES: dict[Any, int] = {F.relu: 0, F.gelu: 1, gelu_tanh: 2, F.silu: 3}
_tanh = tanh_of(torch.float32)
_ONE, _HALF, _ERF_LIMIT = np.float32(1), np.float32(0.5), np.float32(4)
_ROOT_HALF, _ROOT, _CUBIC = map(np.float32, [math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715])
_A0, _A1, _A2 = map(np.float32, [-1.60960333262415e-2, -2.95459980854025e-3, -7.34990630326855e-4])
_A3, _A4 = map(np.float32, [-5.69250639462346e-5, -2.10102402082508e-6])
_A5, _A6 = map(np.float32, [2.77068142495902e-8, -2.72614225801306e-10])
_B0, _B1, _B2 = map(np.float32, [-1.42647390514189e-2, -7.37332916720468e-3, -1.68282697438203e-3])
_B3, _B4 = map(np.float32, [-2.13374055278905e-4, -1.45660718464996e-5])


class Rows(NamedTuple):
    """The input of the next product: float32 (N, D), and the same quantized, where that product is an integer one."""

    values: Tensor
    integers: Integers | None = None


def integer_arrays(integers: Integers | None) -> tuple[Any, ...]:
    """Return the arrays that loops write integers to: empty ones, where the product is in float32."""
    return _EMPTY if integers is None else tuple(x.numpy() for x in integers)


_EMPTY = (np.empty((0, 1), np.uint8), np.empty(0, np.float32), np.empty(0, np.int32))


def allocate_integers(count: int, width: int, form: Format) -> Integers | None:
    """Allocate memory for tokens (N, D) in an integer format; None where the format is float32."""
    if form is FLOAT32:
        return None
    padded = torch.empty(count, width + -width % form.group, dtype=form.dtype)
    return Integers(padded, torch.empty(count), torch.empty(count, dtype=torch.int32))


def activation_code(activation: Callable[..., Tensor]) -> int:
    """Return the number of an activation, by which loops know it."""
    return _ACTIVATION_CODES[activation]


def quantize_rows(x: Tensor, form: Format) -> Rows:
    """Quantize tokens (N, D), each with its own scale and zero point; in the format float32 they stay as they are."""
    values = x.contiguous()
    integers = allocate_integers(len(values), values.shape[1], form)
    if integers is not None:
        quantize_all(values.numpy(), *integer_arrays(integers), form.steps)
    return Rows(values, integers)


def activate(activation: Callable[..., Tensor], values: Tensor, form: Format) -> Rows:
    """Apply the activation to values, in place, and return them."""
    integers = allocate_integers(len(values), values.shape[1], form)
    activate_values(_ACTIVATION_CODES[activation], values.numpy(), *integer_arrays(integers), form.steps)
    return Rows(values, integers)


def add_norm_rows(x: Tensor, y: Tensor, norm: nn.LayerNorm, form: Format) -> Rows:
    """Return norm(x + y); y (N, D) is overwritten by the sum."""
    values = torch.empty_like(x)
    integers = allocate_integers(len(values), values.shape[1], form)
    inputs = (tensor.detach().numpy() for tensor in (x, y, norm.weight, norm.bias))
    add_norm(*inputs, np.float32(norm.eps), values.numpy(), *integer_arrays(integers), form.steps)
    return Rows(values, integers)


@cached_njit()
def _order_preserving(bits):  # type: ignore[no-untyped-def]
    """Map the bits of a float to an integer of the same order, and back: the minimum of integers vectorises."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@cached_njit()
def quantize_row(row, values, integers, scale, zero, steps):  # type: ignore[no-untyped-def]
    """Write round(x / scale) + zero, with the scale for which min(x, 0) is 0 and max(x, 0) is `steps`; NaN spreads."""
    least = most = np.int32(0)
    for column in range(values.shape[1]):
        key = _order_preserving(np.float32(values[row, column]).view(np.int32))
        least, most = min(least, key), max(most, key)
    low, high = np.int32(_order_preserving(least)).view(np.float32), np.int32(_order_preserving(most)).view(np.float32)
    step = max((high - low) / np.float32(steps), np.float32(1e-30))
    inverse = np.float32(1) / step
    zero_point = np.int32(np.float32(0.5) - low * inverse)
    scale[row], zero[row] = step, zero_point
    half = np.float32(zero_point) + np.float32(0.5)
    for column in range(values.shape[1]):
        integers[row, column] = min(np.int32(values[row, column] * inverse + half), np.int32(steps))


@cached_njit()
def quantize_all(values, integers, scale, zero, steps):  # type: ignore[no-untyped-def]
    """Quantize every row."""
    for row in range(values.shape[0]):
        quantize_row(row, values, integers, scale, zero, steps)


@cached_njit(sums=True)
def add_norm(x, y, weight, bias, eps, values, integers, scale, zero, steps):  # type: ignore[no-untyped-def]
    """Write norm(x + y) to `values`, and quantized where `integers` has rows; y is overwritten by the sum."""
    width = np.float32(x.shape[1])
    for row in range(x.shape[0]):
        total, squares = np.float32(0), np.float32(0)
        for column in range(x.shape[1]):
            y[row, column] = x[row, column] + y[row, column]
            total += y[row, column]
        mean = total / width
        for column in range(x.shape[1]):
            squares += (y[row, column] - mean) * (y[row, column] - mean)
        inverse_std = _ONE / math.sqrt(squares / width + eps)
        for column in range(x.shape[1]):
            values[row, column] = (y[row, column] - mean) * inverse_std * weight[column] + bias[column]
        if integers.shape[0]:
            quantize_row(row, values, integers, scale, zero, steps)


@cached_njit()
def _gelu(x):  # type: ignore[no-untyped-def]
    """Return x · Φ(x), with Eigen's rational approximation of erf, right to a few units in the last place."""
    z = x * _ROOT_HALF
    z = _ERF_LIMIT if z > _ERF_LIMIT else z
    z = -_ERF_LIMIT if z < -_ERF_LIMIT else z
    y = z * z
    p = z * (_A0 + y * (_A1 + y * (_A2 + y * (_A3 + y * (_A4 + y * (_A5 + y * _A6))))))
    return _HALF * x * (_ONE + p / (_B0 + y * (_B1 + y * (_B2 + y * (_B3 + y * _B4)))))


@cached_njit()
def activate_values(kind, values, integers, scale, zero, steps):  # type: ignore[no-untyped-def]
    """Apply the activation of this code in place; quantize the rows where `integers` has some."""
    for row in range(values.shape[0]):
        if kind == 0:
            for column in range(values.shape[1]):
                values[row, column] = max(values[row, column], np.float32(0))
        elif kind == 1:
            for column in range(values.shape[1]):
                values[row, column] = _gelu(values[row, column])
        elif kind == 2:
            for column in range(values.shape[1]):
                x = values[row, column]
                values[row, column] = _HALF * x * (_ONE + _tanh(_ROOT * (x + _CUBIC * x * x * x)))
        else:
            for column in range(values.shape[1]):
                x = values[row, column]
                values[row, column] = x * (_HALF * _tanh(_HALF * x) + _HALF)
        if integers.shape[0]:
            quantize_row(row, values, integers, scale, zero, steps)
