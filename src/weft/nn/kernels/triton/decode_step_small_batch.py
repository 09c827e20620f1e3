"""One decoding step of a pre-norm stack for a batch of one, or of very few, hypotheses on CUDA, in Triton.

Imported only where Triton is. With one row there is nothing to share: a step takes the time to read all weights once,
plus the latency of its kernels one after the other. So there are five kernels a layer, each of which loads its weights
into registers while the previous one still runs (`weft.nn.kernels.triton.decode_attention.let_in`), and only then waits
for it:

    linear(norm(s))    attention    s + linear(attention)    act(linear(norm(s)))    s + linear(that)

A program computes some outputs for all rows, over the whole inner dimension, so it normalises the rows itself: they are
short.
"""

# mypy: ignore-errors

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from weft.nn.kernels.triton.decode_attention import PartialAttention, attend_partial, early, let_in
from weft.nn.kernels.triton.decode_step import ACTIVATION_NAMES, add_norm_step, apply_activation

if TYPE_CHECKING:
    from weft.nn.attention.kv_cache import KVCache, KVIndex

_TILE, _WARPS = 16_384, 4  # weights of a program at most
_PROGRAMS = 128  # at least, where there are outputs enough


@triton.jit
def _combine(parts, row, k, inside, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr):
    """Combine the partial attention results of one row, of all heads concatenated."""
    part = parts + ((row * H + k // D) * SPLITS) * (DP + 2)
    max_score, weight_sum, output = tl.load(part + DP, inside, 0.0), tl.load(part + DP + 1, inside, 1.0), 0.0
    output = tl.load(part + k % D, inside, 0.0)
    for split in tl.static_range(1, SPLITS):
        other = part + split * (DP + 2)
        other_max = tl.load(other + DP, inside, 0.0)
        new_max = tl.maximum(max_score, other_max)
        rescale, other_rescale = (
            tl.exp(max_score - new_max),
            tl.exp(other_max - new_max),
        )  # finite: the first split has the token itself
        output = output * rescale + tl.load(other + k % D, inside, 0.0) * other_rescale
        weight_sum = weight_sum * rescale + tl.load(other + DP + 1, inside, 0.0) * other_rescale
        max_score = new_max
    return output / weight_sum


@triton.jit
def _linear_kernel(
    x, weight, bias, gain, shift, stream, out, eps, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BN: tl.constexpr, R: tl.constexpr, H: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr,
    ADD: tl.constexpr, ACT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of all R rows: act(norm(x) Wᵀ + b), plus the stream; x may be partial attention results."""
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, KP)
    n_inside, k_inside = n < N, k < K
    w = tl.load(weight + n[:, None] * K + k[None, :], n_inside[:, None] & k_inside[None, :], 0)
    b = tl.load(bias + n, n_inside, 0).to(tl.float32)
    if NORM:
        g, s = tl.load(gain + k, k_inside, 0).to(tl.float32), tl.load(shift + k, k_inside, 0).to(tl.float32)
    let_in(EARLY)
    for row in tl.static_range(R):
        if SPLITS > 1:
            row_x = _combine(x, row, k, k_inside, H, K // H, DP, SPLITS)
        else:
            row_x = tl.load(x + row * K + k, k_inside, 0).to(tl.float32)
        if NORM:
            centred = tl.where(k_inside, row_x - tl.sum(row_x, 0) / K, 0.0)
            row_x = centred * tl.rsqrt(tl.sum(centred * centred, 0) / K + eps) * g + s
        output = apply_activation(tl.sum(w.to(tl.float32) * row_x[None, :], 1) + b, ACT)
        if ADD:
            output += tl.load(stream + row * N + n, n_inside, 0).to(tl.float32)
        tl.store(out + row * N + n, output, n_inside)


def _linear(x, rows, layer, dtype, norm=None, stream=None, activation=None, attended=None):
    """Return act(layer(norm(x))) + stream, (rows, N); x may be the partial results of `attended`."""
    width, depth = layer.weight.shape
    padded = triton.next_power_of_2(depth)
    block = max(min(_TILE // padded, triton.next_power_of_2(triton.cdiv(width, 2 * _PROGRAMS))), 1)
    out = torch.empty(rows, width, dtype=dtype, device=layer.weight.device)
    gain, shift, eps = (layer.bias, layer.bias, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    heads, head_size, splits = (
        (1, 1, 1) if attended is None else (attended.whole.shape[1], attended.padded, attended.splits)
    )
    _linear_kernel[(triton.cdiv(width, block),)](
        x, layer.weight, layer.bias, gain, shift, out if stream is None else stream, out, eps, N=width, K=depth,
        KP=padded, BN=block, R=rows, H=heads, DP=head_size, SPLITS=splits, NORM=norm is not None,
        ADD=stream is not None, ACT=ACTIVATION_NAMES[activation], num_warps=_WARPS, **early(),
    )  # fmt: skip
    return out


def small_batch_step(
    blocks: nn.Module, x: Tensor, cache: "KVCache", held: tuple[Tensor, ...] = (), kv_index: "KVIndex | None" = None
) -> Tensor:
    """Return the same as `weft.nn.transformer.blocks.Blocks.step`, for a pre-norm stack without cross-attention."""
    rows, dtype, stream = len(x), x.dtype, x
    for depth, block in enumerate(blocks.blocks):
        attention, feed_forward = block.attention, block.feed_forward
        projected = _linear(stream, rows, attention.in_proj, dtype, block.attention_residual.norm).unflatten(
            -1, (3, -1, attention.size)
        )
        attended: PartialAttention = attend_partial(
            projected[:, 0], cache.storage.layers[depth], cache.kv_index, projected[:, 1:], unchanged=True
        )
        heads = attended.whole if attended.splits == 1 else attended.parts
        stream = _linear(heads, rows, attention.out_proj, torch.float32, stream=stream, attended=attended)
        projected = _linear(
            stream, rows, feed_forward.fc1, dtype, block.feed_forward_residual.norm, activation=feed_forward.activation
        )
        stream = _linear(projected, rows, feed_forward.fc2, torch.float32, stream=stream)
    return add_norm_step(stream, blocks.norm, dtype=dtype)[1]
