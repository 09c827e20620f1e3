"""Decoding attention on CUDA, in Triton: one query a hypothesis over the key-value cache, and beam reordering in place.

Imported only where Triton is. A program serves one head of one hypothesis: it reads the columns from the hypothesis'
first to its last, which are given on the device, and no others; the softmax is online, over blocks of columns (Milakov
& Gimelshein 2018). Where a few hypotheses have long texts, several programs split a text, and a second kernel combines
their partial results.
"""

# mypy: ignore-errors

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from weft.nn.attention.kv_cache import KVIndex

COLUMN_BLOCKS = 32, 64  # block sizes: for short texts where there are programs enough to fill the device, and else
MIN_SPLIT, MIN_SPLIT_AND_COMBINE = (
    128,
    512,
)  # columns that are worth a program of their own; and worth a kernel to combine partial results
_PROGRAMS = 264  # that keep all of the device's multiprocessors busy
PER_WARP = 4096  # elements of keys, or of values, of a warp
AHEAD = 128  # columns that are prefetched at a time
_TILE = 4096  # entries of an index that a program moves


class PartialAttention(NamedTuple):
    """Attention output, whole or in partial results: `padded` numbers, the maximum score, and the sum of weights."""

    whole: torch.Tensor  # (B, H, d); not written where there are several splits
    parts: torch.Tensor
    splits: int
    padded: int


@triton.jit
def let_in(EARLY: tl.constexpr):
    """Programmatic dependent launch: wait for the previous kernel, and let the next one be launched."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@cache
def early():
    """Return the launch options of a kernel with `let_in`: from Hopper on it starts while the previous one runs."""
    supported = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"EARLY": supported, "launch_pdl": supported}


@triton.jit
def prefetch(addresses):
    """Prefetch what is at these addresses into the L2 cache."""
    instruction: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(instruction, "=r,l", [addresses.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _load_columns(kv, slots, start, end, h, BT: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Load the keys and values of one head in a block of columns of a text, and the mask of those before the end."""
    t, d = start + tl.arange(0, BT), tl.arange(0, DP)
    real = t < end
    slot = tl.load(slots + t, real, 0).to(tl.int64)
    address = kv + slot[:, None] * (2 * H * D) + h * D + d[None, :]
    inside = real[:, None] & (d < D)[None, :]
    return tl.load(address, inside, 0), tl.load(address + H * D, inside, 0), real


@triton.jit
def _online_softmax(query, k, v, real, max_score, weight_sum, output):
    """Update the running maximum, weight sum and output of an online softmax by a block of columns."""
    score = tl.where(real, tl.sum(k.to(tl.float32) * query[None, :], 1), -float("inf"))
    new_max = tl.maximum(max_score, tl.max(score, 0))
    finite_max = tl.where(new_max == -float("inf"), 0.0, new_max)
    weight, rescale = tl.exp(score - finite_max), tl.exp(max_score - finite_max)
    output = output * rescale + tl.sum(weight[:, None] * v.to(tl.float32), 0)
    return new_max, weight_sum * rescale + tl.sum(weight, 0), output


@triton.jit(do_not_specialize=["T", "last_step"])
def _attend(
    q, new, kv, slots, first, last, out, parts, T, last_step, scale,
    Q_ROW: tl.constexpr, NEW_ROW: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BT: tl.constexpr,
    WRITES: tl.constexpr, UNCHANGED: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attend with one head of one hypothesis; with WRITES the key and value in `new` first go to its last slot.

    Where the cache is UNCHANGED by the previous kernel, loads begin while that one runs: of the first columns into
    registers, of all others into the L2 cache.
    """
    b, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, DP)
    inside = d < D
    if not UNCHANGED:
        let_in(EARLY)
    begin, end = tl.load(first + b), tl.load(last + b * last_step)
    if WRITES:
        end -= 1
        own_slot = kv + tl.load(slots + b * T + end).to(tl.int64) * (2 * H * D) + h * D + d
    if SPLITS > 1:
        size = tl.cdiv(end - begin, SPLITS)
        begin += split * size
        end = tl.minimum(end, begin + size)
    if UNCHANGED and EARLY:
        for start in range(begin + BT, end, AHEAD):
            t = tl.minimum(start + tl.arange(0, AHEAD), end - 1)
            address = kv + tl.load(slots + b * T + t).to(tl.int64) * (2 * H * D) + h * D
            prefetch(address)
            prefetch(address + H * D)
    k, v, real = _load_columns(kv, slots + b * T, begin, end, h, BT, H, D, DP)
    if UNCHANGED:
        let_in(EARLY)
    query = tl.load(q + b * Q_ROW + h * D + d, inside, 0).to(tl.float32) * scale
    max_score, weight_sum, output = -float("inf"), 0.0, tl.zeros((DP,), tl.float32)
    if WRITES:
        is_first = split == 0
        new_k = tl.load(new + b * NEW_ROW + h * D + d, inside, 0)
        new_v = tl.load(new + b * NEW_ROW + (H + h) * D + d, inside, 0)
        tl.store(own_slot, new_k, inside & is_first)
        tl.store(own_slot + H * D, new_v, inside & is_first)
        max_score = tl.where(is_first, tl.sum(query * new_k.to(tl.float32), 0), max_score)
        weight_sum = tl.where(is_first, 1.0, weight_sum)
        output = tl.where(is_first, new_v.to(tl.float32), output)
    max_score, weight_sum, output = _online_softmax(query, k, v, real, max_score, weight_sum, output)
    for start in range(begin + BT, end, BT):
        k, v, real = _load_columns(kv, slots + b * T, start, end, h, BT, H, D, DP)
        max_score, weight_sum, output = _online_softmax(query, k, v, real, max_score, weight_sum, output)
    row = b * H + h
    if SPLITS > 1:
        part = parts + (row * SPLITS + split) * (DP + 2)
        tl.store(part + d, output)
        tl.store(part + DP, max_score)
        tl.store(part + DP + 1, weight_sum)
    else:
        tl.store(out + row * D + d, output / tl.where(weight_sum > 0, weight_sum, 1.0), inside)


@triton.jit
def _combine(parts, out, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr):
    """Combine the partial results of one head of one hypothesis."""
    let_in(EARLY)
    row = tl.program_id(0)
    split, d = tl.arange(0, SPLITS), tl.arange(0, DP)
    part = parts + (row * SPLITS + split) * (DP + 2)
    max_score, weight_sum = tl.load(part + DP), tl.load(part + DP + 1)
    overall_max = tl.max(max_score, 0)
    weight = tl.exp(max_score - tl.where(overall_max == -float("inf"), 0.0, overall_max))
    output = tl.sum(tl.load(part[:, None] + d[None, :]) * weight[:, None], 0)
    weight_sum = tl.sum(weight_sum * weight, 0)
    tl.store(out + row * D + d, output / tl.where(weight_sum > 0, weight_sum, 1.0), d < D)


def attend_partial(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_index: "KVIndex",
    new: torch.Tensor | None,
    unchanged: bool,
    min_split: int = MIN_SPLIT,
) -> PartialAttention:
    """Return the same as `attend_cached_triton`, but leave the partial results of several programs uncombined."""
    rows, heads, size = q.shape
    slots, first, last = kv_index
    columns = slots.shape[1]
    most = min(columns // min_split, _PROGRAMS // (rows * heads))
    splits, padded = 1 << max(most, 1).bit_length() - 1, max(triton.next_power_of_2(size), 16)
    out = torch.empty(rows, heads, size, dtype=q.dtype, device=q.device)
    parts = torch.empty(rows * heads * splits * (padded + 2), device=q.device) if splits > 1 else out
    new_kv, block = q if new is None else new, COLUMN_BLOCKS[columns > 64 or rows * heads * splits <= 2 * _PROGRAMS]
    _attend[rows, heads, splits](
        q, new_kv, kv, slots, first, last, out, parts, columns, last.stride(0), size**-0.5,
        Q_ROW=q.stride(0), NEW_ROW=new_kv.stride(0), H=heads, D=size, DP=padded, BT=block, WRITES=new is not None,
        UNCHANGED=unchanged, SPLITS=splits, AHEAD=AHEAD, num_warps=max(padded * block // PER_WARP, 1), **early(),
    )  # fmt: skip
    return PartialAttention(out, parts, splits, padded)


def attend_cached_triton(
    q: torch.Tensor, kv: torch.Tensor, kv_index: "KVIndex", new: torch.Tensor | None = None, unchanged: bool = False
) -> torch.Tensor:
    """Return the same as `weft.nn.attention.kv_cache.attend_cached`; `new` (B, 2, H, d) first goes to the last slot.

    All but q and `new` is `unchanged` where the previous kernel has not written it: then it is loaded meanwhile.
    """
    out, parts, splits, padded = attend_partial(q, kv, kv_index, new, unchanged, MIN_SPLIT_AND_COMBINE)
    if splits > 1:
        rows, heads, size = q.shape
        _combine[(rows * heads,)](parts, out, D=size, DP=padded, SPLITS=splits, num_warps=1, **early())
    return out


@triton.jit(do_not_specialize=["B", "room"])
def _advance(index, rows, at, B, room, BB: tl.constexpr, BT: tl.constexpr, EARLY: tl.constexpr):
    """Copy a block of index columns from the hypotheses that are continued, and append each one's own slot."""
    let_in(EARLY)
    column = tl.load(at)
    start = tl.program_id(0) * BT
    if start <= column:
        b, t = tl.arange(0, BB), start + tl.arange(0, BT)
        parent = tl.load(rows + b, b < B, 0)
        slots = tl.load(index + parent[:, None] * room + t[None, :], (b < B)[:, None] & (t < column)[None, :], 0)
        slots = tl.where((t == column)[None, :], (b * room + column)[:, None], slots)
        tl.debug_barrier()  # all is read before anything is overwritten
        tl.store(index + b[:, None] * room + t[None, :], slots, (b < B)[:, None] & (t <= column)[None, :])


def advance(index: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> None:
    """Reorder `index` (B, room) so that hypothesis b continues rows[b], and give each its own slot in column `at`."""
    padded = triton.next_power_of_2(len(index))
    block = max(_TILE // padded, 4)
    grid = (triton.cdiv(index.shape[1], block),)
    _advance[grid](index, rows, at, len(index), index.shape[1], BB=padded, BT=block, num_warps=4, **early())
