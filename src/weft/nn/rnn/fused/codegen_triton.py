"""A stage's step on CUDA as one Triton kernel: to CUDA what `weft.nn.rnn.fused.codegen_numba` is to the CPU."""

import linecache
import re
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from typing import Any

import torch

from weft.nn.rnn.fused.codegen_numba import Pointwise, Shape, Stepper, traced

BLOCK = 512  # places a program, in a step on its own


@cache
def available() -> bool:
    """Say whether Triton is here."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


_trusted = {"to learn": False, "to read": False}


def trust(agreed: bool, learning: bool = True) -> None:
    """Enable the kernels for half precision, or not, after their self-test: for training too, or inference alone."""
    _trusted["to read"] = agreed
    if learning:
        _trusted["to learn"] = agreed


def believed(learning: bool) -> bool:
    """Say whether they may be used to learn, or to read."""
    return _trusted["to learn" if learning else "to read"]


def trusted(x: torch.Tensor) -> bool:
    """Say whether the kernels for half precision have shown that they are right for what is done, and fit."""
    return believed(torch.is_grad_enabled()) and in_half(x)


def in_half(x: torch.Tensor) -> bool:
    """Say whether products with it are made on CUDA in half precision, with Triton at hand."""
    half = x.is_cuda and (x.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cuda"))
    # What compiles for CUDA is Triton.
    return half and (torch.compiler.is_compiling() or (available() and ampere(x.device)))


def ampere(device: torch.device) -> bool:
    """Say whether a GPU is of Ampere or newer: on older ones neither the library's attention nor our kernels run."""
    return torch.compiler.is_compiling() or torch.cuda.get_device_capability(device) >= (8, 0)


def halved(x: torch.Tensor) -> torch.Tensor:
    """Cast it to what products with it are made in."""
    return x.to(torch.get_autocast_dtype("cuda")) if torch.is_autocast_enabled("cuda") else x


def load_source(name: str, source: str) -> Any:
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


def triton_line(line: str) -> str:
    """Turn traced code into Triton's words."""
    line = re.sub(r"number\(([^()]*)\)", r"(\1)", line)
    line = re.sub(r"\bZERO\b", "nothing", re.sub(r"\bONE\b", "1.0", line))
    return re.sub(r"\b(" + "|".join(WORDS) + r")\(", lambda found: WORDS[found[1]] + "(", line)


@cache
def stepper(pointwise: Pointwise, shape: Shape, given: tuple[bool, ...] | None, dtype: torch.dtype) -> Stepper:
    """Write a stage's kernels; `given` as in `weft.nn.rnn.fused.codegen_numba.stepper`."""
    code, gradient = traced(pointwise, shape)
    known, product, *_ = shape.grouped(gradient.outputs)
    shared = given is not None and known == product
    values = enumerate(map(triton_line, code.outputs))
    outs = [f"tl.store(out{n} + ((t + 1) * B + b) * D + j, {value}, on)" for n, value in values]
    forward = [*_step_reads(shape), *map(triton_line, code.lines), *outs]
    arrays = ["known", "product", *numbered("state", shape.state), "vectors", *numbered("out", shape.values)]
    back_arrays = [*arrays[: -shape.values], *numbered("gstate", shape.state), "gproduct", "gvectors"]
    back_arrays += [] if shared else ["gknown"]
    back_arrays += ["back0"] if given is None else [f"given{n}" for n, has in enumerate(given) if has]
    backward = [*_step_reads(shape), *_arriving(shape, given), *map(triton_line, gradient.lines)]
    backward += _step_back_writes(shape, gradient.outputs, given, shared)
    return Stepper(_bound(forward, arrays), _bound(backward, back_arrays), shared)


def numbered(name: str, count: int) -> list[str]:
    """Name several of one kind: state0, state1, …"""
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
        f"tl.store(gproduct + (t * B + b) * {shape.product} * D + {n} * D + j, {triton_line(value)}, on)"
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
        lines += [f"tl.store({place}, {triton_line(value)}, on)" for place, value in states]
    return lines + [f"tl.store({place}, tl.load({place}, on, 0) + {triton_line(value)}, on)" for place, value in added]


def _bound(body: list[str], arrays: list[str]) -> Callable[..., Any]:
    head = ["@triton.jit(do_not_specialize=['t'])", f"def kernel(t, D, B, {', '.join(arrays)}, BLOCK: tl.constexpr):"]
    start = ["i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "on = i < B * D", "b = i // D", "j = i % D"]
    start += ["nothing = tl.zeros((BLOCK,), tl.float32)"]
    kernel = load_source("step", "\n".join([*head, *("    " + line for line in [*start, *body])]) + "\n")

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
