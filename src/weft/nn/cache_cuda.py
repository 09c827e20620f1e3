"""The cache on CUDA, in Triton: attend to what a hypothesis reaches, and let hypotheses go on in place.

Imported only where Triton is. A program serves one head of one hypothesis: it reads the columns from the hypothesis'
first to its last, which are on the device, and no other; the softmax is carried on from block to block of columns
(Milakov & Gimelshein 2018). Where a few hypotheses have long texts, several programs share a text, and a second kernel
puts their parts together.
"""

# mypy: ignore-errors

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from weft.nn.cache import Reach

COLUMNS = 32, 64  # of a text, at a time: where there are programs for all multiprocessors and more, and fewer
SHARE = 128  # columns that are worth a program of their own
PROGRAMS = 264  # that keep all of the device's multiprocessors busy
TILE = 4096  # places of an index that a program moves


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


@triton.jit(do_not_specialize=["T", "last_step"])
def _attend(
    q, new, kv, places, first, last, out, parts, T, last_step, scale,
    Q_ROW: tl.constexpr, NEW_ROW: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BT: tl.constexpr,
    WRITES: tl.constexpr, SHARES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attend with one head of one hypothesis; with WRITES its last place gets the key and value in `new` first."""
    let_in(EARLY)
    b, h, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d, column = tl.arange(0, DP), tl.arange(0, BT)
    inside = d < D
    query = tl.load(q + b * Q_ROW + h * D + d, inside, 0).to(tl.float32) * scale
    begin, end = tl.load(first + b), tl.load(last + b * last_step)
    top, total, found = -float("inf"), 0.0, tl.zeros((DP,), tl.float32)
    if WRITES:
        end -= 1
        mine = share == 0
        new_k = tl.load(new + b * NEW_ROW + h * D + d, inside, 0)
        new_v = tl.load(new + b * NEW_ROW + (H + h) * D + d, inside, 0)
        own = kv + tl.load(places + b * T + end).to(tl.int64) * (2 * H * D) + h * D + d
        tl.store(own, new_k, inside & mine)
        tl.store(own + H * D, new_v, inside & mine)
        top = tl.where(mine, tl.sum(query * new_k.to(tl.float32), 0), top)
        total = tl.where(mine, 1.0, total)
        found = tl.where(mine, new_v.to(tl.float32), found)
    if SHARES > 1:
        size = tl.cdiv(end - begin, SHARES)
        begin += share * size
        end = tl.minimum(end, begin + size)
    for start in range(begin, end, BT):
        t = start + column
        real = t < end
        place = tl.load(places + b * T + t, real, 0).to(tl.int64)
        here = kv + place[:, None] * (2 * H * D) + h * D + d[None, :]
        seen = real[:, None] & inside[None, :]
        k = tl.load(here, seen, 0).to(tl.float32)
        v = tl.load(here + H * D, seen, 0).to(tl.float32)
        score = tl.where(real, tl.sum(k * query[None, :], 1), -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 0))
        weight, before = tl.exp(score - new_top), tl.exp(top - new_top)
        found = found * before + tl.sum(weight[:, None] * v, 0)
        total = total * before + tl.sum(weight, 0)
        top = new_top
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


def attend(q: torch.Tensor, kv: torch.Tensor, reach: Reach, new: torch.Tensor | None = None) -> torch.Tensor:
    """Do what `weft.nn.cache.attend_cached` does; where `new` (B, 2, H, d) is given, the last places get it first."""
    rows, heads, size = q.shape
    places, first, last = reach
    columns = places.shape[1]
    many = min(columns // SHARE, PROGRAMS // (rows * heads))
    shares, wide = 1 << max(many, 1).bit_length() - 1, max(triton.next_power_of_2(size), 16)
    out = torch.empty(rows, heads, size, dtype=q.dtype, device=q.device)
    parts = torch.empty(rows * heads * shares * (wide + 2), device=q.device) if shares > 1 else out
    fresh, block = q if new is None else new, COLUMNS[rows * heads * shares <= 2 * PROGRAMS]
    _attend[rows, heads, shares](
        q, fresh, kv, places, first, last, out, parts, columns, last.stride(0), size**-0.5,
        Q_ROW=q.stride(0), NEW_ROW=fresh.stride(0), H=heads, D=size, DP=wide, BT=block,
        WRITES=new is not None, SHARES=shares, num_warps=max(wide // 64, 1), **early(),
    )  # fmt: skip
    if shares > 1:
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
