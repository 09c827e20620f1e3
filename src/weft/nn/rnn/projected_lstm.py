"""LSTM with a recurrent projection layer (LSTMP) and clipping of cell and projection: the layer of ELMo.

    i_t = σ(W_xi x_t + W_hi h_{t-1} + b_i)        f_t = σ(W_xf x_t + W_hf h_{t-1} + b_f)
    g_t = tanh(W_xg x_t + W_hg h_{t-1} + b_g)     o_t = σ(W_xo x_t + W_ho h_{t-1} + b_o)
    c_t = clip(f_t ⊙ c_{t-1} + i_t ⊙ g_t)         h_t = clip(W_p (o_t ⊙ tanh(c_t)))

Sak, Senior & Beaufays 2014, "Long short-term memory based recurrent neural network architectures for large vocabulary
speech recognition" (arXiv:1402.1128), without peepholes; clip(x) = max(-a, min(a, x)) as in bilm-tf. h and c differ in
width, so this is no `Stage` of `weft.nn.rnn.cells`; the elementwise part is fused by the same kernels.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from weft.nn.kernels import dispatch
from weft.nn.rnn.cells import CellState, at_last
from weft.nn.rnn.fused.codegen_numba import StageShape, numba_step_kernels
from weft.nn.rnn.fused.trace import Parts
from weft.nn.rnn.init import init_recurrent_

GATES = 4
_SHAPE = StageShape(input_proj=GATES, product=GATES, state=2, vectors=0, values=2)


class ProjectedLSTM(nn.Module):
    """One layer; the state is (h, c) of widths `width` and `cells`. `clip` bounds both; None means no clipping."""

    def __init__(self, inputs: int, width: int, cells: int, clip: float | None = None) -> None:
        super().__init__()
        self.width, self.cells, self.clip = width, cells, clip
        self.input_weight = nn.Parameter(torch.empty(GATES * cells, inputs))
        self.state_weight = nn.Parameter(torch.empty(GATES * cells, width))
        self.bias = nn.Parameter(torch.empty(GATES * cells))
        self.project = nn.Parameter(torch.empty(width, cells))
        init_recurrent_(self.input_weight, self.state_weight, self.bias, gates=GATES, open_gate=1)
        nn.init.orthogonal_(self.project)

    def begin(self, rows: int, like: Tensor) -> CellState:
        """Return the state before the first step: zeros."""
        return like.new_zeros(rows, self.width), like.new_zeros(rows, self.cells)

    def forward(
        self, inputs: Tensor, state: CellState | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, CellState]:
        """Return the outputs (T, B, P) for inputs (T, B, I), and the state after each row's last real step.

        `real` (T, B) is True at a row's steps, False at the padding after them; None means no padding.
        """
        initial = state or self.begin(inputs.shape[1], inputs)
        input_proj = F.linear(inputs, self.input_weight, self.bias)  # (T, B, 4·C)
        if dispatch.numba_scan(input_proj):
            states: CellState = ProjectedScan.apply(self.clip, input_proj, *initial, self.state_weight, self.project)  # type: ignore[no-untyped-call]
        else:
            states = self._scan_eager(input_proj, initial)
        return states[0], tuple(at_last(part, start, real) for part, start in zip(states, initial, strict=True))

    def _scan_eager(self, input_proj: Tensor, state: CellState) -> CellState:
        """Run the scan step by step under autograd."""
        states, pointwise = [], gate_function(self.clip)
        for step in input_proj:
            product = F.linear(state[0], self.state_weight)
            m, c = pointwise(step.chunk(GATES, -1), product.chunk(GATES, -1), state, ())
            state = _clip(F.linear(m, self.project), self.clip), c
            states.append(state)
        if not states:
            return tuple(part.new_zeros(0, *part.shape) for part in state)
        return tuple(torch.stack(parts) for parts in zip(*states, strict=True))


@cache
def gate_function(clip: float | None) -> Callable[[Parts, Parts, Parts, Parts], Parts]:
    """Return the elementwise function from input projection, W_h h and state to m = o ⊙ tanh(c) and c."""

    def pointwise(input_proj: Parts, product: Parts, state: Parts, vectors: Parts) -> Parts:
        i, f, g, o = (x + h for x, h in zip(input_proj, product, strict=True))
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        if clip is not None:  # by operations that can be fused; exact within the bounds
            c = c - torch.relu(c - clip) + torch.relu(-c - clip)
        return torch.sigmoid(o) * torch.tanh(c), c

    return pointwise


def _clip(values: Tensor, clip: float | None) -> Tensor:
    return values if clip is None else values.clamp(-clip, clip)


class ProjectedScan(torch.autograd.Function):
    """All steps: two products and one fused kernel each; the gradient of a matrix is one product over all steps."""

    @staticmethod
    def forward(
        ctx: Any, clip: float | None, input_proj: Tensor, h: Tensor, c: Tensor, weight: Tensor, project: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return h (T, B, P) and c (T, B, C) after every step."""
        T, B, cells = len(input_proj), input_proj.shape[1], c.shape[1]
        input_proj = input_proj.contiguous()
        outputs = input_proj.new_empty(T + 1, B, len(project))
        unclipped = outputs[1:] if clip is None else torch.empty_like(outputs[1:])
        ms, cs = (input_proj.new_empty(T + 1, B, cells) for _ in range(2))
        outputs[0], cs[0] = h, c
        product = torch.empty_like(input_proj)
        tensors = {"input_proj": input_proj, "product": product, "state0": ms, "state1": cs, "out0": ms, "out1": cs}
        kernel = _gate_kernels(clip, input_proj).forward(cells, B, tensors)
        weight_t, project_t = weight.t().contiguous(), project.t().contiguous()  # else half as fast
        # Unbound before the loop: in a short step, to index a row costs as much as the work on it.
        rows = [part.unbind() for part in (outputs, product, ms[1:], unclipped, outputs[1:])]
        for t, (state, gates, m, projected, output) in enumerate(zip(*rows, strict=False)):
            torch.mm(state, weight_t, out=gates)
            kernel(t)
            torch.mm(m, project_t, out=projected)
            if clip is not None:
                torch.clamp(projected, -clip, clip, out=output)
        ctx.clip = clip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input_proj, product, outputs, unclipped, ms, cs, weight, project)
        return outputs[1:], cs[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_outputs: Tensor | None, grad_cs: Tensor | None) -> Any:
        """Return the gradients; those of matrices are one product over all steps."""
        input_proj, product, outputs, unclipped, ms, cs, weight, project = ctx.saved_tensors
        T, B, cells = len(input_proj), input_proj.shape[1], cs.shape[2]
        grad_product = torch.empty_like(product)
        grad_unclipped = torch.zeros_like(unclipped) if grad_outputs is None else grad_outputs.clone()
        grad_m, grad_c = input_proj.new_zeros(B, cells), input_proj.new_zeros(B, cells)
        tensors = {"input_proj": input_proj, "product": product, "state0": ms, "state1": cs}
        tensors |= {"grad_product": grad_product, "grad_state0": grad_m, "grad_state1": grad_c}
        tensors |= {"grad_output1": None if grad_cs is None else grad_cs.contiguous()}
        kernel = _gate_kernels(ctx.clip, input_proj, grad_cs is not None).backward(cells, B, tensors)
        inside = None if ctx.clip is None else unclipped.abs() <= ctx.clip
        masks = None if inside is None or bool(inside.all()) else inside.to(input_proj.dtype).unbind()
        grad_steps, grad_gates = grad_unclipped.unbind(), grad_product.unbind()
        for t in reversed(range(T)):
            if t + 1 < T:
                grad_steps[t].addmm_(grad_gates[t + 1], weight)
            if masks is not None:
                grad_steps[t].mul_(masks[t])
            torch.mm(grad_steps[t], project, out=grad_m)
            kernel(t)
        grad_weight = grad_product.flatten(0, 1).t() @ outputs[:-1].flatten(0, 1)
        grad_project = grad_unclipped.flatten(0, 1).t() @ ms[1:].flatten(0, 1)
        return None, grad_product, grad_product[0] @ weight, grad_c, grad_weight, grad_project


def _gate_kernels(clip: float | None, input_proj: Tensor, has_grad_c: bool = True) -> Any:
    kernels = numba_step_kernels(gate_function(clip), _SHAPE, (False, has_grad_c), input_proj.dtype)
    assert kernels.shared, "the gradients of products and input projections are the same"
    return kernels
