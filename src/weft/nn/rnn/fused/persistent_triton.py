"""Whole walks on CUDA, in Triton: every step of a cell in one launch.

Each program owns some units of some rows for the whole walk and keeps their state in registers; after each product all
programs of a row meet at a counter in memory. A step then costs its reads of the matrix from the second-level cache and
that meeting, and no launch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from weft.nn.rnn.fused.codegen_numba import Pointwise, Shape, traced
from weft.nn.rnn.fused.codegen_triton import load_source, numbered, triton_line
from weft.nn.rnn.fused.trace import Trace

# A program's rows and units, in the order in which they are tried.
BLOCKS = ((16, 16), (16, 32), (32, 16), (32, 32), (64, 16), (64, 32), (128, 16), (128, 32))
DEPTH = (128, 256)  # of a product's pieces, forward and backward: measured at width 1024


@dataclass(frozen=True)
class ScanKernels:
    """The two kernels of a cell."""

    forward: Any
    backward: Any
    shared: bool
    arrays: list[str]
    back_arrays: list[str]


def blocks_for(rows: int, width: int, device: torch.device) -> tuple[int, int] | None:
    """Choose a program's rows and units such that all programs can run at once; None if there is no way."""
    room = torch.cuda.get_device_properties(device).multi_processor_count
    return next((block for block in BLOCKS if math.prod(_grid(rows, width, block)) <= room), None)


def _grid(rows: int, width: int, block: tuple[int, int]) -> tuple[int, int]:
    return -(-width // block[1]), -(-rows // block[0])


@cache
def scan_kernels(functions: tuple[Pointwise, ...], shapes: tuple[Shape, ...], given: tuple[bool, ...]) -> ScanKernels:
    """Write a cell's walk and its way back."""
    traces = [traced(function, shape) for function, shape in zip(functions, shapes, strict=True)]
    known, product, *_ = shapes[0].grouped(traces[0][1].outputs)
    shared = len(shapes) == 1 and known == product
    states, stages = shapes[0].state, len(shapes)
    arrays = ["known", "vectors", "meet", *numbered("tape", states)]
    for number in range(stages):
        arrays += [f"weight{number}", f"bias{number}"] + ([f"value{number}"] if number < stages - 1 else [])
    back_arrays = [
        "known",
        "vectors",
        "meet",
        "gknown",
        "gvectors",
        *numbered("tape", states),
        *numbered("gstate", states),
    ]
    for number in range(stages):
        back_arrays += [f"turned{number}", f"product{number}", f"gproduct{number}"]
    back_arrays += [f"given{n}" for n, has in enumerate(given) if has]
    forward, backward = _walk_source(shapes, traces), _walk_back_source(shapes, traces, given, shared)
    return ScanKernels(
        load_source("walk", _whole(arrays, forward)),
        load_source("walk back", _whole(back_arrays, backward)),
        shared,
        arrays,
        back_arrays,
    )


def _whole(arrays: list[str], body: list[str]) -> str:
    fixed = ", ".join(f"{name}: tl.constexpr" for name in ("D", "BM", "BU", "BK", "IEEE", "BIASED"))
    head = ["@triton.jit", f"def kernel(T, B, {', '.join(arrays)}, {fixed}):"]
    start = [
        "units = tl.program_id(0) * BU + tl.arange(0, BU)",
        "rows = tl.program_id(1) * BM + tl.arange(0, BM)",
        "row = rows[:, None]",
        "unit = units[None, :]",
        "nothing = tl.zeros((BM, BU), tl.float32)",
        "on = (row < B) & (unit < D)",
        "here = row * D + unit",
        "deep = tl.arange(0, BK)",
        "programs = tl.num_programs(0)",
        "counter = meet + tl.program_id(1)",
        "met = 0",
    ]
    return "\n".join([*head, *("    " + line for line in [*start, *body])]) + "\n"


def _meeting(indent: str) -> list[str]:
    return [
        f"{indent}tl.debug_barrier()",
        f"{indent}met += programs",
        f"{indent}tl.atomic_add(counter, 1, sem='release')",
        f"{indent}while tl.atomic_add(counter, 0, sem='acquire') < met:",
        f"{indent}    pass",
        f"{indent}tl.debug_barrier()",
    ]


def _vectors(shape: Shape) -> list[str]:
    return [f"w{n} = tl.load(vectors + {n} * D + unit, unit < D, 0).to(tl.float32)" for n in range(shape.vectors)]


def _product(into: list[str], source: str, matrix: list[str], depth: str, indent: str = "") -> list[str]:
    """Write the products of rows of `source` (a pointer's rows) with matrices whose rows are units."""
    lines = [f"{indent}{name} = tl.zeros((BM, BU), tl.float32)" for name in into]
    lines += [f"{indent}for k in range(0, {depth}, BK):"]
    inner = f"{indent}    "
    lines += [f"{inner}x = tl.load({source} + k + deep[None, :], (row < B) & (k + deep < {depth})[None, :], 0)"]
    for name, pointer in zip(into, matrix, strict=True):
        lines += [
            f"{inner}m = tl.load({pointer} + (k + deep)[:, None], (unit < D) & (k + deep < {depth})[:, None], 0)",
            f"{inner}{name} = tl.dot(x, m, {name}, input_precision=IEEE)",
        ]
    return lines


def _walk_source(shapes: Sequence[Shape], traces: Sequence[Any]) -> list[str]:
    states = shapes[0].state
    lines = _vectors(shapes[0])
    lines += [f"s{n} = tl.load(tape{n} + here, on, 0).to(tl.float32)" for n in range(states)]
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
            lines += _loads("k", "known", shape.known)
        source = "tape0 + (t * B + row) * D" if not number else f"value{number - 1} + ((t + 1) * B + row) * D"
        matrices = [f"weight{number} + ({n} * D + unit) * D" for n in range(shape.product)]
        lines += _product(numbered("p", shape.product), source, matrices, "D", "    ")
        lines += [f"    p{n} += b{number}_{n}" for n in range(shape.product)]
        lines += [f"    {triton_line(line)}" for line in code.lines]
        if last:
            lines += [f"    s{n}_ = {triton_line(value)}" for n, value in enumerate(code.outputs)]
            lines += [f"    s{n} = s{n}_" for n in range(states)]
            lines += [f"    tl.store(tape{n} + (t + 1) * B * D + here, s{n}, on)" for n in range(states)]
        else:
            lines += [f"    tl.store(value{number} + (t + 1) * B * D + here, {triton_line(code.outputs[0])}, on)"]
        lines += _meeting("    ")
    return lines


def _walk_back_source(
    shapes: Sequence[Shape], traces: Sequence[Any], given: tuple[bool, ...], shared: bool
) -> list[str]:
    first, states = shapes[0], shapes[0].state
    sums = [*numbered("r", states), *numbered("gw", first.vectors)]
    lines = [*_vectors(first), *(f"{name} = tl.zeros((BM, BU), tl.float32)" for name in sums)]
    lines += ["for back in range(T):", "    t = T - 1 - back", *_loads("k", "known", first.known)]
    lines += [f"    s{n} = tl.load(tape{n} + t * B * D + here, on, 0).to(tl.float32)" for n in range(states)]
    for number in reversed(range(len(shapes))):
        lines += _stage_back(number, shapes, traces[number][1], given, shared)
    if not shared:
        lines += [f"    tl.store({_part('gknown', first.known, n)}, gk{n}, on)" for n in range(first.known)]
    lines += [f"tl.store(gstate{n} + here, r{n}, on)" for n in range(states)]
    lines += [
        f"tl.store(gvectors + (tl.program_id(1) * {first.vectors} + {n}) * D + units, "
        f"tl.sum(tl.where(on, gw{n}, 0.0), 0), units < D)"
        for n in range(first.vectors)
    ]
    return lines


def _stage_back(number: int, shapes: Sequence[Shape], code: Trace, given: tuple[bool, ...], shared: bool) -> list[str]:
    """Write one stage of a step back: what arrives, the gradient, and what is sent on."""
    shape, last = shapes[number], number == len(shapes) - 1
    lines = _loads("p", f"product{number}", shape.product)
    lines += _arriving(shapes, number, given)
    lines += [f"    {triton_line(line)}" for line in code.lines]
    to_known, to_product, to_state, to_vectors = shape.grouped([triton_line(one) for one in code.outputs])
    lines += [
        f"    tl.store({_part(f'gproduct{number}', shape.product, n)}, {value}, on)"
        for n, value in enumerate(to_product)
    ]
    if last:  # all of them before any is changed
        lines += [f"    r{n}_ = {value}" for n, value in enumerate(to_state)]
        lines += [f"    r{n} = r{n}_" for n in range(shape.state)]
    else:
        lines += [f"    r{n} = r{n} + {value}" for n, value in enumerate(to_state)]
    lines += [f"    gw{n} += {value}" for n, value in enumerate(to_vectors)]
    if not shared:
        lines += [f"    gk{n} = {'' if last else f'gk{n} + '}{value}" for n, value in enumerate(to_known)]
    return lines + _meeting("    ")


def _arriving(shapes: Sequence[Shape], number: int, given: tuple[bool, ...]) -> list[str]:
    """Write what comes back: to the last stage from the next step's first product, to another from the next stage's."""
    last = number == len(shapes) - 1
    other, when = (0, "t + 1") if last else (number + 1, "t")
    depth = f"({shapes[other].product} * D)"
    source, matrix = f"gproduct{other} + (({when}) * B + row) * {depth}", f"turned{other} + unit * {depth}"
    lines = _product(["a"], source, [matrix], depth, "    ")
    if not last:
        return [*lines, "    d0 = a"]
    for n, has in enumerate(given):
        more = f" + tl.load(given{n} + t * B * D + here, on, 0).to(tl.float32)" if has else ""
        lines += [f"    d{n} = r{n}{' + a' if not n else ''}{more}"]
    return lines


def _part(array: str, parts: int, number: int) -> str:
    """Say where part `number` of step t lies in an array (T, B, parts·D)."""
    return f"{array} + (t * B + row) * {parts} * D + {number} * D + unit"


def _loads(name: str, array: str, parts: int) -> list[str]:
    """Write the loads of all parts of step t."""
    return [f"    {name}{n} = tl.load({_part(array, parts, n)}, on, 0).to(tl.float32)" for n in range(parts)]


def launch(made: ScanKernels, back: bool, named: dict[str, Any], steps: int, rows: int, biased: int) -> None:
    """Run a walk in one launch, all of its programs at once."""
    known, width = named["known"], named["tape0"].shape[-1]
    block = blocks_for(rows, width, known.device)
    assert block is not None
    grid = _grid(rows, width, block)
    meet = torch.zeros(grid[1], dtype=torch.int32, device=known.device)
    kernel, arrays = (made.backward, made.back_arrays) if back else (made.forward, made.arrays)
    chosen = [meet if name == "meet" else known if named.get(name) is None else named[name] for name in arrays]
    sizes = {"D": width, "BM": block[0], "BU": block[1], "BK": min(DEPTH[back], max(16, 1 << (width - 1).bit_length()))}
    precision = "ieee" if known.dtype is torch.float32 else "tf32"
    options = {"num_warps": 4, "num_stages": 3, "launch_cooperative_grid": True}
    kernel[grid](steps, rows, *chosen, **sizes, IEEE=precision, BIASED=biased, **options)
