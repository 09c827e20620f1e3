"""CPU code generation for a cell's stages: scalar code from `weft.nn.rnn.fused.trace`, compiled by numba.

A kernel runs one stage of one step t, for all rows. Forward, it reads `input_proj[t]`, `product[t]`, each part of the
previous state and the cell's vectors, and writes the stage's values. Backward, it writes the gradients of its inputs,
named `grad_*`. The loop over units has neither call nor branch, so that the compiler can vectorise it.
"""

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.nn.rnn.fused.trace import Pointwise, Trace, trace, trace_gradient

StepKernel = Callable[[int, int, dict[str, Any]], Callable[[int], None]]  # (D, B, tensors by name) to a function of t
CACHE_DIR = Path(__file__).parent / "__pycache__"  # numba's own cache for functions of modules


@dataclass(frozen=True)
class StageShape:
    """The number of vectors that a stage reads, by kind, and of values that it returns."""

    input_proj: int
    product: int
    state: int
    vectors: int
    values: int

    @property
    def inputs(self) -> list[str]:
        """A name for each vector that the stage reads: k0, k1, …, p0, …, s0, …, w0, …"""
        kinds = {"k": self.input_proj, "p": self.product, "s": self.state, "w": self.vectors}
        return [f"{kind}{number}" for kind, count in kinds.items() for number in range(count)]

    def split(self, parts: Sequence[Any]) -> list[Sequence[Any]]:
        """Split one list of the stage's inputs into input_proj, product, state and vectors."""
        ends = accumulate([self.input_proj, self.product, self.state, self.vectors], initial=0)
        return [parts[low:high] for low, high in pairwise(ends)]


@dataclass(frozen=True)
class StepKernels:
    """The forward and backward kernel of a stage.

    For the last stage, `backward` reads in `grad_state*` the state's gradient from later steps, adds the `grad_output*`
    that there are, and overwrites `grad_state*` with the gradient of the previous state. For another stage it reads
    `grad_value0`, the gradient from the next stage.
    """

    forward: StepKernel
    backward: StepKernel
    shared: bool  # the gradients of `input_proj` and `product` are equal, and written to `grad_product` only


def trace_stage(pointwise: Pointwise, shape: StageShape) -> tuple[Trace, Trace]:
    """Trace a stage's function and its gradient, as functions of one flat list of vectors."""

    def flat(*parts: Tensor) -> Sequence[Tensor]:
        return pointwise(*shape.split(parts))

    grads = [f"d{number}" for number in range(shape.values)]
    return trace(flat, shape.inputs), trace_gradient(flat, shape.inputs, grads)


@cache
def numba_step_kernels(
    pointwise: Pointwise, shape: StageShape, has_grad: tuple[bool, ...] | None, dtype: torch.dtype
) -> StepKernels:
    """Compile a stage. `has_grad`: which outputs of the last stage have a gradient; None for another stage."""
    code, gradient = trace_stage(pointwise, shape)
    input_proj, product, *_ = shape.split(gradient.outputs)
    shared = has_grad is not None and input_proj == product
    return StepKernels(
        _compile(_forward_source(code, shape), dtype),
        _compile(_backward_source(gradient, shape, has_grad, shared), dtype),
        shared,
    )


@dataclass(frozen=True)
class _Operand:
    """A vector inside a kernel: its name in the code, the array that it is a row of, and the index into it."""

    name: str
    array: str
    index: str


def _input_operands(shape: StageShape) -> list[_Operand]:
    input_proj, product, state, vectors = shape.split(shape.inputs)
    return [
        *(_Operand(name, "input_proj", f"[t, b, {number} * D + j]") for number, name in enumerate(input_proj)),
        *(_Operand(name, "product", f"[t, b, {number} * D + j]") for number, name in enumerate(product)),
        *(_Operand(name, f"state{number}", "[t, b, j]") for number, name in enumerate(state)),
        *(_Operand(name, "vectors", f"[{number}, j]") for number, name in enumerate(vectors)),
    ]


def _forward_source(code: Trace, shape: StageShape) -> str:
    outs = [_Operand(f"o{number}", f"out{number}", "[t + 1, b, j]") for number in range(shape.values)]
    writes = [f"{row.name}[j] = {value}" for row, value in zip(outs, code.outputs, strict=True)]
    return _kernel_source(_input_operands(shape), outs, [*code.lines, *writes])


def _backward_source(code: Trace, shape: StageShape, has_grad: tuple[bool, ...] | None, shared: bool) -> str:
    input_proj, product, state, vectors = shape.split([f"g{name}" for name in shape.inputs])
    to_input_proj, to_product, to_state, to_vectors = shape.split(code.outputs)
    add = "=" if has_grad is not None else "+="  # other stages add to the gradient that the last one wrote
    outs = [_Operand(name, "grad_product", f"[t, b, {number} * D + j]") for number, name in enumerate(product)]
    writes = [f"{name}[j] = {value}" for name, value in zip(product, to_product, strict=True)]
    if not shared:
        outs += [
            _Operand(name, "grad_input_proj", f"[t, b, {number} * D + j]") for number, name in enumerate(input_proj)
        ]
        writes += [f"{name}[j] += {value}" for name, value in zip(input_proj, to_input_proj, strict=True)]
    outs += [_Operand(name, f"grad_state{number}", "[b, j]") for number, name in enumerate(state)]
    writes += [f"{name}[j] {add} {value}" for name, value in zip(state, to_state, strict=True)]
    outs += [_Operand(name, "grad_vectors", f"[{number}, b, j]") for number, name in enumerate(vectors)]
    writes += [f"{name}[j] += {value}" for name, value in zip(vectors, to_vectors, strict=True)]
    reads, incoming = _input_operands(shape), []
    if has_grad is None:
        reads += [_Operand(f"d{number}", f"grad_value{number}", "[b, j]") for number in range(shape.values)]
    else:
        reads += [
            _Operand(f"y{number}", f"grad_output{number}", "[t, b, j]")
            for number, exists in enumerate(has_grad)
            if exists
        ]
        incoming = [f"d{n} = gs{n}[j]" + (f" + y{n}" if exists else "") for n, exists in enumerate(has_grad)]
    return _kernel_source(reads, outs, [*incoming, *code.lines, *writes])


def _kernel_source(reads: list[_Operand], outs: list[_Operand], body: list[str]) -> str:
    """Return the source of a kernel over whole arrays.

    Inputs are indexed in their arrays, for a slice is reference-counted, which costs more than the work on a short row.
    Outputs are sliced, so that no two of them are of one array: otherwise the compiler must assume that they overlap.
    """
    arrays, outputs = (list(dict.fromkeys(row.array for row in rows)) for rows in (reads, outs))
    parameters = ", ".join(dict.fromkeys([*arrays, *outputs]))
    lines = [f"def row_kernel(t, b, D, {', '.join([*arrays, *(row.name for row in outs)])}):", " for j in range(D):"]
    lines += [f"  {row.name} = {row.array}{row.index}" for row in reads]
    lines += [f"  {line}" for line in body]
    lines += ["row_kernel = compiled(row_kernel)", f"def kernel(t, D, B, {parameters}):", " for b in range(B):"]
    lines += [f"  row_kernel(t, b, D, {', '.join([*arrays, *(row.array + _row_slice(row.index) for row in outs)])})"]
    return "\n".join([*lines, "kernel = cached(kernel)", f"arrays = {parameters.split(', ')!r}"])


def _row_slice(index: str) -> str:
    """Return the slice of the row of an element's index, such as [t, b, 2 * D + j]."""
    *first, last = index.strip("[]").split(", ")
    start = last.removesuffix("j").removesuffix(" + ") or "0"
    return f"[{', '.join(first)}][{start} : {start} + D]"


def _compile(source: str, dtype: torch.dtype) -> StepKernel:
    """Return a function from tensors to a function of t that runs one step; the machine code is cached on disk."""
    number = np.float32 if dtype is torch.float32 else np.float64
    compiled, tanh = compiler(), tanh_of(dtype)
    namespace: dict[str, Any] = {"compiled": compiled, "tanh": tanh, "sigmoid": compiled(_sigmoid(tanh, number))}
    namespace |= {"exp": math.exp, "maximum": compiled(_maximum), "where": compiled(_where)}
    namespace |= {"number": number, "ZERO": number(0), "ONE": number(1), "cached": cached_njit(), "__name__": __name__}
    exec(compile(source, _write_source(source, dtype), "exec"), namespace)  # generated above, from a trace
    kernel, arrays = namespace["kernel"], namespace["arrays"]

    def bind(D: int, B: int, tensors: dict[str, Any]) -> Callable[[int], None]:
        arguments = [_array(tensors[name]) for name in arrays]
        return lambda t: kernel(t, D, B, *arguments)

    return bind


def _array(tensor: torch.Tensor) -> Any:
    """Return a tensor as an array; of a parameter a copy: FSDP could not free what numpy has seen."""
    return (tensor.detach().clone() if tensor.requires_grad and tensor.is_leaf else tensor.detach()).numpy()


def _write_source(source: str, dtype: torch.dtype) -> str:
    """Write a kernel's source to `CACHE_DIR`, named by a hash of all that determines it; return the path.

    numba caches machine code only for functions in files. Where the folder is not writable, it compiles each time.
    """
    text = f"# {dtype}, {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}\n{source}\n"
    path = CACHE_DIR / f"stage_{hashlib.sha256(text.encode()).hexdigest()[:24]}.kernel"
    with suppress(OSError):
        CACHE_DIR.mkdir(exist_ok=True)
        _write_once(path, text)
    return str(path)


def _write_once(path: Path, text: str) -> None:
    """Write a file atomically, unless it exists: numba's cache is keyed by its modification time."""
    if path.exists():
        return
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    try:
        os.link(temporary, path)
    finally:
        temporary.unlink()


@cache
def tanh_of(dtype: torch.dtype) -> Any:
    """Return a compiled tanh for a dtype: for float32 one that vectorises."""
    return compiler()(_tanh_float32 if dtype is torch.float32 else _tanh)


def zero_scalar(dtype: torch.dtype) -> Any:
    """Return zero as a numpy scalar of that dtype."""
    return np.zeros((), str(dtype).removeprefix("torch."))[()]


@cache
def compiler() -> Any:
    """Return the `njit` decorator of what is compiled into other functions."""
    return _compiler(False, False)


@cache
def cached_njit(sums: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Return the `njit` decorator of all loops, which caches machine code in `__pycache__`; with `sums` it may reorder
    additions. Only for functions in files.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return _compiler(sums, True)(function)
        except RuntimeError:  # no folder is writable
            return _compiler(sums, False)(function)

    return compiled


def cached_with(function: Callable[..., Any], constants: Mapping[str, Any]) -> Any:
    """Compile a function, with constants for global names that the types of its arguments decide on, and cache it.

    Of a closure over another compiled function nothing would be found again: its pickle differs in each process.
    """
    return cached_njit(sums=True)(FunctionType(function.__code__, {**function.__globals__, **constants}))


def _compiler(sums: bool, cached: bool) -> Any:
    from numba import njit
    from numba.core.compiler import Compiler

    class NoAliasCompiler(Compiler):  # type: ignore[misc]
        """Assumes that no two arrays of a call overlap: with so many it would not vectorise otherwise."""

        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            self.state.flags.noalias = True

    fastmath = {"contract", "arcp", "reassoc", "nsz"} if sums else {"contract", "arcp"}
    return njit(nogil=True, error_model="numpy", fastmath=fastmath, pipeline_class=NoAliasCompiler, cache=cached)


def _tanh(x):  # type: ignore[no-untyped-def]
    return math.tanh(x)


def _maximum(x, y):  # type: ignore[no-untyped-def]
    return y if x < y else x


def _where(condition, x, y):  # type: ignore[no-untyped-def]
    return x if condition else y


def _sigmoid(tanh: Any, number: Any) -> Any:
    half = number(0.5)

    def sigmoid(x):  # type: ignore[no-untyped-def]
        return half * tanh(half * x) + half

    return sigmoid


_TANH_LIMIT = np.float32(7.90531110763549805)
_P = [4.89352455891786e-3, 6.37261928875436e-4, 1.48572235717979e-5, 5.12229709037114e-8]
_P0, _P1, _P2, _P3, _P4, _P5, _P6 = map(
    np.float32, [*_P, -8.60467152213735e-11, 2.00018790482477e-13, -2.760768477e-16]
)
_Q0, _Q1, _Q2, _Q3 = map(np.float32, [4.89352518554385e-3, 2.268434632439e-3, 1.18534705686654e-4, 1.19825839466702e-6])


def _tanh_float32(x):  # type: ignore[no-untyped-def]
    """Return tanh by Eigen's rational approximation, accurate to a few units in the last place; NaN stays NaN."""
    x = _TANH_LIMIT if x > _TANH_LIMIT else x
    x = -_TANH_LIMIT if x < -_TANH_LIMIT else x
    y = x * x
    p = x * (_P0 + y * (_P1 + y * (_P2 + y * (_P3 + y * (_P4 + y * (_P5 + y * _P6))))))
    return p / (_Q0 + y * (_Q1 + y * (_Q2 + y * _Q3)))
