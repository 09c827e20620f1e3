"""The choice of a turn on CUDA, in Triton: three kernels from the logits of all rows to what is read next.

Imported only where Triton is. The first goes over the vocabulary, cut into pieces, and leaves of each piece the sum of
its exponentials and its best value. The second finds the best k ids of each row: they lie in the k pieces with the best
values, and nothing else is looked at again. The third keeps the board.

A value and its place are one 64-bit number, whose order is that of the values and, among equals, that of the places,
the first one the largest.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from weft.decoding.static_state import BeamState, GreedyState
from weft.nn.kernels.triton.decode_attention import early, let_in

PIECE, PIECES = 128, 256  # ids in a piece, at least as many as there are beams; more where there are more pieces
LOWEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


@triton.jit
def _keyed(value, place):
    """Make numbers in the order of the values."""
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # of a negative number, more bits are less
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def _value(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _place(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["S", "eos"])
def _pieces(
    logits, barred, tops, sums, bests, V, apart, S, eos, BS: tl.constexpr, BV: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Look through some pieces of one row: their sums, and the best of what is neither barred nor eos."""
    let_in(EARLY)
    row, s = tl.program_id(0), tl.program_id(1) * BS + tl.arange(0, BS)
    v = s[:, None] * BV + tl.arange(0, BV)[None, :]
    x = tl.load(logits + row.to(tl.int64) * apart + v, v < V, -float("inf")).to(tl.float32)
    out = tl.load(barred + v, v < V, 1).to(tl.int1) | (v == eos)
    top = tl.max(x, 1)
    safe = tl.where(top == -float("inf"), 0.0, top)
    tl.store(tops + row * S + s, safe, s < S)
    tl.store(sums + row * S + s, tl.sum(tl.exp(x - safe[:, None]), 1), s < S)
    tl.store(bests + row * S + s, tl.max(tl.where(out, -float("inf"), x), 1), s < S)


@triton.jit(do_not_specialize=["S", "eos"])
def _rows(
    logits, barred, tops, sums, bests, values, ids, ends, V, apart, S, eos,
    BV: tl.constexpr, SP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Find the best K of one row; leave their log-probabilities and ids, and the log-probability of eos."""
    let_in(EARLY)
    row, s, j = tl.program_id(0), tl.arange(0, SP), tl.arange(0, KP)
    line = logits + row.to(tl.int64) * apart
    top = tl.load(tops + row * S + s, s < S, -float("inf"))
    most = tl.max(top, 0)
    whole = most + tl.log(tl.sum(tl.load(sums + row * S + s, s < S, 0.0) * tl.exp(top - most), 0))
    key, piece = _keyed(tl.load(bests + row * S + s, s < S, -float("inf")), s), S + tl.zeros((KP,), tl.int32)
    for n in range(K):
        best = tl.max(key, 0)
        key = tl.where(key == best, LOWEST, key)
        piece = tl.where((j == n) & (n < S), _place(best), piece)
    v = piece[:, None] * BV + tl.arange(0, BV)[None, :]
    real = (j < K)[:, None] & (v < V)
    x = tl.load(line + v, real, -float("inf")).to(tl.float32)
    out = tl.load(barred + v, real, 1).to(tl.int1) | (v == eos)
    keys = _keyed(tl.where(out, -float("inf"), x), v)
    for n in range(K):
        best = tl.max(tl.max(keys, 1), 0)
        keys = tl.where(keys == best, LOWEST, keys)
        tl.store(values + row * K + n, _value(best) - whole)
        tl.store(ids + row * K + n, tl.minimum(_place(best), V - 1))  # of fewer than K, the rest are -inf
    tl.store(
        ends + row, tl.where(tl.load(barred + eos) != 0, -float("inf"), tl.load(line + eos).to(tl.float32) - whole)
    )


@triton.jit(do_not_specialize=["room"])
def _beam(
    values, ids, ends, logprob, score, node, parents, tokens, token, row, done, written, least, penalty, bound, room,
    K: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Extend the K beams of one source (`weft.decoding.beam_search.extend`), and merge what ends into its pool of N."""
    let_in(EARLY)
    a, j, i = tl.program_id(0), tl.arange(0, KP), tl.arange(0, NP)
    on, rows, count = j < K, a * K + tl.arange(0, KP), tl.load(written + a)
    before = tl.load(logprob + rows, on, -float("inf"))
    real = on[:, None] & on[None, :]
    each = tl.load(values + rows[:, None] * K + j[None, :], real, -float("inf"))
    key = tl.where(real, _keyed(each + before[:, None], j[:, None] * KP + j[None, :]), LOWEST)
    ending = tl.where(
        on & (count >= tl.load(least).to(tl.int32)), tl.load(ends + rows, on, 0.0) + before, -float("inf")
    )
    old, old_node = tl.load(score + a * N + i, i < N, -float("inf")), tl.load(node + a * N + i, i < N, 0)
    was_done = tl.load(done + a) != 0
    tl.debug_barrier()  # all is read before anything is written over
    # Those that go on.
    going = tl.full((KP,), -float("inf"), tl.float32)
    for n in range(K):
        best = tl.max(tl.max(key, 1), 0)
        key = tl.where(key == best, LOWEST, key)
        value, parent = _value(best), _place(best) // KP
        id = tl.load(ids + (a * K + parent) * K + _place(best) % KP)
        going = tl.where(j == n, value, going)
        tl.store(logprob + a * K + n, value)
        tl.store(token + a * K + n, id.to(tl.int64))
        tl.store(row + a * K + n, (a * K + parent).to(tl.int64))
        tl.store(parents + (a * room + count) * K + n, parent)
        tl.store(tokens + (a * room + count) * K + n, id)
    # Those that end, if fewer than K of all are better.
    better = tl.sum((going[None, :] > ending[:, None]).to(tl.int32), 1)
    better += tl.sum((ending[None, :] > ending[:, None]).to(tl.int32), 1)
    ended = tl.where(better < K, ending / tl.load(penalty + count + 1), -float("inf"))
    # The pool is in order: each one's place in the new one is the number of those before it.
    old_place = i + tl.sum((ended[None, :] > old[:, None]).to(tl.int32), 1)
    ahead = (ended[None, :] > ended[:, None]) | ((ended[None, :] == ended[:, None]) & (j[None, :] < j[:, None]))
    place = tl.sum(((old[None, :] >= ended[:, None]) & (i < N)[None, :]).to(tl.int32), 1) + tl.sum(
        ahead.to(tl.int32), 1
    )
    stays, comes = (i < N) & (old_place < N), on & (place < N)
    tl.store(score + a * N + old_place, old, stays)
    tl.store(node + a * N + old_place, old_node, stays)
    tl.store(score + a * N + place, ended, comes)
    tl.store(node + a * N + place, count * K + j, comes)
    worst = tl.maximum(
        tl.max(tl.where(stays & (old_place == N - 1), old, -float("inf")), 0),
        tl.max(tl.where(comes & (place == N - 1), ended, -float("inf")), 0),
    )
    first = tl.max(tl.where(j == 0, going, -float("inf")), 0)
    tl.store(done + a, was_done | (first / tl.load(bound) <= worst))
    tl.store(written + a, count + 1)


@triton.jit(do_not_specialize=["eos", "room", "B"])
def _greedy(
    values, ids, ends, tokens, logprobs, token, done, written, least, eos, room, B, BB: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write the better of the best token and eos, for some rows."""
    let_in(EARLY)
    a = tl.program_id(0) * BB + tl.arange(0, BB)
    on = a < B
    count, value, id = tl.load(written + a, on, 0), tl.load(values + a, on, 0.0), tl.load(ids + a, on, 0)
    last = tl.where(count >= tl.load(least).to(tl.int32), tl.load(ends + a, on, 0.0), -float("inf"))
    ending = (last > value) | ((last == value) & (eos < id))
    id = tl.where(ending, eos, id)
    tl.store(tokens + a * room + count, id, on)
    tl.store(logprobs + a * room + count, tl.where(ending, last, value), on)
    tl.store(token + a, id.to(tl.int64), on)
    tl.store(done + a, (tl.load(done + a, on, 0) != 0) | (id == eos), on)
    tl.store(written + a, count + 1, on)


def _best(board, logits, width):
    """Find the best of each row: log-probabilities and ids (B, width), and the log-probabilities of eos (B,)."""
    rows, vocab = logits.shape
    piece = max(PIECE, triton.next_power_of_2(triton.cdiv(vocab, PIECES)))
    pieces, new = triton.cdiv(vocab, piece), {"device": logits.device}
    parts = [torch.empty(rows, pieces, **new) for _ in range(3)]
    values, ids = torch.empty(rows, width, **new), torch.empty(rows, width, dtype=torch.int32, **new)
    ends = torch.empty(rows, **new)
    read, sizes = (logits, board.barred, *parts), (vocab, logits.stride(0), pieces, board.eos)
    some, wide = max(4096 // piece, 1), triton.next_power_of_2(width)
    _pieces[rows, triton.cdiv(pieces, some)](*read, *sizes, BS=some, BV=piece, num_warps=4, **early())
    _rows[(rows,)](
        *read, values, ids, ends, *sizes, BV=piece, SP=triton.next_power_of_2(pieces), K=width, KP=wide,
        num_warps=max(wide * piece // 2048, 1), **early(),
    )  # fmt: skip
    return values, ids, ends


def beam(board: BeamState, logits: torch.Tensor) -> None:
    """Do what `weft.decoding.static_state.Beams.choose` does."""
    (groups, width), keep = board.row.shape, board.score.shape[1]
    _beam[(groups,)](
        *_best(board, logits, width), board.logprob, board.score, board.node, board.parents, board.tokens,
        board.token, board.row, board.done, board.written, board.least, board.penalty, board.bound, board.room,
        K=width, KP=triton.next_power_of_2(width), N=keep, NP=triton.next_power_of_2(keep), num_warps=1, **early(),
    )  # fmt: skip


def greedy(board: GreedyState, logits: torch.Tensor) -> None:
    """Do what `weft.decoding.static_state.Lines.choose` does, with the best token."""
    _greedy[(triton.cdiv(len(board.row), 128),)](
        *_best(board, logits, 1), board.tokens, board.logprobs, board.token, board.done, board.written, board.least,
        board.eos, board.room, len(board.row), BB=128, **early(),
    )  # fmt: skip
