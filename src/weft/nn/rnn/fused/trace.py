"""A function place by place, and its gradient, each as one compiled loop.

A cell's stage is written once, in plain torch (`weft.nn.rnn.cells.Stage`). Here it is traced, and so is its gradient;
from the two traces one kernel each is written: for the CPU by `weft.nn.rnn.fused.codegen_numba`, in numba, for CUDA by
`weft.nn.rnn.fused.codegen_triton`, in Triton. A function that does more than these operations is not fused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from weft.errors import WeftError

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
    """A function that does more than operations place by place."""


@dataclass(frozen=True)
class Trace:
    """A function as lines of scalar code: `inputs` names come in, `outputs` are expressions of what goes out."""

    lines: tuple[str, ...]
    outputs: tuple[str, ...]


def trace(function: Callable[..., Sequence[Tensor]], inputs: Sequence[str]) -> Trace:
    """Trace a function of tensors of one shape to scalar code over the names `inputs`."""
    found = make_fx(lambda *parts: tuple(function(*parts)))(*(torch.ones(2, 3) for _ in inputs))
    return _written(found, inputs)


def trace_gradient(function: Callable[..., Sequence[Tensor]], inputs: Sequence[str], given: Sequence[str]) -> Trace:
    """Trace the gradient: from the inputs and what comes back for each output, what goes back to each input."""

    def pull(*parts: Tensor) -> Sequence[Tensor]:
        back = torch.func.vjp(lambda *read: tuple(function(*read)), *parts[: len(inputs)])[1]
        return tuple(back(tuple(parts[len(inputs) :])))

    found = make_fx(pull)(*(torch.ones(2, 3) for _ in [*inputs, *given]))
    return _written(found, [*inputs, *given])


def _written(found: GraphModule, inputs: Sequence[str]) -> Trace:
    names: dict[Node, str] = {}
    lines: list[str] = []
    arguments = iter(inputs)
    found.graph.eliminate_dead_code()
    for node in found.graph.nodes:
        if node.op == "placeholder":
            names[node] = next(arguments)
        elif node.op == "output":
            return Trace(tuple(lines), tuple(_name(one, names) for one in node.args[0]))
        else:
            if node.target not in EXPRESSIONS or len({"alpha", "value"} & set(node.kwargs)):
                raise NotFusibleError(f"{node.target} is not an operation place by place that is known here")
            names[node] = f"v{len(lines)}"
            written = EXPRESSIONS[node.target].format(*(_name(one, names) for one in node.args))
            lines.append(f"{names[node]} = {written}")
    raise AssertionError("a trace has an output")


def _name(value: Any, names: dict[Node, str]) -> str:
    return names[value] if isinstance(value, Node) else f"number({value!r})"
