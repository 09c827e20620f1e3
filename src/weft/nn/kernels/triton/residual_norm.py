"""Dropout, sum and norm before the next layer on CUDA, in Triton: s = x + Dropout(z + b) and y = LayerNorm(s), at once.

Imported only where Triton is. What `weft.nn.kernels.triton.add_norm` is to a norm after the sum, this is to a norm
before the layer: the sum goes on beside the norm, in the precision in which it came, and on the way back both meet
again:

    ∂x = ∂s + LayerNorm'(∂y)        ∂z = Dropout'(∂x)

Only s is kept, which the next sum keeps anyway, with the mean and the scale of each row.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from weft.nn.kernels.triton.add_norm import _kept

TILE, ROWS = 4096, 4  # numbers, and rows, of a program of four warps at a time
PROGRAMS = 264  # on the way back: two for each of an H200's 132 multiprocessors


@triton.jit
def _join_forward(
    x, z, shift, weight, bias, seed, total, y, means, scales, N, EPS: tl.constexpr, SHARE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BD)
    inside, place = (row < N)[:, None] & (d < D)[None, :], row[:, None] * D + d[None, :]
    added, before = tl.load(z + place, inside, 0.0).to(tl.float32), tl.load(x + place, inside, 0.0).to(tl.float32)
    c = tl.load(shift + d, d < D, 0.0).to(tl.float32)
    w, b = tl.load(weight + d, d < D, 0.0).to(tl.float32), tl.load(bias + d, d < D, 0.0).to(tl.float32)
    added += c[None, :]
    if SHARE > 0:
        added = tl.where(_kept(seed, place, SHARE), added * (1 / (1 - SHARE)), 0.0)
    made = (before + added).to(total.dtype.element_ty)
    tl.store(total + place, made, inside)
    made = tl.where(inside, made.to(tl.float32), 0.0)  # on the way back it is what was kept that is normed
    mean = tl.sum(made, 1) / D
    centred = tl.where(inside, made - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / D + EPS)
    tl.store(y + place, (centred * scale[:, None] * w[None, :] + b[None, :]).to(y.dtype.element_ty), inside)
    tl.store(means + row, mean, row < N)
    tl.store(scales + row, scale, row < N)


@triton.jit
def _join_backward(
    total, weight, seed, means, scales, gtotal, gy, gx, gz, sums, N, SHARE: tl.constexpr, BOTH: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    w, gshift = tl.load(weight + d, d < D, 0.0).to(tl.float32), tl.zeros((ROWS, BD), tl.float32)
    gweight, gbias = gshift, gshift
    for first in range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside, place = (row < N)[:, None] & (d < D)[None, :], row[:, None] * D + d[None, :]
        kept = tl.load(total + place, inside, 0.0).to(tl.float32)
        given = tl.load(gy + place, inside, 0.0).to(tl.float32)
        beside = tl.load(gtotal + place, inside, 0.0).to(tl.float32)
        mean, scale = tl.load(means + row, row < N, 0.0)[:, None], tl.load(scales + row, row < N, 0.0)[:, None]
        normed = tl.where(inside, (kept - mean) * scale, 0.0)
        gnormed = given * w[None, :]
        along = tl.sum(gnormed * normed, 1)[:, None] / D
        sent = beside + (gnormed - normed * along - tl.sum(gnormed, 1)[:, None] / D) * scale
        tl.store(gx + place, sent.to(gx.dtype.element_ty), inside)
        if SHARE > 0:
            sent = tl.where(_kept(seed, place, SHARE), sent * (1 / (1 - SHARE)), 0.0)
        if BOTH:
            tl.store(gz + place, sent.to(gz.dtype.element_ty), inside)
        gshift += tl.where(inside, sent, 0.0)
        gweight += given * normed
        gbias += given
    to = sums + tl.program_id(0) * 3 * D + d
    tl.store(to, tl.sum(gshift, 0), d < D)
    tl.store(to + D, tl.sum(gweight, 0), d < D)
    tl.store(to + 2 * D, tl.sum(gbias, 0), d < D)


def _sizes(width, share):
    wide = triton.next_power_of_2(width)
    return {"SHARE": share, "D": width, "BD": wide, "ROWS": max(1, min(ROWS, TILE // wide)), "num_warps": 4}


@triton_op("weft::join_norm", mutates_args=())
def join_norm(
    x: Tensor, z: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None, share: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return s = x + Dropout(z + shift), (N, D) in x's dtype, LayerNorm(s) in z's; means and scales."""
    rows, width = z.shape
    stream, y, means = torch.empty_like(x), torch.empty_like(z), z.new_empty(rows, dtype=torch.float32)
    scales, seeded, sizes = torch.empty_like(means), weight if seed is None else seed, _sizes(width, share)
    wrap_triton(_join_forward)[(-(-rows // sizes["ROWS"]),)](
        x, z, shift, weight, bias, seeded, stream, y, means, scales, rows, EPS=eps, **sizes
    )
    return stream, y, means, scales


@triton_op("weft::join_norm_back", mutates_args=())
def join_norm_back(
    stream: Tensor, weight: Tensor, seed: Tensor | None, means: Tensor, scales: Tensor, gstream: Tensor, gy: Tensor,
    share: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what goes back to x, to z (nothing, where that is the same), and (3, D) to shift, weight and bias."""
    rows, width = gy.shape
    both = share > 0 or stream.dtype is not gy.dtype
    gx, gz = torch.empty_like(stream), torch.empty_like(gy if both else gy[:0])
    sums = gy.new_empty(PROGRAMS, 3, width, dtype=torch.float32)
    wrap_triton(_join_backward)[(PROGRAMS,)](
        stream, weight, weight if seed is None else seed, means, scales, gstream, gy, gx, gz, sums, rows, BOTH=both,
        **_sizes(width, share),
    )  # fmt: skip
    return gx, gz, sums.sum(0)


def _keep(ctx, inputs, output):
    _, _, _, weight, _, seed, ctx.share, _ = inputs
    stream, _, means, scales = output
    ctx.save_for_backward(stream, weight, seed, means, scales)
    ctx.set_materialize_grads(True)


def _send_back(ctx, gstream, gy, *_):
    stream, weight, seed, means, scales = ctx.saved_tensors
    gx, gz, sums = join_norm_back(stream, weight, seed, means, scales, gstream.contiguous(), gy.contiguous(), ctx.share)
    return gx, gz if len(gz) else gx, *sums.to(weight.dtype).unbind(), None, None, None


join_norm.register_autograd(_send_back, setup_context=_keep)
