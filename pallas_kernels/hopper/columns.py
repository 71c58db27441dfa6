"""Values per accumulator *column*: of transposed attention, which has the queries there.

A column of an accumulator lies in all four warps. Pallas' own reduction over it (`max(axis=0)`)
takes them together in a buffer of shared memory that is one for all warpgroups of a CTA, and two
that reduce at the same time get each other's values. Here the buffer is an argument.

The simulated GPU (`interpret`) uses the same buffers, so that it sees who shares them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.hopper.inline import any_of_warp, inline_mgpu
from pallas_kernels.hopper.layouts import WGMMA, WGMMA_COLUMN, WGMMA_ROW
from pallas_kernels.hopper.threads import const, extract, warp_and_lane

WARPS = 4
EXCHANGE_ROW = 512
"""Float32 of a row of `give`'s buffer: four for each thread."""


def own_rows(tile: jax.Array, *, largest: bool, interpret: bool) -> jax.Array:
    """Of each column of a `[64, columns]` accumulator, the largest (or the sum) of the rows that
    the thread holds.

    By its layout the result is one value per column, alike in all warps; it is not, until it has
    been through `over_rows`. Until then it may only be used element by element.
    """
    if interpret:
        return tile.max(axis=0) if largest else tile.sum(axis=0)
    columns = tile.shape[1]
    result = plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=WGMMA_COLUMN)

    @inline_mgpu(arg_types=(WGMMA,), return_type=result)
    def combine(ctx, tile):
        del ctx
        of_two, layout = _combine(largest), WGMMA_COLUMN.to_mgpu()
        out = np.empty(layout.registers_shape((columns,)), dtype=object)
        for group, pairs in enumerate(tile.registers.reshape(columns // 8, 2)):
            out.flat[group] = of_two(*pairs)
        return FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    return combine(tile)


def over_rows(values: jax.Array, scratch: Any, *, largest: bool, interpret: bool) -> jax.Array:
    """The largest (or the sum) of all threads' `own_rows` of each column, for all warps.

    `scratch [4, columns]`, float32, is this warpgroup's alone. Its warps must meet before it is
    used again.
    """
    (columns,) = values.shape
    if interpret:
        scratch[...] = jnp.broadcast_to(values, (WARPS, columns))
        return scratch[...][0]
    result = plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=WGMMA_COLUMN)

    @inline_mgpu(arg_types=(WGMMA_COLUMN, plgpu.RefType()), return_type=result)
    def reduce(ctx, values, scratch):
        del ctx
        of_two = _combine(largest)
        f32 = ir.F32Type.get()
        pair_type = ir.VectorType.get((2,), f32)
        warp, lane = warp_and_lane()
        mine = arith.muli(arith.andi(lane, const(3)), const(2))
        base = mgpu_utils.memref_ptr(scratch)
        read = mgpu_utils.getelementptr(base, [mine], f32)
        at = arith.addi(arith.muli(warp, const(columns)), mine)
        write = mgpu_utils.getelementptr(base, [at], f32)
        for group, pair in enumerate(values.registers.flat):
            scalars = [extract(pair, i) for i in range(2)]
            for distance in (4, 8, 16):
                scalars = [of_two(x, mgpu_utils.shfl_bfly(x, distance)) for x in scalars]
            # Eight lanes hold, and store, the same.
            pair = vector.from_elements(pair_type, scalars)
            llvm.store(pair, mgpu_utils.getelementptr(write, [8 * group], f32))
        mgpu_utils.warpgroup_barrier()
        layout = WGMMA_COLUMN.to_mgpu()
        out = np.empty(layout.registers_shape((columns,)), dtype=object)
        for group in range(columns // 8):
            places = [[of_warp * columns + 8 * group] for of_warp in range(WARPS)]
            pairs = [
                llvm.load(pair_type, mgpu_utils.getelementptr(read, place, f32)) for place in places
            ]
            out.flat[group] = functools.reduce(of_two, pairs)
        return FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    return reduce(values, scratch)


def _combine(largest: bool) -> Any:
    return arith.maxnumf if largest else arith.addf


def any_above(values: jax.Array, bounds: jax.Array, *, interpret: bool) -> jax.Array:
    """Whether any of the values, one per accumulator column, is above its bound: alike in all
    warps."""
    if interpret:
        return jnp.any(values > bounds)
    splat = plgpu.Layout.WG_SPLAT(())

    @inline_mgpu(
        arg_types=(WGMMA_COLUMN, WGMMA_COLUMN),
        return_type=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=splat),
    )
    def compare(ctx, values, bounds):
        del ctx
        above = [
            arith.cmpf(arith.CmpFPredicate.OGT, extract(value, i), extract(bound, i))
            for value, bound in zip(values.registers.flat, bounds.registers.flat, strict=True)
            for i in range(2)
        ]
        return FragmentedArray.splat(any_of_warp(above), (), is_signed=False)

    return compare(values, bounds)


def store_column_values(ref: Any, values: jax.Array, *, interpret: bool) -> None:
    """One float32 per column to memory. All warps store the same."""
    if interpret:
        ref[...] = values
        return

    @inline_mgpu(arg_types=(plgpu.RefType(), WGMMA_COLUMN))
    def store(ctx, ref, values):
        del ctx
        f32 = ir.F32Type.get()
        _, lane = warp_and_lane()
        mine = arith.muli(arith.andi(lane, const(3)), const(2))
        first = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [mine], f32)
        for group, pair in enumerate(values.registers.flat):
            llvm.store(pair, mgpu_utils.getelementptr(first, [8 * group], f32))

    store(ref, values)


def load_token_values(
    ref: Any, *, per_row: int, kinds: int = 1, interpret: bool
) -> tuple[jax.Array, ...]:
    """Values of 64 tokens in shared memory, of one kind or several, as one of each per accumulator
    row.

    `ref [rows, ...]` holds those of `per_row` tokens in each row, the kinds side by side
    (`fp8.load_columns` has them for the columns).
    """
    if interpret:
        values = ref[...][:, : per_row * kinds].reshape(64, kinds)
        return tuple(values[:, i] for i in range(kinds))
    row_stride = ref.shape[1]
    result = plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=WGMMA_ROW)

    @inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(result,) * kinds)
    def load(ctx, ref):
        del ctx
        f32, layout = ir.F32Type.get(), WGMMA_ROW.to_mgpu()
        one, loaded = (ir.VectorType.get((n,), f32) for n in (1, kinds))
        warp, lane = warp_and_lane()
        # A warp's 16 tokens are in one row, for there are at least as many in each.
        warps = per_row // 16
        row = arith.shrui(warp, const(warps.bit_length() - 1))
        token = arith.addi(
            arith.muli(arith.andi(warp, const(warps - 1)), const(16)), arith.shrui(lane, const(2))
        )
        at = arith.addi(arith.muli(row, const(row_stride)), arith.muli(token, const(kinds)))
        first = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [at], f32)
        out = [np.empty(layout.registers_shape((64,)), dtype=object) for _ in range(kinds)]
        for half in range(2):
            values = llvm.load(loaded, mgpu_utils.getelementptr(first, [8 * half * kinds], f32))
            for kind in range(kinds):
                out[kind].flat[half] = vector.from_elements(one, [extract(values, kind)])
        return tuple(FragmentedArray(_registers=x, _layout=layout, _is_signed=None) for x in out)

    return load(ref)


def zero_from(values: jax.Array, limit: jax.Array, *, interpret: bool) -> jax.Array:
    """One value per column, with 0 where the column is not below `limit`."""
    if interpret:
        return jnp.where(jnp.arange(values.shape[0]) < limit, values, 0.0)
    result = plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout=WGMMA_COLUMN)

    @inline_mgpu(arg_types=(WGMMA_COLUMN, plgpu.Layout.WG_SPLAT(())), return_type=result)
    def keep(ctx, values, limit):
        # Compared with constants: as Pallas would have it, the numbers of the columns are hoisted
        # out of all loops, and something is spilled for them.
        del ctx
        f32 = ir.F32Type.get()
        pair_type = ir.VectorType.get((2,), f32)
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        _, lane = warp_and_lane()
        mine = arith.muli(arith.andi(lane, const(3)), const(2))
        limit = arith.subi(limit.registers.flat[0], mine)
        out = np.empty_like(values.registers)
        for group, pair in enumerate(values.registers.flat):
            kept = [
                arith.select(
                    arith.cmpi(arith.CmpIPredicate.sgt, limit, const(8 * group + i)),
                    extract(pair, i),
                    zero,
                )
                for i in range(2)
            ]
            out.flat[group] = vector.from_elements(pair_type, kept)
        return FragmentedArray(_registers=out, _layout=values.layout, _is_signed=None)

    return keep(values, limit)


def store_probabilities(ref: Any, p: jax.Array, transforms: Any, *, interpret: bool) -> None:
    """Store an e4m3 accumulator tile `[64 tokens, rows]` as `ref [rows, 64]` in shared memory, an
    operand of wgmma along the tokens, which get the order of `hopper.fp8`.

    In that order the tokens of two neighbouring lanes' rows, t, t + 1, t + 8 and t + 9, are four
    bytes in a row: the two exchange one of their two columns, and each stores a word.
    """
    if interpret:
        ref[...] = p.T
        return

    @inline_mgpu(arg_types=(plgpu.RefType(transforms), WGMMA))
    def store(ctx, ref, p):
        del ctx
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        warp, lane = warp_and_lane()
        quad, in_quad = arith.shrui(lane, const(2)), arith.andi(lane, const(3))
        odd = arith.andi(quad, const(1))
        is_odd = arith.cmpi(arith.CmpIPredicate.eq, odd, const(1))
        # Of the own word's bytes (columns 0, 1 of token t, of t + 8) and the other lane's: those of
        # column 0, the own ones first, or of column 1, the other's first.
        chosen = arith.select(is_odd, const(0x3715), const(0x6240))
        # 64 bytes a row; TMA's swizzle of so many, by the pair of rows.
        row = arith.addi(arith.muli(in_quad, const(2)), odd)
        chunk = arith.muli(arith.xori(warp, in_quad), const(16))
        word = arith.muli(arith.shrui(quad, const(1)), const(4))
        at = arith.addi(arith.muli(row, const(64)), arith.addi(chunk, word))
        first = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [at], i8)
        registers = p.registers.reshape(-1, 2)
        for group, pairs in enumerate(registers):
            mine = mgpu_utils.bitcast(mgpu_utils.vector_concat(list(pairs)), i32)
            theirs = mgpu_utils.shfl_bfly(mine, 4)
            value = mgpu_utils.prmt(mine, theirs, chosen)
            llvm.store(value, mgpu_utils.getelementptr(first, [8 * 64 * group], i8))

    store(ref, p)


def give(ref: Any, tile: jax.Array, *, interpret: bool) -> None:
    """Put a float32 accumulator tile into shared memory as it lies in the registers, for the same
    threads of another warpgroup to `take`.

    `ref [tile.size / EXCHANGE_ROW, EXCHANGE_ROW]`; thread after thread 16 bytes, without bank
    conflicts.
    """
    if interpret:
        ref[...] = tile.reshape(ref.shape)
        return

    @inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def store(ctx, ref, tile):
        del ctx
        first, f32 = _own_place(ref), ir.F32Type.get()
        registers = tile.registers.reshape(-1, 2)
        for row, pairs in enumerate(registers):
            four = mgpu_utils.vector_concat(list(pairs))
            llvm.store(four, mgpu_utils.getelementptr(first, [row * EXCHANGE_ROW], f32))

    store(ref, tile)


def take(ref: Any, shape: tuple[int, int], *, interpret: bool) -> jax.Array:
    """The accumulator tile that another warpgroup has given."""
    if interpret:
        return ref[...].reshape(shape)
    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=WGMMA)

    @inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(ctx, ref):
        del ctx
        first, f32, layout = _own_place(ref), ir.F32Type.get(), WGMMA.to_mgpu()
        pair_type, four_type = (ir.VectorType.get((n,), f32) for n in (2, 4))
        registers = np.empty(layout.registers_shape(shape), dtype=object).reshape(-1, 2)
        for row in range(registers.shape[0]):
            at = mgpu_utils.getelementptr(first, [row * EXCHANGE_ROW], f32)
            four = llvm.load(four_type, at)
            for half in range(2):
                pair = [extract(four, 2 * half + i) for i in range(2)]
                registers[row, half] = vector.from_elements(pair_type, pair)
        registers = registers.reshape(layout.registers_shape(shape))
        return FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref)


def _own_place(ref: ir.Value) -> ir.Value:
    """Where this thread's first four float32 lie in `give`'s buffer."""
    warp, lane = warp_and_lane()
    thread = arith.addi(arith.muli(warp, const(32)), lane)
    place = [arith.muli(thread, const(4))]
    return mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), place, ir.F32Type.get())
