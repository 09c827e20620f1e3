"""Attention over many short sequences on CUDA, in Triton: a program a sequence and head.

Imported only where Triton is. Kernels made for long texts cut each sequence into blocks and spread those over the
machine; of sequences of a hundred tokens, most of such a block is empty. Here a sequence of up to 128 tokens is one
block: all its scores live in registers, and on the way back they are made again from queries and keys, and nothing is
added up in memory. Longer ones go block by block, with a softmax that is carried on (Dao et al. 2022). Queries, keys
and values are read where their projection left them, and their gradients written the same way:

    own (N, 3, H, d)                          queries, keys and values of sequences that look at themselves
    own (N, 1, H, d), other (M, 2, H, d)      queries, and the keys and values of what they look at
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

# Queries, keys, warps and stages of a program: for sequences of up to 64 tokens, of up to 128, and for those that need
# several blocks. Chosen on an H200, for heads of 64.
FORWARD = ((64, 64, 4, 1), (128, 128, 8, 1), (64, 128, 8, 3))
BACKWARD = ((64, 64, 4, 1), (32, 128, 4, 3), (64, 128, 8, 1))
ROOMS = (64, 128, 1 << 30)


@triton.jit
def _rows(base, first, count, stride, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Read `ROWS` rows of a sequence from the row `first` on, nought beyond its end."""
    row, place = first + tl.arange(0, ROWS), tl.arange(0, BD)
    inside = (row < count)[:, None] & (place < D)[None, :]
    return tl.load(base + row[:, None] * stride + place[None, :], inside, 0.0)


@triton.jit
def _put(tile, base, first, count, stride, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Write such rows."""
    row, place = first + tl.arange(0, ROWS), tl.arange(0, BD)
    inside = (row < count)[:, None] & (place < D)[None, :]
    tl.store(base + row[:, None] * stride + place[None, :], tile.to(base.dtype.element_ty), inside)


@triton.jit
def _attend_forward(
    own, other, shift, out, lse, starts, over, H, SCALE: tl.constexpr, ITSELF: tl.constexpr, CAUSAL: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """Let one head of a block of one sequence look; the logarithms, to the base 2, of its sums are kept."""
    h, b, i = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BT
    t, s, d = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, BD)
    asks, holds = tl.load(starts + b).to(tl.int64), tl.load(over + b).to(tl.int64)
    T, S = (tl.load(starts + b + 1) - asks).to(tl.int32), (tl.load(over + b + 1) - holds).to(tl.int32)
    if (tl.maximum(T, S) > LEAST) & (tl.maximum(T, S) <= MOST) & (i < T):
        wide, shift = H * D, shift + h * D
        q_row, kv_row = (3 * wide, 3 * wide) if ITSELF else (wide, 2 * wide)
        k = (own + wide if ITSELF else other) + holds * kv_row + h * D
        query = _rows(own + asks * q_row + h * D, i, T, q_row, BT, D, BD)
        query = (query + tl.load(shift + d, d < D, 0.0)[None, :]).to(query.dtype)
        top = tl.full((BT,), float("-inf"), tl.float32)
        total, context = tl.zeros((BT,), tl.float32), tl.zeros((BT, BD), tl.float32)
        for j in range(0, BS if ONE else (tl.minimum(S, i + BT) if CAUSAL else S), BS):
            key, value = _rows(k, j, S, kv_row, BS, D, BD), _rows(k + wide, j, S, kv_row, BS, D, BD)
            seen = (j + s < S)[None, :]
            if CAUSAL:
                seen = seen & (i + t[:, None] >= j + s[None, :])
            score = tl.where(seen, tl.dot(query, tl.trans(key)) * (SCALE * 1.4426950408889634), float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)  # where there is nothing to look at
            weight, less = tl.exp2(score - level[:, None]), tl.exp2(top - level)
            total = total * less + tl.sum(weight, 1)
            context = tl.dot(weight.to(value.dtype), value, context * less[:, None])
            top = higher
        total = tl.where(total > 0, total, 1.0)
        moved = tl.load(shift + 2 * wide + d, (d < D) & (S > 0), 0.0)
        _put(context / total[:, None] + moved[None, :], out + asks * wide + h * D, i, T, wide, BT, D, BD)
        tl.store(lse + (asks + i + t) * H + h, top + tl.log2(total), i + t < T)


@triton.jit
def _attend_backward(
    own, other, shift, out, lse, back, gown, gother, gshift, sofar, starts, over, H, SCALE: tl.constexpr,
    ITSELF: tl.constexpr, CAUSAL: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Send what came back for one head of one sequence to its queries, keys and values. Scores lie turned, (S, T)."""
    h, b = tl.program_id(0), tl.program_id(1)
    t, s, d = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, BD)
    asks, holds = tl.load(starts + b).to(tl.int64), tl.load(over + b).to(tl.int64)
    T, S = (tl.load(starts + b + 1) - asks).to(tl.int32), (tl.load(over + b + 1) - holds).to(tl.int32)
    if (tl.maximum(T, S) > LEAST) & (tl.maximum(T, S) <= MOST):
        wide, shift = H * D, shift + h * D
        q_row, kv_row = (3 * wide, 3 * wide) if ITSELF else (wide, 2 * wide)
        held, gheld = (own + wide, gown + wide) if ITSELF else (other, gother)
        q, gq, here = own + asks * q_row + h * D, gown + asks * q_row + h * D, asks * wide + h * D
        k, gk = held + holds * kv_row + h * D, gheld + holds * kv_row + h * D
        moves = tl.load(shift + d, d < D, 0.0)[None, :]
        to_q, to_v = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
        for j in range(0, BS if ONE else tl.maximum(S, 1), BS):
            key, value = _rows(k, j, S, kv_row, BS, D, BD), _rows(k + wide, j, S, kv_row, BS, D, BD)
            gkey, gvalue = tl.zeros((BS, BD), tl.float32), tl.zeros((BS, BD), tl.float32)
            for i in range(j // BT * BT if CAUSAL else 0, BT if BT == MOST else T, BT):
                query, given = _rows(q, i, T, q_row, BT, D, BD), _rows(back + here, i, T, wide, BT, D, BD)
                if j == 0:
                    to_v += tl.sum(given.to(tl.float32), 0)
                query = (query + moves).to(query.dtype)
                level = tl.load(lse + (asks + i + t) * H + h, i + t < T, 0.0)
                seen = (j + s < S)[:, None] & (i + t < T)[None, :]
                if CAUSAL:
                    seen = seen & (i + t[None, :] >= j + s[:, None])
                score = tl.dot(key, tl.trans(query)) * (SCALE * 1.4426950408889634)
                weight = tl.where(seen, tl.exp2(score - level[None, :]), 0.0)
                gvalue = tl.dot(weight.to(given.dtype), given, gvalue)
                gweight = tl.dot(value, tl.trans(given))
                if ONE:
                    mean = tl.sum(weight * gweight, 0)
                else:  # the same, over all blocks
                    moved = tl.load(shift + 2 * wide + d, d < D, 0.0)[None, :]
                    mean = tl.sum((_rows(out + here, i, T, wide, BT, D, BD) - moved) * given.to(tl.float32), 1)
                gscore = (weight * (gweight - mean[None, :])).to(query.dtype)
                gkey = tl.dot(gscore, query, gkey)
                gquery = tl.dot(tl.trans(gscore), key)
                to_q += tl.sum(gquery, 0)
                if not ONE:  # nobody else has these rows, so what is so far may wait in memory
                    if j > 0:
                        gquery += _rows(sofar + here, i, T, wide, BT, D, BD)
                    _put(gquery, sofar + here, i, T, wide, BT, D, BD)
                    tl.debug_barrier()
                _put(gquery * SCALE, gq, i, T, q_row, BT, D, BD)
            _put(gvalue, gk + wide, j, S, kv_row, BS, D, BD)
            _put(gkey * SCALE, gk, j, S, kv_row, BS, D, BD)
        sums = gshift + b * 3 * wide + h * D + d
        tl.store(sums, to_q * SCALE, d < D)
        tl.store(sums + 2 * wide, to_v, (d < D) & (S > 0))


def _launches(blocks, own, other, causal, longest):
    """Yield what each launch is given: each has the sequences that are too long for the one before."""
    size, least = own.shape[-1], 0
    for room, (queries, keys, warps, stages) in zip(ROOMS, blocks, strict=True):
        if longest > least:
            yield {
                "SCALE": size**-0.5, "ITSELF": other is None, "CAUSAL": causal, "LEAST": least, "MOST": room, "D": size,
                "BD": max(16, triton.next_power_of_2(size)), "BT": queries, "BS": keys, "ONE": keys == room,
                "num_warps": warps, "num_stages": stages,
            }  # fmt: skip
        least = room


@triton_op("weft::attend", mutates_args=())
def attend(
    own: Tensor, other: Tensor | None, shift: Tensor, starts: Tensor, over: Tensor, longest: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Let each sequence of `own` look, at itself or at its own of `other`; `longest` bounds the lengths of both.

    Queries, keys and values are shifted by a third of `shift` (3·H·d,) each: the queries before they are used, the
    values after their mean was taken, and the keys not at all, for that would add the same to all scores of a query.
    Returns what was found, (N, H, d), and the logarithmic sums (N, H).
    """
    tokens, _, heads, size = own.shape
    out, lse = own.new_empty(tokens, heads, size), own.new_empty(tokens, heads, dtype=torch.float32)
    held, rows = own if other is None else other, len(starts) - 1
    for sizes in _launches(FORWARD, own, other, causal, longest):
        grid = (heads, rows, -(-min(longest, sizes["MOST"]) // sizes["BT"]))
        wrap_triton(_attend_forward)[grid](own, held, shift, out, lse, starts, over, heads, **sizes)
    return out, lse


@triton_op("weft::attend_back", mutates_args=())
def attend_back(
    own: Tensor, other: Tensor | None, shift: Tensor, out: Tensor, lse: Tensor, back: Tensor, starts: Tensor,
    over: Tensor, longest: int, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what goes back to `own`, to `other` (nothing where there is none) and to the shift."""
    heads = own.shape[-2]
    held = own if other is None else other
    gown, gother = torch.empty_like(own), torch.empty_like(own[:0] if other is None else other)
    gshift = shift.new_zeros(len(starts) - 1, len(shift), dtype=torch.float32)
    sofar = own.new_empty(out.shape if longest > ROOMS[-2] else (0,), dtype=torch.float32)
    grid = (heads, len(starts) - 1)
    for sizes in _launches(BACKWARD, own, other, causal, longest):
        wrap_triton(_attend_backward)[grid](
            own, held, shift, out, lse, back, gown, gother, gshift, sofar, starts, over, heads, **sizes
        )  # fmt: skip
    return gown, gother, gshift.sum(0)


def _keep(ctx, inputs, output):
    own, other, shift, starts, over, ctx.longest, ctx.causal = inputs
    ctx.save_for_backward(own, other, shift, *output, starts, over)


def _send_back(ctx, back, _):
    own, other, shift, out, lse, starts, over = ctx.saved_tensors
    back = back.contiguous()
    gown, gother, gshift = attend_back(own, other, shift, out, lse, back, starts, over, ctx.longest, ctx.causal)
    return gown, None if other is None else gother, gshift.to(shift.dtype), None, None, None, None


attend.register_autograd(_send_back, setup_context=_keep)
