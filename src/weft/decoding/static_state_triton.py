"""Triton kernels for a step of beam or greedy search: three launches from the logits of all rows to the next tokens.

Imported only where Triton is installed. The first kernel reads the vocabulary in chunks, and writes the sum of
exponentials and the maximum of each chunk. The second finds the k best ids of each row: they lie in the k chunks with
the highest maxima, and only these are read again. The third updates the decoding state.

A value and its index are packed into one 64-bit sort key: keys are ordered by value, ties by index, the lowest index
first (largest key).
"""

# mypy: ignore-errors

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from weft.decoding.static_state import BeamState, GreedyState
from weft.nn.kernels.triton.decode_attention import early, let_in

if TYPE_CHECKING:
    from weft.decoding.captured_batch import StaticBatch

CHUNK, MAX_CHUNKS = 128, 256  # ids a chunk, at least the beam width; larger where there would be too many chunks
MIN_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


@triton.jit
def _sort_key(value, index):
    """Return int64 keys in the order of the values."""
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative floats sort in reverse
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _key_value(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key_index(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["S", "eos"])
def _chunk_kernel(
    logits, forbidden, tops, sums, maxima, V, stride, S, eos, BS: tl.constexpr, BV: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Reduce some chunks of one row: sums of exponentials, and maxima over ids neither forbidden nor eos."""
    let_in(EARLY)
    row, s = tl.program_id(0), tl.program_id(1) * BS + tl.arange(0, BS)
    v = s[:, None] * BV + tl.arange(0, BV)[None, :]
    x = tl.load(logits + row.to(tl.int64) * stride + v, v < V, -float("inf")).to(tl.float32)
    excluded = tl.load(forbidden + v, v < V, 1).to(tl.int1) | (v == eos)
    top = tl.max(x, 1)
    finite_top = tl.where(top == -float("inf"), 0.0, top)
    tl.store(tops + row * S + s, finite_top, s < S)
    tl.store(sums + row * S + s, tl.sum(tl.exp(x - finite_top[:, None]), 1), s < S)
    tl.store(maxima + row * S + s, tl.max(tl.where(excluded, -float("inf"), x), 1), s < S)


@triton.jit(do_not_specialize=["S", "eos"])
def _top_k_kernel(
    logits, forbidden, tops, sums, maxima, values, ids, ends, V, stride, S, eos,
    BV: tl.constexpr, SP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the log-probabilities and ids of the K best of one row, and the log-probability of eos."""
    let_in(EARLY)
    row, s, j = tl.program_id(0), tl.arange(0, SP), tl.arange(0, KP)
    row_logits = logits + row.to(tl.int64) * stride
    top = tl.load(tops + row * S + s, s < S, -float("inf"))
    max_top = tl.max(top, 0)
    logsumexp = max_top + tl.log(tl.sum(tl.load(sums + row * S + s, s < S, 0.0) * tl.exp(top - max_top), 0))
    key, chunk = _sort_key(tl.load(maxima + row * S + s, s < S, -float("inf")), s), S + tl.zeros((KP,), tl.int32)
    for n in range(K):
        best = tl.max(key, 0)
        key = tl.where(key == best, MIN_KEY, key)
        chunk = tl.where((j == n) & (n < S), _key_index(best), chunk)
    v = chunk[:, None] * BV + tl.arange(0, BV)[None, :]
    valid = (j < K)[:, None] & (v < V)
    x = tl.load(row_logits + v, valid, -float("inf")).to(tl.float32)
    excluded = tl.load(forbidden + v, valid, 1).to(tl.int1) | (v == eos)
    keys = _sort_key(tl.where(excluded, -float("inf"), x), v)
    for n in range(K):
        best = tl.max(tl.max(keys, 1), 0)
        keys = tl.where(keys == best, MIN_KEY, keys)
        tl.store(values + row * K + n, _key_value(best) - logsumexp)
        tl.store(ids + row * K + n, tl.minimum(_key_index(best), V - 1))  # if there are fewer than K, the rest are -inf
    tl.store(
        ends + row,
        tl.where(tl.load(forbidden + eos) != 0, -float("inf"), tl.load(row_logits + eos).to(tl.float32) - logsumexp),
    )


@triton.jit(do_not_specialize=["room"])
def _beam_kernel(
    values, ids, ends, logprob, score, node, parents, tokens, token, row, done, written, min_length, penalty, bound,
    room, K: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Extend the K beams of one source (`weft.decoding.beam_search.extend`); merge what finishes into its pool of N."""
    let_in(EARLY)
    a, j, i = tl.program_id(0), tl.arange(0, KP), tl.arange(0, NP)
    valid_beam, rows, count = j < K, a * K + tl.arange(0, KP), tl.load(written + a)
    before = tl.load(logprob + rows, valid_beam, -float("inf"))
    valid = valid_beam[:, None] & valid_beam[None, :]
    values_by_beam = tl.load(values + rows[:, None] * K + j[None, :], valid, -float("inf"))
    key = tl.where(valid, _sort_key(values_by_beam + before[:, None], j[:, None] * KP + j[None, :]), MIN_KEY)
    ending = tl.where(
        valid_beam & (count >= tl.load(min_length).to(tl.int32)),
        tl.load(ends + rows, valid_beam, 0.0) + before,
        -float("inf"),
    )
    old, old_node = tl.load(score + a * N + i, i < N, -float("inf")), tl.load(node + a * N + i, i < N, 0)
    was_done = tl.load(done + a) != 0
    tl.debug_barrier()  # all loads before any store
    # The live beams.
    live = tl.full((KP,), -float("inf"), tl.float32)
    for n in range(K):
        best = tl.max(tl.max(key, 1), 0)
        key = tl.where(key == best, MIN_KEY, key)
        value, parent = _key_value(best), _key_index(best) // KP
        id = tl.load(ids + (a * K + parent) * K + _key_index(best) % KP)
        live = tl.where(j == n, value, live)
        tl.store(logprob + a * K + n, value)
        tl.store(token + a * K + n, id.to(tl.int64))
        tl.store(row + a * K + n, (a * K + parent).to(tl.int64))
        tl.store(parents + (a * room + count) * K + n, parent)
        tl.store(tokens + (a * room + count) * K + n, id)
    # Hypotheses that end, if fewer than K of all are better.
    better = tl.sum((live[None, :] > ending[:, None]).to(tl.int32), 1)
    better += tl.sum((ending[None, :] > ending[:, None]).to(tl.int32), 1)
    ended = tl.where(better < K, ending / tl.load(penalty + count + 1), -float("inf"))
    # The pool is sorted: the new place of an entry is the number of entries before it.
    old_place = i + tl.sum((ended[None, :] > old[:, None]).to(tl.int32), 1)
    ahead = (ended[None, :] > ended[:, None]) | ((ended[None, :] == ended[:, None]) & (j[None, :] < j[:, None]))
    new_place = tl.sum(((old[None, :] >= ended[:, None]) & (i < N)[None, :]).to(tl.int32), 1) + tl.sum(
        ahead.to(tl.int32), 1
    )
    stays, enters = (i < N) & (old_place < N), valid_beam & (new_place < N)
    tl.store(score + a * N + old_place, old, stays)
    tl.store(node + a * N + old_place, old_node, stays)
    tl.store(score + a * N + new_place, ended, enters)
    tl.store(node + a * N + new_place, count * K + j, enters)
    worst = tl.maximum(
        tl.max(tl.where(stays & (old_place == N - 1), old, -float("inf")), 0),
        tl.max(tl.where(enters & (new_place == N - 1), ended, -float("inf")), 0),
    )
    first = tl.max(tl.where(j == 0, live, -float("inf")), 0)
    tl.store(done + a, was_done | (first / tl.load(bound) <= worst))
    tl.store(written + a, count + 1)


@triton.jit(do_not_specialize=["eos", "room", "B"])
def _greedy_kernel(
    values, ids, ends, tokens, logprobs, token, done, written, min_length, eos, room, B, BB: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Write the better of the best token and eos, for a block of rows."""
    let_in(EARLY)
    a = tl.program_id(0) * BB + tl.arange(0, BB)
    valid = a < B
    count, value, id = tl.load(written + a, valid, 0), tl.load(values + a, valid, 0.0), tl.load(ids + a, valid, 0)
    eos_logprob = tl.where(count >= tl.load(min_length).to(tl.int32), tl.load(ends + a, valid, 0.0), -float("inf"))
    ending = (eos_logprob > value) | ((eos_logprob == value) & (eos < id))
    id = tl.where(ending, eos, id)
    tl.store(tokens + a * room + count, id, valid)
    tl.store(logprobs + a * room + count, tl.where(ending, eos_logprob, value), valid)
    tl.store(token + a, id.to(tl.int64), valid)
    tl.store(done + a, (tl.load(done + a, valid, 0) != 0) | (id == eos), valid)
    tl.store(written + a, count + 1, valid)


@triton.jit(do_not_specialize=["eos", "room", "B"])
def _rows_kernel(
    values, ids, ends, output, logprobs, token, written, min_length, max_length, active, tick, eos, room, B,
    BB: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the better of the best token and eos for the rows of a running batch, in one program; count the step."""
    let_in(EARLY)
    a, step = tl.arange(0, BB), tl.load(tick)
    valid = a < B
    count, value, id = tl.load(written + a, valid, 0), tl.load(values + a, valid, 0.0), tl.load(ids + a, valid, 0)
    is_active = tl.load(active + a, valid, 0) != 0
    eos_logprob = tl.where(count >= tl.load(min_length + a, valid, 0), tl.load(ends + a, valid, 0.0), -float("inf"))
    ending = (eos_logprob > value) | ((eos_logprob == value) & (eos < id))
    id = tl.where(ending, eos, id)
    count += is_active.to(tl.int32)
    goes_on = is_active & (id != eos) & (count < tl.load(max_length + a, valid, 0))
    tl.debug_barrier()  # all is read before anything is overwritten
    tl.store(output + step * room + a, tl.where(is_active, id, -1), valid)
    tl.store(logprobs + step * room + a, tl.where(ending, eos_logprob, value), valid)
    tl.store(token + a, id.to(tl.int64), valid)
    tl.store(written + a, count, valid)
    tl.store(active + a, goes_on.to(tl.int32), valid)
    tl.store(tick, step + 1)


def _top_k(state, logits, width):
    """Return the best of each row: log-probabilities and ids (B, width), and log-probabilities of eos (B,)."""
    rows, vocab = logits.shape
    chunk = max(CHUNK, triton.next_power_of_2(triton.cdiv(vocab, MAX_CHUNKS)))
    chunks, options = triton.cdiv(vocab, chunk), {"device": logits.device}
    buffers = [torch.empty(rows, chunks, **options) for _ in range(3)]
    values, ids = torch.empty(rows, width, **options), torch.empty(rows, width, dtype=torch.int32, **options)
    ends = torch.empty(rows, **options)
    inputs, sizes = (logits, state.forbidden, *buffers), (vocab, logits.stride(0), chunks, state.eos)
    chunks_per_block, padded_width = max(4096 // chunk, 1), triton.next_power_of_2(width)
    _chunk_kernel[rows, triton.cdiv(chunks, chunks_per_block)](
        *inputs, *sizes, BS=chunks_per_block, BV=chunk, num_warps=4, **early()
    )
    _top_k_kernel[(rows,)](
        *inputs, values, ids, ends, *sizes, BV=chunk, SP=triton.next_power_of_2(chunks), K=width, KP=padded_width,
        num_warps=max(padded_width * chunk // 2048, 1), **early(),
    )  # fmt: skip
    return values, ids, ends


def beam(state: BeamState, logits: torch.Tensor) -> None:
    """Do `weft.decoding.static_state.BeamState.choose`."""
    (groups, width), keep = state.row.shape, state.score.shape[1]
    _beam_kernel[(groups,)](
        *_top_k(state, logits, width), state.logprob, state.score, state.node, state.parents, state.tokens,
        state.token, state.row, state.done, state.written, state.min_length, state.penalty, state.bound, state.room,
        K=width, KP=triton.next_power_of_2(width), N=keep, NP=triton.next_power_of_2(keep), num_warps=1, **early(),
    )  # fmt: skip


def running(batch: "StaticBatch", rows: int, logits: torch.Tensor) -> None:
    """Do `weft.decoding.captured_batch.StaticBatch.choose` for rows that search greedily."""
    own = batch.settings
    _rows_kernel[(1,)](
        *_top_k(batch, logits, 1), batch.output, batch.logprobs, own.token, own.written, own.min_length,
        own.max_length, batch.pool.active, batch.tick, batch.eos, batch.rows, rows,
        BB=triton.next_power_of_2(rows), num_warps=4, **early(),
    )  # fmt: skip


def greedy(state: GreedyState, logits: torch.Tensor) -> None:
    """Do `weft.decoding.static_state.GreedyState.choose` with `argmax_token`."""
    _greedy_kernel[(triton.cdiv(len(state.row), 128),)](
        *_top_k(state, logits, 1), state.tokens, state.logprobs, state.token, state.done, state.written,
        state.min_length, state.eos, state.room, len(state.row), BB=128, **early(),
    )  # fmt: skip
