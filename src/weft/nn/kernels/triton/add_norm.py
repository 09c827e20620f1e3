"""Fused dropout, residual sum and post-norm on CUDA, in Triton: y = LayerNorm(x + Dropout(z + b)), one pass each way.

Imported only where Triton is. Only x, z and the mean and scale of each row are saved: the dropout mask is recomputed
from a seed. Statistics are float32, and so are the sums for the gradients of the bias and of the norm's parameters:
each program sums its own rows, in the same order every time.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

_ROWS, _PROGRAMS = (
    1,
    1056,
)  # rows at a time, and programs of the backward pass: eight for each of an H200's 132 multiprocessors
_STAGES = 4  # of the software pipeline that loads rows


@triton.jit
def _dropout_mask(seed, index, SHARE: tl.constexpr):
    """Return the mask of what is kept, each with probability 1 - SHARE, by a 32-bit hash (lowbias32, Wellons 2018)."""
    x = index.to(tl.uint32) ^ tl.load(seed).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return ((x ^ (x >> 16)) >> 8).to(tl.float32) >= SHARE * 16777216


@triton.jit
def _norm_backward(gout, normed, w, scale, D: tl.constexpr):
    """Return the gradient of a layer norm's input from that of its output; `scale` is 1 / σ of each row."""
    gnormed = gout * w[None, :]
    projection = tl.sum(gnormed * normed, 1)[:, None] / D
    return (gnormed - normed * projection - tl.sum(gnormed, 1)[:, None] / D) * scale


@triton.jit
def _store_sums(sums, gz_bias, gweight, gbias, d, D: tl.constexpr):
    """Store a program's sums for the gradients of the bias of z and of the norm's weight and bias."""
    address = sums + tl.program_id(0) * 3 * D + d
    tl.store(address, tl.sum(gz_bias, 0), d < D)
    tl.store(address + D, tl.sum(gweight, 0), d < D)
    tl.store(address + 2 * D, tl.sum(gbias, 0), d < D)


@triton.jit
def _add_norm_forward(
    x, z, z_bias, weight, bias, seed, y, means, scales, N, EPS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BD)
    inside, index = (row < N)[:, None] & (d < D)[None, :], row[:, None] * D + d[None, :]
    added = tl.load(z + index, inside, 0.0).to(tl.float32) + tl.load(z_bias + d, d < D, 0.0).to(tl.float32)[None, :]
    if SHARE > 0:
        added = tl.where(_dropout_mask(seed, index, SHARE), added * (1 / (1 - SHARE)), 0.0)
    total = tl.load(x + index, inside, 0.0).to(tl.float32) + added
    mean = tl.sum(total, 1) / D
    centred = tl.where(inside, total - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / D + EPS)
    w, b = tl.load(weight + d, d < D, 0.0).to(tl.float32), tl.load(bias + d, d < D, 0.0).to(tl.float32)
    normed = centred * scale[:, None] * w[None, :] + b[None, :]
    tl.store(y + index, normed.to(y.dtype.element_ty), inside)
    tl.store(means + row, mean, row < N)
    tl.store(scales + row, scale, row < N)


@triton.jit
def _add_norm_backward(
    x, z, z_bias, weight, seed, means, scales, grad_out, gx, gz, sums, N, SHARE: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    w, c = tl.load(weight + d, d < D, 0.0).to(tl.float32), tl.load(z_bias + d, d < D, 0.0).to(tl.float32)
    gz_bias = tl.zeros((ROWS, BD), tl.float32)
    gweight, gbias = gz_bias, gz_bias
    for first in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside, index = (row < N)[:, None] & (d < D)[None, :], row[:, None] * D + d[None, :]
        added = tl.load(z + index, inside, 0.0).to(tl.float32) + c[None, :]
        gout = tl.load(grad_out + index, inside, 0.0).to(tl.float32)
        total = tl.load(x + index, inside, 0.0).to(tl.float32)
        mean, scale = tl.load(means + row, row < N, 0.0)[:, None], tl.load(scales + row, row < N, 0.0)[:, None]
        if SHARE > 0:
            kept = _dropout_mask(seed, index, SHARE)
            added = tl.where(kept, added * (1 / (1 - SHARE)), 0.0)
        normed = tl.where(inside, (total + added - mean) * scale, 0.0)
        gtotal = _norm_backward(gout, normed, w, scale, D)
        tl.store(gx + index, gtotal.to(gx.dtype.element_ty), inside)
        if SHARE > 0:
            gtotal = tl.where(kept, gtotal * (1 / (1 - SHARE)), 0.0)
        tl.store(gz + index, gtotal.to(gz.dtype.element_ty), inside)
        gz_bias += tl.where(inside, gtotal, 0.0)
        gweight += gout * normed
        gbias += gout
    _store_sums(sums, gz_bias, gweight, gbias, d, D)


def _constants(width, share):
    padded = triton.next_power_of_2(width)
    return {"SHARE": share, "D": width, "BD": padded, "ROWS": _ROWS, "num_warps": max(1, min(8, padded // 1024))}


@triton_op("weft::add_norm", mutates_args=())
def add_norm(
    x: Tensor, z: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None, share: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return LayerNorm(x + Dropout(z + shift)) of (N, D), in z's dtype, dropped with p = `share`; means, scales."""
    rows, width = z.shape
    y, means = torch.empty_like(z), z.new_empty(rows, dtype=torch.float32)
    scales, seeded = torch.empty_like(means), weight if seed is None else seed
    wrap_triton(_add_norm_forward)[(-(-rows // _ROWS),)](
        x, z, shift, weight, bias, seeded, y, means, scales, rows, EPS=eps, **_constants(width, share)
    )
    return y, means, scales


@triton_op("weft::add_norm_backward", mutates_args=())
def add_norm_backward(
    x: Tensor, z: Tensor, shift: Tensor, weight: Tensor, seed: Tensor | None, means: Tensor, scales: Tensor,
    grad_out: Tensor, share: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x, of z, and (3, D) of shift, weight and bias."""
    rows, width = z.shape
    gx, gz, seeded = torch.empty_like(x), torch.empty_like(z), weight if seed is None else seed
    sums = z.new_empty(_PROGRAMS, 3, width, dtype=torch.float32)
    wrap_triton(_add_norm_backward)[(_PROGRAMS,)](
        x,
        z,
        shift,
        weight,
        seeded,
        means,
        scales,
        grad_out,
        gx,
        gz,
        sums,
        rows,
        STAGES=_STAGES,
        **_constants(width, share),
    )
    return gx, gz, sums.sum(0)


def _setup_context(ctx, inputs, output):
    x, z, shift, weight, _, seed, ctx.share, _ = inputs
    ctx.save_for_backward(x, z, shift, weight, seed, *output[1:])


def _backward(ctx, grad_out, *_):
    x, z, shift, weight, seed, means, scales = ctx.saved_tensors
    gx, gz, sums = add_norm_backward(x, z, shift, weight, seed, means, scales, grad_out.contiguous(), ctx.share)
    return gx, gz, *sums.to(weight.dtype).unbind(), None, None, None


add_norm.register_autograd(_backward, setup_context=_setup_context)
