"""Persistent Triton kernels: all steps of a cell in one launch on CUDA.

Each program owns some units of some rows for the whole sequence and keeps their state in registers. After each product
all programs of a row synchronise at a counter in global memory. A step then costs its reads of the matrix from the L2
cache and that barrier, and no launch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from weft.nn.rnn.fused.codegen_numba import StageShape, trace_stage
from weft.nn.rnn.fused.codegen_triton import load_source, numbered, triton_line
from weft.nn.rnn.fused.trace import Pointwise, Trace

# Block sizes (rows, units) of a program, in the order in which they are tried.
BLOCK_SIZES = ((16, 16), (16, 32), (32, 16), (32, 32), (64, 16), (64, 32), (128, 16), (128, 32))
BLOCK_K = (128, 256)  # block size along a product's inner dimension, forward and backward: measured at width 1024


@dataclass(frozen=True)
class ScanKernels:
    """The two kernels of a cell, and the names of their array arguments; `shared` as in `StepKernels`."""

    forward: Any
    backward: Any
    shared: bool
    arrays: list[str]
    backward_arrays: list[str]


def choose_block(rows: int, width: int, device: torch.device) -> tuple[int, int] | None:
    """Return a block size (rows, units) such that all programs are resident at once; None if there is none."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return next((block for block in BLOCK_SIZES if math.prod(_grid(rows, width, block)) <= multiprocessors), None)


def _grid(rows: int, width: int, block: tuple[int, int]) -> tuple[int, int]:
    return -(-width // block[1]), -(-rows // block[0])


@cache
def scan_kernels(
    functions: tuple[Pointwise, ...], shapes: tuple[StageShape, ...], has_grad: tuple[bool, ...]
) -> ScanKernels:
    """Generate the forward and backward kernel of a cell. `has_grad`: which outputs have a gradient."""
    traces = [trace_stage(function, shape) for function, shape in zip(functions, shapes, strict=True)]
    input_proj, product, *_ = shapes[0].split(traces[0][1].outputs)
    shared = len(shapes) == 1 and input_proj == product
    num_states, stages = shapes[0].state, len(shapes)
    arrays = ["input_proj", "vectors", "barriers", *numbered("states", num_states)]
    for number in range(stages):
        arrays += [f"weight{number}", f"bias{number}"] + ([f"value{number}"] if number < stages - 1 else [])
    backward_arrays = [
        "input_proj",
        "vectors",
        "barriers",
        "grad_input_proj",
        "grad_vectors",
        *numbered("states", num_states),
        *numbered("grad_state", num_states),
    ]
    for number in range(stages):
        backward_arrays += [f"transposed{number}", f"product{number}", f"grad_product{number}"]
    backward_arrays += [f"grad_output{n}" for n, exists in enumerate(has_grad) if exists]
    forward, backward = _forward_body(shapes, traces), _backward_body(shapes, traces, has_grad, shared)
    return ScanKernels(
        load_source("scan", _kernel_source(arrays, forward)),
        load_source("scan backward", _kernel_source(backward_arrays, backward)),
        shared,
        arrays,
        backward_arrays,
    )


def _kernel_source(arrays: list[str], body: list[str]) -> str:
    constants = ", ".join(f"{name}: tl.constexpr" for name in ("D", "BM", "BU", "BK", "IEEE", "BIASED"))
    head = ["@triton.jit", f"def kernel(T, B, {', '.join(arrays)}, {constants}):"]
    start = [
        "units = tl.program_id(0) * BU + tl.arange(0, BU)",
        "rows = tl.program_id(1) * BM + tl.arange(0, BM)",
        "row = rows[:, None]",
        "unit = units[None, :]",
        "zeros = tl.zeros((BM, BU), tl.float32)",
        "mask = (row < B) & (unit < D)",
        "offsets = row * D + unit",
        "depths = tl.arange(0, BK)",
        "programs = tl.num_programs(0)",
        "counter = barriers + tl.program_id(1)",
        "expected = 0",
    ]
    return "\n".join([*head, *("    " + line for line in [*start, *body])]) + "\n"


def _barrier(indent: str) -> list[str]:
    return [
        f"{indent}tl.debug_barrier()",
        f"{indent}expected += programs",
        f"{indent}tl.atomic_add(counter, 1, sem='release')",
        f"{indent}while tl.atomic_add(counter, 0, sem='acquire') < expected:",
        f"{indent}    pass",
        f"{indent}tl.debug_barrier()",
    ]


def _vector_loads(shape: StageShape) -> list[str]:
    return [f"w{n} = tl.load(vectors + {n} * D + unit, unit < D, 0).to(tl.float32)" for n in range(shape.vectors)]


def _product(into: list[str], source: str, matrix: list[str], depth: str, indent: str = "") -> list[str]:
    """Return the code of products of the rows at pointer `source` with matrices whose rows are units."""
    lines = [f"{indent}{name} = tl.zeros((BM, BU), tl.float32)" for name in into]
    lines += [f"{indent}for k in range(0, {depth}, BK):"]
    inner = f"{indent}    "
    lines += [f"{inner}x = tl.load({source} + k + depths[None, :], (row < B) & (k + depths < {depth})[None, :], 0)"]
    for name, pointer in zip(into, matrix, strict=True):
        lines += [
            f"{inner}m = tl.load({pointer} + (k + depths)[:, None], (unit < D) & (k + depths < {depth})[:, None], 0)",
            f"{inner}{name} = tl.dot(x, m, {name}, input_precision=IEEE)",
        ]
    return lines


def _forward_body(shapes: Sequence[StageShape], traces: Sequence[Any]) -> list[str]:
    num_states = shapes[0].state
    lines = _vector_loads(shapes[0])
    lines += [f"s{n} = tl.load(states{n} + offsets, mask, 0).to(tl.float32)" for n in range(num_states)]
    lines += [
        f"b{number}_{n} = tl.load(bias{number} + {n} * D + unit, (unit < D) & ((BIASED & {1 << number}) > 0), 0)"
        ".to(tl.float32)"
        for number, shape in enumerate(shapes)
        for n in range(shape.product)
    ]
    lines += ["for t in range(T):"]
    for number, (shape, (code, _)) in enumerate(zip(shapes, traces, strict=True)):
        last = number == len(shapes) - 1
        if not number:
            lines += _loads("k", "input_proj", shape.input_proj)
        source = "states0 + (t * B + row) * D" if not number else f"value{number - 1} + ((t + 1) * B + row) * D"
        matrices = [f"weight{number} + ({n} * D + unit) * D" for n in range(shape.product)]
        lines += _product(numbered("p", shape.product), source, matrices, "D", "    ")
        lines += [f"    p{n} += b{number}_{n}" for n in range(shape.product)]
        lines += [f"    {triton_line(line)}" for line in code.lines]
        if last:
            lines += [f"    s{n}_ = {triton_line(value)}" for n, value in enumerate(code.outputs)]
            lines += [f"    s{n} = s{n}_" for n in range(num_states)]
            lines += [f"    tl.store(states{n} + (t + 1) * B * D + offsets, s{n}, mask)" for n in range(num_states)]
        else:
            lines += [f"    tl.store(value{number} + (t + 1) * B * D + offsets, {triton_line(code.outputs[0])}, mask)"]
        lines += _barrier("    ")
    return lines


def _backward_body(
    shapes: Sequence[StageShape], traces: Sequence[Any], has_grad: tuple[bool, ...], shared: bool
) -> list[str]:
    first, num_states = shapes[0], shapes[0].state
    sums = [*numbered("r", num_states), *numbered("gw", first.vectors)]
    lines = [*_vector_loads(first), *(f"{name} = tl.zeros((BM, BU), tl.float32)" for name in sums)]
    lines += ["for reverse in range(T):", "    t = T - 1 - reverse", *_loads("k", "input_proj", first.input_proj)]
    lines += [f"    s{n} = tl.load(states{n} + t * B * D + offsets, mask, 0).to(tl.float32)" for n in range(num_states)]
    for number in reversed(range(len(shapes))):
        lines += _stage_backward(number, shapes, traces[number][1], has_grad, shared)
    if not shared:
        lines += [
            f"    tl.store({_pointer('grad_input_proj', first.input_proj, n)}, gk{n}, mask)"
            for n in range(first.input_proj)
        ]
    lines += [f"tl.store(grad_state{n} + offsets, r{n}, mask)" for n in range(num_states)]
    lines += [
        f"tl.store(grad_vectors + (tl.program_id(1) * {first.vectors} + {n}) * D + units, "
        f"tl.sum(tl.where(mask, gw{n}, 0.0), 0), units < D)"
        for n in range(first.vectors)
    ]
    return lines


def _stage_backward(
    number: int, shapes: Sequence[StageShape], code: Trace, has_grad: tuple[bool, ...], shared: bool
) -> list[str]:
    """Return the code of one stage of a backward step: incoming gradients, the gradient, its stores."""
    shape, last = shapes[number], number == len(shapes) - 1
    lines = _loads("p", f"product{number}", shape.product)
    lines += _incoming_gradients(shapes, number, has_grad)
    lines += [f"    {triton_line(line)}" for line in code.lines]
    to_input_proj, to_product, to_state, to_vectors = shape.split([triton_line(value) for value in code.outputs])
    lines += [
        f"    tl.store({_pointer(f'grad_product{number}', shape.product, n)}, {value}, mask)"
        for n, value in enumerate(to_product)
    ]
    if last:  # compute all of them before any is overwritten
        lines += [f"    r{n}_ = {value}" for n, value in enumerate(to_state)]
        lines += [f"    r{n} = r{n}_" for n in range(shape.state)]
    else:
        lines += [f"    r{n} = r{n} + {value}" for n, value in enumerate(to_state)]
    lines += [f"    gw{n} += {value}" for n, value in enumerate(to_vectors)]
    if not shared:
        lines += [f"    gk{n} = {'' if last else f'gk{n} + '}{value}" for n, value in enumerate(to_input_proj)]
    return lines + _barrier("    ")


def _incoming_gradients(shapes: Sequence[StageShape], number: int, has_grad: tuple[bool, ...]) -> list[str]:
    """Return the code of incoming gradients: of the next step's first product, or of the next stage's product."""
    last = number == len(shapes) - 1
    stage, step = (0, "t + 1") if last else (number + 1, "t")
    depth = f"({shapes[stage].product} * D)"
    source, matrix = f"grad_product{stage} + (({step}) * B + row) * {depth}", f"transposed{stage} + unit * {depth}"
    lines = _product(["a"], source, [matrix], depth, "    ")
    if not last:
        return [*lines, "    d0 = a"]
    for n, exists in enumerate(has_grad):
        more = f" + tl.load(grad_output{n} + t * B * D + offsets, mask, 0).to(tl.float32)" if exists else ""
        lines += [f"    d{n} = r{n}{' + a' if not n else ''}{more}"]
    return lines


def _pointer(array: str, parts: int, number: int) -> str:
    """Return the pointer to part `number` of step t in an array (T, B, parts·D)."""
    return f"{array} + (t * B + row) * {parts} * D + {number} * D + unit"


def _loads(name: str, array: str, parts: int) -> list[str]:
    """Return the code that loads all parts of step t."""
    return [f"    {name}{n} = tl.load({_pointer(array, parts, n)}, mask, 0).to(tl.float32)" for n in range(parts)]


def launch(kernels: ScanKernels, backward: bool, tensors: dict[str, Any], steps: int, rows: int, biased: int) -> None:
    """Run all steps in one cooperative launch; bit n of `biased` is set if stage n has a bias."""
    input_proj, width = tensors["input_proj"], tensors["states0"].shape[-1]
    block = choose_block(rows, width, input_proj.device)
    assert block is not None
    grid = _grid(rows, width, block)
    barriers = torch.zeros(grid[1], dtype=torch.int32, device=input_proj.device)
    kernel, arrays = (kernels.backward, kernels.backward_arrays) if backward else (kernels.forward, kernels.arrays)
    arguments = [
        barriers if name == "barriers" else input_proj if tensors.get(name) is None else tensors[name]
        for name in arrays
    ]
    sizes = {
        "D": width,
        "BM": block[0],
        "BU": block[1],
        "BK": min(BLOCK_K[backward], max(16, 1 << (width - 1).bit_length())),
    }
    precision = "ieee" if input_proj.dtype is torch.float32 else "tf32"
    options = {"num_warps": 4, "num_stages": 3, "launch_cooperative_grid": True}
    kernel[grid](steps, rows, *arguments, **sizes, IEEE=precision, BIASED=biased, **options)
