"""Matrix products with packed weights on the CPU: y = x Wᵀ, compiled by LLVM for the instructions of this machine.

W (N, K) is packed once into panels of a few columns of Wᵀ, so that a product reads it in order (Goto and van de Geijn
2008, *Anatomy of high-performance matrix multiplication*). A tile of y, some rows by one panel, stays in registers
while K is walked through: each step loads one row of the panel, and for each row of x one value that all lanes share.

| format    | x       | W       | a step of a 32-bit lane                                                             |
|-----------|---------|---------|-------------------------------------------------------------------------------------|
| `FLOAT32` | float32 | float32 | 1 product: a fused multiply-add, where the machine has it                           |
| `UINT8`   | uint8   | int8    | 4 products: VNNI's `vpdpbusd`, or `vpmaddubsw` and `vpmaddwd` on older x86          |
| `INT16`   | int16   | int8    | 2 products, on other machines                                                       |

All sums of integers are exact. `vpmaddubsw` adds two products in 16 bits, which saturate at 32,767: where it is used,
`quantize_weight` keeps every pair of weights small enough that they never do.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import binding, ir
from numba.core import cgutils, config, types
from numba.extending import intrinsic
from torch import Tensor

from weft.nn.rnn.fused.codegen_numba import keeper

_CACHED = 1 << 19  # bytes of x whose products with all panels are made before the next rows come: an L2 cache
_UNROLLED = 4  # steps of K in one turn of the innermost loop
_SHARED = 1 << 24  # products from which on it pays to share them among threads
_FLOAT, _INT16, _INT32, _INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


class Format(NamedTuple):
    """How x is held: as q = round(x / scale) + zero, 0 ≤ q ≤ steps, with a scale and a zero a row; or as it is."""

    dtype: torch.dtype
    group: int  # values in 32 bits
    steps: int = 0


FLOAT32 = Format(torch.float32, 1)
UINT8 = Format(torch.uint8, 4, 255)
INT16 = Format(torch.int16, 2, 1023)

WIDEST = (2**31 - 1) // (127 * INT16.steps)  # columns of W up to which no sum of products overflows
_PAIR = 128  # 255 times as much fits in 16 bits


@cache
def cpu_features() -> frozenset[str]:
    """Return the names of the CPU's features that are compiled for, as LLVM has them, such as `avx2`."""
    if config.CPU_FEATURES is not None:
        return frozenset(name[1:] for name in config.CPU_FEATURES.split(",") if name.startswith("+"))
    return frozenset(name for name, has in binding.get_host_cpu_features().items() if has)


def has_vnni() -> bool:
    """Return whether one instruction multiplies bytes and adds four products in 32 bits."""
    return bool(cpu_features() & {"avx512vnni", "avxvnni"})


@cache
def integer_format() -> Format | None:
    """Return the integer format whose products are exact on this machine, as a self-test shows; None: there is none."""
    forms = (UINT8, INT16) if "ssse3" in cpu_features() else (INT16,)
    return next((form for form in forms if is_exact(form)), None)


def is_exact(form: Format) -> bool:
    """Return whether integer products are exact where it is hardest: with all values at both ends of their range."""
    q = torch.tensor([0, form.steps])[torch.arange(13 * 72).view(13, 72) // 5 % 2]  # 13 rows: a tile, and a part of one
    weight, _ = quantize_weight(torch.tensor([-1.0, 1.0, 1.0])[torch.arange(41 * 72).view(41, 72) // 7 % 3])
    zero = torch.arange(13, dtype=torch.int32) * (form.steps // 12)
    x = Integers(q.to(form.dtype), torch.ones(13), zero)
    y = PackedWeights.integers(weight, torch.ones(41), form).multiply(x)
    return torch.equal(y, ((q - zero[:, None]) @ weight.long().t()).float())


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix (N, K) to int8, with a scale for each of its rows: so that no sum saturates on this machine."""
    size = weight.abs()
    most = size.amax(1) / 127
    if not has_vnni():
        pairs = torch.nn.functional.pad(size, (0, size.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2)
        most = torch.maximum(most, pairs.amax(1) / (_PAIR - 1))  # each of the two may be rounded up by a half
    scale = most.clamp(min=1e-12)
    return torch.round(weight / scale[:, None]).to(torch.int8), scale


class Tile(NamedTuple):
    """The part of y that is held in registers: `rows` by `vectors` · `lanes` columns."""

    rows: int
    vectors: int
    lanes: int

    @property
    def columns(self) -> int:
        """How many columns of y a panel makes."""
        return self.vectors * self.lanes


@cache
def tile() -> Tile:
    """Return the tile that fills the registers of this machine."""
    if "avx512f" in cpu_features():
        return Tile(12, 2, 16)  # 24 of 32 registers, of 512 bits
    if "avx" in cpu_features():
        return Tile(6, 2, 8)  # 12 of 16, of 256 bits
    return Tile(4, 2, 4)  # of 128 bits: any x86-64, ARM


class Integers(NamedTuple):
    """A matrix x (M, K) in an integer format."""

    values: Tensor  # (M, K), filled up to whole groups
    scale: Tensor  # (M,) float32
    zero: Tensor  # (M,) int32


@dataclass(frozen=True)
class PackedWeights:
    """A matrix (N, K) as panels (N / columns, K / group, columns), and vectors (N,), filled up to whole panels."""

    panels: Tensor  # 32-bit groups: float32, or int32 that hold several integers
    scale: Tensor  # float32, of integers
    sums: Tensor  # int32: of each row of W, which a zero of x is multiplied with
    rows: int  # N

    @classmethod
    def floats(cls, weight: Tensor) -> "PackedWeights":
        """Pack a float32 matrix."""
        columns = tile().columns
        panels = np.empty((-(-len(weight) // columns), weight.shape[1], columns), np.float32)  # in huge pages
        _pack(weight.detach().numpy(), panels)
        return cls(torch.from_numpy(panels), torch.empty(0), torch.empty(0, dtype=torch.int32), len(weight))

    @classmethod
    def integers(cls, weight: Tensor, scale: Tensor, form: Format) -> "PackedWeights":
        """Pack what `quantize_weight` returned, for products with x in a format."""
        sums = weight.sum(1, dtype=torch.int32)
        return cls(_integer_panels(weight, form), _filled(scale), _filled(sums), len(weight))

    def multiply(self, x: Tensor | Integers, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return x Wᵀ + bias, float32 (M, N). A row's result does not depend on the other rows, to the last bit."""
        if isinstance(x, Tensor):
            x = Integers(x, _NOTHING, _NO_ZERO)
        if out is None:
            out = torch.empty(len(x.values), self.rows)
        if not len(x.values):
            return out
        bias = _filled(torch.zeros(self.rows) if bias is None else bias.detach())
        arrays = [each.numpy() for each in (*x, self.panels, self.scale, self.sums, bias, out)]
        count, threads = len(self.panels), torch.get_num_threads()
        if threads == 1 or len(x.values) * self.panels.numel() < _SHARED:
            _multiply(0, count, *arrays)
        else:
            cuts = [count * part // threads for part in range(threads + 1)]
            list(_pool(threads).map(lambda cut: _multiply(*cut, *arrays), pairwise(cuts)))
        return out


_NOTHING, _NO_ZERO = torch.empty(0), torch.empty(0, dtype=torch.int32)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "weft-matmul")


os.register_at_fork(after_in_child=_pool.cache_clear)


def _filled(vector: Tensor) -> Tensor:
    """Lengthen a vector to whole panels."""
    return torch.nn.functional.pad(vector, (0, -len(vector) % tile().columns))


def _integer_panels(weight: Tensor, form: Format) -> Tensor:
    """Lay out int8 (N, K) as int32 (N / columns, K / group, columns); what is filled up is 0."""
    columns, group = tile().columns, form.group
    held = weight if form is UINT8 else weight.to(form.dtype)
    padded = torch.nn.functional.pad(held, (0, -held.shape[1] % group, 0, -len(held) % columns))
    panels = padded.view(-1, columns, padded.shape[1] // group, group).transpose(1, 2).contiguous()
    return panels.view(torch.int32).squeeze(3)


@keeper()
def _pack(weight, panels):  # type: ignore[no-untyped-def]
    rows, columns = weight.shape[0], panels.shape[2]
    for panel in range(panels.shape[0]):
        first = panel * columns
        for k in range(weight.shape[1]):
            for column in range(min(columns, rows - first)):
                panels[panel, k, column] = weight[first + column, k]
            for column in range(rows - first, columns):
                panels[panel, k, column] = 0


@keeper()
def _multiply(low, high, x, x_scale, x_zero, panels, scale, sums, bias, out):  # type: ignore[no-untyped-def]
    """Multiply with the panels low … high."""
    steps, M = panels.shape[1], x.shape[0]
    block = max(1, _CACHED // (4 * steps) // _ROWS) * _ROWS
    rows = _ROWS if x.itemsize == 4 or _VNNI else _FEW  # other sums need registers for products, too
    for first in range(0, M, block):
        for panel in range(low, high):
            column = 4 * panel * _COLUMNS
            multiply_panel(
                x,
                rows,
                min(block, M - first),
                x.ctypes.data + first * x.strides[0],
                x.strides[0],
                4,
                x_scale.ctypes.data + 4 * first,
                x_zero.ctypes.data + 4 * first,
                panels.ctypes.data + column * steps,
                4 * _COLUMNS,
                steps,
                scale.ctypes.data + column,
                sums.ctypes.data + column,
                bias.ctypes.data + column,
                out.ctypes.data + first * out.strides[0] + column,
                out.strides[0],
                out.shape[1] - panel * _COLUMNS,
            )


_ROWS, _COLUMNS, _FEW, _VNNI = tile().rows, tile().columns, min(4, tile().rows), has_vnni()


@keeper()
def multiply_panel(  # type: ignore[no-untyped-def]
    kind, most, rows, x, x_row, x_step, x_scale, x_zero, w, w_step, steps, scale, sums, bias, y, y_row, columns
):
    """Multiply `rows` of x with a panel, `most` at a time: see `_tile`, whose arguments these are."""
    while rows > 0:
        if rows >= _ROWS and most == _ROWS:
            done = _ROWS
            _tile(
                kind, _ROWS, x, x_row, x_step, x_scale, x_zero, w, w_step, steps, scale, sums, bias, y, y_row, columns
            )
        elif rows >= _FEW:
            done = _FEW
            _tile(kind, _FEW, x, x_row, x_step, x_scale, x_zero, w, w_step, steps, scale, sums, bias, y, y_row, columns)
        else:
            done = 1
            _tile(kind, 1, x, x_row, x_step, x_scale, x_zero, w, w_step, steps, scale, sums, bias, y, y_row, columns)
        rows, x, y = rows - done, x + done * x_row, y + done * y_row
        x_scale, x_zero = x_scale + 4 * done, x_zero + 4 * done


@intrinsic(prefer_literal=True)
def _tile(  # type: ignore[no-untyped-def]
    typing, kind, rows, x, x_row, x_step, x_scale, x_zero, w, w_step, steps, scale, sums, bias, y, y_row, columns
):
    """Make a tile of y: `rows`, a constant, by the columns of a panel, of which `columns` are written.

    `kind` is an array whose dtype says which products. All else are the addresses of what is read and written, and
    distances in bytes: between rows (x_row, y_row) and between steps through K (x_step, w_step).
    """
    names = ["x", "x_row", "x_step", "x_scale", "x_zero", "w", "w_step", "steps", "scale", "sums", "bias"]
    names += ["y", "y_row", "columns"]
    signature = types.void(kind, rows, *[types.int64] * len(names))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _Generator(builder, rows.literal_value, str(kind.dtype), dict(zip(names, args[2:], strict=True))).generate()
        return context.get_dummy_value()

    return signature, generate


class _Generator:
    """Writes the instructions of one tile."""

    def __init__(self, builder: Any, rows: int, dtype: str, given: dict[str, Any]) -> None:
        self.builder, self.rows, self.dtype, self.given = builder, rows, dtype, given
        self.vectors, self.lanes = tile().vectors, tile().lanes
        self.number = _FLOAT if dtype == "float32" else _INT32
        self.in_order = dtype == "float32" or (dtype == "uint8" and _VNNI)  # else LLVM would mix the sums of steps
        self.vector, self.floats = ir.VectorType(self.number, self.lanes), ir.VectorType(_FLOAT, self.lanes)

    def generate(self) -> None:
        """Write the loops over K, and what is done with the sums."""
        build, steps = self.builder, self.given["steps"]
        self.x = [self._at("x", "x_row", row) for row in range(self.rows)]
        if self.dtype == "float32":
            start = self._columns("bias", self.vector)
        else:
            start = [ir.Constant(self.vector, [0] * self.lanes)] * self.vectors
        whole = build.and_(steps, _INT64(-_UNROLLED)) if self.in_order else _INT64(0)
        sums = self._loop(start * self.rows, _INT64(0), whole, _UNROLLED) if self.in_order else start * self.rows
        sums = self._loop(sums, whole, steps, 1)
        self._store(sums if self.dtype == "float32" else self._scaled(sums))

    @property
    def _parts(self) -> range:
        return range(self.vectors)

    def _at(self, name: str, stride: str | None = None, row: int = 0, part: int = 0) -> Any:
        """Return the address of a vector: that of `name`, some rows and vectors on."""
        build, address = self.builder, self.given[name]
        if stride is not None:
            address = build.add(address, build.mul(self.given[stride], _INT64(row)))
        return build.add(address, _INT64(4 * part * self.lanes))

    def _loop(self, sums: list[Any], first: Any, last: Any, unrolled: int) -> list[Any]:
        """Add the products of steps first … last to the sums."""
        build = self.builder
        before, body, after = build.block, build.append_basic_block(), build.append_basic_block()
        build.cbranch(build.icmp_signed("<", first, last), body, after)
        build.position_at_end(body)
        step, inside = build.phi(_INT64), [build.phi(self.vector) for _ in sums]
        added: list[Any] = list(inside)
        for turn in range(unrolled):
            added = self._step(added, build.add(step, _INT64(turn)))
        following = build.add(step, _INT64(unrolled))
        build.cbranch(build.icmp_signed("<", following, last), body, after)
        for phi, at_first, later in zip([step, *inside], [first, *sums], [following, *added], strict=True):
            phi.add_incoming(at_first, before)
            phi.add_incoming(later, body)
        build.position_at_end(after)
        totals = [build.phi(self.vector) for _ in sums]
        for phi, at_first, later in zip(totals, sums, added, strict=True):
            phi.add_incoming(at_first, before)
            phi.add_incoming(later, body)
        return totals

    def _step(self, sums: list[Any], step: Any) -> list[Any]:
        """Add the products of one 32-bit group of each row of x with a row of the panel."""
        build, given = self.builder, self.given
        row = build.add(given["w"], build.mul(step, given["w_step"]))
        weights = [self._load(build.add(row, _INT64(4 * part * self.lanes)), self.vector) for part in self._parts]
        added = []
        for at, x in enumerate(self.x):
            value = self._shared(self._load(build.add(x, build.mul(step, given["x_step"])), self.number))
            own = sums[at * self.vectors : (at + 1) * self.vectors]
            added += [self._add_product(total, value, weight) for total, weight in zip(own, weights, strict=True)]
        return added

    def _shared(self, value: Any) -> Any:
        """Put one number into all lanes."""
        none = ir.Constant(ir.VectorType(value.type, self.lanes), ir.Undefined)
        lanes = ir.Constant(ir.VectorType(_INT32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(self.builder.insert_element(none, value, _INT32(0)), none, lanes)

    def _add_product(self, total: Any, x: Any, weight: Any) -> Any:
        build, loose = self.builder, ["contract"]
        if self.dtype == "float32":
            return build.fadd(total, build.fmul(x, weight, flags=loose), flags=loose)
        if self.dtype == "uint8" and _VNNI:
            return self._call(f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}", self.vector, total, x, weight)
        if self.dtype == "uint8":
            ones = ir.Constant(ir.VectorType(_INT16, 2 * self.lanes), [1] * 2 * self.lanes)
            return build.add(total, self._pairs(self._pairs_of_bytes(x, weight), ones))
        return build.add(total, self._pairs(x, weight))

    def _pairs_of_bytes(self, x: Any, weight: Any) -> Any:
        """Multiply bytes and add neighbours, in 16 bits."""
        narrow, wide = ir.VectorType(ir.IntType(8), 4 * self.lanes), ir.VectorType(_INT16, 2 * self.lanes)
        names = {4: "ssse3.pmadd.ub.sw.128", 8: "avx2.pmadd.ub.sw", 16: "avx512.pmaddubs.w.512"}
        values = (self.builder.bitcast(each, narrow) for each in (x, weight))
        return self._call(f"llvm.x86.{names[self.lanes]}", wide, *values)

    def _pairs(self, x: Any, weight: Any) -> Any:
        """Multiply 16-bit integers and add neighbours: LLVM makes one instruction of it where there is one."""
        build = self.builder
        narrow, wide = (ir.VectorType(kind, 2 * self.lanes) for kind in (_INT16, _INT32))
        product = build.mul(*(build.sext(build.bitcast(each, narrow), wide) for each in (x, weight)))
        none, lanes = ir.Constant(wide, ir.Undefined), ir.VectorType(_INT32, self.lanes)
        halves = [ir.Constant(lanes, list(range(at, 2 * self.lanes, 2))) for at in (0, 1)]
        return build.add(*(build.shuffle_vector(product, none, half) for half in halves))

    def _scaled(self, sums: list[Any]) -> list[Any]:
        """Return the products of what the integers stand for: (sum - zero · Σ w) · scales + bias."""
        build, scaled = self.builder, []
        columns = list(
            zip(
                self._columns("sums", self.vector),
                self._columns("scale", self.floats),
                self._columns("bias", self.floats),
                strict=True,
            )
        )
        for row in range(self.rows):
            zero = self._shared(self._load(build.add(self.given["x_zero"], _INT64(4 * row)), _INT32))
            own = self._shared(self._load(build.add(self.given["x_scale"], _INT64(4 * row)), _FLOAT))
            for total, (column, scale, bias) in zip(sums[row * self.vectors :], columns, strict=False):
                number = build.sitofp(build.sub(total, build.mul(zero, column)), self.floats)
                product = build.fmul(build.fmul(number, scale), own, flags=["contract"])
                scaled.append(build.fadd(product, bias, flags=["contract"]))
        return scaled

    def _columns(self, name: str, kind: Any) -> list[Any]:
        """Load what each column has of its own."""
        return [self._load(self._at(name, part=part), kind) for part in self._parts]

    def _store(self, values: list[Any]) -> None:
        """Write the tile; of a panel that is only filled up, what there is room for."""
        build, columns = self.builder, self.given["columns"]
        places = [self._at("y", "y_row", row, part) for row in range(self.rows) for part in self._parts]
        with build.if_else(build.icmp_signed(">=", columns, _INT64(self.vectors * self.lanes))) as (whole, part_of_it):
            with whole:
                for value, place in zip(values, places, strict=True):
                    build.store(value, build.inttoptr(place, self.floats.as_pointer()), align=4)
            with part_of_it:
                masks = [self._before(columns, part * self.lanes) for part in self._parts]
                for value, place, mask in zip(values, places, masks * self.rows, strict=True):
                    where = build.inttoptr(place, self.floats.as_pointer())
                    name = f"llvm.masked.store.v{self.lanes}f32.p0"
                    self._call(name, ir.VoidType(), value, where, _INT32(4), mask)

    def _before(self, end: Any, first: int) -> Any:
        """Return which lanes, the first of which is a number, come before an end."""
        lanes = ir.Constant(ir.VectorType(_INT64, self.lanes), list(range(first, first + self.lanes)))
        return self.builder.icmp_signed("<", lanes, self._shared(end))

    def _load(self, address: Any, kind: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=4)

    def _call(self, name: str, result: Any, *values: Any) -> Any:
        kind = ir.FunctionType(result, [value.type for value in values])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), values)
