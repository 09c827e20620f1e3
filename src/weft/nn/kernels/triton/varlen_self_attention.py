"""Self-attention over ragged sequences on CUDA, in Triton, for heads of 16, 32 or 64 numbers.

Imported only where Triton is. Forward, a program has 64 queries of one head, and goes over the keys of their sequence
with a softmax that is carried on (Dao et al. 2022). On the way back, a sequence of up to 128 tokens is one tile: its
scores are made once for all gradients, by programs that stay and load the next sequence while they work. For longer
ones one kernel goes over the keys for each block of queries, another over the queries for each block of keys: seven
products in place of five, but nothing is added up in memory. The longest sequences come first (`BlockSchedule`), so
that programs end together, and no program is started for nothing.

Queries, keys and values are read where their projection left them, own (N, 3, H, d), and their gradients written the
same way. Queries and values are shifted by their thirds of `shift` (3·H·d,); a shift of the keys would add the same to
all scores of a query. What a shift adds to the scores is one number a key; it is minus infinity where there is no key.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from weft.nn.kernels.block_schedule import KEYS, QUERIES, ROOMS

# Queries, keys, warps, stages, and of programs that stay those on a multiprocessor. Chosen on an H200, for heads of 64.
FORWARD, TO_QUERIES, TO_KEYS = (QUERIES, 64, 4, 3), (QUERIES, 64, 4, 3), (32, KEYS, 4, 3)
WHOLE = ((64, 64, 4, 2, 3), (128, 128, 8, 2, 1))  # by room


@triton.jit
def _rows(base, first, count, stride, ROWS: tl.constexpr, D: tl.constexpr):
    """Read `ROWS` rows of a sequence from the row `first` on, nought beyond its end."""
    row, place = first + tl.arange(0, ROWS), tl.arange(0, D)
    return tl.load(base + row[:, None] * stride + place[None, :], (row < count)[:, None], 0.0)


@triton.jit
def _put(tile, base, first, count, stride, ROWS: tl.constexpr, D: tl.constexpr):
    """Write such rows."""
    row, place = first + tl.arange(0, ROWS), tl.arange(0, D)
    tl.store(base + row[:, None] * stride + place[None, :], tile.to(base.dtype.element_ty), (row < count)[:, None])


@triton.jit
def _attend(
    own, shift, out, lse, starts, work, N, SCALE: tl.constexpr, CAUSAL: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Let one head of a block of queries look; the logarithms, to the base 2, of its sums are kept."""
    h, u = tl.program_id(0), tl.program_id(1)
    b, i = tl.load(work + 2 * u), tl.load(work + 2 * u + 1)
    if b >= 0:
        W: tl.constexpr = H * D
        C: tl.constexpr = SCALE * 1.4426950408889634
        t, s, d = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, D)
        asks = tl.load(starts + b).to(tl.int64)
        T = (tl.load(starts + b + 1) - asks).to(tl.int32)
        q = own + asks * (3 * W) + h * D
        query = _rows(q, i, T, 3 * W, BT, D)
        query = (query + tl.load(shift + h * D + d)[None, :]).to(query.dtype)
        top = tl.full((BT,), float("-inf"), tl.float32)
        total, context = tl.zeros((BT,), tl.float32), tl.zeros((BT, D), tl.float32)
        for j in range(0, tl.minimum(T, i + BT) if CAUSAL else T, BS):
            key, value = _rows(q + W, j, T, 3 * W, BS, D), _rows(q + 2 * W, j, T, 3 * W, BS, D)
            seen = (j + s < T)[None, :]
            if CAUSAL:
                seen = seen & (i + t[:, None] >= j + s[None, :])
            score = tl.where(seen, tl.dot(query, tl.trans(key)), float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1) * C)  # all see the first key: it is a number from then on
            weight, less = tl.exp2(score * C - higher[:, None]), tl.exp2(top - higher)
            total = total * less + tl.sum(weight, 1)
            context = tl.dot(weight.to(value.dtype), value, context * less[:, None])
            top = higher
        moved = tl.load(shift + 2 * W + h * D + d)
        _put(context / total[:, None] + moved[None, :], out + asks * W + h * D, i, T, W, BT, D)
        tl.store(lse + h * N + asks + i + t, top + tl.log2(total), i + t < T)


@triton.jit
def _whole_back(
    own, shift, lse, back, gown, gshift, starts, order, span, N, SCALE: tl.constexpr, CAUSAL: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Send what came back for sequences of up to BT tokens, one after the other, to all; scores lie turned, (S, T)."""
    W: tl.constexpr = H * D
    C: tl.constexpr = SCALE * 1.4426950408889634
    t, d = tl.arange(0, BT), tl.arange(0, D)
    for p in range(tl.load(span) * H + tl.program_id(0), tl.load(span + 1) * H, tl.num_programs(0)):
        u, h = p // H, p % H
        b = tl.load(order + u)
        asks = tl.load(starts + b).to(tl.int64)
        T = (tl.load(starts + b + 1) - asks).to(tl.int32)
        at, here = asks * (3 * W) + h * D, asks * W + h * D
        query, given = _rows(own + at, 0, T, 3 * W, BT, D), _rows(back + here, 0, T, W, BT, D)
        key, value = _rows(own + at + W, 0, T, 3 * W, BT, D), _rows(own + at + 2 * W, 0, T, 3 * W, BT, D)
        level = tl.load(lse + h * N + asks + t, t < T, float("inf"))  # what is beyond the end weighs nothing
        moves = tl.load(shift + h * D + d).to(tl.float32)[None, :]
        lift = tl.where(t < T, tl.sum(key.to(tl.float32) * moves, 1) * C, float("-inf"))
        score = tl.dot(key, tl.trans(query)) * C + lift[:, None] - level[None, :]
        if CAUSAL:
            score = tl.where(t[None, :] >= t[:, None], score, float("-inf"))
        weight = tl.exp2(score)
        gvalue = tl.dot(weight.to(given.dtype), given)
        _put(gvalue, gown + at + 2 * W, 0, T, 3 * W, BT, D)
        sums = gshift + u * (2 * W) + h * D + d
        tl.store(sums + W, tl.sum(gvalue, 0))  # the weights of a query sum to one
        gweight = tl.dot(value, tl.trans(given))
        gscore = weight * (gweight - tl.sum(weight * gweight, 0)[None, :])
        drawn = tl.sum(gscore, 1)
        gscore = gscore.to(query.dtype)
        gkey = tl.dot(gscore, query) + drawn[:, None] * moves
        _put(gkey * SCALE, gown + at + W, 0, T, 3 * W, BT, D)
        gquery = tl.dot(tl.trans(key), gscore) * SCALE  # turned, (d, T)
        tl.store(sums, tl.sum(gquery, 1))
        to = gown + at + t[None, :] * (3 * W) + d[:, None]
        tl.store(to, gquery.to(gown.dtype.element_ty), (t < T)[None, :])


@triton.jit
def _queries_back(
    own, shift, out, lse, back, gown, gshift, means, starts, work, N, SCALE: tl.constexpr, CAUSAL: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Send it to a block of queries and to the shift; leave, for the keys, the mean of what came back for weights."""
    h, u = tl.program_id(0), tl.program_id(1)
    b, i = tl.load(work + 2 * u), tl.load(work + 2 * u + 1)
    W: tl.constexpr = H * D
    C: tl.constexpr = SCALE * 1.4426950408889634
    t, s, d = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, D)
    sums = gshift + u * (2 * W) + h * D + d
    if b < 0:
        tl.store(sums, tl.zeros((D,), tl.float32))
        tl.store(sums + W, tl.zeros((D,), tl.float32))
    else:
        asks = tl.load(starts + b).to(tl.int64)
        T = (tl.load(starts + b + 1) - asks).to(tl.int32)
        at, here, flat = asks * (3 * W) + h * D, asks * W + h * D, h * N + asks
        given = _rows(back + here, i, T, W, BT, D)
        tl.store(sums + W, tl.sum(given.to(tl.float32), 0))
        moved = tl.load(shift + 2 * W + h * D + d)[None, :].to(tl.float32)
        mean = tl.sum((_rows(out + here, i, T, W, BT, D).to(tl.float32) - moved) * given.to(tl.float32), 1)
        tl.store(means + flat + i + t, mean, i + t < T)
        level = tl.load(lse + flat + i + t, i + t < T, float("inf"))
        query = _rows(own + at, i, T, 3 * W, BT, D)
        query = (query + tl.load(shift + h * D + d)[None, :]).to(query.dtype)
        gquery = tl.zeros((BT, D), tl.float32)
        for j in range(0, tl.minimum(T, i + BT) if CAUSAL else T, BS):
            key, value = _rows(own + at + W, j, T, 3 * W, BS, D), _rows(own + at + 2 * W, j, T, 3 * W, BS, D)
            score = tl.dot(query, tl.trans(key)) * C - level[:, None]
            score += tl.where(j + s < T, 0.0, float("-inf"))[None, :]
            if CAUSAL:
                score = tl.where(i + t[:, None] >= j + s[None, :], score, float("-inf"))
            gscore = tl.exp2(score) * (tl.dot(given, tl.trans(value)) - mean[:, None])
            gquery = tl.dot(gscore.to(key.dtype), key, gquery)
        gquery *= SCALE
        _put(gquery, gown + at, i, T, 3 * W, BT, D)
        tl.store(sums, tl.sum(gquery, 0))


@triton.jit
def _keys_back(
    own, shift, lse, back, gown, means, starts, work, N, SCALE: tl.constexpr, CAUSAL: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Send it to a block of keys and values; scores lie turned, (S, T)."""
    h, u = tl.program_id(0), tl.program_id(1)
    b, j = tl.load(work + 2 * u), tl.load(work + 2 * u + 1)
    if b >= 0:
        W: tl.constexpr = H * D
        C: tl.constexpr = SCALE * 1.4426950408889634
        t, s, d = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, D)
        asks = tl.load(starts + b).to(tl.int64)
        T = (tl.load(starts + b + 1) - asks).to(tl.int32)
        at, here, flat = asks * (3 * W) + h * D, asks * W + h * D, h * N + asks
        key, value = _rows(own + at + W, j, T, 3 * W, BS, D), _rows(own + at + 2 * W, j, T, 3 * W, BS, D)
        moves = tl.load(shift + h * D + d).to(tl.float32)[None, :]
        lift = tl.where(j + s < T, tl.sum(key.to(tl.float32) * moves, 1) * C, float("-inf"))
        gkey, gvalue, drawn = tl.zeros((BS, D), tl.float32), tl.zeros((BS, D), tl.float32), tl.zeros((BS,), tl.float32)
        for i in range(j // BT * BT if CAUSAL else 0, T, BT):
            query, given = _rows(own + at, i, T, 3 * W, BT, D), _rows(back + here, i, T, W, BT, D)
            level = tl.load(lse + flat + i + t, i + t < T, float("inf"))
            mean = tl.load(means + flat + i + t, i + t < T, 0.0)
            score = tl.dot(key, tl.trans(query)) * C + lift[:, None] - level[None, :]
            if CAUSAL:
                score = tl.where(i + t[None, :] >= j + s[:, None], score, float("-inf"))
            weight = tl.exp2(score)
            gvalue = tl.dot(weight.to(given.dtype), given, gvalue)
            gscore = weight * (tl.dot(value, tl.trans(given)) - mean[None, :])
            drawn += tl.sum(gscore, 1)
            gkey = tl.dot(gscore.to(query.dtype), query, gkey)
        _put(gvalue, gown + at + 2 * W, j, T, 3 * W, BS, D)
        _put((gkey + drawn[:, None] * moves) * SCALE, gown + at + W, j, T, 3 * W, BS, D)


def _sizes(own, causal, blocks):
    """What each launch is given of the sizes; the blocks of queries and of keys, warps and stages."""
    _, _, heads, size = own.shape
    queries, keys, warps, stages = blocks
    sizes = {"SCALE": size**-0.5, "CAUSAL": causal, "H": heads, "D": size, "BT": queries, "BS": keys}
    return sizes | {"num_warps": warps, "num_stages": stages}


@triton_op("weft::attend_itself", mutates_args=())
def attend_itself(
    own: Tensor, shift: Tensor, starts: Tensor, order: Tensor, spans: Tensor, queries: Tensor, keys: Tensor,
    longest: int, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Let each sequence look at itself; return what was found, (N, H, d), and the logarithmic sums (H, N)."""
    tokens, _, heads, size = own.shape
    out, lse = own.new_empty(tokens, heads, size), own.new_empty(heads, tokens, dtype=torch.float32)
    wrap_triton(_attend)[(heads, len(queries))](
        own, shift, out, lse, starts, queries, tokens, **_sizes(own, causal, FORWARD)
    )
    return out, lse


@triton_op("weft::attend_itself_back", mutates_args=())
def attend_itself_back(
    own: Tensor, shift: Tensor, out: Tensor, lse: Tensor, back: Tensor, starts: Tensor, order: Tensor, spans: Tensor,
    queries: Tensor, keys: Tensor, longest: int, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what goes back to `own` and to the shift."""
    tokens, _, heads, size = own.shape
    gown, wide = torch.empty_like(own), heads * size
    if longest <= ROOMS[-1]:
        gshift, least = own.new_empty(len(order), 2, wide, dtype=torch.float32), -1
        for span, room, (*blocks, stay) in zip(spans.unbind(), ROOMS, WHOLE, strict=True):
            if longest > least:
                sizes = _sizes(own, causal, blocks)
                del sizes["BS"]
                programs = min(stay * _processors(own.device), len(order) * heads)
                wrap_triton(_whole_back)[(programs,)](
                    own, shift, lse, back, gown, gshift, starts, order, span, tokens, **sizes
                )
            least = room
    else:
        gshift, means = own.new_empty(len(queries), 2, wide, dtype=torch.float32), torch.empty_like(lse)
        wrap_triton(_queries_back)[(heads, len(queries))](
            own, shift, out, lse, back, gown, gshift, means, starts, queries, tokens,
            **_sizes(own, causal, TO_QUERIES),
        )  # fmt: skip
        wrap_triton(_keys_back)[(heads, len(keys))](
            own, shift, lse, back, gown, means, starts, keys, tokens, **_sizes(own, causal, TO_KEYS)
        )
    to_queries, to_values = gshift.sum(0).unbind()
    return gown, torch.cat([to_queries, torch.zeros_like(to_queries), to_values])


def _processors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _keep(ctx, inputs, output):
    own, shift, *work, ctx.longest, ctx.causal = inputs
    ctx.save_for_backward(own, shift, *output, *work)


def _send_back(ctx, back, _):
    own, shift, out, lse, *work = ctx.saved_tensors
    gown, gshift = attend_itself_back(own, shift, out, lse, back.contiguous(), *work, ctx.longest, ctx.causal)
    return gown, gshift.to(shift.dtype), None, None, None, None, None, None, None


attend_itself.register_autograd(_send_back, setup_context=_keep)
