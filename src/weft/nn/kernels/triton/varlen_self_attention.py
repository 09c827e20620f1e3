"""Variable-length self-attention on CUDA, in Triton, for heads of size 16, 32 or 64.

Imported only where Triton is. Forward, a program has 64 queries of one head, and loops over the keys of their sequence
with an online softmax (Dao et al. 2022). Backward, a sequence of up to 128 tokens is one tile: its scores are computed
once for all gradients, by persistent programs that load the next sequence while they compute. For longer sequences one
kernel loops over the keys for each block of queries, another over the queries for each block of keys: seven products in
place of five, but no atomic sums in memory. The longest sequences come first (`BlockSchedule`), so that programs end
together, and no program is launched for nothing.

Queries, keys and values are read in place from the output of their projection without bias, qkv (N, 3, H, d), and their
gradients are written in the same layout. The biases of queries and values, thirds of `bias` (3·H·d,), are added here;
that of the keys would add the same to all scores of a query. In the backward pass the query bias adds one number a key
to the scores; it is minus infinity where there is no key.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from weft.nn.kernels.block_schedule import KEY_BLOCK, QUERY_BLOCK, TILE_LENGTHS

# Block sizes of queries and keys, warps, stages, and persistent programs a multiprocessor. Tuned on an H200, d = 64.
_FORWARD_BLOCKS = (QUERY_BLOCK, 64, 4, 3)
_QUERY_BACKWARD_BLOCKS, _KEY_BACKWARD_BLOCKS = (QUERY_BLOCK, 64, 4, 3), (32, KEY_BLOCK, 4, 3)
_SINGLE_TILE_BLOCKS = ((64, 64, 4, 2, 3), (128, 128, 8, 2, 1))  # by tile length


@triton.jit
def _load_rows(base, first, count, stride, ROWS: tl.constexpr, D: tl.constexpr):
    """Load `ROWS` rows of a sequence from the row `first` on, zero beyond its end."""
    row, column = first + tl.arange(0, ROWS), tl.arange(0, D)
    return tl.load(base + row[:, None] * stride + column[None, :], (row < count)[:, None], 0.0)


@triton.jit
def _store_rows(tile, base, first, count, stride, ROWS: tl.constexpr, D: tl.constexpr):
    """Store `ROWS` rows of a sequence from the row `first` on."""
    row, column = first + tl.arange(0, ROWS), tl.arange(0, D)
    tl.store(base + row[:, None] * stride + column[None, :], tile.to(base.dtype.element_ty), (row < count)[:, None])


@triton.jit
def _forward(
    qkv, bias, out, lse, starts, blocks, N, SCALE: tl.constexpr, CAUSAL: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Compute one head of a block of queries, and store the base-2 log-sum-exp of its scores."""
    h, u = tl.program_id(0), tl.program_id(1)
    b, i = tl.load(blocks + 2 * u), tl.load(blocks + 2 * u + 1)
    if b >= 0:
        W: tl.constexpr = H * D
        C: tl.constexpr = SCALE * 1.4426950408889634
        t, s, d = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, D)
        start = tl.load(starts + b).to(tl.int64)
        T = (tl.load(starts + b + 1) - start).to(tl.int32)
        q = qkv + start * (3 * W) + h * D
        query = _load_rows(q, i, T, 3 * W, BT, D)
        query = (query + tl.load(bias + h * D + d)[None, :]).to(query.dtype)
        row_max = tl.full((BT,), float("-inf"), tl.float32)
        row_sum, context = tl.zeros((BT,), tl.float32), tl.zeros((BT, D), tl.float32)
        for j in range(0, tl.minimum(T, i + BT) if CAUSAL else T, BS):
            key, value = _load_rows(q + W, j, T, 3 * W, BS, D), _load_rows(q + 2 * W, j, T, 3 * W, BS, D)
            mask = (j + s < T)[None, :]
            if CAUSAL:
                mask = mask & (i + t[:, None] >= j + s[None, :])
            score = tl.where(mask, tl.dot(query, tl.trans(key)), float("-inf"))
            new_max = tl.maximum(
                row_max, tl.max(score, 1) * C
            )  # every query attends to the first key: finite from then on
            weight, rescale = tl.exp2(score * C - new_max[:, None]), tl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + tl.sum(weight, 1)
            context = tl.dot(weight.to(value.dtype), value, context * rescale[:, None])
            row_max = new_max
        value_bias = tl.load(bias + 2 * W + h * D + d)
        _store_rows(context / row_sum[:, None] + value_bias[None, :], out + start * W + h * D, i, T, W, BT, D)
        tl.store(lse + h * N + start + i + t, row_max + tl.log2(row_sum), i + t < T)


@triton.jit
def _single_tile_backward(
    qkv, bias, lse, grad_out, grad_qkv, grad_bias, starts, order, span, N, SCALE: tl.constexpr, CAUSAL: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of sequences of up to BT tokens, one after the other; scores are transposed, (S, T)."""
    W: tl.constexpr = H * D
    C: tl.constexpr = SCALE * 1.4426950408889634
    t, d = tl.arange(0, BT), tl.arange(0, D)
    for p in range(tl.load(span) * H + tl.program_id(0), tl.load(span + 1) * H, tl.num_programs(0)):
        u, h = p // H, p % H
        b = tl.load(order + u)
        start = tl.load(starts + b).to(tl.int64)
        T = (tl.load(starts + b + 1) - start).to(tl.int32)
        qkv_offset, out_offset = start * (3 * W) + h * D, start * W + h * D
        query, gout = (
            _load_rows(qkv + qkv_offset, 0, T, 3 * W, BT, D),
            _load_rows(grad_out + out_offset, 0, T, W, BT, D),
        )
        key, value = (
            _load_rows(qkv + qkv_offset + W, 0, T, 3 * W, BT, D),
            _load_rows(qkv + qkv_offset + 2 * W, 0, T, 3 * W, BT, D),
        )
        row_lse = tl.load(lse + h * N + start + t, t < T, float("inf"))  # queries beyond the end have weight zero
        query_bias = tl.load(bias + h * D + d).to(tl.float32)[None, :]
        bias_score = tl.where(t < T, tl.sum(key.to(tl.float32) * query_bias, 1) * C, float("-inf"))
        score = tl.dot(key, tl.trans(query)) * C + bias_score[:, None] - row_lse[None, :]
        if CAUSAL:
            score = tl.where(t[None, :] >= t[:, None], score, float("-inf"))
        weight = tl.exp2(score)
        gvalue = tl.dot(weight.to(gout.dtype), gout)
        _store_rows(gvalue, grad_qkv + qkv_offset + 2 * W, 0, T, 3 * W, BT, D)
        sums = grad_bias + u * (2 * W) + h * D + d
        tl.store(sums + W, tl.sum(gvalue, 0))  # the weights of a query sum to one
        gweight = tl.dot(value, tl.trans(gout))
        gscore = weight * (gweight - tl.sum(weight * gweight, 0)[None, :])
        gscore_sum = tl.sum(gscore, 1)
        gscore = gscore.to(query.dtype)
        gkey = tl.dot(gscore, query) + gscore_sum[:, None] * query_bias
        _store_rows(gkey * SCALE, grad_qkv + qkv_offset + W, 0, T, 3 * W, BT, D)
        gquery = tl.dot(tl.trans(key), gscore) * SCALE  # transposed, (d, T)
        tl.store(sums, tl.sum(gquery, 1))
        out = grad_qkv + qkv_offset + t[None, :] * (3 * W) + d[:, None]
        tl.store(out, gquery.to(grad_qkv.dtype.element_ty), (t < T)[None, :])


@triton.jit
def _query_backward(
    qkv, bias, out, lse, grad_out, grad_qkv, grad_bias, deltas, starts, blocks, N, SCALE: tl.constexpr,
    CAUSAL: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of queries and of the bias; store Δ = Σ_d out · grad_out for the keys."""
    h, u = tl.program_id(0), tl.program_id(1)
    b, i = tl.load(blocks + 2 * u), tl.load(blocks + 2 * u + 1)
    W: tl.constexpr = H * D
    C: tl.constexpr = SCALE * 1.4426950408889634
    t, s, d = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, D)
    sums = grad_bias + u * (2 * W) + h * D + d
    if b < 0:
        tl.store(sums, tl.zeros((D,), tl.float32))
        tl.store(sums + W, tl.zeros((D,), tl.float32))
    else:
        start = tl.load(starts + b).to(tl.int64)
        T = (tl.load(starts + b + 1) - start).to(tl.int32)
        qkv_offset, out_offset, lse_offset = start * (3 * W) + h * D, start * W + h * D, h * N + start
        gout = _load_rows(grad_out + out_offset, i, T, W, BT, D)
        tl.store(sums + W, tl.sum(gout.to(tl.float32), 0))
        value_bias = tl.load(bias + 2 * W + h * D + d)[None, :].to(tl.float32)
        delta = tl.sum(
            (_load_rows(out + out_offset, i, T, W, BT, D).to(tl.float32) - value_bias) * gout.to(tl.float32), 1
        )
        tl.store(deltas + lse_offset + i + t, delta, i + t < T)
        row_lse = tl.load(lse + lse_offset + i + t, i + t < T, float("inf"))
        query = _load_rows(qkv + qkv_offset, i, T, 3 * W, BT, D)
        query = (query + tl.load(bias + h * D + d)[None, :]).to(query.dtype)
        gquery = tl.zeros((BT, D), tl.float32)
        for j in range(0, tl.minimum(T, i + BT) if CAUSAL else T, BS):
            key, value = (
                _load_rows(qkv + qkv_offset + W, j, T, 3 * W, BS, D),
                _load_rows(qkv + qkv_offset + 2 * W, j, T, 3 * W, BS, D),
            )
            score = tl.dot(query, tl.trans(key)) * C - row_lse[:, None]
            score += tl.where(j + s < T, 0.0, float("-inf"))[None, :]
            if CAUSAL:
                score = tl.where(i + t[:, None] >= j + s[None, :], score, float("-inf"))
            gscore = tl.exp2(score) * (tl.dot(gout, tl.trans(value)) - delta[:, None])
            gquery = tl.dot(gscore.to(key.dtype), key, gquery)
        gquery *= SCALE
        _store_rows(gquery, grad_qkv + qkv_offset, i, T, 3 * W, BT, D)
        tl.store(sums, tl.sum(gquery, 0))


@triton.jit
def _key_value_backward(
    qkv, bias, lse, grad_out, grad_qkv, deltas, starts, blocks, N, SCALE: tl.constexpr, CAUSAL: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values; scores are transposed, (S, T)."""
    h, u = tl.program_id(0), tl.program_id(1)
    b, j = tl.load(blocks + 2 * u), tl.load(blocks + 2 * u + 1)
    if b >= 0:
        W: tl.constexpr = H * D
        C: tl.constexpr = SCALE * 1.4426950408889634
        t, s, d = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, D)
        start = tl.load(starts + b).to(tl.int64)
        T = (tl.load(starts + b + 1) - start).to(tl.int32)
        qkv_offset, out_offset, lse_offset = start * (3 * W) + h * D, start * W + h * D, h * N + start
        key, value = (
            _load_rows(qkv + qkv_offset + W, j, T, 3 * W, BS, D),
            _load_rows(qkv + qkv_offset + 2 * W, j, T, 3 * W, BS, D),
        )
        query_bias = tl.load(bias + h * D + d).to(tl.float32)[None, :]
        bias_score = tl.where(j + s < T, tl.sum(key.to(tl.float32) * query_bias, 1) * C, float("-inf"))
        gkey, gvalue, gscore_sum = (
            tl.zeros((BS, D), tl.float32),
            tl.zeros((BS, D), tl.float32),
            tl.zeros((BS,), tl.float32),
        )
        for i in range(j // BT * BT if CAUSAL else 0, T, BT):
            query, gout = (
                _load_rows(qkv + qkv_offset, i, T, 3 * W, BT, D),
                _load_rows(grad_out + out_offset, i, T, W, BT, D),
            )
            row_lse = tl.load(lse + lse_offset + i + t, i + t < T, float("inf"))
            delta = tl.load(deltas + lse_offset + i + t, i + t < T, 0.0)
            score = tl.dot(key, tl.trans(query)) * C + bias_score[:, None] - row_lse[None, :]
            if CAUSAL:
                score = tl.where(i + t[None, :] >= j + s[:, None], score, float("-inf"))
            weight = tl.exp2(score)
            gvalue = tl.dot(weight.to(gout.dtype), gout, gvalue)
            gscore = weight * (tl.dot(value, tl.trans(gout)) - delta[None, :])
            gscore_sum += tl.sum(gscore, 1)
            gkey = tl.dot(gscore.to(query.dtype), query, gkey)
        _store_rows(gvalue, grad_qkv + qkv_offset + 2 * W, j, T, 3 * W, BS, D)
        _store_rows((gkey + gscore_sum[:, None] * query_bias) * SCALE, grad_qkv + qkv_offset + W, j, T, 3 * W, BS, D)


def _launch_options(qkv, causal, blocks):
    """Return the constants of a launch; `blocks` are the block sizes of queries and keys, warps and stages."""
    _, _, heads, size = qkv.shape
    queries, keys, warps, stages = blocks
    constants = {"SCALE": size**-0.5, "CAUSAL": causal, "H": heads, "D": size, "BT": queries, "BS": keys}
    return constants | {"num_warps": warps, "num_stages": stages}


@triton_op("weft::varlen_self_attention", mutates_args=())
def varlen_self_attention(
    qkv: Tensor, bias: Tensor, starts: Tensor, order: Tensor, spans: Tensor, queries: Tensor, keys: Tensor,
    longest: int, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the self-attention of each sequence, (N, H, d), and the base-2 log-sum-exp of the scores, (H, N)."""
    tokens, _, heads, size = qkv.shape
    out, lse = qkv.new_empty(tokens, heads, size), qkv.new_empty(heads, tokens, dtype=torch.float32)
    wrap_triton(_forward)[(heads, len(queries))](
        qkv, bias, out, lse, starts, queries, tokens, **_launch_options(qkv, causal, _FORWARD_BLOCKS)
    )
    return out, lse


@triton_op("weft::varlen_self_attention_backward", mutates_args=())
def varlen_self_attention_backward(
    qkv: Tensor, bias: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, starts: Tensor, order: Tensor, spans: Tensor,
    queries: Tensor, keys: Tensor, longest: int, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of qkv and of the bias."""
    tokens, _, heads, size = qkv.shape
    grad_qkv, width = torch.empty_like(qkv), heads * size
    if longest <= TILE_LENGTHS[-1]:
        grad_bias, shorter = qkv.new_empty(len(order), 2, width, dtype=torch.float32), -1
        for span, length, (*blocks, programs_each) in zip(
            spans.unbind(), TILE_LENGTHS, _SINGLE_TILE_BLOCKS, strict=True
        ):
            if longest > shorter:
                options = _launch_options(qkv, causal, blocks)
                del options["BS"]
                programs = min(programs_each * _num_multiprocessors(qkv.device), len(order) * heads)
                wrap_triton(_single_tile_backward)[(programs,)](
                    qkv, bias, lse, grad_out, grad_qkv, grad_bias, starts, order, span, tokens, **options
                )
            shorter = length
    else:
        grad_bias, deltas = qkv.new_empty(len(queries), 2, width, dtype=torch.float32), torch.empty_like(lse)
        wrap_triton(_query_backward)[(heads, len(queries))](
            qkv, bias, out, lse, grad_out, grad_qkv, grad_bias, deltas, starts, queries, tokens,
            **_launch_options(qkv, causal, _QUERY_BACKWARD_BLOCKS),
        )  # fmt: skip
        wrap_triton(_key_value_backward)[(heads, len(keys))](
            qkv,
            bias,
            lse,
            grad_out,
            grad_qkv,
            deltas,
            starts,
            keys,
            tokens,
            **_launch_options(qkv, causal, _KEY_BACKWARD_BLOCKS),
        )
    grad_query_bias, grad_value_bias = grad_bias.sum(0).unbind()
    return grad_qkv, torch.cat([grad_query_bias, torch.zeros_like(grad_query_bias), grad_value_bias])


def _num_multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _setup_context(ctx, inputs, output):
    qkv, bias, *schedule, ctx.longest, ctx.causal = inputs
    ctx.save_for_backward(qkv, bias, *output, *schedule)


def _backward(ctx, grad_out, _):
    qkv, bias, out, lse, *schedule = ctx.saved_tensors
    grad_qkv, grad_bias = varlen_self_attention_backward(
        qkv, bias, out, lse, grad_out.contiguous(), *schedule, ctx.longest, ctx.causal
    )
    return grad_qkv, grad_bias.to(bias.dtype), None, None, None, None, None, None, None


varlen_self_attention.register_autograd(_backward, setup_context=_setup_context)
