"""The first half of a feed-forward layer on CUDA: max(0, x Wᵀ + b), all in the product's own last step.

Imported only where Triton is. A compiler makes a product and a pass over memory for the rest; cuBLAS adds and cuts
what is still in registers. On the way back one pass, in Triton, cuts what came back and adds it up for the bias.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

ROWS, COLUMNS, PROGRAMS = 8, 512, 264  # of a program at a time, and how many share a column


@triton.jit
def _cut_backward(found, back, cut, sums, N, V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(tl.program_id(1) * ROWS, N, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside, place = (row < N)[:, None] & (v < V)[None, :], row[:, None] * V + v[None, :]
        given = tl.load(back + place, inside, 0.0)
        given = tl.where(tl.load(found + place, inside, 0.0) > 0, given, 0.0)
        tl.store(cut + place, given, inside)
        total += given.to(tl.float32)
    tl.store(sums + tl.program_id(1) * V + v, tl.sum(total, 0), v < V)


@triton_op("weft::cut_back", mutates_args=())
def cut_back(found: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
    """Return what came back (N, V) where something was found, and its sum (V,)."""
    rows, width = found.shape
    cut, sums = torch.empty_like(back), back.new_empty(PROGRAMS, width, dtype=torch.float32)
    wrap_triton(_cut_backward)[(-(-width // COLUMNS), PROGRAMS)](
        found, back, cut, sums, rows, V=width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
    )
    return cut, sums.sum(0)


@custom_op("weft::linear_relu", mutates_args=())
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Map (N, D) by a matrix (V, D) of its dtype and a bias (V,) to (N, V)."""
    return torch._addmm_activation(bias.to(x.dtype), x, weight.t())


@linear_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(len(x), len(weight))


def _keep(ctx, inputs, output):
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight, bias, output)


def _send_back(ctx, back):
    x, weight, bias, found = ctx.saved_tensors
    cut, total = cut_back(found, back.contiguous())
    return cut @ weight, cut.t() @ x, total.to(bias.dtype)


linear_relu.register_autograd(_send_back, setup_context=_keep)
