"""A cell's stages as loops for the CPU: scalar code from `weft.nn.rnn.fused.trace`, compiled by numba.

A kernel makes one step t of one stage, for all rows. It reads `known[t]`, `product[t]`, each part of the state before
the step and the cell's vectors, and writes the stage's values; or, backwards, what goes back to each of what it read.
The loop over places has neither call nor branch, so that the compiler makes vector instructions of it.
"""

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.nn.rnn.fused.trace import Trace, trace, trace_gradient

Pointwise = Callable[..., Sequence[Tensor]]
Kernel = Callable[[int, int, dict[str, Any]], Callable[[int], None]]  # (D, B, arrays by name) to a function of t
KEPT = Path(__file__).parent / "__pycache__"  # where numba keeps what is compiled of modules, too


@dataclass(frozen=True)
class Shape:
    """How many vectors a stage reads, of each kind, and how many it puts out."""

    known: int
    product: int
    state: int
    vectors: int
    values: int

    @property
    def inputs(self) -> list[str]:
        """A name for each vector that is read."""
        kinds = {"k": self.known, "p": self.product, "s": self.state, "w": self.vectors}
        return [f"{kind}{number}" for kind, count in kinds.items() for number in range(count)]

    def grouped(self, parts: Sequence[Any]) -> list[Sequence[Any]]:
        """Cut what is read into known, product, state and vectors."""
        ends = accumulate([self.known, self.product, self.state, self.vectors], initial=0)
        return [parts[low:high] for low, high in pairwise(ends)]


@dataclass(frozen=True)
class Stepper:
    """A stage's kernels.

    `backward` takes, for the last stage, what comes back from later steps (where it then leaves what goes back to
    earlier ones) and, by `given`, what comes back from each output; for another stage, what the next one sent back.
    """

    forward: Kernel
    backward: Kernel
    shared: bool  # what goes back to `known` is what goes back to `product`, and is written there alone


def traced(pointwise: Pointwise, shape: Shape) -> tuple[Trace, Trace]:
    """Trace a stage's function and its gradient, of one list of vectors each."""

    def flat(*parts: Tensor) -> Sequence[Tensor]:
        return pointwise(*shape.grouped(parts))

    backs = [f"d{number}" for number in range(shape.values)]
    return trace(flat, shape.inputs), trace_gradient(flat, shape.inputs, backs)


@cache
def stepper(pointwise: Pointwise, shape: Shape, given: tuple[bool, ...] | None, dtype: torch.dtype) -> Stepper:
    """Compile a stage; `given` says which outputs of the last stage something comes back for, None is another stage."""
    code, gradient = traced(pointwise, shape)
    known, product, *_ = shape.grouped(gradient.outputs)
    shared = given is not None and known == product
    return Stepper(
        _compile(_forward(code, shape), dtype),
        _compile(_backward(gradient, shape, given, shared), dtype),
        shared,
    )


@dataclass(frozen=True)
class _Row:
    """A vector inside a kernel: its name in the code, the array that it is a row of, and where in it."""

    name: str
    array: str
    place: str


def _reads(shape: Shape) -> list[_Row]:
    known, product, state, vectors = shape.grouped(shape.inputs)
    return [
        *(_Row(name, "known", f"[t, b, {number} * D + j]") for number, name in enumerate(known)),
        *(_Row(name, "product", f"[t, b, {number} * D + j]") for number, name in enumerate(product)),
        *(_Row(name, f"state{number}", "[t, b, j]") for number, name in enumerate(state)),
        *(_Row(name, "vectors", f"[{number}, j]") for number, name in enumerate(vectors)),
    ]


def _forward(code: Trace, shape: Shape) -> str:
    outs = [_Row(f"o{number}", f"out{number}", "[t + 1, b, j]") for number in range(shape.values)]
    writes = [f"{row.name}[j] = {value}" for row, value in zip(outs, code.outputs, strict=True)]
    return _source(_reads(shape), outs, [*code.lines, *writes])


def _backward(code: Trace, shape: Shape, given: tuple[bool, ...] | None, shared: bool) -> str:
    known, product, state, vectors = shape.grouped([f"g{name}" for name in shape.inputs])
    to_known, to_product, to_state, to_vectors = shape.grouped(code.outputs)
    add = "=" if given is not None else "+="  # other stages find what the last one has left
    outs = [_Row(name, "gproduct", f"[t, b, {number} * D + j]") for number, name in enumerate(product)]
    writes = [f"{name}[j] = {value}" for name, value in zip(product, to_product, strict=True)]
    if not shared:
        outs += [_Row(name, "gknown", f"[t, b, {number} * D + j]") for number, name in enumerate(known)]
        writes += [f"{name}[j] += {value}" for name, value in zip(known, to_known, strict=True)]
    outs += [_Row(name, f"gstate{number}", "[b, j]") for number, name in enumerate(state)]
    writes += [f"{name}[j] {add} {value}" for name, value in zip(state, to_state, strict=True)]
    outs += [_Row(name, "gvectors", f"[{number}, b, j]") for number, name in enumerate(vectors)]
    writes += [f"{name}[j] += {value}" for name, value in zip(vectors, to_vectors, strict=True)]
    reads, arriving = _reads(shape), []
    if given is None:
        reads += [_Row(f"d{number}", f"back{number}", "[b, j]") for number in range(shape.values)]
    else:
        reads += [_Row(f"y{number}", f"given{number}", "[t, b, j]") for number, has in enumerate(given) if has]
        arriving = [f"d{n} = gs{n}[j]" + (f" + y{n}" if has else "") for n, has in enumerate(given)]
    return _source(reads, outs, [*arriving, *code.lines, *writes])


def _source(reads: list[_Row], outs: list[_Row], body: list[str]) -> str:
    """Write a function of whole arrays.

    What is read goes by its place in its array, for a slice is counted, which costs more than a short row's work. What
    is written is sliced, so that no two outputs are of one array: else the compiler must fear that they overlap.
    """
    arrays, written = (list(dict.fromkeys(row.array for row in rows)) for rows in (reads, outs))
    given = ", ".join(dict.fromkeys([*arrays, *written]))
    lines = [f"def by_row(t, b, D, {', '.join([*arrays, *(row.name for row in outs)])}):", " for j in range(D):"]
    lines += [f"  {row.name} = {row.array}{row.place}" for row in reads]
    lines += [f"  {line}" for line in body]
    lines += ["by_row = compiled(by_row)", f"def kernel(t, D, B, {given}):", " for b in range(B):"]
    lines += [f"  by_row(t, b, D, {', '.join([*arrays, *(row.array + _sliced(row.place) for row in outs)])})"]
    return "\n".join([*lines, "kernel = kept(kernel)", f"arrays = {given.split(', ')!r}"])


def _sliced(place: str) -> str:
    """Turn the place of one number, such as [t, b, 2 * D + j], into that of its row."""
    *first, last = place.strip("[]").split(", ")
    start = last.removesuffix("j").removesuffix(" + ") or "0"
    return f"[{', '.join(first)}][{start} : {start} + D]"


def _compile(source: str, dtype: torch.dtype) -> Kernel:
    """Return a function that takes the arrays, and returns one that makes a step; it stays compiled on the disk."""
    number = np.float32 if dtype is torch.float32 else np.float64
    compiled, tanh = compiler(), tanh_of(dtype)
    space: dict[str, Any] = {"compiled": compiled, "tanh": tanh, "sigmoid": compiled(_sigmoid(tanh, number))}
    space |= {"exp": math.exp, "maximum": compiled(_maximum), "where": compiled(_where)}
    space |= {"number": number, "ZERO": number(0), "ONE": number(1), "kept": keeper(), "__name__": __name__}
    exec(compile(source, _written(source, dtype), "exec"), space)  # of our own writing, from a trace
    kernel, arrays = space["kernel"], space["arrays"]

    def bind(D: int, B: int, named: dict[str, Any]) -> Callable[[int], None]:
        chosen = [named[name].detach().numpy() for name in arrays]
        return lambda t: kernel(t, D, B, *chosen)

    return bind


def _written(source: str, dtype: torch.dtype) -> str:
    """Write a kernel's source beside the module's bytecode, named by all that it is made from; return where.

    numba keeps the machine code of functions in files alone. Where nothing may be written, it is compiled each time.
    """
    text = f"# {dtype}, {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}\n{source}\n"
    path = KEPT / f"stage_{hashlib.sha256(text.encode()).hexdigest()[:24]}.py"
    with suppress(OSError):
        KEPT.mkdir(exist_ok=True)
        _write_once(path, text)
    return str(path)


def _write_once(path: Path, text: str) -> None:
    """Write a file that is whole from its first moment, unless it is there: numba knows it by its time."""
    if path.exists():
        return
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    try:
        os.link(beside, path)
    finally:
        beside.unlink()


@cache
def tanh_of(dtype: torch.dtype) -> Any:
    """Compile tanh for a type: for float32 one that vector instructions can do."""
    return compiler()(_tanh_float32 if dtype is torch.float32 else _tanh)


def zero_of(dtype: torch.dtype) -> Any:
    """Return nought as a number of that type."""
    return np.zeros((), str(dtype).removeprefix("torch."))[()]


@cache
def compiler(sums: bool = False) -> Any:
    """Return the compiler that all loops share; with `sums` it may add up in any order."""
    return _compiler(sums, False)


@cache
def keeper(sums: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Return a compiler that keeps what it made beside the module's own bytecode, for functions of modules alone."""

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return _compiler(sums, True)(function)
        except RuntimeError:  # there is no place where it may write
            return _compiler(sums, False)(function)

    return compiled


def _compiler(sums: bool, kept: bool) -> Any:
    from numba import njit
    from numba.core.compiler import Compiler

    class Apart(Compiler):  # type: ignore[misc]
        """Knows that no two arrays of a call overlap: so many would keep it from vector instructions else."""

        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            self.state.flags.noalias = True

    loose = {"contract", "arcp", "reassoc", "nsz"} if sums else {"contract", "arcp"}
    return njit(nogil=True, error_model="numpy", fastmath=loose, pipeline_class=Apart, cache=kept)


def _tanh(x):  # type: ignore[no-untyped-def]
    return math.tanh(x)


def _maximum(x, y):  # type: ignore[no-untyped-def]
    return y if x < y else x


def _where(which, x, y):  # type: ignore[no-untyped-def]
    return x if which else y


def _sigmoid(tanh: Any, number: Any) -> Any:
    half = number(0.5)

    def sigmoid(x):  # type: ignore[no-untyped-def]
        return half * tanh(half * x) + half

    return sigmoid


_FAR = np.float32(7.90531110763549805)
_P = [4.89352455891786e-3, 6.37261928875436e-4, 1.48572235717979e-5, 5.12229709037114e-8]
_P0, _P1, _P2, _P3, _P4, _P5, _P6 = map(
    np.float32, [*_P, -8.60467152213735e-11, 2.00018790482477e-13, -2.760768477e-16]
)
_Q0, _Q1, _Q2, _Q3 = map(np.float32, [4.89352518554385e-3, 2.268434632439e-3, 1.18534705686654e-4, 1.19825839466702e-6])


def _tanh_float32(x):  # type: ignore[no-untyped-def]
    """Eigen's rational function for tanh, right to a few units in the last place; NaN stays NaN."""
    x = _FAR if x > _FAR else x
    x = -_FAR if x < -_FAR else x
    y = x * x
    p = x * (_P0 + y * (_P1 + y * (_P2 + y * (_P3 + y * (_P4 + y * (_P5 + y * _P6))))))
    return p / (_Q0 + y * (_Q1 + y * (_Q2 + y * _Q3)))
