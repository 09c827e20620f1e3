"""What a Transformer does with one token at a time, in compiled loops: the CPU's way to answer.

A matrix product leaves rows of numbers, in int8 yet to be scaled back. One loop over them does all that comes before
the next product, so that a row stays in the nearest cache: scale, bias, and the activation or the sum and the norm.
Where the next product is of bytes, the loop rounds the row to them, too, as `weft.nn.quantized` says.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.kernels import keeper, tanh_of
from weft.nn.transformer import gelu_tanh

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
    """Tokens as a product reads them: numbers, or where there are any, bytes of them with a scale a token."""

    values: Tensor  # (N, D)
    bytes_: Tensor  # (N, D) or (0, D), unsigned: 128 stands for 0
    scale: Tensor  # (N, 1); of numbers it is 1

    @classmethod
    def over(cls, values: Tensor, rounded: bool) -> "Rows":
        """Take values that are there, or that a loop will write, and make room for the bytes."""
        count, width = values.shape
        bytes_ = torch.empty(count if rounded else 0, width, dtype=torch.uint8)
        return cls(values, bytes_, torch.empty(count, 1) if rounded else torch.ones(count, 1))

    @property
    def rounded(self) -> bool:
        """Whether there are bytes."""
        return len(self.bytes_) > 0

    @property
    def arrays(self) -> list[Any]:
        """What loops read and write."""
        return [self.values.numpy(), self.bytes_.numpy(), self.scale.numpy()]


def round_rows(x: Tensor) -> Rows:
    """Round tokens (N, D) to bytes, each by its own scale."""
    rows = Rows.over(x.contiguous(), True)
    _round_all(*rows.arrays)
    return rows


def activate(activation: Callable[..., Tensor], found: Tensor, of: Rows, bias: Tensor) -> Rows:
    """Return act(found + bias), which takes the place of `found` (N, M): what a product has made `of` rows."""
    rows = Rows.over(found, of.rounded)
    _activate(_KINDS[activation], of.scale.numpy(), bias.detach().numpy(), *rows.arrays)
    return rows


def add_norm(x: Tensor, found: Tensor, of: Rows, bias: Tensor, norm: nn.LayerNorm) -> Rows:
    """Return norm(x + found + bias); the sum itself takes the place of `found` (N, D)."""
    rows = Rows.over(torch.empty_like(x), of.rounded)
    known = (x, found, of.scale, bias, norm.weight, norm.bias)
    _add_norm(*(one.detach().numpy() for one in known), np.float32(norm.eps), *rows.arrays)
    return rows


@keeper()
def round_row(row, values, bytes_, scale):  # type: ignore[no-untyped-def]
    """Add 128.5 and cut off, which rounds to the nearest."""
    bits = np.int32(0)  # without their sign numbers have the order of their bits, of which vectors can find the most
    for place in range(values.shape[1]):
        bits = max(bits, np.float32(values[row, place]).view(np.int32) & np.int32(0x7FFFFFFF))
    most = max(np.int32(bits).view(np.float32), np.float32(1e-12))
    up = np.float32(127) / most
    scale[row, 0] = most / np.float32(127)
    for place in range(values.shape[1]):
        bytes_[row, place] = np.uint8(values[row, place] * up + np.float32(128.5))


@keeper()
def _round_all(values, bytes_, scale):  # type: ignore[no-untyped-def]
    for row in range(values.shape[0]):
        round_row(row, values, bytes_, scale)


@keeper(sums=True)
def _add_norm(x, found, before, bias, weight, shift, eps, values, bytes_, scale):  # type: ignore[no-untyped-def]
    width = np.float32(x.shape[1])
    for row in range(x.shape[0]):
        up, total, spread = before[row, 0], np.float32(0), np.float32(0)
        for place in range(x.shape[1]):
            found[row, place] = x[row, place] + (found[row, place] * up + bias[place])
            total += found[row, place]
        mean = total / width
        for place in range(x.shape[1]):
            spread += (found[row, place] - mean) * (found[row, place] - mean)
        sharp = _ONE / math.sqrt(spread / width + eps)
        for place in range(x.shape[1]):
            values[row, place] = (found[row, place] - mean) * sharp * weight[place] + shift[place]
        if bytes_.shape[0]:
            round_row(row, values, bytes_, scale)


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
def _activate(kind, before, bias, values, bytes_, scale):  # type: ignore[no-untyped-def]
    for row in range(values.shape[0]):
        up = before[row, 0]
        for place in range(values.shape[1]):
            values[row, place] = values[row, place] * up + bias[place]
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
        if bytes_.shape[0]:
            round_row(row, values, bytes_, scale)
