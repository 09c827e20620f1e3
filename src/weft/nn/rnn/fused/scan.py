"""Scan of a recurrent cell over time, for cells without a torch kernel.

A forward step is, for each stage, a matrix product and one fused kernel. The backward pass is written by hand: it keeps
the gradients of all products, so that the gradient of each matrix is one product over all steps, not a sum of T small
ones. Where a stage cannot be fused, or a sequence is too short to be worth it, the steps run eagerly under autograd.

Notation: `grad_x` is the gradient of the loss by x; `input_proj` is the input projection W_x x_t + b of all steps.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from weft.nn.kernels import dispatch
from weft.nn.rnn.fused import persistent_triton
from weft.nn.rnn.fused.attention import AttentionSpec, AttentionStep, InputFeedingSpec, InputFeedingStep
from weft.nn.rnn.fused.codegen_numba import StageShape, StepKernels
from weft.nn.rnn.fused.self_attention import SelfAttentionSpec, SelfAttentionStep
from weft.nn.rnn.fused.trace import NotFusibleError

if TYPE_CHECKING:
    from weft.nn.rnn.cells import Cell, CellStage, CellState

AnyAttentionSpec = AttentionSpec | InputFeedingSpec | SelfAttentionSpec
Stages = tuple["CellStage", ...]


def scan(cell: "Cell", input_proj: Tensor, state: "CellState", stages: Stages | None = None) -> tuple[Tensor, ...]:
    """Return each part of the state after every step, (T, B, D), given input_proj (T, B, G·D) and the initial state.

    `stages` replace the cell's own (`Cell.dropped`).
    """
    if dispatch.fused_scan(input_proj):
        with suppress(NotFusibleError):
            return scan_fused(cell, input_proj, state, stages=stages)
    return scan_eager(cell, input_proj, state, stages)


def scan_eager(
    cell: "Cell", input_proj: Tensor, state: "CellState", stages: Stages | None = None
) -> tuple[Tensor, ...]:
    """Run the scan step by step under autograd."""
    states = []
    for step in input_proj:
        state = cell.step(step, state, stages)
        states.append(state)
    if not states:
        return tuple(part.new_zeros(0, *part.shape) for part in state)
    return tuple(torch.stack(parts) for parts in zip(*states, strict=True))


def scan_fused(
    cell: "Cell",
    input_proj: Tensor,
    state: "CellState",
    attention: AnyAttentionSpec | None = None,
    stages: Stages | None = None,
) -> tuple[Tensor, ...]:
    """Run the scan in fused kernels; raise `NotFusibleError` if a stage has operations that are not elementwise.

    With `attention`, one more tensor is returned last: the contexts, or with input feeding the readouts, (T, B, D);
    with self-attention the mixture of states that the last step started from, (B, D).
    """
    stages, vectors = stages or cell.stages(), cell.vectors()
    functions = tuple(stage.pointwise for stage in stages)
    shapes = tuple(
        StageShape(
            cell.gates,
            len(stage.weight) // cell.width,
            cell.states,
            0 if vectors is None else len(vectors),
            cell.states if number == len(stages) - 1 else 1,
        )
        for number, stage in enumerate(stages)
    )
    plan = _Plan(functions, shapes, cell.width, attention)
    plan.kernels_for((True,) * plan.parts, input_proj)  # raises NotFusibleError here, if at all
    weights = [_cast(part, input_proj) for stage in stages for part in (stage.weight, stage.bias)]
    state = (_cast(state[0], input_proj), *(part.float() if input_proj.is_cuda else part for part in state[1:]))
    if attention is None and dispatch.persistent_scan(input_proj, cell.width):
        return PersistentScan.apply(plan, input_proj, vectors, *state, *weights)  # type: ignore[no-any-return, no-untyped-call]
    with torch.autocast(input_proj.device.type, enabled=False):
        attended = [_cast(part, input_proj) for part in plan.attended]
        states: tuple[Tensor, ...] = FusedScan.apply(plan, input_proj, vectors, *attended, *state, *weights)  # type: ignore[no-untyped-call]
    return states


@dataclass(frozen=True)
class _Plan:
    functions: tuple[Any, ...]
    shapes: tuple[StageShape, ...]
    width: int
    attention: AnyAttentionSpec | None = None

    @property
    def parts(self) -> int:
        return self.shapes[0].state

    @property
    def attended(self) -> list[Any]:
        return self.attention.tensors if self.attention else []

    def kernels_for(self, has_grad: tuple[bool, ...], input_proj: Tensor) -> list[StepKernels]:
        last, make = len(self.shapes) - 1, dispatch.step_kernel_generator(input_proj)
        return [
            make(function, shape, has_grad if number == last else None, input_proj.dtype)
            for number, (function, shape) in enumerate(zip(self.functions, self.shapes, strict=True))
        ]


class FusedScan(torch.autograd.Function):
    """All steps of a cell: one product and one fused kernel per stage and step."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, input_proj: Tensor, vectors: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        """Return each part of the state after every step."""
        T, B, _ = input_proj.shape
        attended, rest = rest[: len(plan.attended)], rest[len(plan.attended) :]
        state, weights, biases = rest[: plan.parts], rest[plan.parts :: 2], rest[plan.parts + 1 :: 2]
        input_proj = (
            input_proj.clone(memory_format=torch.contiguous_format) if plan.attention else input_proj.contiguous()
        )
        vectors = None if vectors is None else vectors.contiguous()
        states = [start.new_empty(T + 1, B, plan.width) for start in state]
        for buffer, start in zip(states, state, strict=True):
            buffer[0] = start
        attention = plan.attention.with_tensors(attended).make_step(states) if plan.attention else None
        start_states = attention.start_states if attention else states
        products = [input_proj.new_empty(T, B, shape.product * plan.width) for shape in plan.shapes]
        values = [*([input_proj.new_empty(T + 1, B, plan.width)] for _ in plan.shapes[1:]), states]
        common = {"input_proj": input_proj, "vectors": vectors, **_numbered("state", start_states)}
        stage_kernels = plan.kernels_for((True,) * plan.parts, input_proj)
        kernels = [
            stage.forward(plan.width, B, {**common, "product": product, **_numbered("out", value)})
            for stage, product, value in zip(stage_kernels, products, values, strict=True)
        ]
        transposed = [weight.t().contiguous() for weight in weights]  # without the copy products are half as fast
        # Unbound before the loop: in a short step, to index a row costs as much as the work on it.
        parts = [(product.unbind(), value[0][1:].unbind()) for product, value in zip(products, values, strict=True)]
        stages, previous = list(zip(kernels, transposed, biases, parts, strict=True)), start_states[0].unbind()
        for t in range(T):
            if attention:
                attention.forward(t, input_proj[t])
            operand = previous[t]
            for kernel, weight, bias, (product, value) in stages:
                if bias is None:
                    torch.mm(operand, weight, out=product[t])
                else:
                    torch.addmm(bias, operand, weight, out=product[t])
                kernel(t)
                operand = value[t]
        if attention:
            attention.finish()
        ctx.plan, ctx.attention, ctx.biased = plan, attention, [bias is not None for bias in biases]
        ctx.save_for_backward(
            input_proj, vectors, *weights, *start_states, *products, *(value[0] for value in values[:-1])
        )
        return *(buffer[1:] for buffer in states), *(attention.outputs if attention else [])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradients; those of matrices are one product over all steps."""
        plan: _Plan = ctx.plan
        attention: AttentionStep | InputFeedingStep | SelfAttentionStep | None = ctx.attention
        if attention:
            attention.setup_backward(grads[plan.parts :])
            grads = grads[: plan.parts]
        input_proj, vectors, *saved = ctx.saved_tensors
        count, T, B = len(plan.shapes), len(input_proj), input_proj.shape[1]
        weights, start_states = saved[:count], saved[count : count + plan.parts]
        products, between = saved[count + plan.parts :][:count], saved[count + plan.parts :][count:]
        stage_kernels = plan.kernels_for(tuple(grad is not None for grad in grads), input_proj)
        grad_products = [torch.empty_like(product) for product in products]
        grad_state = [torch.zeros_like(start[0]) for start in start_states]
        grad_vectors = None if vectors is None else vectors.new_zeros(len(vectors), B, plan.width)
        grad_input_proj = grad_products[0] if count == 1 and stage_kernels[0].shared else torch.zeros_like(input_proj)
        grad_values = [torch.empty_like(grad_state[0]) for _ in plan.shapes]  # of a stage, from the next one's product
        common = {"input_proj": input_proj, "vectors": vectors}
        common |= {"grad_input_proj": grad_input_proj, "grad_vectors": grad_vectors}
        common |= {**_numbered("state", start_states), **_numbered("grad_state", grad_state)}
        common |= _numbered("grad_output", [grad if grad is None else grad.contiguous() for grad in grads])
        kernels = [
            stage.backward(plan.width, B, {**common, "product": product, "grad_product": grad, "grad_value0": value})
            for stage, product, grad, value in zip(stage_kernels, products, grad_products, grad_values, strict=True)
        ]
        steps = [grad_product.unbind() for grad_product in grad_products]
        for t in reversed(range(T)):
            if attention:
                attention.accumulate_state_grad(t, grad_input_proj, grad_state)
            for stage in reversed(range(count)):
                kernels[stage](t)
                if stage:
                    torch.mm(steps[stage][t], weights[stage], out=grad_values[stage - 1])
            grad_state[0].addmm_(steps[0][t], weights[0])
            if attention:
                attention.backward(t, grad_input_proj[t], grad_state)
        grad_weights: list[Tensor | None] = []
        operands = [start_states[0][:T], *(value[1:] for value in between)]
        for grad_product, operand, biased in zip(grad_products, operands, ctx.biased, strict=True):
            flat = grad_product.flatten(0, 1)
            grad_weights += [flat.t() @ operand.flatten(0, 1), flat.sum(0) if biased else None]
        grad_attended = attention.gradients(grad_input_proj) if attention else ()
        return (
            None,
            grad_input_proj,
            None if grad_vectors is None else grad_vectors.sum(1),
            *grad_attended,
            *grad_state,
            *grad_weights,
        )


class PersistentScan(torch.autograd.Function):
    """All steps of a cell in one launch; the backward pass recomputes the products, one product over all steps."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, input_proj: Tensor, vectors: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        """Return each part of the state after every step."""
        T, B, _ = input_proj.shape
        state, weights, biases = rest[: plan.parts], rest[plan.parts :: 2], rest[plan.parts + 1 :: 2]
        input_proj, weights = input_proj.contiguous(), tuple(weight.contiguous() for weight in weights)
        states = [start.new_empty(T + 1, B, plan.width) for start in state]
        for buffer, start in zip(states, state, strict=True):
            buffer[0] = start
        values = [input_proj.new_empty(T + 1, B, plan.width) for _ in plan.shapes[1:]]
        tensors = {"input_proj": input_proj, "vectors": vectors, **_numbered("states", states)}
        tensors |= {**_numbered("weight", weights), **_numbered("bias", biases), **_numbered("value", values)}
        kernels = persistent_triton.scan_kernels(plan.functions, plan.shapes, (True,) * plan.parts)
        biased = sum(1 << number for number, bias in enumerate(biases) if bias is not None)
        persistent_triton.launch(kernels, False, tensors, T, B, biased)
        ctx.plan = plan
        ctx.save_for_backward(input_proj, vectors, *weights, *biases, *states, *values)
        return tuple(buffer[1:] for buffer in states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradients; those of matrices are one product over all steps."""
        plan: _Plan = ctx.plan
        input_proj, vectors, *saved = ctx.saved_tensors
        count, T, B = len(plan.shapes), len(input_proj), input_proj.shape[1]
        weights, biases, saved = saved[:count], saved[count : 2 * count], saved[2 * count :]
        states, values = saved[: plan.parts], saved[plan.parts :]
        operands = [states[0][:-1], *(value[1:] for value in values)]
        products = [F.linear(*parts) for parts in zip(operands, weights, biases, strict=True)]
        # With a zero step T: the last step gets no gradient from a next one.
        grad_products = [product.new_empty(T + 1, *product.shape[1:]) for product in products]
        for grad_product in grad_products:
            grad_product[T].zero_()
        grad_state = [torch.empty_like(buffer[0]) for buffer in states]
        kernels = persistent_triton.scan_kernels(plan.functions, plan.shapes, tuple(grad is not None for grad in grads))
        grad_input_proj = grad_products[0][:T] if kernels.shared else torch.empty_like(input_proj)
        grad_vectors = None if vectors is None else vectors.new_empty(-(-B // 16), *vectors.shape).zero_()
        tensors = {"input_proj": input_proj, "vectors": vectors}
        tensors |= {"grad_input_proj": grad_input_proj, "grad_vectors": grad_vectors}
        tensors |= {**_numbered("states", states), **_numbered("grad_state", grad_state)}
        tensors |= {**_numbered("product", products), **_numbered("grad_product", grad_products)}
        tensors |= _numbered("transposed", [weight.t().contiguous() for weight in weights])
        tensors |= _numbered("grad_output", [grad if grad is None else grad.contiguous() for grad in grads])
        persistent_triton.launch(kernels, True, tensors, T, B, 0)
        grad_state[0] += grad_products[0][0] @ weights[0]
        grad_weights: list[Tensor | None] = []
        for grad_product, operand, bias in zip(grad_products, operands, biases, strict=True):
            flat = grad_product[:T].flatten(0, 1)
            grad_weights += [flat.t() @ operand.flatten(0, 1), None if bias is None else flat.sum(0)]
        return None, grad_input_proj, None if grad_vectors is None else grad_vectors.sum(0), *grad_state, *grad_weights


def _cast(part: Any, like: Tensor) -> Any:
    """Cast a tensor to the dtype of the scan's products."""
    return part if part is None else part.to(like.dtype)


def _numbered(name: str, parts: Any) -> dict[str, Any]:
    return {f"{name}{number}": part for number, part in enumerate(parts)}
