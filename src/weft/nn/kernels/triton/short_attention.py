"""Self- and cross-attention over many short sequences on CUDA, in Triton: one program for each sequence and head.

Imported only where Triton is. Kernels for long texts split each sequence into blocks and distribute those over the
GPU; with sequences of a hundred tokens, most of such a block is padding. Here a sequence of up to 128 tokens is one
block: all its scores are in registers, the backward pass recomputes them from queries and keys, and there are no atomic
sums in memory. Longer sequences go block by block, with an online softmax (Dao et al. 2022). Queries, keys and values
are read in place from the output of their projections, and their gradients are written in the same layout:

    qkv (N, 3, H, d)                      queries, keys and values of self-attention
    qkv (N, 1, H, d), kv (M, 2, H, d)     queries, and the source's keys and values, of cross-attention
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

# Block sizes of queries and keys, warps and stages: for sequences of up to 64 tokens, of up to 128, and for those that
# need several blocks. Tuned on an H200, for heads of 64.
_FORWARD_BLOCKS = ((64, 64, 4, 1), (128, 128, 8, 1), (64, 128, 8, 3))
_BACKWARD_BLOCKS = ((64, 64, 4, 1), (32, 128, 4, 3), (64, 128, 8, 1))
_MAX_LENGTHS = (64, 128, 1 << 30)


@triton.jit
def _load_rows(base, first, count, stride, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Load `ROWS` rows of a sequence from the row `first` on, zero beyond its end."""
    row, column = first + tl.arange(0, ROWS), tl.arange(0, BD)
    inside = (row < count)[:, None] & (column < D)[None, :]
    return tl.load(base + row[:, None] * stride + column[None, :], inside, 0.0)


@triton.jit
def _store_rows(tile, base, first, count, stride, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Store `ROWS` rows of a sequence from the row `first` on."""
    row, column = first + tl.arange(0, ROWS), tl.arange(0, BD)
    inside = (row < count)[:, None] & (column < D)[None, :]
    tl.store(base + row[:, None] * stride + column[None, :], tile.to(base.dtype.element_ty), inside)


@triton.jit
def _attend_forward(
    qkv, kv, bias, out, lse, q_starts, k_starts, H, SCALE: tl.constexpr, SELF: tl.constexpr, CAUSAL: tl.constexpr,
    MIN_LENGTH: tl.constexpr, MAX_LENGTH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    BS: tl.constexpr, SINGLE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one head of a block of one sequence, and store the base-2 log-sum-exp of its scores."""
    h, b, i = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BT
    t, s, d = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, BD)
    q_start, k_start = tl.load(q_starts + b).to(tl.int64), tl.load(k_starts + b).to(tl.int64)
    T, S = (tl.load(q_starts + b + 1) - q_start).to(tl.int32), (tl.load(k_starts + b + 1) - k_start).to(tl.int32)
    if (tl.maximum(T, S) > MIN_LENGTH) & (tl.maximum(T, S) <= MAX_LENGTH) & (i < T):
        width, bias = H * D, bias + h * D
        q_row, kv_row = (3 * width, 3 * width) if SELF else (width, 2 * width)
        k = (qkv + width if SELF else kv) + k_start * kv_row + h * D
        query = _load_rows(qkv + q_start * q_row + h * D, i, T, q_row, BT, D, BD)
        query = (query + tl.load(bias + d, d < D, 0.0)[None, :]).to(query.dtype)
        row_max = tl.full((BT,), float("-inf"), tl.float32)
        row_sum, context = tl.zeros((BT,), tl.float32), tl.zeros((BT, BD), tl.float32)
        for j in range(0, BS if SINGLE_BLOCK else (tl.minimum(S, i + BT) if CAUSAL else S), BS):
            key, value = _load_rows(k, j, S, kv_row, BS, D, BD), _load_rows(k + width, j, S, kv_row, BS, D, BD)
            mask = (j + s < S)[None, :]
            if CAUSAL:
                mask = mask & (i + t[:, None] >= j + s[None, :])
            score = tl.where(mask, tl.dot(query, tl.trans(key)) * (SCALE * 1.4426950408889634), float("-inf"))
            new_max = tl.maximum(row_max, tl.max(score, 1))
            finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf where there is nothing to attend to
            weight, rescale = tl.exp2(score - finite_max[:, None]), tl.exp2(row_max - finite_max)
            row_sum = row_sum * rescale + tl.sum(weight, 1)
            context = tl.dot(weight.to(value.dtype), value, context * rescale[:, None])
            row_max = new_max
        row_sum = tl.where(row_sum > 0, row_sum, 1.0)
        value_bias = tl.load(bias + 2 * width + d, (d < D) & (S > 0), 0.0)
        _store_rows(
            context / row_sum[:, None] + value_bias[None, :], out + q_start * width + h * D, i, T, width, BT, D, BD
        )
        tl.store(lse + (q_start + i + t) * H + h, row_max + tl.log2(row_sum), i + t < T)


@triton.jit
def _attend_backward(
    qkv, kv, bias, out, lse, grad_out, grad_qkv, grad_kv, grad_bias, gquery_sums, q_starts, k_starts, H,
    SCALE: tl.constexpr, SELF: tl.constexpr, CAUSAL: tl.constexpr, MIN_LENGTH: tl.constexpr, MAX_LENGTH: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, SINGLE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one head of one sequence; scores are transposed, (S, T)."""
    h, b = tl.program_id(0), tl.program_id(1)
    t, s, d = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, BD)
    q_start, k_start = tl.load(q_starts + b).to(tl.int64), tl.load(k_starts + b).to(tl.int64)
    T, S = (tl.load(q_starts + b + 1) - q_start).to(tl.int32), (tl.load(k_starts + b + 1) - k_start).to(tl.int32)
    if (tl.maximum(T, S) > MIN_LENGTH) & (tl.maximum(T, S) <= MAX_LENGTH):
        width, bias = H * D, bias + h * D
        q_row, kv_row = (3 * width, 3 * width) if SELF else (width, 2 * width)
        keys, gkeys = (qkv + width, grad_qkv + width) if SELF else (kv, grad_kv)
        q, gq, out_offset = qkv + q_start * q_row + h * D, grad_qkv + q_start * q_row + h * D, q_start * width + h * D
        k, gk = keys + k_start * kv_row + h * D, gkeys + k_start * kv_row + h * D
        query_bias = tl.load(bias + d, d < D, 0.0)[None, :]
        gquery_bias, gvalue_bias = tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32)
        for j in range(0, BS if SINGLE_BLOCK else tl.maximum(S, 1), BS):
            key, value = _load_rows(k, j, S, kv_row, BS, D, BD), _load_rows(k + width, j, S, kv_row, BS, D, BD)
            gkey, gvalue = tl.zeros((BS, BD), tl.float32), tl.zeros((BS, BD), tl.float32)
            for i in range(j // BT * BT if CAUSAL else 0, BT if BT == MAX_LENGTH else T, BT):
                query, gout = (
                    _load_rows(q, i, T, q_row, BT, D, BD),
                    _load_rows(grad_out + out_offset, i, T, width, BT, D, BD),
                )
                if j == 0:
                    gvalue_bias += tl.sum(gout.to(tl.float32), 0)
                query = (query + query_bias).to(query.dtype)
                row_lse = tl.load(lse + (q_start + i + t) * H + h, i + t < T, 0.0)
                mask = (j + s < S)[:, None] & (i + t < T)[None, :]
                if CAUSAL:
                    mask = mask & (i + t[None, :] >= j + s[:, None])
                score = tl.dot(key, tl.trans(query)) * (SCALE * 1.4426950408889634)
                weight = tl.where(mask, tl.exp2(score - row_lse[None, :]), 0.0)
                gvalue = tl.dot(weight.to(gout.dtype), gout, gvalue)
                gweight = tl.dot(value, tl.trans(gout))
                if SINGLE_BLOCK:
                    delta = tl.sum(weight * gweight, 0)
                else:  # the same, over all blocks
                    value_bias = tl.load(bias + 2 * width + d, d < D, 0.0)[None, :]
                    delta = tl.sum(
                        (_load_rows(out + out_offset, i, T, width, BT, D, BD) - value_bias) * gout.to(tl.float32), 1
                    )
                gscore = (weight * (gweight - delta[None, :])).to(query.dtype)
                gkey = tl.dot(gscore, query, gkey)
                gquery = tl.dot(tl.trans(gscore), key)
                gquery_bias += tl.sum(gquery, 0)
                if not SINGLE_BLOCK:  # no other program has these rows, so partial sums may be kept in memory
                    if j > 0:
                        gquery += _load_rows(gquery_sums + out_offset, i, T, width, BT, D, BD)
                    _store_rows(gquery, gquery_sums + out_offset, i, T, width, BT, D, BD)
                    tl.debug_barrier()
                _store_rows(gquery * SCALE, gq, i, T, q_row, BT, D, BD)
            _store_rows(gvalue, gk + width, j, S, kv_row, BS, D, BD)
            _store_rows(gkey * SCALE, gk, j, S, kv_row, BS, D, BD)
        sums = grad_bias + b * 3 * width + h * D + d
        tl.store(sums, gquery_bias * SCALE, d < D)
        tl.store(sums + 2 * width, gvalue_bias, (d < D) & (S > 0))


def _launch_options(blocks, qkv, kv, causal, longest):
    """Yield the constants of each launch: each serves the sequences that are too long for the one before."""
    size, shorter = qkv.shape[-1], 0
    for length, (queries, keys, warps, stages) in zip(_MAX_LENGTHS, blocks, strict=True):
        if longest > shorter:
            yield {
                "SCALE": size**-0.5, "SELF": kv is None, "CAUSAL": causal, "MIN_LENGTH": shorter, "MAX_LENGTH": length,
                "D": size, "BD": max(16, triton.next_power_of_2(size)), "BT": queries, "BS": keys,
                "SINGLE_BLOCK": keys == length, "num_warps": warps, "num_stages": stages,
            }  # fmt: skip
        shorter = length


@triton_op("weft::short_attention", mutates_args=())
def short_attention(
    qkv: Tensor, kv: Tensor | None, bias: Tensor, q_starts: Tensor, k_starts: Tensor, longest: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the attention (N, H, d) of each sequence, to itself or its source in kv, and log-sum-exps (N, H).

    `longest` bounds the lengths of both. `bias` (3·H·d,) holds the biases of queries, keys and values: that of the
    queries is added first, that of the values to their weighted mean, and that of the keys not at all, for it would add
    the same to all scores of a query.
    """
    tokens, _, heads, size = qkv.shape
    out, lse = qkv.new_empty(tokens, heads, size), qkv.new_empty(tokens, heads, dtype=torch.float32)
    keys_values, rows = qkv if kv is None else kv, len(q_starts) - 1
    for options in _launch_options(_FORWARD_BLOCKS, qkv, kv, causal, longest):
        grid = (heads, rows, -(-min(longest, options["MAX_LENGTH"]) // options["BT"]))
        wrap_triton(_attend_forward)[grid](qkv, keys_values, bias, out, lse, q_starts, k_starts, heads, **options)
    return out, lse


@triton_op("weft::short_attention_backward", mutates_args=())
def short_attention_backward(
    qkv: Tensor, kv: Tensor | None, bias: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, q_starts: Tensor,
    k_starts: Tensor, longest: int, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of qkv, of kv (empty where there is none) and of the bias."""
    heads = qkv.shape[-2]
    keys_values = qkv if kv is None else kv
    grad_qkv, grad_kv = torch.empty_like(qkv), torch.empty_like(qkv[:0] if kv is None else kv)
    grad_bias = bias.new_zeros(len(q_starts) - 1, len(bias), dtype=torch.float32)
    gquery_sums = qkv.new_empty(out.shape if longest > _MAX_LENGTHS[-2] else (0,), dtype=torch.float32)
    grid = (heads, len(q_starts) - 1)
    for options in _launch_options(_BACKWARD_BLOCKS, qkv, kv, causal, longest):
        wrap_triton(_attend_backward)[grid](
            qkv, keys_values, bias, out, lse, grad_out, grad_qkv, grad_kv, grad_bias, gquery_sums, q_starts,
            k_starts, heads, **options,
        )  # fmt: skip
    return grad_qkv, grad_kv, grad_bias.sum(0)


def _setup_context(ctx, inputs, output):
    qkv, kv, bias, q_starts, k_starts, ctx.longest, ctx.causal = inputs
    ctx.save_for_backward(qkv, kv, bias, *output, q_starts, k_starts)


def _backward(ctx, grad_out, _):
    qkv, kv, bias, out, lse, q_starts, k_starts = ctx.saved_tensors
    grad_out = grad_out.contiguous()
    grad_qkv, grad_kv, grad_bias = short_attention_backward(
        qkv, kv, bias, out, lse, grad_out, q_starts, k_starts, ctx.longest, ctx.causal
    )
    return grad_qkv, None if kv is None else grad_kv, grad_bias.to(bias.dtype), None, None, None, None


short_attention.register_autograd(_backward, setup_context=_setup_context)
