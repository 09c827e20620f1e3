"""The cache on CUDA, in Triton: attend to what a hypothesis reaches, and let hypotheses go on in place.

Imported only where Triton is. A program serves one head of one hypothesis: it reads the columns from the hypothesis'
first to its last, which are on the device, and no other; the softmax is carried on from block to block of columns
(Milakov & Gimelshein 2018). Where a few hypotheses have long texts, several programs share a text, and a second kernel
puts their parts together.
"""

# mypy: ignore-errors

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from weft.nn.attention.kv_cache import KVIndex

COLUMNS = 32, 64  # of a text, at a time: of a short one where there are programs for all and more, and else
SHARE, APART = 128, 512  # columns that are worth a program of their own; and worth a kernel to join what they find
PROGRAMS = 264  # that keep all of the device's multiprocessors busy
PER_WARP = 4096  # keys, or values, that a warp has at once
AHEAD = 128  # columns that are sent for at a time
TILE = 4096  # places of an index that a program moves


class Looked(NamedTuple):
    """What heads found: as it is, or in parts, each `wide` numbers, the largest score, and the sum of the weights."""

    whole: torch.Tensor  # (B, H, d); not there where there are several parts
    parts: torch.Tensor
    shares: int
    wide: int


@triton.jit
def let_in(EARLY: tl.constexpr):
    """Begin a kernel that may have been let in early: wait for the one before it, and let the next one in."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@cache
def early():
    """Say how a kernel that begins with `let_in` is launched: from Hopper on, while the one before it still runs."""
    able = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"EARLY": able, "launch_pdl": able}


@triton.jit
def fetch(places):
    """Let what is at these places set out for the second-level cache."""
    word: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(word, "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _columns(kv, places, start, end, h, BT: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Read the keys and values of one head in some columns of a text, and say which of them are real."""
    t, d = start + tl.arange(0, BT), tl.arange(0, DP)
    real = t < end
    place = tl.load(places + t, real, 0).to(tl.int64)
    here = kv + place[:, None] * (2 * H * D) + h * D + d[None, :]
    seen = real[:, None] & (d < D)[None, :]
    return tl.load(here, seen, 0), tl.load(here + H * D, seen, 0), real


@triton.jit
def _carried(query, k, v, real, top, total, found):
    """Carry a softmax on over some columns."""
    score = tl.where(real, tl.sum(k.to(tl.float32) * query[None, :], 1), -float("inf"))
    higher = tl.maximum(top, tl.max(score, 0))
    level = tl.where(higher == -float("inf"), 0.0, higher)
    weight, before = tl.exp(score - level), tl.exp(top - level)
    found = found * before + tl.sum(weight[:, None] * v.to(tl.float32), 0)
    return higher, total * before + tl.sum(weight, 0), found


@triton.jit(do_not_specialize=["T", "last_step"])
def _attend(
    q, new, kv, places, first, last, out, parts, T, last_step, scale,
    Q_ROW: tl.constexpr, NEW_ROW: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BT: tl.constexpr,
    WRITES: tl.constexpr, STILL: tl.constexpr, SHARES: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attend with one head of one hypothesis; with WRITES its last place gets the key and value in `new` first.

    Where what is held is STILL, it sets out while the kernel before this one runs: the first columns for the registers,
    all others for the second-level cache.
    """
    b, h, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, DP)
    inside = d < D
    if not STILL:
        let_in(EARLY)
    begin, end = tl.load(first + b), tl.load(last + b * last_step)
    if WRITES:
        end -= 1
        own = kv + tl.load(places + b * T + end).to(tl.int64) * (2 * H * D) + h * D + d
    if SHARES > 1:
        size = tl.cdiv(end - begin, SHARES)
        begin += share * size
        end = tl.minimum(end, begin + size)
    if STILL and EARLY:
        for start in range(begin + BT, end, AHEAD):
            t = tl.minimum(start + tl.arange(0, AHEAD), end - 1)
            here = kv + tl.load(places + b * T + t).to(tl.int64) * (2 * H * D) + h * D
            fetch(here)
            fetch(here + H * D)
    k, v, real = _columns(kv, places + b * T, begin, end, h, BT, H, D, DP)
    if STILL:
        let_in(EARLY)
    query = tl.load(q + b * Q_ROW + h * D + d, inside, 0).to(tl.float32) * scale
    top, total, found = -float("inf"), 0.0, tl.zeros((DP,), tl.float32)
    if WRITES:
        mine = share == 0
        new_k = tl.load(new + b * NEW_ROW + h * D + d, inside, 0)
        new_v = tl.load(new + b * NEW_ROW + (H + h) * D + d, inside, 0)
        tl.store(own, new_k, inside & mine)
        tl.store(own + H * D, new_v, inside & mine)
        top = tl.where(mine, tl.sum(query * new_k.to(tl.float32), 0), top)
        total = tl.where(mine, 1.0, total)
        found = tl.where(mine, new_v.to(tl.float32), found)
    top, total, found = _carried(query, k, v, real, top, total, found)
    for start in range(begin + BT, end, BT):
        k, v, real = _columns(kv, places + b * T, start, end, h, BT, H, D, DP)
        top, total, found = _carried(query, k, v, real, top, total, found)
    row = b * H + h
    if SHARES > 1:
        part = parts + (row * SHARES + share) * (DP + 2)
        tl.store(part + d, found)
        tl.store(part + DP, top)
        tl.store(part + DP + 1, total)
    else:
        tl.store(out + row * D + d, found / tl.where(total > 0, total, 1.0), inside)


@triton.jit
def _join(parts, out, D: tl.constexpr, DP: tl.constexpr, SHARES: tl.constexpr, EARLY: tl.constexpr):
    """Put the parts of one head of one hypothesis together."""
    let_in(EARLY)
    row = tl.program_id(0)
    share, d = tl.arange(0, SHARES), tl.arange(0, DP)
    part = parts + (row * SHARES + share) * (DP + 2)
    top, total = tl.load(part + DP), tl.load(part + DP + 1)
    best = tl.max(top, 0)
    weight = tl.exp(top - tl.where(best == -float("inf"), 0.0, best))
    found = tl.sum(tl.load(part[:, None] + d[None, :]) * weight[:, None], 0)
    total = tl.sum(total * weight, 0)
    tl.store(out + row * D + d, found / tl.where(total > 0, total, 1.0), d < D)


def looked(
    q: torch.Tensor, kv: torch.Tensor, reach: KVIndex, new: torch.Tensor | None, still: bool, share: int = SHARE
) -> Looked:
    """Do what `attend` does, but leave what several programs found of one text apart."""
    rows, heads, size = q.shape
    places, first, last = reach
    columns = places.shape[1]
    many = min(columns // share, PROGRAMS // (rows * heads))
    shares, wide = 1 << max(many, 1).bit_length() - 1, max(triton.next_power_of_2(size), 16)
    out = torch.empty(rows, heads, size, dtype=q.dtype, device=q.device)
    parts = torch.empty(rows * heads * shares * (wide + 2), device=q.device) if shares > 1 else out
    fresh, block = q if new is None else new, COLUMNS[columns > 64 or rows * heads * shares <= 2 * PROGRAMS]
    _attend[rows, heads, shares](
        q, fresh, kv, places, first, last, out, parts, columns, last.stride(0), size**-0.5,
        Q_ROW=q.stride(0), NEW_ROW=fresh.stride(0), H=heads, D=size, DP=wide, BT=block, WRITES=new is not None,
        STILL=still, SHARES=shares, AHEAD=AHEAD, num_warps=max(wide * block // PER_WARP, 1), **early(),
    )  # fmt: skip
    return Looked(out, parts, shares, wide)


def attend(
    q: torch.Tensor, kv: torch.Tensor, reach: KVIndex, new: torch.Tensor | None = None, still: bool = False
) -> torch.Tensor:
    """Do what `attend_cached` does (`weft.nn.attention.kv_cache`); `new` (B, 2, H, d) is first written last.

    All but q and `new` is `still` where the kernel before this one has not written it: then it is read meanwhile.
    """
    out, parts, shares, wide = looked(q, kv, reach, new, still, APART)
    if shares > 1:
        rows, heads, size = q.shape
        _join[(rows * heads,)](parts, out, D=size, DP=wide, SHARES=shares, num_warps=1, **early())
    return out


@triton.jit(do_not_specialize=["B", "room"])
def _advance(index, rows, at, B, room, BB: tl.constexpr, BT: tl.constexpr, EARLY: tl.constexpr):
    """Let all hypotheses take over some columns of those that they continue; their own place comes after the last."""
    let_in(EARLY)
    now = tl.load(at)
    start = tl.program_id(0) * BT
    if start <= now:
        b, t = tl.arange(0, BB), start + tl.arange(0, BT)
        parent = tl.load(rows + b, b < B, 0)
        held = tl.load(index + parent[:, None] * room + t[None, :], (b < B)[:, None] & (t < now)[None, :], 0)
        held = tl.where((t == now)[None, :], (b * room + now)[:, None], held)
        tl.debug_barrier()  # all is read before anything is written over
        tl.store(index + b[:, None] * room + t[None, :], held, (b < B)[:, None] & (t <= now)[None, :])


def advance(index: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> None:
    """Let hypothesis b continue rows[b], in `index` (B, room), and give each a place of its own in column `at`."""
    high = triton.next_power_of_2(len(index))
    wide = max(TILE // high, 4)
    grid = (triton.cdiv(index.shape[1], wide),)
    _advance[grid](index, rows, at, len(index), index.shape[1], BB=high, BT=wide, num_warps=4, **early())
