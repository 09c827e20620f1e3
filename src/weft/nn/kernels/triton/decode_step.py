"""A step through a stack of Transformer blocks on CUDA, in few Triton kernels, without gradient.

Imported only where Triton is. A step has so few rows that it costs what its kernels cost to begin and end, so there are
eleven of them a decoder layer: two looks; six products, each with the bias and the activation after it; and three
kernels that add what a layer made to the stream around it and norm that. A product over a great depth is shared by
several programs, and what each of them finds is added up by the kernel that adds to the stream.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F

from weft.nn.attention.kv_cache import KVCache, KVIndex
from weft.nn.kernels.triton.decode_attention import attend, early, fetch, let_in
from weft.nn.transformer.blocks import gelu_tanh

MANY = 256  # rows for which the library's products are the better ones
MOST, EVEN, BUSY = 6, 256, 3072  # programs that share a depth, what they share it in, and columns of all that suffice
LINE = 64  # numbers that come from memory at once
ACTIVATIONS = {F.relu: "relu", F.gelu: "gelu", gelu_tanh: "gelu-tanh", F.silu: "silu", None: ""}


@triton.jit
def activated(x, ACT: tl.constexpr):
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
def _product(
    x, weight, bias, out, M, N: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, SHARE: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LINES: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """act(x Wᵀ + b) for some rows and columns; without BIAS x Wᵀ alone, over a share of the depth."""
    rows, cols = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    share, found = tl.program_id(2), tl.zeros((BM, BN), tl.float32)
    if EARLY:  # the weights are there already, so they may set out
        line = share * SHARE + tl.arange(0, LINES) * (SHARE // LINES)
        fetch(weight + tl.minimum(cols, N - 1)[:, None] * K + line[None, :])
    let_in(EARLY)
    for start in range(share * SHARE, (share + 1) * SHARE, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x + rows[:, None] * K + k[None, :], (rows < M)[:, None] & (k < K)[None, :], 0)
        w = tl.load(weight + cols[None, :] * K + k[:, None], (cols < N)[None, :] & (k < K)[:, None], 0)
        found = tl.dot(a, w, found, input_precision=PRECISION)
    if BIAS:
        found += tl.load(bias + cols, cols < N, 0).to(tl.float32)[None, :]
    found = activated(found, ACT)
    real = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(out + share * M * ROW + rows[:, None] * ROW + cols[None, :], found, real)


def _blocks(rows, width, shares):
    """Choose how many rows and columns a program makes, and how deep it goes at a time, as measured on an H200."""
    if rows <= 16:
        return {"BM": 16, "BN": 32, "BK": 256, "num_warps": 4, "num_stages": 3}
    if rows <= 64:
        return {"BM": 32 if rows <= 32 else 64, "BN": 32, "BK": 64, "num_warps": 4, "num_stages": 5}
    return {"BM": 32, "BN": 32 if width * shares <= 1024 else 64, "BK": 128, "num_warps": 4, "num_stages": 3}


def _shares(rows, depth, width):
    """Say how many programs share a depth: as many as keep the device busy, of an even depth each."""
    if rows > 64:
        return 4 if depth % 2048 == 0 else 1
    able = [some for some in range(1, MOST + 1) if depth % (some * EVEN) == 0] or [1]
    return min([some for some in able if some * width >= BUSY] or able[-1:])


def product(x, part, activation=None):
    """Put x (B, K) through `part` and the activation: (B, N)."""
    if len(x) > MANY:
        made = part(x)
        return made if activation is None else activation(made)
    out = torch.empty(len(x), part.out_features, dtype=x.dtype, device=x.device)
    return _launched(x, part.weight, out, _blocks(len(x), part.out_features, 1), part.bias, ACTIVATIONS[activation])


def shared(x, part):
    """Put x (B, K) through `part`, but for its bias, in shares that are to be added up: (shares, B, N)."""
    rows, depth = x.shape
    if rows > MANY:
        return F.linear(x, part.weight)[None]
    shares = _shares(rows, depth, part.out_features)
    out = torch.empty(shares, rows, part.out_features, device=x.device)
    return _launched(x, part.weight, out, _blocks(rows, part.out_features, shares))


def read_out(x: Tensor, weight: Tensor) -> Tensor:
    """Put x (B, K) through a matrix of many rows, such as a vocabulary's: (B, N), in rows that begin at even places."""
    rows, width = len(x), len(weight)
    out = torch.empty(rows, triton.cdiv(width, LINE) * LINE, dtype=x.dtype, device=x.device)[:, :width]
    high = max(min(triton.next_power_of_2(rows), 128), 16)
    sizes = {"BM": high, "BN": 64, "BK": 128 if high <= 64 else 64, "num_warps": 4 if high <= 64 else 8}
    return _launched(x, weight, out, sizes | {"num_stages": 3})


def _launched(x, weight, out, sizes, bias=None, activation=""):
    rows, (width, depth), shares = len(x), weight.shape, len(out) if out.dim() == 3 else 1
    grid = (triton.cdiv(width, sizes["BN"]), triton.cdiv(rows, sizes["BM"]), shares)
    _product[grid](
        x, weight, weight if bias is None else bias, out, rows, N=width, K=depth, ROW=out.stride(-2),
        SHARE=depth // shares, BIAS=bias is not None, ACT=activation,
        LINES=triton.next_power_of_2(triton.cdiv(depth // shares, LINE)),
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32", **sizes, **early(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def _settle(
    x, parts, bias, gain, shift, stream, out, M, eps, SHARES: tl.constexpr, KEEP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add what a layer made to one row of the stream, and norm the sum."""
    d = tl.arange(0, DP)
    on, here = d < D, tl.program_id(0) * D + d
    g, s = tl.load(gain + d, on, 0).to(tl.float32), tl.load(shift + d, on, 0).to(tl.float32)
    if SHARES:  # the stream was there before the layer was
        y = tl.load(x + here, on, 0).to(tl.float32) + tl.load(bias + d, on, 0).to(tl.float32)
        let_in(EARLY)
    else:
        let_in(EARLY)
        y = tl.load(x + here, on, 0).to(tl.float32)
    for share in tl.static_range(SHARES):
        y += tl.load(parts + share * M * D + here, on, 0).to(tl.float32)
    if KEEP:
        tl.store(stream + here, y, on)
    away = tl.where(on, y - tl.sum(y, 0) / D, 0.0)
    tl.store(out + here, away * tl.rsqrt(tl.sum(away * away, 0) / D + eps) * g + s, on)


def settle(x, norm, parts=None, bias=None, keep=False, dtype=None):
    """Return the stream x + bias + Σ parts, and that normed; where it is not kept, the normed one goes on as stream."""
    rows, width = x.shape
    wide, out = triton.next_power_of_2(width), torch.empty_like(x, dtype=dtype)
    stream = torch.empty_like(x) if keep else out
    shares, made, added = (0, x, x) if parts is None else (len(parts), parts, bias)
    _settle[(rows,)](
        x, made, added, norm.weight, norm.bias, stream, out, rows, norm.eps, SHARES=shares, KEEP=keep,
        D=width, DP=wide, num_warps=max(min(wide // 256, 8), 1), **early(),
    )  # fmt: skip
    return stream, out


@triton.jit(do_not_specialize=["last"])
def _placed(
    ids, words, places, at, first, out, scale, last, D: tl.constexpr, DP: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Add a hypothesis' word, scaled, and its place."""
    let_in(EARLY)
    b, d = tl.program_id(0), tl.arange(0, DP)
    place = tl.minimum(tl.load(at) - 1 - tl.load(first + b), last)  # a search that is done may run on
    word = tl.load(words + tl.load(ids + b).to(tl.int64) * D + d, d < D, 0).to(tl.float32)
    here = tl.load(places + place.to(tl.int64) * D + d, d < D, 0).to(tl.float32)
    tl.store(out + b * D + d, word * scale + here, d < D)


def placed(ids: Tensor, words: Tensor, places: Tensor, cache: KVCache, scale: float) -> Tensor:
    """Make scale · words[ids] + places[position]: (B, D)."""
    width = words.shape[1]
    out = torch.empty(len(ids), width, dtype=words.dtype, device=words.device)
    sizes = {"D": width, "DP": triton.next_power_of_2(width)}
    _placed[(len(ids),)](ids, words, places, cache.at, cache.first, out, scale, len(places) - 1, **sizes, **early())
    return out


def step(blocks: nn.Module, x: Tensor, cache: KVCache, held: tuple[Tensor, ...], reach: KVIndex | None) -> Tensor:
    """Do what `weft.nn.transformer.blocks.Blocks.step` does."""
    arounds = [around for block in blocks.blocks for around in _arounds(block)]
    before = arounds[0].before
    norms = [around.norm for around in arounds]
    read = settle(x, norms[0])[1] if before else x
    after = iter([*norms[1:], blocks.norm] if before else norms)  # the norm of what the next layer reads

    def leave(made, part):
        return settle(x, next(after), shared(made.flatten(1), part), part.bias, keep=before)

    for depth, block in enumerate(blocks.blocks):
        attention, cross, feed_forward = block.attention, block.cross_attention, block.feed_forward
        made = product(read, attention.in_proj).unflatten(-1, (3, -1, attention.size))
        x, read = leave(
            attend(made[:, 0], cache.log.layers[depth], cache.reach, made[:, 1:], still=True), attention.out_proj
        )
        if cross is not None:
            made = product(read, cross.in_proj).unflatten(-1, (-1, cross.size))
            x, read = leave(attend(made, held[depth], reach, still=True), cross.out_proj)
        x, read = leave(product(read, feed_forward.fc1, feed_forward.activation), feed_forward.fc2)
    return read


def _arounds(block):
    """Name a block's residuals in order."""
    return [
        one
        for one in (block.attention_residual, block.cross_attention_residual, block.feed_forward_residual)
        if one is not None
    ]
