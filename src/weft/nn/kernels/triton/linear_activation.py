"""Fused linear layer and activation on CUDA, the first half of a feed-forward layer: act(x Wᵀ + b).

Imported only where Triton is. torch.compile makes a product, and a pass over memory for the rest; cuBLAS adds the bias
and applies ReLU in the product's epilogue. GELU is a pass of its own, since the backward pass needs its input. The
backward pass, in Triton, multiplies by the activation's derivative and sums the gradient of the bias in one pass.
"""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

_ROWS, _COLUMNS, _PROGRAMS = 4, 512, 528  # of a program at a time, and programs for each column
_STAGES = 2  # of the software pipeline that loads rows
_BLOCK = 4096  # elements of a program, forward


RELU, GELU_TANH, GELU = 0, 1, 2


@triton.jit
def _normal_cdf(x):
    """Return Φ(x), with an error of 1e-7, and exp(-x²/2), used in it (Abramowitz and Stegun 1964, 7.1.26)."""
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(x))
    polynomial = 0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    gaussian = tl.exp2(-0.7213475204444817 * x * x)
    tail = 0.5 * t * polynomial * gaussian
    return tl.where(x >= 0, 1.0 - tail, tail), gaussian


@triton.jit
def _gelu(x, ACT: tl.constexpr):
    """Return GELU x Φ(x), or its tanh approximation x σ(2 √(2/π) (x + 0.044715 x³))."""
    if ACT == 2:
        cdf, _ = _normal_cdf(x)
        return x * cdf
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _gelu_derivative(x, ACT: tl.constexpr):
    """Return the derivative of `_gelu`."""
    if ACT == 2:
        cdf, gaussian = _normal_cdf(x)
        return cdf + x * 0.3989422804014327 * gaussian
    gate = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return gate + x * gate * (1.0 - gate) * (1.5957691216057308 + 0.21406449466162796 * x * x)


@triton.jit
def _gelu_forward(inputs, outputs, SIZE, ACT: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(inputs + index, index < SIZE, 0.0).to(tl.float32)
    y = _gelu(x, ACT)
    tl.store(outputs + index, y.to(outputs.dtype.element_ty), index < SIZE)


@triton.jit
def _activation_backward(
    saved, grad_out, grad_in, sums, N, ACT: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    v = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(tl.program_id(1) * ROWS, N, tl.num_programs(1) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside, index = (row < N)[:, None] & (v < V)[None, :], row[:, None] * V + v[None, :]
        grad, value = tl.load(grad_out + index, inside, 0.0), tl.load(saved + index, inside, 0.0)
        if ACT > 0:
            grad = (grad.to(tl.float32) * _gelu_derivative(value.to(tl.float32), ACT)).to(grad.dtype)
        else:
            grad = tl.where(value > 0, grad, 0.0)
        tl.store(grad_in + index, grad, inside)
        total += grad.to(tl.float32)
    tl.store(sums + tl.program_id(1) * V + v, tl.sum(total, 0), v < V)


@triton_op("weft::activation_backward", mutates_args=())
def activation_backward(saved: Tensor, grad_out: Tensor, act: int) -> tuple[Tensor, Tensor]:
    """Return the gradient (N, V) of the activation's input, and its sum (V,), from ReLU's output or GELU's input."""
    rows, width = saved.shape
    grad_in, sums = torch.empty_like(grad_out), grad_out.new_empty(_PROGRAMS, width, dtype=torch.float32)
    wrap_triton(_activation_backward)[(-(-width // _COLUMNS), _PROGRAMS)](
        saved,
        grad_out,
        grad_in,
        sums,
        rows,
        ACT=act,
        V=width,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        STAGES=_STAGES,
        num_warps=4,
    )
    return grad_in, sums.sum(0)


@custom_op("weft::linear_relu", mutates_args=())
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return relu(x Wᵀ + b), (N, V), of x (N, D), a matrix (V, D) of its dtype and a bias (V,)."""
    return torch._addmm_activation(bias.to(x.dtype), x, weight.t())


@linear_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(len(x), len(weight))


def _setup_relu(ctx, inputs, output):
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight, bias, output)


def _relu_backward(ctx, grad_out):
    x, weight, bias, output = ctx.saved_tensors
    grad, grad_bias = activation_backward(output, grad_out.contiguous(), RELU)
    return grad @ weight, grad.t() @ x, grad_bias.to(bias.dtype)


linear_relu.register_autograd(_relu_backward, setup_context=_setup_relu)


@triton_op("weft::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    """Map (N, D) as `linear_relu` does, with GELU, exact or by tanh; return the activation's input, too."""
    projected = torch.addmm(bias.to(x.dtype), x, weight.t())
    output, size = torch.empty_like(projected), projected.numel()
    wrap_triton(_gelu_forward)[(-(-size // _BLOCK),)](
        projected, output, size, ACT=GELU if exact else GELU_TANH, BLOCK=_BLOCK, num_warps=4
    )  # fmt: skip
    return output, projected


def _setup_gelu(ctx, inputs, output):
    *tensors, ctx.exact = inputs
    ctx.save_for_backward(*tensors, output[1])


def _gelu_backward(ctx, grad_out, _):
    x, weight, bias, projected = ctx.saved_tensors
    grad, grad_bias = activation_backward(projected, grad_out.contiguous(), GELU if ctx.exact else GELU_TANH)
    return grad @ weight, grad.t() @ x, grad_bias.to(bias.dtype), None


linear_gelu.register_autograd(_gelu_backward, setup_context=_setup_gelu)


def linear_exact_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Map (N, D) as `linear_relu` does, with exact GELU."""
    return linear_gelu(x, weight, bias, True)[0]


def linear_tanh_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Map (N, D) as `linear_relu` does, with GELU by tanh."""
    return linear_gelu(x, weight, bias, False)[0]
