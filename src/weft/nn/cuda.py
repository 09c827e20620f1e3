"""Walks on CUDA, in Triton: a stage's step as one kernel, and whole walks as one kernel that stays on the device.

`stepper` is to CUDA what `weft.nn.kernels.stepper` is to the CPU. A `walker` makes every step of a cell in one launch:
each program owns some units of some rows for the whole walk and keeps their state in registers; after each product all
programs of a row meet at a counter in memory. A step then costs its reads of the matrix from the second-level cache and
that meeting, and no launch.
"""

import linecache
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from weft.nn.fuse import trace, trace_gradient
from weft.nn.kernels import Shape, Stepper

BLOCKS = (
    (16, 16),
    (16, 32),
    (32, 16),
    (32, 32),
    (64, 16),
    (64, 32),
    (128, 16),
    (128, 32),
)  # a program's rows and units
DEPTH = (128, 256)  # of a product's pieces, forward and backward: measured at width 1024
BLOCK = 512  # places a program, in a step on its own

Pointwise = Callable[..., Sequence[Tensor]]


@cache
def available() -> bool:
    """Say whether Triton is here."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _load(name: str, source: str) -> Any:
    """Run written source, and return its kernel. Triton reads the source again, so it is left where `inspect` looks."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    place = f"<weft {name} {sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
    space = {"triton": triton, "tl": tl, "libdevice": libdevice, "__name__": __name__}
    exec(compile(source, place, "exec"), space)  # of our own writing, from a trace
    return space["kernel"]


WORDS = {
    "sigmoid": "tl.sigmoid",
    "tanh": "libdevice.tanh",
    "exp": "tl.exp",
    "maximum": "tl.maximum",
    "where": "tl.where",
}


def _line(line: str) -> str:
    """Turn traced code into Triton's words."""
    line = re.sub(r"number\(([^()]*)\)", r"(\1)", line)
    line = re.sub(r"\bZERO\b", "nothing", re.sub(r"\bONE\b", "1.0", line))
    return re.sub(r"\b(" + "|".join(WORDS) + r")\(", lambda found: WORDS[found[1]] + "(", line)


def _traced(pointwise: Pointwise, shape: Shape) -> tuple[Any, Any]:
    def flat(*parts: Tensor) -> Sequence[Tensor]:
        return pointwise(*shape.grouped(parts))

    backs = [f"d{number}" for number in range(shape.values)]
    return trace(flat, shape.inputs), trace_gradient(flat, shape.inputs, backs)


# A step on its own.


@cache
def stepper(pointwise: Pointwise, shape: Shape, given: tuple[bool, ...] | None, dtype: torch.dtype) -> Stepper:
    """Write a stage's kernels; `given` as in `weft.nn.kernels.stepper`."""
    code, gradient = _traced(pointwise, shape)
    known, product, *_ = shape.grouped(gradient.outputs)
    shared = given is not None and known == product
    outs = [f"tl.store(out{n} + ((t + 1) * B + b) * D + j, {_line(value)}, on)" for n, value in enumerate(code.outputs)]
    forward = [*_step_reads(shape), *map(_line, code.lines), *outs]
    arrays = ["known", "product", *_numbered("state", shape.state), "vectors", *_numbered("out", shape.values)]
    back_arrays = [*arrays[: -shape.values], *_numbered("gstate", shape.state), "gproduct", "gvectors"]
    back_arrays += [] if shared else ["gknown"]
    back_arrays += ["back0"] if given is None else [f"given{n}" for n, has in enumerate(given) if has]
    backward = [*_step_reads(shape), *_arriving(shape, given), *map(_line, gradient.lines)]
    backward += _step_back_writes(shape, gradient.outputs, given, shared)
    return Stepper(_bound(forward, arrays), _bound(backward, back_arrays), shared)


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}{number}" for number in range(count)]


def _step_reads(shape: Shape) -> list[str]:
    rows = {
        "k": f"known + (t * B + b) * {shape.known} * D + {{0}} * D + j",
        "p": f"product + (t * B + b) * {shape.product} * D + {{0}} * D + j",
        "s": "state{0} + (t * B + b) * D + j",
        "w": "vectors + {0} * D + j",
    }
    return [f"{name} = tl.load({rows[name[0]].format(name[1:])}, on, 0).to(tl.float32)" for name in shape.inputs]


def _arriving(shape: Shape, given: tuple[bool, ...] | None) -> list[str]:
    if given is None:
        return ["d0 = tl.load(back0 + b * D + j, on, 0).to(tl.float32)"]
    lines = []
    for n, has in enumerate(given):
        more = f" + tl.load(given{n} + (t * B + b) * D + j, on, 0).to(tl.float32)" if has else ""
        lines.append(f"d{n} = tl.load(gstate{n} + b * D + j, on, 0).to(tl.float32){more}")
    return lines


def _step_back_writes(shape: Shape, outputs: Sequence[str], given: tuple[bool, ...] | None, shared: bool) -> list[str]:
    to_known, to_product, to_state, to_vectors = shape.grouped(outputs)
    lines = [
        f"tl.store(gproduct + (t * B + b) * {shape.product} * D + {n} * D + j, {_line(value)}, on)"
        for n, value in enumerate(to_product)
    ]
    added = (
        []
        if shared
        else [(f"gknown + (t * B + b) * {shape.known} * D + {n} * D + j", v) for n, v in enumerate(to_known)]
    )
    added += [(f"gvectors + ({n} * B + b) * D + j", value) for n, value in enumerate(to_vectors)]
    states = [(f"gstate{n} + b * D + j", value) for n, value in enumerate(to_state)]
    if given is None:
        added += states
    else:
        lines += [f"tl.store({place}, {_line(value)}, on)" for place, value in states]
    return lines + [f"tl.store({place}, tl.load({place}, on, 0) + {_line(value)}, on)" for place, value in added]


def _bound(body: list[str], arrays: list[str]) -> Callable[..., Any]:
    head = ["@triton.jit(do_not_specialize=['t'])", f"def kernel(t, D, B, {', '.join(arrays)}, BLOCK: tl.constexpr):"]
    start = ["i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "on = i < B * D", "b = i // D", "j = i % D"]
    start += ["nothing = tl.zeros((BLOCK,), tl.float32)"]
    kernel = _load("step", "\n".join([*head, *("    " + line for line in [*start, *body])]) + "\n")

    def bind(D: int, B: int, named: dict[str, Any]) -> Callable[[int], None]:
        chosen = [named[name] if named[name] is not None else named["known"] for name in arrays]
        grid = ((B * D + BLOCK - 1) // BLOCK, 1, 1)

        # Compiled and launched apart: to look its arguments over costs Triton several times what a launch does.
        compiled = kernel.warmup(0, D, B, *chosen, BLOCK=BLOCK, grid=grid)
        ready = compiled[grid]

        def step(t: int) -> None:
            ready(t, D, B, *chosen, BLOCK)

        return step

    return bind


# A whole walk.


@dataclass(frozen=True)
class Walker:
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
def walker(functions: tuple[Pointwise, ...], shapes: tuple[Shape, ...], given: tuple[bool, ...]) -> Walker:
    """Write a cell's walk and its way back."""
    traces = [_traced(function, shape) for function, shape in zip(functions, shapes, strict=True)]
    known, product, *_ = shapes[0].grouped(traces[0][1].outputs)
    shared = len(shapes) == 1 and known == product
    states, stages = shapes[0].state, len(shapes)
    arrays = ["known", "vectors", "meet", *_numbered("tape", states)]
    for number in range(stages):
        arrays += [f"weight{number}", f"bias{number}"] + ([f"value{number}"] if number < stages - 1 else [])
    back_arrays = [
        "known",
        "vectors",
        "meet",
        "gknown",
        "gvectors",
        *_numbered("tape", states),
        *_numbered("gstate", states),
    ]
    for number in range(stages):
        back_arrays += [f"turned{number}", f"product{number}", f"gproduct{number}"]
    back_arrays += [f"given{n}" for n, has in enumerate(given) if has]
    forward, backward = _walk_source(shapes, traces), _walk_back_source(shapes, traces, given, shared)
    return Walker(
        _load("walk", _whole(arrays, forward)),
        _load("walk back", _whole(back_arrays, backward)),
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
            lines += [
                f"    k{n} = tl.load(known + (t * B + row) * {shape.known} * D + {n} * D + unit, on, 0).to(tl.float32)"
                for n in range(shape.known)
            ]
        source = "tape0 + (t * B + row) * D" if not number else f"value{number - 1} + ((t + 1) * B + row) * D"
        matrices = [f"weight{number} + ({n} * D + unit) * D" for n in range(shape.product)]
        lines += _product(_numbered("p", shape.product), source, matrices, "D", "    ")
        lines += [f"    p{n} += b{number}_{n}" for n in range(shape.product)]
        lines += [f"    {_line(line)}" for line in code.lines]
        if last:
            lines += [f"    s{n}_ = {_line(value)}" for n, value in enumerate(code.outputs)]
            lines += [f"    s{n} = s{n}_" for n in range(states)]
            lines += [f"    tl.store(tape{n} + (t + 1) * B * D + here, s{n}, on)" for n in range(states)]
        else:
            lines += [f"    tl.store(value{number} + (t + 1) * B * D + here, {_line(code.outputs[0])}, on)"]
        lines += _meeting("    ")
    return lines


def _walk_back_source(
    shapes: Sequence[Shape], traces: Sequence[Any], given: tuple[bool, ...], shared: bool
) -> list[str]:
    first, states = shapes[0], shapes[0].state
    lines = _vectors(first)
    lines += [
        f"{name} = tl.zeros((BM, BU), tl.float32)"
        for name in [*_numbered("r", states), *_numbered("gw", first.vectors)]
    ]
    lines += ["for back in range(T):", "    t = T - 1 - back"]
    lines += [
        f"    k{n} = tl.load(known + (t * B + row) * {first.known} * D + {n} * D + unit, on, 0).to(tl.float32)"
        for n in range(first.known)
    ]
    lines += [f"    s{n} = tl.load(tape{n} + t * B * D + here, on, 0).to(tl.float32)" for n in range(states)]
    for number in reversed(range(len(shapes))):
        shape, (_, code) = shapes[number], traces[number]
        last = number == len(shapes) - 1
        lines += [
            f"    p{n} = tl.load(product{number} + (t * B + row) * {shape.product} * D + {n} * D + unit, on, 0)"
            ".to(tl.float32)"
            for n in range(shape.product)
        ]
        # What came back: to the last stage from the next step's first product, to another from the next stage's.
        other, when = (0, "t + 1") if last else (number + 1, "t")
        depth = f"({shapes[other].product} * D)"
        source, matrix = f"gproduct{other} + (({when}) * B + row) * {depth}", f"turned{other} + unit * {depth}"
        lines += _product(["a"], source, [matrix], depth, "    ")
        if last:
            for n in range(states):
                more = f" + tl.load(given{n} + t * B * D + here, on, 0).to(tl.float32)" if given[n] else ""
                lines += [f"    d{n} = r{n}{' + a' if not n else ''}{more}"]
        else:
            lines += ["    d0 = a"]
        lines += [f"    {_line(line)}" for line in code.lines]
        to_known, to_product, to_state, to_vectors = shape.grouped(code.outputs)
        lines += [
            f"    tl.store(gproduct{number} + (t * B + row) * {shape.product} * D + {n} * D + unit, {_line(value)}, on)"
            for n, value in enumerate(to_product)
        ]
        lines += [
            f"    r{n}{'_' if last else ''} = {'' if last else f'r{n} + '}{_line(v)}" for n, v in enumerate(to_state)
        ]
        lines += [f"    r{n} = r{n}_" for n in range(states)] if last else []
        lines += [f"    gw{n} += {_line(value)}" for n, value in enumerate(to_vectors)]
        if not shared:
            for n, value in enumerate(to_known):
                lines += [f"    gk{n} = {'' if last else f'gk{n} + '}{_line(value)}"]
        lines += _meeting("    ")
    if not shared:
        lines += [
            f"    tl.store(gknown + (t * B + row) * {first.known} * D + {n} * D + unit, gk{n}, on)"
            for n in range(first.known)
        ]
    lines += [f"tl.store(gstate{n} + here, r{n}, on)" for n in range(states)]
    lines += [
        f"tl.store(gvectors + (tl.program_id(1) * {first.vectors} + {n}) * D + units, "
        f"tl.sum(tl.where(on, gw{n}, 0.0), 0), units < D)"
        for n in range(first.vectors)
    ]
    return lines


def launch(made: Walker, back: bool, named: dict[str, Any], steps: int, rows: int, biased: int) -> None:
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
