"""Tracing of an elementwise function and its gradient to scalar code, for code generation.

A cell's stage is written once, in plain torch (`weft.nn.rnn.cells.CellStage`). Here it and its gradient are traced,
below autograd. From each trace one kernel is generated: for the CPU in numba (`weft.nn.rnn.fused.codegen_numba`), for
CUDA in Triton (`weft.nn.rnn.fused.codegen_triton`). A function with operations outside `EXPRESSIONS` is not fused.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Call(NamedTuple):
    """An operation, as it was called."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class _Recorder(TorchDispatchMode):
    """Records the operations that run inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and keep it with its tensors."""
        self.calls.append(_Call(operation, args, kwargs or {}, operation(*args, **(kwargs or {}))))
        return self.calls[-1].result


# PyTorch wraps it for `torch.compile`, whose import takes as long as all of PyTorch's.
_Recorder.__torch_dispatch__ = inspect.unwrap(_Recorder.__torch_dispatch__)  # type: ignore[method-assign]


def trace(function: Callable[..., Sequence[Tensor]], inputs: Sequence[str]) -> Trace:
    """Trace a function of tensors of one shape to scalar code over the names `inputs`."""
    with torch.inference_mode(False), torch.enable_grad():
        parts = [torch.ones(2, 3) for _ in inputs]
        with _Recorder() as recorder:
            outputs = tuple(function(*parts))
    return _scalar_code(_needed(recorder.calls, outputs), dict(zip(map(id, parts), inputs, strict=True)), outputs)


def trace_gradient(function: Callable[..., Sequence[Tensor]], inputs: Sequence[str], grads: Sequence[str]) -> Trace:
    """Trace the vector-Jacobian product: inputs and output gradients, named `grads`, to input gradients."""

    def gradient(*parts: Tensor) -> Sequence[Tensor]:
        primals = [part.requires_grad_() for part in parts[: len(inputs)]]
        outputs = [output.clone() for output in function(*primals)]
        for output, grad in zip(outputs, parts[len(inputs) :], strict=True):  # as `grad_outputs` they would need sympy
            output.register_hook(lambda _, grad=grad: grad)
        total = torch.stack([output.sum() for output in outputs]).sum()
        return torch.autograd.grad(total, primals, materialize_grads=True)

    return trace(gradient, [*inputs, *grads])


def _needed(calls: Sequence[_Call], outputs: Sequence[Tensor]) -> list[_Call]:
    """Return the calls that the outputs follow from, in their order."""
    needed, kept = set(map(id, outputs)), list[_Call]()
    for call in reversed(calls):
        if id(call.result) in needed:
            needed |= set(map(id, call.args))
            kept.append(call)
    return kept[::-1]


def _scalar_code(calls: Sequence[_Call], names: dict[int, str], outputs: Sequence[Tensor]) -> Trace:
    """Write each call as a line; `names` has the names of tensors by their identity."""
    lines: list[str] = []
    for call in calls:
        if call.operation not in EXPRESSIONS or len({"alpha", "value"} & call.kwargs.keys()):
            raise NotFusibleError(f"{call.operation} is not an operation place by place that is known here")
        expression = EXPRESSIONS[call.operation].format(*(_expression(value, names) for value in call.args))
        names[id(call.result)] = f"v{len(lines)}"
        lines.append(f"v{len(lines)} = {expression}")
    return Trace(tuple(lines), tuple(_expression(output, names) for output in outputs))


def _expression(value: Any, names: dict[int, str]) -> str:
    """Return the name of a tensor, or a number."""
    if not isinstance(value, Tensor):
        return f"number({value!r})"
    if id(value) not in names:
        raise NotFusibleError("a tensor that is no input cannot be part of a kernel")
    return names[id(value)]
