"""One decoding step of a stack of Transformer blocks on CUDA, in few Triton kernels, without gradient.

Imported only where Triton is. A step has so few rows that launch latency dominates, so there are eleven kernels a
decoder layer: two of attention; six matrix products, each with its bias and activation; and three that add a layer's
output to the residual stream and apply the layer norm. A product with a large inner dimension is split over several
programs (split-K), and the kernel that adds to the residual stream sums their partial results.
"""

# mypy: ignore-errors

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.kernels.triton.decode_attention import attend_cached_triton, early, let_in, prefetch
from weft.nn.layers.activations import gelu_tanh

if TYPE_CHECKING:
    from weft.nn.attention.kv_cache import KVCache, KVIndex

MAX_ROWS = 256  # rows above which PyTorch's products are faster
MAX_SPLITS, SPLIT_MULTIPLE, MIN_COLUMNS = (
    6,
    256,
    3072,
)  # split-K: splits at most, the multiple each is of, and columns of all that suffice
CACHE_LINE = 64  # elements of a cache line
ACTIVATION_NAMES = {F.relu: "relu", F.gelu: "gelu", gelu_tanh: "gelu-tanh", F.silu: "silu", None: ""}


@triton.jit
def apply_activation(x, ACT: tl.constexpr):
    """Return act(x)."""
    if ACT == "relu":
        x = tl.maximum(x, 0.0)
    if ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if ACT == "gelu-tanh":  # 0.5 (1 + tanh z) is sigmoid(2 z)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    if ACT == "silu":
        x = x * tl.sigmoid(x)
    return x


@triton.jit(do_not_specialize=["M"])
def _linear(
    x, weight, bias, out, M, N: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, SPLIT: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LINES: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a block of act(x Wᵀ + b); without BIAS, of x Wᵀ alone over one split of the inner dimension."""
    rows, cols = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    split, acc = tl.program_id(2), tl.zeros((BM, BN), tl.float32)
    if EARLY:  # the weights do not depend on the previous kernel: prefetch them
        lines = split * SPLIT + tl.arange(0, LINES) * (SPLIT // LINES)
        prefetch(weight + tl.minimum(cols, N - 1)[:, None] * K + lines[None, :])
    let_in(EARLY)
    for start in range(split * SPLIT, (split + 1) * SPLIT, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x + rows[:, None] * K + k[None, :], (rows < M)[:, None] & (k < K)[None, :], 0)
        w = tl.load(weight + cols[None, :] * K + k[:, None], (cols < N)[None, :] & (k < K)[:, None], 0)
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + cols, cols < N, 0).to(tl.float32)[None, :]
    acc = apply_activation(acc, ACT)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(out + split * M * ROW + rows[:, None] * ROW + cols[None, :], acc, inside)


def _blocks(rows, width, splits):
    """Return the block sizes of a product, tuned on an H200."""
    if rows <= 16:
        return {"BM": 16, "BN": 32, "BK": 256, "num_warps": 4, "num_stages": 3}
    if rows <= 64:
        return {"BM": 32 if rows <= 32 else 64, "BN": 32, "BK": 64, "num_warps": 4, "num_stages": 5}
    return {"BM": 32, "BN": 32 if width * splits <= 1024 else 64, "BK": 128, "num_warps": 4, "num_stages": 3}


def _num_splits(rows, depth, width):
    """Return the number of splits of the inner dimension: enough to keep the device busy, all of equal size."""
    if rows > 64:
        return 4 if depth % 2048 == 0 else 1
    allowed = [splits for splits in range(1, MAX_SPLITS + 1) if depth % (splits * SPLIT_MULTIPLE) == 0] or [1]
    return min([splits for splits in allowed if splits * width >= MIN_COLUMNS] or allowed[-1:])


def step_linear(x, layer, activation=None):
    """Return act(layer(x)), (B, N), of x (B, K)."""
    if len(x) > MAX_ROWS:
        output = layer(x)
        return output if activation is None else activation(output)
    out = torch.empty(len(x), layer.out_features, dtype=x.dtype, device=x.device)
    return _launch_linear(
        x, layer.weight, out, _blocks(len(x), layer.out_features, 1), layer.bias, ACTIVATION_NAMES[activation]
    )


def split_linear(x, layer):
    """Return x Wᵀ of a layer, without its bias, as partial sums of split-K: (splits, B, N)."""
    rows, depth = x.shape
    if rows > MAX_ROWS:
        return F.linear(x, layer.weight)[None]
    splits = _num_splits(rows, depth, layer.out_features)
    out = torch.empty(splits, rows, layer.out_features, device=x.device)
    return _launch_linear(x, layer.weight, out, _blocks(rows, layer.out_features, splits))


def linear_large_vocab(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ, (B, N), of x (B, K) and a large matrix, such as a vocabulary's; rows are aligned to cache lines."""
    rows, width = len(x), len(weight)
    out = torch.empty(rows, triton.cdiv(width, CACHE_LINE) * CACHE_LINE, dtype=x.dtype, device=x.device)[:, :width]
    block = max(min(triton.next_power_of_2(rows), 128), 16)
    options = {"BM": block, "BN": 64, "BK": 128 if block <= 64 else 64, "num_warps": 4 if block <= 64 else 8}
    return _launch_linear(x, weight, out, options | {"num_stages": 3})


def _launch_linear(x, weight, out, options, bias=None, activation=""):
    rows, (width, depth), splits = len(x), weight.shape, len(out) if out.dim() == 3 else 1
    grid = (triton.cdiv(width, options["BN"]), triton.cdiv(rows, options["BM"]), splits)
    _linear[grid](
        x, weight, weight if bias is None else bias, out, rows, N=width, K=depth, ROW=out.stride(-2),
        SPLIT=depth // splits, BIAS=bias is not None, ACT=activation,
        LINES=triton.next_power_of_2(triton.cdiv(depth // splits, CACHE_LINE)),
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32", **options, **early(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def _add_norm(
    x, parts, bias, gain, shift, stream, out, M, eps, SPLITS: tl.constexpr, KEEP_SUM: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add a layer's output, in partial sums, to one row of the residual stream, and normalise the sum."""
    d = tl.arange(0, DP)
    inside, index = d < D, tl.program_id(0) * D + d
    g, s = tl.load(gain + d, inside, 0).to(tl.float32), tl.load(shift + d, inside, 0).to(tl.float32)
    if SPLITS:  # the stream does not depend on the previous kernel
        y = tl.load(x + index, inside, 0).to(tl.float32) + tl.load(bias + d, inside, 0).to(tl.float32)
        let_in(EARLY)
    else:
        let_in(EARLY)
        y = tl.load(x + index, inside, 0).to(tl.float32)
    for split in tl.static_range(SPLITS):
        y += tl.load(parts + split * M * D + index, inside, 0).to(tl.float32)
    if KEEP_SUM:
        tl.store(stream + index, y, inside)
    centred = tl.where(inside, y - tl.sum(y, 0) / D, 0.0)
    tl.store(out + index, centred * tl.rsqrt(tl.sum(centred * centred, 0) / D + eps) * g + s, inside)


def add_norm_step(x, norm, parts=None, bias=None, keep=False, dtype=None):
    """Return the residual stream x + bias + Σ parts and its layer norm; without `keep` (post-norm) the norm twice."""
    rows, width = x.shape
    padded, out = triton.next_power_of_2(width), torch.empty_like(x, dtype=dtype)
    stream = torch.empty_like(x) if keep else out
    splits, partial_sums, layer_bias = (0, x, x) if parts is None else (len(parts), parts, bias)
    _add_norm[(rows,)](
        x, partial_sums, layer_bias, norm.weight, norm.bias, stream, out, rows, norm.eps, SPLITS=splits, KEEP_SUM=keep,
        D=width, DP=padded, num_warps=max(min(padded // 256, 8), 1), **early(),
    )  # fmt: skip
    return stream, out


@triton.jit(do_not_specialize=["last"])
def _embed(
    ids, words, positions, at, first, out, scale, last, D: tl.constexpr, DP: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Add a hypothesis' scaled token embedding and its position embedding."""
    let_in(EARLY)
    b, d = tl.program_id(0), tl.arange(0, DP)
    position = tl.minimum(tl.load(at) - 1 - tl.load(first + b), last)  # a finished search may run on
    word = tl.load(words + tl.load(ids + b).to(tl.int64) * D + d, d < D, 0).to(tl.float32)
    position_embedding = tl.load(positions + position.to(tl.int64) * D + d, d < D, 0).to(tl.float32)
    tl.store(out + b * D + d, word * scale + position_embedding, d < D)


def embed_next(ids: Tensor, words: Tensor, places: Tensor, cache: "KVCache", scale: float) -> Tensor:
    """Return scale · words[ids] + places[position], (B, D)."""
    width = words.shape[1]
    out = torch.empty(len(ids), width, dtype=words.dtype, device=words.device)
    constants = {"D": width, "DP": triton.next_power_of_2(width)}
    _embed[(len(ids),)](ids, words, places, cache.at, cache.first, out, scale, len(places) - 1, **constants, **early())
    return out


def decode_step(
    blocks: nn.Module, x: Tensor, cache: "KVCache", held: tuple[Tensor, ...], kv_index: "KVIndex | None"
) -> Tensor:
    """Return the same as `weft.nn.transformer.blocks.Blocks.step`."""
    residuals = [residual for block in blocks.blocks for residual in _residuals(block)]
    pre_norm = residuals[0].pre_norm
    norms = [residual.norm for residual in residuals]
    normed = add_norm_step(x, norms[0])[1] if pre_norm else x
    next_norms = iter([*norms[1:], blocks.norm] if pre_norm else norms)  # the norm of the next layer's input

    def add_output(projected, layer):
        return add_norm_step(x, next(next_norms), split_linear(projected.flatten(1), layer), layer.bias, keep=pre_norm)

    for depth, block in enumerate(blocks.blocks):
        attention, cross, feed_forward = block.attention, block.cross_attention, block.feed_forward
        projected = step_linear(normed, attention.in_proj).unflatten(-1, (3, -1, attention.size))
        kv, new = cache.storage.layers[depth], projected[:, 1:]
        heads = attend_cached_triton(projected[:, 0], kv, cache.kv_index, new, unchanged=True)
        x, normed = add_output(heads, attention.out_proj)
        if cross is not None:
            projected = step_linear(normed, cross.in_proj).unflatten(-1, (-1, cross.size))
            x, normed = add_output(
                attend_cached_triton(projected, held[depth], kv_index, unchanged=True), cross.out_proj
            )
        x, normed = add_output(step_linear(normed, feed_forward.fc1, feed_forward.activation), feed_forward.fc2)
    return normed


def _residuals(block):
    """Return a block's residuals in order."""
    return [
        residual
        for residual in (block.attention_residual, block.cross_attention_residual, block.feed_forward_residual)
        if residual is not None
    ]
