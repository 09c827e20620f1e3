"""An LSTM whose state is projected to fewer numbers than it has cells, both held within bounds: the layer of ELMo.

    i_t = σ(W_xi x_t + W_hi h_{t-1} + b_i)        f_t = σ(W_xf x_t + W_hf h_{t-1} + b_f)
    g_t = tanh(W_xg x_t + W_hg h_{t-1} + b_g)     o_t = σ(W_xo x_t + W_ho h_{t-1} + b_o)
    c_t = clip(f_t ⊙ c_{t-1} + i_t ⊙ g_t)         h_t = clip(W_p (o_t ⊙ tanh(c_t)))

Sak, Senior & Beaufays 2014, "Long short-term memory based recurrent neural network architectures for large vocabulary
speech recognition" (arXiv:1402.1128), without peepholes; clip(x) = max(-a, min(a, x)) as in bilm-tf. A state (h, c) is
of two widths, so it is no `Stage` of `weft.nn.rnn.cells`; what is done place by place is fused by the same kernels.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from weft.nn.rnn.cells import Parts, State, at_last
from weft.nn.rnn.fused.codegen_numba import Shape, stepper
from weft.nn.rnn.fused.scan import worthwhile
from weft.nn.rnn.init import init_recurrent_

GATES = 4
_SHAPE = Shape(known=GATES, product=GATES, state=2, vectors=0, values=2)


class ProjectedLSTM(nn.Module):
    """One layer; its state is (h, c), of `width` and of `cells` numbers. `clip` bounds both, None neither."""

    def __init__(self, inputs: int, width: int, cells: int, clip: float | None = None) -> None:
        super().__init__()
        self.width, self.cells, self.clip = width, cells, clip
        self.input_weight = nn.Parameter(torch.empty(GATES * cells, inputs))
        self.state_weight = nn.Parameter(torch.empty(GATES * cells, width))
        self.bias = nn.Parameter(torch.empty(GATES * cells))
        self.project = nn.Parameter(torch.empty(width, cells))
        init_recurrent_(self.input_weight, self.state_weight, self.bias, gates=GATES, open_gate=1)
        nn.init.orthogonal_(self.project)

    def begin(self, rows: int, like: Tensor) -> State:
        """Return the state before the first step: zeros."""
        return like.new_zeros(rows, self.width), like.new_zeros(rows, self.cells)

    def forward(self, inputs: Tensor, state: State | None = None, real: Tensor | None = None) -> tuple[Tensor, State]:
        """Read inputs (T, B, I); return the output of every step, (T, B, P), and the state after each row's last.

        A row's steps are those that `real` (T, B) has, from the first on; without it all are.
        """
        begun = state or self.begin(inputs.shape[1], inputs)
        known = F.linear(inputs, self.input_weight, self.bias)  # (T, B, 4·C)
        if worthwhile(known) and not known.is_cuda:
            walked: State = ProjectedScan.apply(self.clip, known, *begun, self.state_weight, self.project)  # type: ignore[no-untyped-call]
        else:
            walked = self._step_by_step(known, begun)
        return walked[0], tuple(at_last(part, start, real) for part, start in zip(walked, begun, strict=True))

    def _step_by_step(self, known: Tensor, state: State) -> State:
        """Walk under autograd."""
        walked, pointwise = [], gates(self.clip)
        for step in known:
            product = F.linear(state[0], self.state_weight)
            m, c = pointwise(step.chunk(GATES, -1), product.chunk(GATES, -1), state, ())
            state = _clipped(F.linear(m, self.project), self.clip), c
            walked.append(state)
        if not walked:
            return tuple(part.new_zeros(0, *part.shape) for part in state)
        return tuple(torch.stack(parts) for parts in zip(*walked, strict=True))


@cache
def gates(clip: float | None) -> Callable[[Parts, Parts, Parts, Parts], Parts]:
    """Return what a step does place by place: from what is known and the product with h to m = o ⊙ tanh(c), and c."""

    def pointwise(known: Parts, product: Parts, state: Parts, vectors: Parts) -> Parts:
        i, f, g, o = (one + other for one, other in zip(known, product, strict=True))
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        if clip is not None:  # in operations that can be fused; within the bounds it is exact
            c = c - torch.relu(c - clip) + torch.relu(-c - clip)
        return torch.sigmoid(o) * torch.tanh(c), c

    return pointwise


def _clipped(values: Tensor, clip: float | None) -> Tensor:
    return values if clip is None else values.clamp(-clip, clip)


class ProjectedScan(torch.autograd.Function):
    """All steps: two products and one fused kernel each; the gradients of the matrices are products over all steps."""

    @staticmethod
    def forward(
        ctx: Any, clip: float | None, known: Tensor, h: Tensor, c: Tensor, weight: Tensor, project: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return h and c after every step."""
        T, B, cells = len(known), known.shape[1], c.shape[1]
        known = known.contiguous()
        outputs = known.new_empty(T + 1, B, len(project))
        raw = outputs[1:] if clip is None else torch.empty_like(outputs[1:])
        ms, cs = (known.new_empty(T + 1, B, cells) for _ in range(2))
        outputs[0], cs[0] = h, c
        product = torch.empty_like(known)
        named = {"known": known, "product": product, "state0": ms, "state1": cs, "out0": ms, "out1": cs}
        kernel = _stepper(clip, known).forward(cells, B, named)
        to_gates, to_state = weight.t().contiguous(), project.t().contiguous()  # as they lie they are half as fast
        # Taken apart before the walk: on a short step, to reach for a row costs as much as to work on it.
        rows = [part.unbind() for part in (outputs, product, ms[1:], raw, outputs[1:])]
        for t, (state, gate, m, bare, after) in enumerate(zip(*rows, strict=False)):
            torch.mm(state, to_gates, out=gate)
            kernel(t)
            torch.mm(m, to_state, out=bare)
            if clip is not None:
                torch.clamp(bare, -clip, clip, out=after)
        ctx.clip = clip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(known, product, outputs, raw, ms, cs, weight, project)
        return outputs[1:], cs[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor | None, given_c: Tensor | None) -> Any:
        """Walk back; then multiply for all steps at once."""
        known, product, outputs, raw, ms, cs, weight, project = ctx.saved_tensors
        T, B, cells = len(known), known.shape[1], cs.shape[2]
        gproduct = torch.empty_like(product)
        graw = torch.zeros_like(raw) if given is None else given.clone()
        gm, gc = known.new_zeros(B, cells), known.new_zeros(B, cells)
        named = {"known": known, "product": product, "state0": ms, "state1": cs, "gproduct": gproduct}
        named |= {"gstate0": gm, "gstate1": gc, "given1": None if given_c is None else given_c.contiguous()}
        kernel = _stepper(ctx.clip, known, given_c is not None).backward(cells, B, named)
        inside = None if ctx.clip is None else raw.abs() <= ctx.clip
        bent = None if inside is None or bool(inside.all()) else inside.to(known.dtype).unbind()
        backs, gates_back = graw.unbind(), gproduct.unbind()
        for t in reversed(range(T)):
            if t + 1 < T:
                backs[t].addmm_(gates_back[t + 1], weight)
            if bent is not None:
                backs[t].mul_(bent[t])
            torch.mm(backs[t], project, out=gm)
            kernel(t)
        gweight = gproduct.flatten(0, 1).t() @ outputs[:-1].flatten(0, 1)
        gproject = graw.flatten(0, 1).t() @ ms[1:].flatten(0, 1)
        return None, gproduct, gproduct[0] @ weight, gc, gweight, gproject


def _stepper(clip: float | None, known: Tensor, c_given: bool = True) -> Any:
    made = stepper(gates(clip), _SHAPE, (False, c_given), known.dtype)
    assert made.shared, "what goes back to the products goes back to the inputs"
    return made
