"""The walk of a cell over time, for cells that no library kernel knows.

A step forward is, for each stage, a product and one fused kernel. The way back is written by hand: what a step sends
back to its products is kept, so that the gradient of each matrix is one product over all steps, not a sum of T small
ones. Where a stage cannot be fused, or a walk is too short to be worth it, autograd follows the steps one by one.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from weft.nn.rnn.fused import codegen_triton, persistent_triton
from weft.nn.rnn.fused.attention import AttentionSpec, AttentionStep, InputFeedingSpec, InputFeedingStep
from weft.nn.rnn.fused.codegen_numba import Shape, Stepper, stepper
from weft.nn.rnn.fused.self_attention import SelfAttentionSpec, SelfAttentionStep
from weft.nn.rnn.fused.trace import NotFusibleError

if TYPE_CHECKING:
    from weft.nn.rnn.cells import Cell, Stage, State

At = AttentionSpec | InputFeedingSpec | SelfAttentionSpec  # what a walk looks at
SHORT = 4  # steps: a walk of fewer is not worth a compilation
FUSED = torch.float32  # what kernels are made for unasked


Stages = tuple["Stage", ...]


def scan(cell: "Cell", known: Tensor, state: "State", stages: Stages | None = None) -> tuple[Tensor, ...]:
    """Step through known (T, B, G·D) from `state` on; return each part of the state after every step, (T, B, D).

    `stages`, if not the cell's own, are those of this walk (`Cell.dropped`).
    """
    if worthwhile(known):
        with suppress(NotFusibleError):
            return scan_fused(cell, known, state, stages=stages)
    return step_by_step(cell, known, state, stages)


def worthwhile(known: Tensor) -> bool:
    """Say whether a walk over known (T, B, G·D) is one for kernels."""
    if known.device.type == "cuda":
        fits = codegen_triton.available()
    else:
        fits = known.dtype is FUSED and not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    return fits and len(known) >= SHORT and known.shape[1] > 0


def step_by_step(cell: "Cell", known: Tensor, state: "State", stages: Stages | None = None) -> tuple[Tensor, ...]:
    """Walk under autograd."""
    walked = []
    for step in known:
        state = cell.step(step, state, stages)
        walked.append(state)
    if not walked:
        return tuple(part.new_zeros(0, *part.shape) for part in state)
    return tuple(torch.stack(parts) for parts in zip(*walked, strict=True))


def scan_fused(
    cell: "Cell", known: Tensor, state: "State", at: At | None = None, stages: Stages | None = None
) -> tuple[Tensor, ...]:
    """Walk in fused kernels; a stage that is more than operations place by place is refused with `NotFusibleError`.

    With `at`, states look there, and what is returned last is what they saw of a memory or read out, (T, B, D), or,
    where they look at their own past, what the last step started from.
    """
    stages, vectors = stages or cell.stages(), cell.vectors()
    functions = tuple(stage.pointwise for stage in stages)
    shapes = tuple(
        Shape(
            cell.gates,
            len(stage.weight) // cell.width,
            cell.states,
            0 if vectors is None else len(vectors),
            cell.states if number == len(stages) - 1 else 1,
        )
        for number, stage in enumerate(stages)
    )
    plan = _Plan(functions, shapes, cell.width, at)
    plan.steppers((True,) * plan.parts, known)  # is refused here, if it is
    weights = [_cast(part, known) for stage in stages for part in (stage.weight, stage.bias)]
    state = (_cast(state[0], known), *(part.float() if known.is_cuda else part for part in state[1:]))
    if known.is_cuda and at is None and persistent_triton.blocks_for(known.shape[1], cell.width, known.device):
        return PersistentScan.apply(plan, known, vectors, *state, *weights)  # type: ignore[no-any-return, no-untyped-call]
    with torch.autocast(known.device.type, enabled=False):
        seen = [_cast(part, known) for part in plan.seen]
        walked: tuple[Tensor, ...] = FusedScan.apply(plan, known, vectors, *seen, *state, *weights)  # type: ignore[no-untyped-call]
    return walked


@dataclass(frozen=True)
class _Plan:
    functions: tuple[Any, ...]
    shapes: tuple[Shape, ...]
    width: int
    at: At | None = None

    @property
    def parts(self) -> int:
        return self.shapes[0].state

    @property
    def seen(self) -> list[Any]:
        return self.at.tensors if self.at else []

    def steppers(self, given: tuple[bool, ...], known: Tensor) -> list[Stepper]:
        last, make = len(self.shapes) - 1, codegen_triton.stepper if known.is_cuda else stepper
        return [
            make(function, shape, given if number == last else None, known.dtype)
            for number, (function, shape) in enumerate(zip(self.functions, self.shapes, strict=True))
        ]


class FusedScan(torch.autograd.Function):
    """All steps of a cell."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, known: Tensor, vectors: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        """Return each part of the state after every step."""
        T, B, _ = known.shape
        seen, rest = rest[: len(plan.seen)], rest[len(plan.seen) :]
        state, weights, biases = rest[: plan.parts], rest[plan.parts :: 2], rest[plan.parts + 1 :: 2]
        known = known.clone(memory_format=torch.contiguous_format) if plan.at else known.contiguous()
        vectors = None if vectors is None else vectors.contiguous()
        tapes = [start.new_empty(T + 1, B, plan.width) for start in state]
        for tape, start in zip(tapes, state, strict=True):
            tape[0] = start
        looks = plan.at.holding(seen).begin(tapes) if plan.at else None
        starts = looks.starts if looks else tapes
        products = [known.new_empty(T, B, shape.product * plan.width) for shape in plan.shapes]
        values = [*([known.new_empty(T + 1, B, plan.width)] for _ in plan.shapes[1:]), tapes]
        common = {"known": known, "vectors": vectors, **_numbered("state", starts)}
        kernels = [
            one.forward(plan.width, B, {**common, "product": product, **_numbered("out", value)})
            for one, product, value in zip(plan.steppers((True,) * plan.parts, known), products, values, strict=True)
        ]
        turned = [weight.t().contiguous() for weight in weights]  # a product with it as it lies is half as fast
        # Taken apart before the walk: on a short step, to reach for a row costs as much as to work on it.
        parts = [(product.unbind(), value[0][1:].unbind()) for product, value in zip(products, values, strict=True)]
        stages, begins = list(zip(kernels, turned, biases, parts, strict=True)), starts[0].unbind()
        for t in range(T):
            if looks:
                looks.forward(t, known[t])
            read = begins[t]
            for kernel, weight, bias, (product, value) in stages:
                if bias is None:
                    torch.mm(read, weight, out=product[t])
                else:
                    torch.addmm(bias, read, weight, out=product[t])
                kernel(t)
                read = value[t]
        if looks:
            looks.finish()
        ctx.plan, ctx.looks, ctx.biased = plan, looks, [bias is not None for bias in biases]
        ctx.save_for_backward(known, vectors, *weights, *starts, *products, *(value[0] for value in values[:-1]))
        return *(tape[1:] for tape in tapes), *(looks.outputs if looks else [])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        """Walk back; then multiply for all steps at once."""
        plan: _Plan = ctx.plan
        looks: AttentionStep | InputFeedingStep | SelfAttentionStep | None = ctx.looks
        if looks:
            looks.turn_back(given[plan.parts :])
            given = given[: plan.parts]
        known, vectors, *saved = ctx.saved_tensors
        count, T, B = len(plan.shapes), len(known), known.shape[1]
        weights, starts = saved[:count], saved[count : count + plan.parts]
        products, between = saved[count + plan.parts :][:count], saved[count + plan.parts :][count:]
        steppers = plan.steppers(tuple(one is not None for one in given), known)
        gproducts = [torch.empty_like(one) for one in products]
        gstate = [torch.zeros_like(start[0]) for start in starts]
        gvectors = None if vectors is None else vectors.new_zeros(len(vectors), B, plan.width)
        gknown = gproducts[0] if count == 1 and steppers[0].shared else torch.zeros_like(known)
        backs = [torch.empty_like(gstate[0]) for _ in plan.shapes]  # to a stage, from the next one's product
        common = {"known": known, "vectors": vectors, "gknown": gknown, "gvectors": gvectors}
        common |= {**_numbered("state", starts), **_numbered("gstate", gstate)}
        common |= _numbered("given", [one if one is None else one.contiguous() for one in given])
        kernels = [
            one.backward(plan.width, B, {**common, "product": product, "gproduct": gproduct, "back0": back})
            for one, product, gproduct, back in zip(steppers, products, gproducts, backs, strict=True)
        ]
        apart = [gproduct.unbind() for gproduct in gproducts]
        for t in reversed(range(T)):
            if looks:
                looks.arrive(t, gknown, gstate)
            for stage in reversed(range(count)):
                kernels[stage](t)
                if stage:
                    torch.mm(apart[stage][t], weights[stage], out=backs[stage - 1])
            gstate[0].addmm_(apart[0][t], weights[0])
            if looks:
                looks.backward(t, gknown[t], gstate)
        gweights: list[Tensor | None] = []
        reads = [starts[0][:T], *(one[1:] for one in between)]
        for gproduct, read, biased in zip(gproducts, reads, ctx.biased, strict=True):
            flat = gproduct.flatten(0, 1)
            gweights += [flat.t() @ read.flatten(0, 1), flat.sum(0) if biased else None]
        seen = looks.gradients(gknown) if looks else ()
        return None, gknown, None if gvectors is None else gvectors.sum(1), *seen, *gstate, *gweights


class PersistentScan(torch.autograd.Function):
    """All steps of a cell in one launch; products are made again for the way back, in one product over all steps."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, known: Tensor, vectors: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        """Return each part of the state after every step."""
        T, B, _ = known.shape
        state, weights, biases = rest[: plan.parts], rest[plan.parts :: 2], rest[plan.parts + 1 :: 2]
        known, weights = known.contiguous(), tuple(weight.contiguous() for weight in weights)
        tapes = [start.new_empty(T + 1, B, plan.width) for start in state]
        for tape, start in zip(tapes, state, strict=True):
            tape[0] = start
        values = [known.new_empty(T + 1, B, plan.width) for _ in plan.shapes[1:]]
        named = {"known": known, "vectors": vectors, **_numbered("tape", tapes), **_numbered("weight", weights)}
        named |= {**_numbered("bias", biases), **_numbered("value", values)}
        made = persistent_triton.scan_kernels(plan.functions, plan.shapes, (True,) * plan.parts)
        biased = sum(1 << number for number, bias in enumerate(biases) if bias is not None)
        persistent_triton.launch(made, False, named, T, B, biased)
        ctx.plan = plan
        ctx.save_for_backward(known, vectors, *weights, *biases, *tapes, *values)
        return tuple(tape[1:] for tape in tapes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        """Walk back; then multiply for all steps at once."""
        plan: _Plan = ctx.plan
        known, vectors, *saved = ctx.saved_tensors
        count, T, B = len(plan.shapes), len(known), known.shape[1]
        weights, biases, saved = saved[:count], saved[count : 2 * count], saved[2 * count :]
        tapes, values = saved[: plan.parts], saved[plan.parts :]
        reads = [tapes[0][:-1], *(value[1:] for value in values)]
        products = [F.linear(*parts) for parts in zip(reads, weights, biases, strict=True)]
        # One step more than there are: what comes back to the last step, from beyond it, is nothing.
        gproducts = [one.new_empty(T + 1, *one.shape[1:]) for one in products]
        for gproduct in gproducts:
            gproduct[T].zero_()
        gstate = [torch.empty_like(tape[0]) for tape in tapes]
        made = persistent_triton.scan_kernels(plan.functions, plan.shapes, tuple(one is not None for one in given))
        gknown = gproducts[0][:T] if made.shared else torch.empty_like(known)
        gvectors = None if vectors is None else vectors.new_empty(-(-B // 16), *vectors.shape).zero_()
        named = {"known": known, "vectors": vectors, "gknown": gknown, "gvectors": gvectors}
        named |= {**_numbered("tape", tapes), **_numbered("gstate", gstate), **_numbered("product", products)}
        named |= {**_numbered("gproduct", gproducts), **_numbered("turned", [one.t().contiguous() for one in weights])}
        named |= _numbered("given", [one if one is None else one.contiguous() for one in given])
        persistent_triton.launch(made, True, named, T, B, 0)
        gstate[0] += gproducts[0][0] @ weights[0]
        gweights: list[Tensor | None] = []
        for gproduct, read, bias in zip(gproducts, reads, biases, strict=True):
            flat = gproduct[:T].flatten(0, 1)
            gweights += [flat.t() @ read.flatten(0, 1), None if bias is None else flat.sum(0)]
        return None, gknown, None if gvectors is None else gvectors.sum(0), *gstate, *gweights


def _cast(part: Any, like: Tensor) -> Any:
    """Bring a matrix to the type that a walk's products are made in."""
    return part if part is None else part.to(like.dtype)


def _numbered(name: str, parts: Any) -> dict[str, Any]:
    return {f"{name}{number}": part for number, part in enumerate(parts)}
