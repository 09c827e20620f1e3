"""Fused dropout, residual sum and pre-norm on CUDA, in Triton: s = x + Dropout(z + b) and y = LayerNorm(s) in one pass.

Imported only where Triton is. This is for pre-norm blocks what `weft.nn.kernels.triton.add_norm` is for post-norm ones:
the sum is returned beside its norm, in the dtype of x, and the backward pass adds both gradients:

    ∂x = ∂s + LayerNorm'(∂y)        ∂z = Dropout'(∂x)

Only s is saved, which the next sum saves anyway, with the mean and the scale of each row.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from weft.nn.kernels.triton.add_norm import _dropout_mask, _norm_backward, _store_sums

_TILE, _ROWS = 4096, 4  # elements, and rows, of a program of four warps at a time
_PROGRAMS = 264  # of the backward pass: two for each of an H200's 132 multiprocessors


@triton.jit
def _residual_norm_forward(
    x, z, z_bias, weight, bias, seed, total, y, means, scales, N, EPS: tl.constexpr, SHARE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BD)
    inside, index = (row < N)[:, None] & (d < D)[None, :], row[:, None] * D + d[None, :]
    added, residual = tl.load(z + index, inside, 0.0).to(tl.float32), tl.load(x + index, inside, 0.0).to(tl.float32)
    c = tl.load(z_bias + d, d < D, 0.0).to(tl.float32)
    w, b = tl.load(weight + d, d < D, 0.0).to(tl.float32), tl.load(bias + d, d < D, 0.0).to(tl.float32)
    added += c[None, :]
    if SHARE > 0:
        added = tl.where(_dropout_mask(seed, index, SHARE), added * (1 / (1 - SHARE)), 0.0)
    sums = (residual + added).to(total.dtype.element_ty)
    tl.store(total + index, sums, inside)
    sums = tl.where(inside, sums.to(tl.float32), 0.0)  # the backward pass uses the rounded sum, too
    mean = tl.sum(sums, 1) / D
    centred = tl.where(inside, sums - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / D + EPS)
    tl.store(y + index, (centred * scale[:, None] * w[None, :] + b[None, :]).to(y.dtype.element_ty), inside)
    tl.store(means + row, mean, row < N)
    tl.store(scales + row, scale, row < N)


@triton.jit
def _residual_norm_backward(
    total, weight, seed, means, scales, gtotal, gy, gx, gz, sums, N, SHARE: tl.constexpr, BOTH: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    w, gz_bias = tl.load(weight + d, d < D, 0.0).to(tl.float32), tl.zeros((ROWS, BD), tl.float32)
    gweight, gbias = gz_bias, gz_bias
    for first in range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside, index = (row < N)[:, None] & (d < D)[None, :], row[:, None] * D + d[None, :]
        saved = tl.load(total + index, inside, 0.0).to(tl.float32)
        gout = tl.load(gy + index, inside, 0.0).to(tl.float32)
        gresidual = tl.load(gtotal + index, inside, 0.0).to(tl.float32)
        mean, scale = tl.load(means + row, row < N, 0.0)[:, None], tl.load(scales + row, row < N, 0.0)[:, None]
        normed = tl.where(inside, (saved - mean) * scale, 0.0)
        gsum = gresidual + _norm_backward(gout, normed, w, scale, D)
        tl.store(gx + index, gsum.to(gx.dtype.element_ty), inside)
        if SHARE > 0:
            gsum = tl.where(_dropout_mask(seed, index, SHARE), gsum * (1 / (1 - SHARE)), 0.0)
        if BOTH:
            tl.store(gz + index, gsum.to(gz.dtype.element_ty), inside)
        gz_bias += tl.where(inside, gsum, 0.0)
        gweight += gout * normed
        gbias += gout
    _store_sums(sums, gz_bias, gweight, gbias, d, D)


def _constants(width, share):
    padded = triton.next_power_of_2(width)
    return {"SHARE": share, "D": width, "BD": padded, "ROWS": max(1, min(_ROWS, _TILE // padded)), "num_warps": 4}


@triton_op("weft::residual_norm", mutates_args=())
def residual_norm(
    x: Tensor, z: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None, share: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return s = x + Dropout(z + shift), (N, D) in x's dtype, LayerNorm(s) in z's; means and scales."""
    rows, width = z.shape
    stream, y, means = torch.empty_like(x), torch.empty_like(z), z.new_empty(rows, dtype=torch.float32)
    scales, seeded, constants = torch.empty_like(means), weight if seed is None else seed, _constants(width, share)
    wrap_triton(_residual_norm_forward)[(-(-rows // constants["ROWS"]),)](
        x, z, shift, weight, bias, seeded, stream, y, means, scales, rows, EPS=eps, **constants
    )
    return stream, y, means, scales


@triton_op("weft::residual_norm_backward", mutates_args=())
def residual_norm_backward(
    stream: Tensor, weight: Tensor, seed: Tensor | None, means: Tensor, scales: Tensor, gstream: Tensor, gy: Tensor,
    share: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, of z (empty where that is the same), and (3, D) of shift, weight and bias."""
    rows, width = gy.shape
    both = share > 0 or stream.dtype is not gy.dtype
    gx, gz = torch.empty_like(stream), torch.empty_like(gy if both else gy[:0])
    sums = gy.new_empty(_PROGRAMS, 3, width, dtype=torch.float32)
    wrap_triton(_residual_norm_backward)[(_PROGRAMS,)](
        stream, weight, weight if seed is None else seed, means, scales, gstream, gy, gx, gz, sums, rows, BOTH=both,
        **_constants(width, share),
    )  # fmt: skip
    return gx, gz, sums.sum(0)


def _setup_context(ctx, inputs, output):
    _, _, _, weight, _, seed, ctx.share, _ = inputs
    stream, _, means, scales = output
    ctx.save_for_backward(stream, weight, seed, means, scales)
    ctx.set_materialize_grads(True)


def _backward(ctx, gstream, gy, *_):
    stream, weight, seed, means, scales = ctx.saved_tensors
    gx, gz, sums = residual_norm_backward(
        stream, weight, seed, means, scales, gstream.contiguous(), gy.contiguous(), ctx.share
    )
    return gx, gz if len(gz) else gx, *sums.to(weight.dtype).unbind(), None, None, None


residual_norm.register_autograd(_backward, setup_context=_setup_context)
