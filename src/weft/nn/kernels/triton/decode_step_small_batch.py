"""A step of one hypothesis, or of very few, through a stack of blocks with the norm before each layer, in Triton.

Imported only where Triton is. With one row there is nothing to share: a step takes what it takes to read all weights
once, and to begin and end its kernels one after the other. So there are five of them a layer, each of which reads its
weights into registers while the one before it still runs (`weft.nn.kernels.triton.decode_attention.let_in`), and only
then waits for it:

    product(norm(s))    attention    s + product(attention)    act(product(norm(s)))    s + product(that)

A program makes some outputs for all rows, from the whole depth, so it norms the rows itself: they are short.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from weft.nn.attention.kv_cache import KVCache
from weft.nn.kernels.triton.decode_attention import Looked, early, let_in, looked
from weft.nn.kernels.triton.decode_step import ACTIVATIONS, activated, settle

ROWS = 4  # at most
TILE, WARPS = 16_384, 4  # weights of a program at most
PROGRAMS = 128  # at least, where there are outputs enough
DEEP = 8192  # a greater depth does not fit into the registers of one program


@triton.jit
def _joined(parts, row, k, inside, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SHARES: tl.constexpr):
    """Put together what several programs found with all heads of one row, side by side."""
    part = parts + ((row * H + k // D) * SHARES) * (DP + 2)
    top, total, found = tl.load(part + DP, inside, 0.0), tl.load(part + DP + 1, inside, 1.0), 0.0
    found = tl.load(part + k % D, inside, 0.0)
    for share in tl.static_range(1, SHARES):
        other = part + share * (DP + 2)
        high = tl.load(other + DP, inside, 0.0)
        best = tl.maximum(top, high)
        mine, theirs = tl.exp(top - best), tl.exp(high - best)  # the first part has seen something: the token itself
        found = found * mine + tl.load(other + k % D, inside, 0.0) * theirs
        total = total * mine + tl.load(other + DP + 1, inside, 0.0) * theirs
        top = best
    return found / total


@triton.jit
def _thin(
    x, weight, bias, gain, shift, stream, out, eps, N: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BN: tl.constexpr, R: tl.constexpr, H: tl.constexpr, DP: tl.constexpr, SHARES: tl.constexpr, NORM: tl.constexpr,
    ADD: tl.constexpr, ACT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Make some outputs of all R rows: act(norm(x) Wᵀ + b), and what is on the stream; x may be parts of looks."""
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, KP)
    on, inside = n < N, k < K
    w = tl.load(weight + n[:, None] * K + k[None, :], on[:, None] & inside[None, :], 0)
    b = tl.load(bias + n, on, 0).to(tl.float32)
    if NORM:
        g, s = tl.load(gain + k, inside, 0).to(tl.float32), tl.load(shift + k, inside, 0).to(tl.float32)
    let_in(EARLY)
    for row in tl.static_range(R):
        if SHARES > 1:
            read = _joined(x, row, k, inside, H, K // H, DP, SHARES)
        else:
            read = tl.load(x + row * K + k, inside, 0).to(tl.float32)
        if NORM:
            away = tl.where(inside, read - tl.sum(read, 0) / K, 0.0)
            read = away * tl.rsqrt(tl.sum(away * away, 0) / K + eps) * g + s
        found = activated(tl.sum(w.to(tl.float32) * read[None, :], 1) + b, ACT)
        if ADD:
            found += tl.load(stream + row * N + n, on, 0).to(tl.float32)
        tl.store(out + row * N + n, found, on)


def _thinned(x, rows, part, dtype, norm=None, stream=None, activation=None, seen=None):
    """Put x, or what was `seen`, through the norm, `part` and the activation, and add the stream: (rows, N)."""
    width, depth = part.weight.shape
    wide = triton.next_power_of_2(depth)
    block = max(min(TILE // wide, triton.next_power_of_2(triton.cdiv(width, 2 * PROGRAMS))), 1)
    out = torch.empty(rows, width, dtype=dtype, device=part.weight.device)
    gain, shift, eps = (part.bias, part.bias, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)
    heads, deep, shares = (1, 1, 1) if seen is None else (seen.whole.shape[1], seen.wide, seen.shares)
    _thin[(triton.cdiv(width, block),)](
        x, part.weight, part.bias, gain, shift, out if stream is None else stream, out, eps, N=width, K=depth, KP=wide,
        BN=block, R=rows, H=heads, DP=deep, SHARES=shares, NORM=norm is not None, ADD=stream is not None,
        ACT=ACTIVATIONS[activation], num_warps=WARPS, **early(),
    )  # fmt: skip
    return out


def fits(blocks: nn.Module, x: Tensor) -> bool:
    """Say whether there are few rows, and the stack is of this kind."""
    first = blocks.blocks[0]
    depth = max(first.feed_forward.fc2.in_features, first.feed_forward.fc1.in_features)
    return len(x) <= ROWS and isinstance(blocks.norm, nn.LayerNorm) and first.cross is None and depth <= DEEP


def step(blocks: nn.Module, x: Tensor, cache: KVCache) -> Tensor:
    """Do what `weft.nn.transformer.blocks.Blocks.step` does, for a stack that `fits`."""
    rows, half, stream = len(x), x.dtype, x
    for depth, block in enumerate(blocks.blocks):
        attention, feed_forward = block.attention, block.feed_forward
        made = _thinned(stream, rows, attention.in_proj, half, block.attention_residual.norm).unflatten(
            -1, (3, -1, attention.size)
        )
        seen: Looked = looked(made[:, 0], cache.log.layers[depth], cache.reach, made[:, 1:], still=True)
        found = seen.whole if seen.shares == 1 else seen.parts
        stream = _thinned(found, rows, attention.out_proj, torch.float32, stream=stream, seen=seen)
        made = _thinned(
            stream, rows, feed_forward.fc1, half, block.feed_forward_residual.norm, activation=feed_forward.activation
        )
        stream = _thinned(made, rows, feed_forward.fc2, torch.float32, stream=stream)
    return settle(stream, blocks.norm, dtype=half)[1]
