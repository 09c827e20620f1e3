"""Cross-entropy over a large vocabulary on CUDA, in Triton: the logits are read once, and once more on the way back.

Imported only where Triton is. A program a row; the softmax is carried on from block to block of the vocabulary
(Milakov & Gimelshein 2018), in float32 whatever the logits are in. With ε of smoothing, over V words,

    loss = log Σ_v exp x_v - (1 - ε) x_target - ε/V Σ_v x_v
    ∂loss/∂x_v = softmax(x)_v - (1 - ε) [v = target] - ε/V
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

BLOCK, WARPS = 4096, 4  # words at a time


@triton.jit
def _cross_entropy_forward(
    logits, targets, losses, sums, SMOOTHING: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr
):
    n, target = tl.program_id(0), tl.load(targets + tl.program_id(0))
    loss, top = 0.0, -float("inf")
    if target >= 0:  # as in torch, a row is left out by a target of -100
        row, total, whole = logits + n.to(tl.int64) * V, 0.0, 0.0
        for first in range(0, V, BLOCK):
            v = first + tl.arange(0, BLOCK)
            x = tl.load(row + v, v < V, -float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            whole += tl.sum(tl.where(v < V, x, 0.0), 0)
            top = higher
        top += tl.log(total)
        right = tl.load(row + target).to(tl.float32)
        loss = top - (1 - SMOOTHING) * right - SMOOTHING / V * whole
    tl.store(losses + n, loss)
    tl.store(sums + n, top)


@triton.jit
def _cross_entropy_backward(
    logits, targets, sums, back, glogits, SMOOTHING: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr
):
    n, v = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target, place = tl.load(targets + n), n.to(tl.int64) * V + v
    made = tl.zeros((BLOCK,), tl.float32)
    if target >= 0:  # as in torch, a row is left out by a target of -100
        x = tl.load(logits + place, v < V, 0.0).to(tl.float32)
        made = tl.exp(x - tl.load(sums + n)) - tl.where(v == target, 1 - SMOOTHING, 0.0) - SMOOTHING / V
        made *= tl.load(back + n)
    tl.store(glogits + place, made.to(glogits.dtype.element_ty), v < V)


@triton_op("weft::cross_entropy", mutates_args=())
def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the loss of each row of logits (N, V), and the logarithms of their sums."""
    rows, vocab = logits.shape
    losses, sums = logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.float32)
    wrap_triton(_cross_entropy_forward)[(rows,)](
        logits, targets, losses, sums, SMOOTHING=smoothing, V=vocab, BLOCK=BLOCK, num_warps=WARPS
    )  # fmt: skip
    return losses, sums


@triton_op("weft::cross_entropy_back", mutates_args=())
def cross_entropy_back(logits: Tensor, targets: Tensor, sums: Tensor, back: Tensor, smoothing: float) -> Tensor:
    """Return what goes back to the logits."""
    rows, vocab = logits.shape
    glogits = torch.empty_like(logits)
    wrap_triton(_cross_entropy_backward)[(rows, -(-vocab // BLOCK))](
        logits, targets, sums, back, glogits, SMOOTHING=smoothing, V=vocab, BLOCK=BLOCK, num_warps=WARPS
    )  # fmt: skip
    return glogits


def _keep(ctx, inputs, output):
    logits, targets, ctx.smoothing = inputs
    ctx.save_for_backward(logits, targets, output[1])


def _send_back(ctx, back, _):
    logits, targets, sums = ctx.saved_tensors
    return cross_entropy_back(logits, targets, sums, back.contiguous(), ctx.smoothing), None, None


cross_entropy.register_autograd(_send_back, setup_context=_keep)
