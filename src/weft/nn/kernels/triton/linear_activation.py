"""The first half of a feed-forward layer on CUDA: act(x Wᵀ + b).

Imported only where Triton is. A compiler makes a product and a pass over memory for the rest; cuBLAS adds the bias,
and cuts, while the numbers are still in registers. GELU is a pass of its own, since the way back needs what it was
made of. On the way back one pass, in Triton, takes what came back through the activation and adds it up for the bias.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

ROWS, COLUMNS, PROGRAMS = 4, 512, 528  # of a program at a time, and how many share a column
STAGES = 2  # times so many rows are on their way to a program
BLOCK = 4096  # numbers of a program forward


RELU, NEARLY, GELU = 0, 1, 2  # NEARLY: GELU by tanh


@triton.jit
def _normal(x):
    """Return Φ(x), right to 1e-7, and exp(-x²/2), of which it is made (Abramowitz and Stegun 1964, 7.1.26)."""
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
    powers = 0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    bell = tl.exp2(-0.7213475204444817 * x * x)
    tail = 0.5 * t * powers * bell
    return tl.where(x >= 0, 1.0 - tail, tail), bell


@triton.jit
def _gelu(x, ACT: tl.constexpr):
    """Return x Φ(x), or nearly: x σ(2 √(2/π) (x + 0.044715 x³))."""
    if ACT == 2:
        below, _ = _normal(x)
        return x * below
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _slope(x, ACT: tl.constexpr):
    """Return the derivative of that."""
    if ACT == 2:
        below, bell = _normal(x)
        return below + x * 0.3989422804014327 * bell
    share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return share + x * share * (1.0 - share) * (1.5957691216057308 + 0.21406449466162796 * x * x)


@triton.jit
def _gelu_forward(known, found, SIZE, ACT: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(known + place, place < SIZE, 0.0).to(tl.float32)
    made = _gelu(x, ACT)
    tl.store(found + place, made.to(found.dtype.element_ty), place < SIZE)


@triton.jit
def _cut_backward(
    found, back, cut, sums, N, ACT: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(tl.program_id(1) * ROWS, N, tl.num_programs(1) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside, place = (row < N)[:, None] & (v < V)[None, :], row[:, None] * V + v[None, :]
        given, known = tl.load(back + place, inside, 0.0), tl.load(found + place, inside, 0.0)
        if ACT > 0:
            given = (given.to(tl.float32) * _slope(known.to(tl.float32), ACT)).to(given.dtype)
        else:
            given = tl.where(known > 0, given, 0.0)
        tl.store(cut + place, given, inside)
        total += given.to(tl.float32)
    tl.store(sums + tl.program_id(1) * V + v, tl.sum(total, 0), v < V)


@triton_op("weft::cut_back", mutates_args=())
def cut_back(found: Tensor, back: Tensor, act: int) -> tuple[Tensor, Tensor]:
    """Return what came back (N, V) where something was found, or by GELU's slope there, and its sum (V,)."""
    rows, width = found.shape
    cut, sums = torch.empty_like(back), back.new_empty(PROGRAMS, width, dtype=torch.float32)
    wrap_triton(_cut_backward)[(-(-width // COLUMNS), PROGRAMS)](
        found,
        back,
        cut,
        sums,
        rows,
        ACT=act,
        V=width,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        STAGES=STAGES,
        num_warps=4,
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
    cut, total = cut_back(found, back.contiguous(), RELU)
    return cut @ weight, cut.t() @ x, total.to(bias.dtype)


linear_relu.register_autograd(_send_back, setup_context=_keep)


@triton_op("weft::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    """Map (N, D) as `linear_relu` does, with GELU, or that by tanh; return what was before that, too."""
    known = torch.addmm(bias.to(x.dtype), x, weight.t())
    found, size = torch.empty_like(known), known.numel()
    wrap_triton(_gelu_forward)[(-(-size // BLOCK),)](
        known, found, size, ACT=GELU if exact else NEARLY, BLOCK=BLOCK, num_warps=4
    )  # fmt: skip
    return found, known


def _keep_known(ctx, inputs, output):
    *known, ctx.exact = inputs
    ctx.save_for_backward(*known, output[1])


def _send_back_gelu(ctx, back, _):
    x, weight, bias, known = ctx.saved_tensors
    made, total = cut_back(known, back.contiguous(), GELU if ctx.exact else NEARLY)
    return made @ weight, made.t() @ x, total.to(bias.dtype), None


linear_gelu.register_autograd(_send_back_gelu, setup_context=_keep_known)
