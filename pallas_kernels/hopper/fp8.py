"""e4m3 tiles on their way to and from wgmma, which takes 8-bit operands K-major only.

The value tile is the key tile `[tokens, channels]`; as the second product's operand it must lie
along the tokens. `ldmatrix` transposes 16-bit elements: read as such, an element is a pair of
neighbouring channels of one token, and two byte permutations part the pairs into the rows of the
even and of the odd channels. That puts the tokens of each group of 16 into the order

    0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15

which is the order that the probabilities get when the registers of an accumulator are taken, as
they are, for an 8-bit operand. A product over tokens is none the wiser.

On the simulated GPU (`interpret`) everything stays in natural order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from pallas_kernels.hopper.inline import inline_mgpu
from pallas_kernels.hopper.layouts import WGMMA, WGMMA_8BIT, WGMMA_COLUMN, WGMMA_ROW
from pallas_kernels.hopper.threads import const as _const
from pallas_kernels.hopper.threads import extract as _extract
from pallas_kernels.hopper.threads import warp_and_lane as _warp_and_lane

E4M3 = jnp.float8_e4m3fn


def as_operand(p: jax.Array, *, interpret: bool) -> jax.Array:
    """An e4m3 accumulator tile `[64, tokens]` as an 8-bit operand, its tokens in the module's
    order."""
    if interpret:
        return p
    rows, tokens = p.shape
    result = plgpu.ShapeDtypeStruct(p.shape, E4M3, layout=WGMMA_8BIT)

    @inline_mgpu(arg_types=(WGMMA,), return_type=result)
    def relabel(ctx, p):
        del ctx
        layout = WGMMA_8BIT.to_mgpu()
        pairs = p.registers.reshape(rows // 64, tokens // 8, 2)
        fours = np.empty((rows // 64, tokens // 16, 2), dtype=object)
        for m, group, half in np.ndindex(fours.shape):
            both = [pairs[m, 2 * group, half], pairs[m, 2 * group + 1, half]]
            fours[m, group, half] = mgpu_utils.vector_concat(both)
        fours = fours.reshape(layout.registers_shape(p.shape))
        return FragmentedArray(_registers=fours, _layout=layout, _is_signed=None)

    return relabel(p)


def rounding_error(values: jax.Array, terms: int = 1) -> jax.Array:
    """What is left of float32 values when `terms` times what is left is rounded to e4m3."""
    for _ in range(terms):
        values = values - values.astype(E4M3).astype(jnp.float32)
    return values


def load_transposed(tile: Any, pairs: Any, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The even and the odd columns of an e4m3 tile `[tokens, columns]` as operands
    `[columns / 2, tokens]`; `pairs` is the tile's memory as `[tokens, columns / 2]` 16-bit
    elements."""
    if interpret:
        values = tile[...].T
        return values[0::2], values[1::2]
    pairs_t = plgpu.load(pairs.T, layout=WGMMA)
    rows, tokens = pairs_t.shape
    result = plgpu.ShapeDtypeStruct((rows, tokens), E4M3, layout=WGMMA_8BIT)

    @inline_mgpu(arg_types=(WGMMA,), return_type=(result, result))
    def part(ctx, pairs_t):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        four = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
        layout = WGMMA_8BIT.to_mgpu()
        registers = pairs_t.registers.reshape(rows // 64, tokens // 8, 2)
        parted = [np.empty((rows // 64, tokens // 16, 2), dtype=object) for _ in range(2)]
        for m, group, half in np.ndindex(parted[0].shape):
            low, high = (
                mgpu_utils.bitcast(registers[m, 2 * group + i, half], i32) for i in range(2)
            )
            for out, selection in zip(parted, (0x6420, 0x7531), strict=True):
                chosen = mgpu_utils.prmt(low, high, _const(selection))
                out[m, group, half] = mgpu_utils.bitcast(chosen, four)
        return tuple(
            FragmentedArray(
                _registers=out.reshape(layout.registers_shape((rows, tokens))),
                _layout=layout,
                _is_signed=None,
            )
            for out in parted
        )

    return part(pairs_t)


def load_rows(ref: Any, rows: int, *, interpret: bool) -> jax.Array:
    """64 rows of a 16-bit matrix in global memory, which has `rows`; the last stands in for those
    that it has not."""
    if interpret:
        values = ref[...]
        rest = jnp.broadcast_to(values[rows - 1 :], (64 - rows, values.shape[1]))
        return jnp.concatenate([values, rest])
    columns = ref.shape[1]
    result = plgpu.ShapeDtypeStruct((64, columns), ref.dtype, layout=WGMMA_8BIT)

    @inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(ctx, ref):
        del ctx
        element = ir.MemRefType(ref.type).element_type
        (row_stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        four = ir.VectorType.get((4,), element)
        layout = WGMMA_8BIT.to_mgpu()
        warp, lane = _warp_and_lane()
        row = arith.addi(arith.muli(warp, _const(16)), arith.shrui(lane, _const(2)))
        column = arith.muli(arith.andi(lane, _const(3)), _const(4))
        registers = np.empty((1, columns // 16, 2), dtype=object)
        for half in range(2):
            at = arith.addi(row, _const(8 * half))
            if rows < 64:
                at = arith.minui(at, _const(rows - 1))
            at = arith.addi(arith.muli(at, _const(row_stride)), column)
            first = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [at], element)
            for group in range(columns // 16):
                at = mgpu_utils.getelementptr(first, [16 * group], element)
                registers[0, group, half] = llvm.load(four, at)
        registers = registers.reshape(layout.registers_shape((64, columns)))
        return FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref)


def store_operand(ref: Any, values: jax.Array, transforms: Any, *, interpret: bool) -> None:
    """Store 64 rows in `load_rows`' layout to a tile in shared memory that wgmma reads."""
    if interpret:
        ref[...] = values
        return

    @inline_mgpu(arg_types=(plgpu.RefType(transforms), WGMMA_8BIT))
    def store(ctx, ref, values):
        del ctx
        i8 = ir.IntegerType.get_signless(8)
        itemsize = mgpu_utils.bitwidth(values.mlir_dtype) // 8
        row_tile_bytes, column_tile_bytes, row_bytes = tile_strides(ref)
        warp, lane = _warp_and_lane()
        row = arith.muli(arith.shrui(lane, _const(2)), _const(row_bytes))
        # Chunks of 16 bytes trade places within a row, by the 128 bytes that the row lies in.
        swizzle = arith.andi(arith.shrui(row, _const(7)), _const(row_bytes // 16 - 1))
        swizzle = arith.muli(swizzle, _const(16))
        column = arith.muli(arith.andi(lane, _const(3)), _const(4 * itemsize))
        tile = arith.muli(warp, _const(2 * row_tile_bytes))
        row = arith.addi(row, tile)
        registers = values.registers.reshape(values.shape[1] // 16, 2)
        base = mgpu_utils.memref_ptr(ref)
        for group in range(registers.shape[0]):
            column_tile, first = divmod(16 * itemsize * group, row_bytes)
            place = arith.xori(arith.addi(column, _const(first)), swizzle)
            at = mgpu_utils.getelementptr(base, [arith.addi(row, place)], i8)
            for half in range(2):
                offset = half * row_tile_bytes + column_tile * column_tile_bytes
                four = registers[group, half]
                if itemsize == 1:  # LLVM has no such type
                    four = mgpu_utils.bitcast(four, ir.IntegerType.get_signless(32))
                llvm.store(four, mgpu_utils.getelementptr(at, [offset], i8))

    store(ref, values)


def load_columns(
    ref: Any, columns: int, *, per_row: int | None = None, kinds: int = 1, interpret: bool
) -> tuple[jax.Array, ...]:
    """Values in shared memory, of one kind or two, as one of each per accumulator column.

    `ref [rows, ...]` holds those of `per_row` columns in each row, the kinds side by side.
    """
    per_row = columns if per_row is None else per_row
    if interpret:
        values = ref[...][:, : per_row * kinds].reshape(columns, kinds)
        return tuple(values[:, i] for i in range(kinds))
    row_stride = ref.shape[1]
    result = plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=WGMMA_COLUMN)

    @inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(result,) * kinds)
    def load(ctx, ref):
        del ctx
        f32 = ir.F32Type.get()
        loaded = ir.VectorType.get((2 * kinds,), f32)
        layout = WGMMA_COLUMN.to_mgpu()
        _, lane = _warp_and_lane()
        mine = arith.muli(arith.andi(lane, _const(3)), _const(2 * kinds))
        first = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [mine], f32)
        out = [np.empty(layout.registers_shape((columns,)), dtype=object) for _ in range(kinds)]
        for group in range(columns // 8):
            row, column = divmod(8 * group, per_row)
            at = [row * row_stride + column * kinds]
            values = llvm.load(loaded, mgpu_utils.getelementptr(first, at, f32))
            for kind in range(kinds):
                pair = [_extract(values, i * kinds + kind) for i in range(2)]
                out[kind].flat[group] = vector.from_elements(ir.VectorType.get((2,), f32), pair)
        return tuple(FragmentedArray(_registers=x, _layout=layout, _is_signed=None) for x in out)

    return load(ref)


def load_row_values(ref: Any, *, interpret: bool) -> jax.Array:
    """64 float32 in global memory, as one value per accumulator row."""
    if interpret:
        return ref[...]
    result = plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=WGMMA_ROW)

    @inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(ctx, ref):
        del ctx
        one, layout = ir.VectorType.get((1,), ir.F32Type.get()), WGMMA_ROW.to_mgpu()
        registers = np.empty(layout.registers_shape((64,)), dtype=object)
        for half, at in enumerate(_row_places(ref)):
            registers.flat[half] = llvm.load(one, at)
        return FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref)


def store_row_values(ref: Any, values: jax.Array, *, interpret: bool) -> None:
    """The inverse of `load_row_values`."""
    if interpret:
        ref[...] = values
        return

    @inline_mgpu(arg_types=(plgpu.RefType(), WGMMA_ROW))
    def store(ctx, ref, values):
        del ctx
        for value, at in zip(values.registers.flat, _row_places(ref), strict=True):
            llvm.store(value, at)

    store(ref, values)


def max_over_columns(values: jax.Array, *, interpret: bool) -> jax.Array:
    """The largest of one value per accumulator column.

    Within each warp, which holds all of them: Pallas' own reduction takes the way through shared
    memory, in a buffer that all warpgroups share.
    """
    if interpret:
        return values.max()

    @inline_mgpu(
        arg_types=(WGMMA_COLUMN,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def reduce(ctx, values):
        del ctx
        scalars = [_extract(pair, i) for pair in values.registers.flat for i in range(2)]
        while len(scalars) > 1:
            pairs = zip(scalars[::2], scalars[1::2], strict=False)
            odd = scalars[len(scalars) & ~1 :]
            scalars = [arith.maxnumf(a, b) for a, b in pairs] + odd
        largest = scalars[0]
        for distance in (1, 2):
            largest = arith.maxnumf(largest, mgpu_utils.shfl_bfly(largest, distance))
        return FragmentedArray.splat(largest, ())

    return reduce(values)


def at_most(values: jax.Array, bound: float, *, interpret: bool) -> jax.Array:
    """Non-negative values, one per accumulator column, bounded; all that is none, NaN too, becomes
    `bound`."""
    if interpret:
        return jnp.where((values >= 0) & (values <= bound), values, bound)
    result = plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout=WGMMA_COLUMN)

    @inline_mgpu(arg_types=(WGMMA_COLUMN,), return_type=result)
    def smaller(ctx, values):
        # As unsigned integers: infinity, NaN and what has a sign are the largest.
        del ctx
        bits = _const(int(np.float32(bound).view(np.int32)))
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        out = np.empty_like(values.registers)
        for i, pair in enumerate(values.registers.flat):
            scalars = [
                mgpu_utils.bitcast(
                    arith.minui(mgpu_utils.bitcast(_extract(pair, j), i32), bits), f32
                )
                for j in range(2)
            ]
            out.flat[i] = vector.from_elements(ir.VectorType.get((2,), f32), scalars)
        return FragmentedArray(_registers=out, _layout=values.layout, _is_signed=None)

    return smaller(values)


def keep_columns(
    tile: jax.Array, values: jax.Array, row_limit: jax.Array, limit: jax.Array, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """`tile` with -inf where the column is not below the row's limit; `values`, one per column,
    with 0 where it is not below `limit`."""
    if interpret:
        column = lax.broadcasted_iota(jnp.int32, tile.shape, 1)
        kept = jnp.where(column < row_limit[:, None], tile, -jnp.inf)
        return kept, jnp.where(jnp.arange(tile.shape[1]) < limit, values, 0.0)

    results = (
        plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, layout=WGMMA),
        plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout=WGMMA_COLUMN),
    )
    arguments = (WGMMA, WGMMA_COLUMN, WGMMA_ROW, plgpu.Layout.WG_SPLAT(()))

    @inline_mgpu(arg_types=arguments, return_type=results)
    def keep(ctx, tile, values, row_limit, limit):
        # Compared with constants: as Pallas would have it, the numbers of the columns are hoisted
        # out of the loop, and spilled.
        del ctx
        f32 = ir.F32Type.get()
        pair_type = ir.VectorType.get((2,), f32)
        below = lambda limit, x: arith.cmpi(arith.CmpIPredicate.sgt, limit, _const(x))
        _, lane = _warp_and_lane()
        mine = arith.muli(arith.andi(lane, _const(3)), _const(2))

        def chosen(pair, limit, group, other):
            other = arith.constant(f32, ir.FloatAttr.get(f32, other))
            scalars = [
                arith.select(below(limit, 8 * group + i), _extract(pair, i), other)
                for i in range(2)
            ]
            return vector.from_elements(pair_type, scalars)

        limits = [arith.subi(_extract(x, 0), mine) for x in row_limit.registers.flat]
        before = tile.registers.reshape(8, 2)
        after = np.empty_like(before)
        for group, half in np.ndindex(before.shape):
            after[group, half] = chosen(before[group, half], limits[half], group, -np.inf)
        limit = arith.subi(limit.registers.flat[0], mine)
        kept = np.empty_like(values.registers)
        for group in range(8):
            kept.flat[group] = chosen(values.registers.flat[group], limit, group, 0.0)
        return (
            FragmentedArray(
                _registers=after.reshape(tile.registers.shape), _layout=tile.layout, _is_signed=None
            ),
            FragmentedArray(_registers=kept, _layout=values.layout, _is_signed=None),
        )

    return keep(tile, values, row_limit, limit)


def zero_rows(ref: Any, first: jax.Array, transforms: Any, *, interpret: bool) -> None:
    """Zero the rows from `first` on of an e4m3 tile of 64 rows in shared memory."""
    if interpret:
        values = ref[...]
        row = lax.broadcasted_iota(jnp.int32, values.shape, 0)
        ref[...] = jnp.where(row < first, values, jnp.zeros_like(values))
        return

    @inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.Layout.WG_SPLAT(())))
    def zero(ctx, ref, first):
        # Two threads a row. Swizzling only changes places within the 128 bytes of a row.
        del ctx
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        row_tile_bytes, column_tile_bytes, row_bytes = tile_strides(ref)
        column_tiles = ir.MemRefType(ref.type).shape[1]
        warp, lane = _warp_and_lane()
        thread = arith.addi(arith.muli(warp, _const(32)), lane)
        row, half = arith.shrui(thread, _const(1)), arith.andi(thread, _const(1))
        at = arith.addi(
            arith.muli(arith.shrui(row, _const(3)), _const(row_tile_bytes)),
            arith.muli(arith.andi(row, _const(7)), _const(row_bytes)),
        )
        at = arith.addi(at, arith.muli(half, _const(row_bytes // 2)))
        place = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [at], i8)
        four = ir.VectorType.get((4,), i32)
        zeros = arith.constant(
            four, ir.DenseElementsAttr.get_splat(four, ir.IntegerAttr.get(i32, 0))
        )
        dead = arith.cmpi(arith.CmpIPredicate.sge, row, first.registers.flat[0])
        branch = scf.IfOp(dead)
        with ir.InsertionPoint(branch.then_block):
            for tile in range(column_tiles):
                for chunk in range(0, row_bytes // 2, 16):
                    offset = tile * column_tile_bytes + chunk
                    llvm.store(zeros, mgpu_utils.getelementptr(place, [offset], i8))
            scf.yield_([])

    zero(ref, first)


def store_transposed(ref: Any, even: jax.Array, odd: jax.Array, *, interpret: bool) -> None:
    """Store 16-bit `[columns / 2, rows]` accumulator tiles of the even and the odd columns as
    `ref [rows, columns]` in global memory."""
    if interpret:
        ref[...] = _interleave(even, odd)
        return

    @inline_mgpu(arg_types=(plgpu.RefType(), WGMMA, WGMMA))
    def store(ctx, ref, even, odd):
        del ctx
        element = ir.MemRefType(ref.type).element_type
        (row_stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        warp, lane = _warp_and_lane()
        row = arith.muli(arith.andi(lane, _const(3)), _const(2))
        pair = arith.addi(arith.muli(warp, _const(16)), arith.shrui(lane, _const(2)))
        at = arith.addi(arith.muli(row, _const(row_stride)), arith.muli(pair, _const(2)))
        first = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [at], element)
        for (block, group, half), words in _words(even, odd):
            for i, word in enumerate(words):
                offset = (8 * group + i) * row_stride + 2 * (64 * block + 8 * half)
                llvm.store(word, mgpu_utils.getelementptr(first, [offset], element))

    store(ref, even, odd)


def stage_transposed(
    ref: Any, even: jax.Array, odd: jax.Array, transforms: Any, *, interpret: bool
) -> None:
    """`store_transposed` into a tile of 16-bit elements in shared memory, swizzled by 128 bytes.

    Eight lanes write 32 bytes of one row, and the four rows of a warp's store are two apart: the
    swizzle puts them into different banks.
    """
    if interpret:
        ref[...] = _interleave(even, odd)
        return

    @inline_mgpu(arg_types=(plgpu.RefType(transforms), WGMMA, WGMMA))
    def store(ctx, ref, even, odd):
        del ctx
        i8 = ir.IntegerType.get_signless(8)
        row_tile_bytes, column_tile_bytes, row_bytes = tile_strides(ref)
        assert row_bytes == 128
        warp, lane = _warp_and_lane()
        row = arith.muli(arith.andi(lane, _const(3)), _const(2))  # + 1 for the second word
        # Bytes: 4 a pair, 32 pairs a row of 128 bytes, two warps' 16 pairs each.
        in_row = arith.addi(
            arith.muli(arith.andi(warp, _const(1)), _const(64)),
            arith.muli(arith.shrui(lane, _const(2)), _const(4)),
        )
        tile = arith.muli(arith.shrui(warp, _const(1)), _const(column_tile_bytes))
        base = mgpu_utils.memref_ptr(ref)
        firsts = {}
        for half, i in np.ndindex(2, 2):
            at_row = arith.addi(row, _const(i))
            swizzle = arith.muli(at_row, _const(16))
            column = arith.xori(arith.addi(in_row, _const(32 * half)), swizzle)
            at = arith.addi(tile, arith.addi(arith.muli(at_row, _const(128)), column))
            firsts[half, i] = mgpu_utils.getelementptr(base, [at], i8)
        for (block, group, half), words in _words(even, odd):
            offset = group * row_tile_bytes + 2 * block * column_tile_bytes
            for i, word in enumerate(words):
                llvm.store(word, mgpu_utils.getelementptr(firsts[half, i], [offset], i8))

    store(ref, even, odd)


def _interleave(even: jax.Array, odd: jax.Array) -> jax.Array:
    return jnp.stack([even.T, odd.T], axis=-1).reshape(even.shape[1], -1)


def _words(even: FragmentedArray, odd: FragmentedArray):
    """For every register: its place, and for both of its columns the pair of an even and an odd
    value."""
    blocks, groups = even.shape[0] // 64, even.shape[1] // 8
    evens, odds = ([*x.registers.reshape(-1)] for x in (even, odd))
    i32 = ir.IntegerType.get_signless(32)
    for at, pair in zip(np.ndindex(blocks, groups, 2), zip(evens, odds, strict=True), strict=True):
        low, high = (mgpu_utils.bitcast(x, i32) for x in pair)
        yield at, [mgpu_utils.prmt(low, high, _const(c)) for c in (0x5410, 0x7632)]


def _row_places(ref: ir.Value) -> list[ir.Value]:
    """The addresses of this thread's accumulator rows in 64 float32."""
    warp, lane = _warp_and_lane()
    row = arith.addi(arith.muli(warp, _const(16)), arith.shrui(lane, _const(2)))
    f32 = ir.F32Type.get()
    first = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [row], f32)
    return [first, mgpu_utils.getelementptr(first, [8], f32)]


def tile_strides(ref: ir.Value) -> tuple[int, int, int]:
    """Of a tiled matrix in shared memory, in bytes: from 8 rows to the next 8, from one tile of
    columns to the next, and from row to row of a tile."""
    matrix = ir.MemRefType(ref.type)
    itemsize = mgpu_utils.bitwidth(matrix.element_type) // 8
    strides, _ = matrix.get_strides_and_offset()
    assert matrix.shape[2] == 8 and strides[2:] == [matrix.shape[3], 1]
    row_tile, column_tile, row, _ = (stride * itemsize for stride in strides)
    return row_tile, column_tile, row
