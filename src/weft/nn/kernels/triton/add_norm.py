"""Dropout, sum and norm on CUDA, in Triton: y = LayerNorm(x + Dropout(z + b)) in one pass over memory, and one back.

Imported only where Triton is. Nothing is kept but x and z, the mean and the scale of each row: which places were
dropped follows from a seed, and is made again. Statistics are float32, and so is what is added up for the gradient of
the norm's own weights: each program adds up its own rows, in the same order every time.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

ROWS, PROGRAMS = 1, 1056  # of a program at a time, and of programs on the way back: eight for each of an H200's 132
STAGES = 4  # times so many rows are on their way to a program


@triton.jit
def _kept(seed, place, SHARE: tl.constexpr):
    """Say which places are kept, all but a share of them, by a hash of 32 bits (lowbias32, Wellons 2018)."""
    x = place.to(tl.uint32) ^ tl.load(seed).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return ((x ^ (x >> 16)) >> 8).to(tl.float32) >= SHARE * 16777216


@triton.jit
def _add_norm_forward(
    x, z, shift, weight, bias, seed, y, means, scales, N, EPS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BD)
    inside, place = (row < N)[:, None] & (d < D)[None, :], row[:, None] * D + d[None, :]
    added = tl.load(z + place, inside, 0.0).to(tl.float32) + tl.load(shift + d, d < D, 0.0).to(tl.float32)[None, :]
    if SHARE > 0:
        added = tl.where(_kept(seed, place, SHARE), added * (1 / (1 - SHARE)), 0.0)
    total = tl.load(x + place, inside, 0.0).to(tl.float32) + added
    mean = tl.sum(total, 1) / D
    centred = tl.where(inside, total - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / D + EPS)
    w, b = tl.load(weight + d, d < D, 0.0).to(tl.float32), tl.load(bias + d, d < D, 0.0).to(tl.float32)
    made = centred * scale[:, None] * w[None, :] + b[None, :]
    tl.store(y + place, made.to(y.dtype.element_ty), inside)
    tl.store(means + row, mean, row < N)
    tl.store(scales + row, scale, row < N)


@triton.jit
def _add_norm_backward(
    x, z, shift, weight, seed, means, scales, back, gx, gz, sums, N, SHARE: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    w, c = tl.load(weight + d, d < D, 0.0).to(tl.float32), tl.load(shift + d, d < D, 0.0).to(tl.float32)
    gshift = tl.zeros((ROWS, BD), tl.float32)
    gweight, gbias = gshift, gshift
    for first in tl.range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside, place = (row < N)[:, None] & (d < D)[None, :], row[:, None] * D + d[None, :]
        added = tl.load(z + place, inside, 0.0).to(tl.float32) + c[None, :]
        given = tl.load(back + place, inside, 0.0).to(tl.float32)
        total = tl.load(x + place, inside, 0.0).to(tl.float32)
        mean, scale = tl.load(means + row, row < N, 0.0)[:, None], tl.load(scales + row, row < N, 0.0)[:, None]
        if SHARE > 0:
            kept = _kept(seed, place, SHARE)
            added = tl.where(kept, added * (1 / (1 - SHARE)), 0.0)
        normed = tl.where(inside, (total + added - mean) * scale, 0.0)
        gnormed = given * w[None, :]
        along = tl.sum(gnormed * normed, 1)[:, None] / D
        gtotal = (gnormed - normed * along - tl.sum(gnormed, 1)[:, None] / D) * scale
        tl.store(gx + place, gtotal.to(gx.dtype.element_ty), inside)
        if SHARE > 0:
            gtotal = tl.where(kept, gtotal * (1 / (1 - SHARE)), 0.0)
        tl.store(gz + place, gtotal.to(gz.dtype.element_ty), inside)
        gshift += tl.where(inside, gtotal, 0.0)
        gweight += given * normed
        gbias += given
    to = sums + tl.program_id(0) * 3 * D + d
    tl.store(to, tl.sum(gshift, 0), d < D)
    tl.store(to + D, tl.sum(gweight, 0), d < D)
    tl.store(to + 2 * D, tl.sum(gbias, 0), d < D)


def _sizes(width, share):
    wide = triton.next_power_of_2(width)
    return {"SHARE": share, "D": width, "BD": wide, "ROWS": ROWS, "num_warps": max(1, min(8, wide // 1024))}


@triton_op("weft::add_norm", mutates_args=())
def add_norm(
    x: Tensor, z: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None, share: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return LayerNorm(x + Dropout(z + shift)) of (N, D), in z's dtype, with `share` dropped; means and scales."""
    rows, width = z.shape
    y, means = torch.empty_like(z), z.new_empty(rows, dtype=torch.float32)
    scales, seeded = torch.empty_like(means), weight if seed is None else seed
    wrap_triton(_add_norm_forward)[(-(-rows // ROWS),)](
        x, z, shift, weight, bias, seeded, y, means, scales, rows, EPS=eps, **_sizes(width, share)
    )
    return y, means, scales


@triton_op("weft::add_norm_back", mutates_args=())
def add_norm_back(
    x: Tensor, z: Tensor, shift: Tensor, weight: Tensor, seed: Tensor | None, means: Tensor, scales: Tensor,
    back: Tensor, share: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what goes back to x, to z, and (3, D) to shift, weight and bias."""
    rows, width = z.shape
    gx, gz, seeded = torch.empty_like(x), torch.empty_like(z), weight if seed is None else seed
    sums = z.new_empty(PROGRAMS, 3, width, dtype=torch.float32)
    wrap_triton(_add_norm_backward)[(PROGRAMS,)](
        x, z, shift, weight, seeded, means, scales, back, gx, gz, sums, rows, STAGES=STAGES, **_sizes(width, share)
    )
    return gx, gz, sums.sum(0)


def _keep(ctx, inputs, output):
    x, z, shift, weight, _, seed, ctx.share, _ = inputs
    ctx.save_for_backward(x, z, shift, weight, seed, *output[1:])


def _send_back(ctx, back, *_):
    x, z, shift, weight, seed, means, scales = ctx.saved_tensors
    gx, gz, sums = add_norm_back(x, z, shift, weight, seed, means, scales, back.contiguous(), ctx.share)
    return gx, gz, *sums.to(weight.dtype).unbind(), None, None, None


add_norm.register_autograd(_send_back, setup_context=_keep)
