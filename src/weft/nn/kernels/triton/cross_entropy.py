"""Cross-entropy over a large vocabulary on CUDA, in Triton: the logits are read once, and once more on the way back.

Imported only where Triton is. A program a row; the softmax is carried on from block to block of the vocabulary
(Milakov & Gimelshein 2018), in float32 whatever the logits are in. Rows may be longer than there are words, so that
they begin at even places: what is left over counts for nothing. With ε of smoothing, over V words,

    loss = log Σ_v exp x_v - (1 - ε) x_target - ε/V Σ_v x_v
    ∂loss/∂x_v = softmax(x)_v - (1 - ε) [v = target] - ε/V
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

BLOCK, WARPS = 4096, 4  # words at a time, on the way back
FORWARD, STAGES = 2048, 3  # and forward; how many times so many are on their way


@triton.jit
def _carried(x, top, total):
    """Carry a softmax on over some words; one that has nothing yet is at -inf and 0."""
    higher = tl.maximum(top, tl.max(x, 0))
    scale: tl.constexpr = 1.4426950408889634
    return higher, total * tl.exp2((top - higher) * scale) + tl.sum(tl.exp2(x * scale - higher * scale), 0)


@triton.jit
def _cross_entropy_forward(
    logits, targets, losses, sums, SMOOTHING: tl.constexpr, V: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    n, target = tl.program_id(0), tl.load(targets + tl.program_id(0))
    loss, top = 0.0, -float("inf")
    if target >= 0:  # as in torch, a row is left out by a target of -100
        row, total, whole = logits + n.to(tl.int64) * ROW, 0.0, 0.0
        for first in tl.range(0, V // BLOCK * BLOCK, BLOCK, num_stages=STAGES):
            x = tl.load(row + first + tl.arange(0, BLOCK)).to(tl.float32)
            top, total = _carried(x, top, total)
            if SMOOTHING > 0:
                whole += tl.sum(x, 0)
        if V % BLOCK:
            v = V // BLOCK * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(row + v, v < ROW, 0.0).to(tl.float32)
            whole += tl.sum(tl.where(v < V, x, 0.0), 0)
            # Not while it is read, or numbers would be read one by one.
            top, total = _carried(tl.where(v < V, x, -float("inf")), top, total)
        top += tl.log(total)
        right = tl.load(row + target).to(tl.float32)
        loss = top - (1 - SMOOTHING) * right - SMOOTHING / V * whole
    tl.store(losses + n, loss)
    tl.store(sums + n, top)


@triton.jit
def _cross_entropy_backward(
    logits, targets, sums, back, glogits, SMOOTHING: tl.constexpr, V: tl.constexpr, ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n, v = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target, place = tl.load(targets + n), n.to(tl.int64) * ROW + v
    made = tl.zeros((BLOCK,), tl.float32)
    if target >= 0:  # as in torch, a row is left out by a target of -100
        x = tl.load(logits + place, v < ROW, 0.0).to(tl.float32)
        made = tl.exp(x - tl.load(sums + n)) - tl.where(v == target, 1 - SMOOTHING, 0.0) - SMOOTHING / V
        made = tl.where(v < V, made * tl.load(back + n), 0.0)
    tl.store(glogits + place, made.to(glogits.dtype.element_ty), v < ROW)


@triton_op("weft::cross_entropy", mutates_args=())
def cross_entropy(logits: Tensor, targets: Tensor, vocab: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the loss of each row of logits (N, V or more), and the logarithms of their sums."""
    rows, wide = logits.shape
    losses, sums = logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.float32)
    wrap_triton(_cross_entropy_forward)[(rows,)](
        logits,
        targets,
        losses,
        sums,
        SMOOTHING=smoothing,
        V=vocab,
        ROW=wide,
        BLOCK=FORWARD,
        STAGES=STAGES,
        num_warps=WARPS,
    )
    return losses, sums


@triton_op("weft::cross_entropy_back", mutates_args=())
def cross_entropy_back(
    logits: Tensor, targets: Tensor, sums: Tensor, back: Tensor, vocab: int, smoothing: float
) -> Tensor:
    """Return what goes back to the logits."""
    rows, wide = logits.shape
    glogits = torch.empty_like(logits)
    wrap_triton(_cross_entropy_backward)[(rows, -(-wide // BLOCK))](
        logits, targets, sums, back, glogits, SMOOTHING=smoothing, V=vocab, ROW=wide, BLOCK=BLOCK, num_warps=WARPS
    )
    return glogits


def _keep(ctx, inputs, output):
    logits, targets, ctx.vocab, ctx.smoothing = inputs
    ctx.save_for_backward(logits, targets, output[1])


def _send_back(ctx, back, _):
    logits, targets, sums = ctx.saved_tensors
    found = cross_entropy_back(logits, targets, sums, back.contiguous(), ctx.vocab, ctx.smoothing)
    return found, None, None, None


cross_entropy.register_autograd(_send_back, setup_context=_keep)
