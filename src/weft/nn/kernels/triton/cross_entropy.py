"""Cross-entropy over a large vocabulary on CUDA, in Triton: the logits are read once forward and once backward.

Imported only where Triton is. One program a row; the softmax is online, over blocks of the vocabulary (Milakov &
Gimelshein 2018), in float32 whatever the logits' dtype. Rows may be padded beyond the vocabulary, for alignment: the
padding is ignored. With label smoothing ε over a vocabulary of V,

    loss = log Σ_v exp x_v - (1 - ε) x_target - ε/V Σ_v x_v
    ∂loss/∂x_v = softmax(x)_v - (1 - ε) [v = target] - ε/V
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

_BLOCK, _WARPS = 4096, 4  # logits at a time, backward
_FORWARD_BLOCK, _STAGES = 2048, 3  # the same forward; stages of the software pipeline


@triton.jit
def _online_logsumexp(x, row_max, row_sum):
    """Return the running maximum and sum of exponentials, updated by more logits; they start at -inf and 0."""
    new_max = tl.maximum(row_max, tl.max(x, 0))
    scale: tl.constexpr = 1.4426950408889634
    return new_max, row_sum * tl.exp2((row_max - new_max) * scale) + tl.sum(tl.exp2(x * scale - new_max * scale), 0)


@triton.jit
def _cross_entropy_forward(
    logits, targets, losses, lses, SMOOTHING: tl.constexpr, V: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    n, target = tl.program_id(0), tl.load(targets + tl.program_id(0))
    loss, row_max = 0.0, -float("inf")
    if target >= 0:  # as in PyTorch, rows with a target of -100 are ignored
        row, row_sum, logit_sum = logits + n.to(tl.int64) * ROW, 0.0, 0.0
        for first in tl.range(0, V // BLOCK * BLOCK, BLOCK, num_stages=STAGES):
            x = tl.load(row + first + tl.arange(0, BLOCK)).to(tl.float32)
            row_max, row_sum = _online_logsumexp(x, row_max, row_sum)
            if SMOOTHING > 0:
                logit_sum += tl.sum(x, 0)
        if V % BLOCK:
            v = V // BLOCK * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(row + v, v < ROW, 0.0).to(tl.float32)
            logit_sum += tl.sum(tl.where(v < V, x, 0.0), 0)
            # Masked after the load, not in it, or the load would not be vectorised.
            row_max, row_sum = _online_logsumexp(tl.where(v < V, x, -float("inf")), row_max, row_sum)
        row_max += tl.log(row_sum)
        target_logit = tl.load(row + target).to(tl.float32)
        loss = row_max - (1 - SMOOTHING) * target_logit - SMOOTHING / V * logit_sum
    tl.store(losses + n, loss)
    tl.store(lses + n, row_max)


@triton.jit
def _cross_entropy_backward(
    logits, targets, lses, grad_out, glogits, SMOOTHING: tl.constexpr, V: tl.constexpr, ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n, v = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target, index = tl.load(targets + n), n.to(tl.int64) * ROW + v
    grad = tl.zeros((BLOCK,), tl.float32)
    if target >= 0:  # as in PyTorch, rows with a target of -100 are ignored
        x = tl.load(logits + index, v < ROW, 0.0).to(tl.float32)
        grad = tl.exp(x - tl.load(lses + n)) - tl.where(v == target, 1 - SMOOTHING, 0.0) - SMOOTHING / V
        grad = tl.where(v < V, grad * tl.load(grad_out + n), 0.0)
    tl.store(glogits + index, grad.to(glogits.dtype.element_ty), v < ROW)


@triton_op("weft::cross_entropy", mutates_args=())
def cross_entropy(logits: Tensor, targets: Tensor, vocab: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the loss of each row of logits (N, V or more), and their log-sum-exps."""
    rows, row_stride = logits.shape
    losses, lses = logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.float32)
    wrap_triton(_cross_entropy_forward)[(rows,)](
        logits,
        targets,
        losses,
        lses,
        SMOOTHING=smoothing,
        V=vocab,
        ROW=row_stride,
        BLOCK=_FORWARD_BLOCK,
        STAGES=_STAGES,
        num_warps=_WARPS,
    )
    return losses, lses


@triton_op("weft::cross_entropy_backward", mutates_args=())
def cross_entropy_backward(
    logits: Tensor, targets: Tensor, lses: Tensor, grad_out: Tensor, vocab: int, smoothing: float
) -> Tensor:
    """Return the gradient of the logits."""
    rows, row_stride = logits.shape
    glogits = torch.empty_like(logits)
    wrap_triton(_cross_entropy_backward)[(rows, -(-row_stride // _BLOCK))](
        logits,
        targets,
        lses,
        grad_out,
        glogits,
        SMOOTHING=smoothing,
        V=vocab,
        ROW=row_stride,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return glogits


def _setup_context(ctx, inputs, output):
    logits, targets, ctx.vocab, ctx.smoothing = inputs
    ctx.save_for_backward(logits, targets, output[1])


def _backward(ctx, grad_out, _):
    logits, targets, lses = ctx.saved_tensors
    grad_logits = cross_entropy_backward(logits, targets, lses, grad_out.contiguous(), ctx.vocab, ctx.smoothing)
    return grad_logits, None, None, None


cross_entropy.register_autograd(_backward, setup_context=_setup_context)
