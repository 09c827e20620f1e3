"""The microkernel of matrix products on the CPU: one tile of y = x Wᵀ, generated as LLVM IR for this machine.

A tile, some rows of y by the columns of one panel of Wᵀ, stays in registers during the loop over K. `tile` gives its
size for this machine's registers; `multiply_panel` loops over all rows. `weft.nn.kernels.numba.matmul` packs matrices
into panels.
"""

from functools import cache
from typing import Any, NamedTuple

from llvmlite import binding, ir
from numba.core import cgutils, config, types
from numba.extending import intrinsic

from weft.nn.rnn.fused.codegen_numba import cached_njit

_UNROLL = 4  # steps of K in one iteration of the innermost loop
_FLOAT, _INT16, _INT32, _INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


@cache
def cpu_features() -> frozenset[str]:
    """Return the CPU features to compile for, by LLVM's names, such as `avx2`."""
    if config.CPU_FEATURES is not None:
        return frozenset(name[1:] for name in config.CPU_FEATURES.split(",") if name.startswith("+"))
    return frozenset(name for name, supported in binding.get_host_cpu_features().items() if supported)


def has_vnni() -> bool:
    """Return whether one instruction multiplies bytes and adds four products in 32 bits."""
    return bool(cpu_features() & {"avx512vnni", "avxvnni"})


class Tile(NamedTuple):
    """The part of y that is held in registers: `rows` by `vectors` · `lanes` columns."""

    rows: int
    vectors: int
    lanes: int

    @property
    def columns(self) -> int:
        """Number of columns of y that a panel computes."""
        return self.vectors * self.lanes


@cache
def tile() -> Tile:
    """Return the tile that fills the registers of this machine."""
    if "avx512f" in cpu_features():
        return Tile(12, 2, 16)  # 24 of 32 registers, of 512 bits
    if "avx" in cpu_features():
        return Tile(6, 2, 8)  # 12 of 16, of 256 bits
    return Tile(4, 2, 4)  # of 128 bits: any x86-64, ARM


ROWS, COLUMNS, FEW_ROWS, VNNI = tile().rows, tile().columns, min(4, tile().rows), has_vnni()


@cached_njit()
def multiply_panel(  # type: ignore[no-untyped-def]
    kind, tile_rows, rows, x, x_row, x_step, x_scale, x_zero, w, w_step, steps, scale, sums, bias, y, y_row, columns
):
    """Multiply `rows` of x with a panel, `tile_rows` at a time: see `_tile` for the arguments."""
    while rows > 0:
        if rows >= ROWS and tile_rows == ROWS:
            done = ROWS
            _tile(kind, ROWS, x, x_row, x_step, x_scale, x_zero, w, w_step, steps, scale, sums, bias, y, y_row, columns)
        elif rows >= FEW_ROWS:
            done = FEW_ROWS
            _tile(
                kind,
                FEW_ROWS,
                x,
                x_row,
                x_step,
                x_scale,
                x_zero,
                w,
                w_step,
                steps,
                scale,
                sums,
                bias,
                y,
                y_row,
                columns,
            )
        else:
            done = 1
            _tile(kind, 1, x, x_row, x_step, x_scale, x_zero, w, w_step, steps, scale, sums, bias, y, y_row, columns)
        rows, x, y = rows - done, x + done * x_row, y + done * y_row
        x_scale, x_zero = x_scale + 4 * done, x_zero + 4 * done


@intrinsic(prefer_literal=True)
def _tile(  # type: ignore[no-untyped-def]
    typing, kind, rows, x, x_row, x_step, x_scale, x_zero, w, w_step, steps, scale, sums, bias, y, y_row, columns
):
    """Compute a tile of y: `rows`, a constant, by the columns of a panel, of which `columns` are written.

    `kind` is an array whose dtype selects the product. All others are addresses, and strides in bytes: between rows
    (x_row, y_row) and between steps of K (x_step, w_step).
    """
    names = ["x", "x_row", "x_step", "x_scale", "x_zero", "w", "w_step", "steps", "scale", "sums", "bias"]
    names += ["y", "y_row", "columns"]
    signature = types.void(kind, rows, *[types.int64] * len(names))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _Generator(builder, rows.literal_value, str(kind.dtype), dict(zip(names, args[2:], strict=True))).generate()
        return context.get_dummy_value()

    return signature, generate


class _Generator:
    """Generates the LLVM instructions of one tile."""

    def __init__(self, builder: Any, rows: int, dtype: str, args: dict[str, Any]) -> None:
        self.builder, self.rows, self.dtype, self.args = builder, rows, dtype, args
        self.vectors, self.lanes = tile().vectors, tile().lanes
        self.scalar = _FLOAT if dtype == "float32" else _INT32
        self.in_order = dtype == "float32" or (
            dtype == "uint8" and VNNI
        )  # else LLVM would interleave the sums of steps
        self.vector, self.floats = ir.VectorType(self.scalar, self.lanes), ir.VectorType(_FLOAT, self.lanes)

    def generate(self) -> None:
        """Generate the loops over K, and the storing of the sums."""
        build, steps = self.builder, self.args["steps"]
        self.x = [self._address("x", "x_row", row) for row in range(self.rows)]
        if self.dtype == "float32":
            start = self._load_columns("bias", self.vector)
        else:
            start = [ir.Constant(self.vector, [0] * self.lanes)] * self.vectors
        unrolled = build.and_(steps, _INT64(-_UNROLL)) if self.in_order else _INT64(0)
        sums = self._loop(start * self.rows, _INT64(0), unrolled, _UNROLL) if self.in_order else start * self.rows
        sums = self._loop(sums, unrolled, steps, 1)
        self._store(sums if self.dtype == "float32" else self._dequantize(sums))

    @property
    def _parts(self) -> range:
        return range(self.vectors)

    def _address(self, name: str, stride: str | None = None, row: int = 0, part: int = 0) -> Any:
        """Return the address of a vector: that of the argument `name`, plus some rows and vectors."""
        build, address = self.builder, self.args[name]
        if stride is not None:
            address = build.add(address, build.mul(self.args[stride], _INT64(row)))
        return build.add(address, _INT64(4 * part * self.lanes))

    def _loop(self, sums: list[Any], first: Any, last: Any, unrolled: int) -> list[Any]:
        """Add the products of steps first … last to the sums."""
        build = self.builder
        before, body, after = build.block, build.append_basic_block(), build.append_basic_block()
        build.cbranch(build.icmp_signed("<", first, last), body, after)
        build.position_at_end(body)
        step, phis = build.phi(_INT64), [build.phi(self.vector) for _ in sums]
        totals: list[Any] = list(phis)
        for offset in range(unrolled):
            totals = self._step(totals, build.add(step, _INT64(offset)))
        next_step = build.add(step, _INT64(unrolled))
        build.cbranch(build.icmp_signed("<", next_step, last), body, after)
        for phi, initial, updated in zip([step, *phis], [first, *sums], [next_step, *totals], strict=True):
            phi.add_incoming(initial, before)
            phi.add_incoming(updated, body)
        build.position_at_end(after)
        exits = [build.phi(self.vector) for _ in sums]
        for phi, initial, updated in zip(exits, sums, totals, strict=True):
            phi.add_incoming(initial, before)
            phi.add_incoming(updated, body)
        return exits

    def _step(self, sums: list[Any], step: Any) -> list[Any]:
        """Add the products of one 32-bit group of each row of x with a row of the panel."""
        build, args = self.builder, self.args
        panel_row = build.add(args["w"], build.mul(step, args["w_step"]))
        weights = [self._load(build.add(panel_row, _INT64(4 * part * self.lanes)), self.vector) for part in self._parts]
        added = []
        for row, x in enumerate(self.x):
            value = self._broadcast(self._load(build.add(x, build.mul(step, args["x_step"])), self.scalar))
            row_sums = sums[row * self.vectors : (row + 1) * self.vectors]
            added += [self._add_product(total, value, weight) for total, weight in zip(row_sums, weights, strict=True)]
        return added

    def _broadcast(self, value: Any) -> Any:
        """Broadcast a scalar to all lanes."""
        undefined = ir.Constant(ir.VectorType(value.type, self.lanes), ir.Undefined)
        lanes = ir.Constant(ir.VectorType(_INT32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(self.builder.insert_element(undefined, value, _INT32(0)), undefined, lanes)

    def _add_product(self, total: Any, x: Any, weight: Any) -> Any:
        build, flags = self.builder, ["contract"]
        if self.dtype == "float32":
            return build.fadd(total, build.fmul(x, weight, flags=flags), flags=flags)
        if self.dtype == "uint8" and VNNI:
            return self._call(f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}", self.vector, total, x, weight)
        if self.dtype == "uint8":
            ones = ir.Constant(ir.VectorType(_INT16, 2 * self.lanes), [1] * 2 * self.lanes)
            return build.add(total, self._multiply_add_pairs(self._multiply_add_bytes(x, weight), ones))
        return build.add(total, self._multiply_add_pairs(x, weight))

    def _multiply_add_bytes(self, x: Any, weight: Any) -> Any:
        """Multiply bytes and add neighbours, in 16 bits."""
        narrow, wide = ir.VectorType(ir.IntType(8), 4 * self.lanes), ir.VectorType(_INT16, 2 * self.lanes)
        names = {4: "ssse3.pmadd.ub.sw.128", 8: "avx2.pmadd.ub.sw", 16: "avx512.pmaddubs.w.512"}
        values = (self.builder.bitcast(value, narrow) for value in (x, weight))
        return self._call(f"llvm.x86.{names[self.lanes]}", wide, *values)

    def _multiply_add_pairs(self, x: Any, weight: Any) -> Any:
        """Multiply 16-bit integers and add neighbours: one instruction, where LLVM has one."""
        build = self.builder
        narrow, wide = (ir.VectorType(kind, 2 * self.lanes) for kind in (_INT16, _INT32))
        product = build.mul(*(build.sext(build.bitcast(value, narrow), wide) for value in (x, weight)))
        undefined, lanes = ir.Constant(wide, ir.Undefined), ir.VectorType(_INT32, self.lanes)
        halves = [ir.Constant(lanes, list(range(first, 2 * self.lanes, 2))) for first in (0, 1)]
        return build.add(*(build.shuffle_vector(product, undefined, half) for half in halves))

    def _dequantize(self, sums: list[Any]) -> list[Any]:
        """Return the dequantized products: (sum - zero · Σ w) · scales + bias."""
        build, scaled = self.builder, []
        columns = list(
            zip(
                self._load_columns("sums", self.vector),
                self._load_columns("scale", self.floats),
                self._load_columns("bias", self.floats),
                strict=True,
            )
        )
        for row in range(self.rows):
            zero = self._broadcast(self._load(build.add(self.args["x_zero"], _INT64(4 * row)), _INT32))
            x_scale = self._broadcast(self._load(build.add(self.args["x_scale"], _INT64(4 * row)), _FLOAT))
            for total, (column, scale, bias) in zip(sums[row * self.vectors :], columns, strict=False):
                value = build.sitofp(build.sub(total, build.mul(zero, column)), self.floats)
                product = build.fmul(build.fmul(value, scale), x_scale, flags=["contract"])
                scaled.append(build.fadd(product, bias, flags=["contract"]))
        return scaled

    def _load_columns(self, name: str, kind: Any) -> list[Any]:
        """Load a vector of one value a column."""
        return [self._load(self._address(name, part=part), kind) for part in self._parts]

    def _store(self, values: list[Any]) -> None:
        """Store the tile; of a padded panel, only the columns that y has."""
        build, columns = self.builder, self.args["columns"]
        addresses = [self._address("y", "y_row", row, part) for row in range(self.rows) for part in self._parts]
        with build.if_else(build.icmp_signed(">=", columns, _INT64(self.vectors * self.lanes))) as (full, partial):
            with full:
                for value, address in zip(values, addresses, strict=True):
                    build.store(value, build.inttoptr(address, self.floats.as_pointer()), align=4)
            with partial:
                masks = [self._lanes_before(columns, part * self.lanes) for part in self._parts]
                for value, address, mask in zip(values, addresses, masks * self.rows, strict=True):
                    pointer = build.inttoptr(address, self.floats.as_pointer())
                    name = f"llvm.masked.store.v{self.lanes}f32.p0"
                    self._call(name, ir.VoidType(), value, pointer, _INT32(4), mask)

    def _lanes_before(self, end: Any, first: int) -> Any:
        """Return the mask of the lanes, numbered from `first`, that come before `end`."""
        lanes = ir.Constant(ir.VectorType(_INT64, self.lanes), list(range(first, first + self.lanes)))
        return self.builder.icmp_signed("<", lanes, self._broadcast(end))

    def _load(self, address: Any, kind: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=4)

    def _call(self, name: str, result: Any, *values: Any) -> Any:
        kind = ir.FunctionType(result, [value.type for value in values])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), values)
