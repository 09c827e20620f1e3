"""Tracing of an elementwise function and its gradient to scalar code, for code generation.

A cell's stage is written once, in plain torch (`weft.nn.rnn.cells.CellStage`). Here it and its gradient are traced with
`make_fx`. From each trace one kernel is generated: for the CPU in numba (`weft.nn.rnn.fused.codegen_numba`), for CUDA
in Triton (`weft.nn.rnn.fused.codegen_triton`). A function with operations outside `EXPRESSIONS` is not fused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from weft.errors import WeftError

Parts = Sequence[Tensor]  # (B, D) each
Pointwise = Callable[[Parts, Parts, Parts, Parts], Parts]  # a stage's function: `weft.nn.rnn.cells.CellStage`

aten = torch.ops.aten

EXPRESSIONS: dict[Any, str] = {
    aten.add.Tensor: "({0} + {1})",
    aten.add.Scalar: "({0} + {1})",
    aten.sub.Tensor: "({0} - {1})",
    aten.sub.Scalar: "({0} - {1})",
    aten.rsub.Scalar: "({1} - {0})",
    aten.mul.Tensor: "({0} * {1})",
    aten.mul.Scalar: "({0} * {1})",
    aten.div.Tensor: "({0} / {1})",
    aten.div.Scalar: "({0} / {1})",
    aten.neg.default: "(-{0})",
    aten.exp.default: "exp({0})",
    aten.sigmoid.default: "sigmoid({0})",
    aten.tanh.default: "tanh({0})",
    aten.relu.default: "maximum({0}, ZERO)",
    aten.sigmoid_backward.default: "({0} * {1} * (ONE - {1}))",
    aten.tanh_backward.default: "({0} * (ONE - {1} * {1}))",
    aten.threshold_backward.default: "where({1} > {2}, {0}, ZERO)",
    aten.detach.default: "{0}",
    aten.alias.default: "{0}",
    aten.clone.default: "{0}",
    aten.zeros_like.default: "ZERO",
    aten.ones_like.default: "ONE",
}


class NotFusibleError(WeftError):
    """A function with an operation that is not elementwise, or not in `EXPRESSIONS`."""


@dataclass(frozen=True)
class Trace:
    """A function as lines of scalar code over named inputs; `outputs` are expressions, one per value returned."""

    lines: tuple[str, ...]
    outputs: tuple[str, ...]


def trace(function: Callable[..., Sequence[Tensor]], inputs: Sequence[str]) -> Trace:
    """Trace a function of tensors of one shape to scalar code over the names `inputs`."""
    module = make_fx(lambda *parts: tuple(function(*parts)))(*(torch.ones(2, 3) for _ in inputs))
    return _scalar_code(module, inputs)


def trace_gradient(function: Callable[..., Sequence[Tensor]], inputs: Sequence[str], grads: Sequence[str]) -> Trace:
    """Trace the vector-Jacobian product: inputs and output gradients, named `grads`, to input gradients."""

    def gradient(*parts: Tensor) -> Sequence[Tensor]:
        vjp = torch.func.vjp(lambda *primals: tuple(function(*primals)), *parts[: len(inputs)])[1]
        return tuple(vjp(tuple(parts[len(inputs) :])))

    module = make_fx(gradient)(*(torch.ones(2, 3) for _ in [*inputs, *grads]))
    return _scalar_code(module, [*inputs, *grads])


def _scalar_code(module: GraphModule, inputs: Sequence[str]) -> Trace:
    names: dict[Node, str] = {}
    lines: list[str] = []
    arguments = iter(inputs)
    module.graph.eliminate_dead_code()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            names[node] = next(arguments)
        elif node.op == "output":
            return Trace(tuple(lines), tuple(_expression(output, names) for output in node.args[0]))
        else:
            if node.target not in EXPRESSIONS or len({"alpha", "value"} & set(node.kwargs)):
                raise NotFusibleError(f"{node.target} is not an operation place by place that is known here")
            names[node] = f"v{len(lines)}"
            expression = EXPRESSIONS[node.target].format(*(_expression(value, names) for value in node.args))
            lines.append(f"{names[node]} = {expression}")
    raise AssertionError("a trace has an output")


def _expression(value: Any, names: dict[Node, str]) -> str:
    return names[value] if isinstance(value, Node) else f"number({value!r})"
