"""Values per accumulator *column*: of transposed attention, which has the queries there.

A column of an accumulator lies in all four warps. Pallas' own reduction over it (`max(axis=0)`)
takes them together in a buffer of shared memory that is one for all warpgroups of a CTA, and two
that reduce at the same time get each other's values. Here the buffer is an argument.

The simulated GPU (`interpret`) uses the same buffers, so that it sees who shares them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.hopper.inline import inline_mgpu
from pallas_kernels.hopper.layouts import WGMMA, WGMMA_COLUMN
from pallas_kernels.hopper.threads import const, extract, warp_and_lane

WARPS = 4
EXCHANGE_ROW = 512
"""Float32 of a row of `give`'s buffer: four for each thread."""


def reduce_rows(tile: jax.Array, scratch: Any, *, largest: bool, interpret: bool) -> jax.Array:
    """The largest (or the sum) of each column of a `[64, columns]` accumulator, for all warps.

    `scratch [4, columns]`, float32, is this warpgroup's alone. Its warps must meet before it is
    used again.
    """
    rows, columns = tile.shape
    if interpret:
        of_warps = tile.reshape(WARPS, rows // WARPS, columns)
        scratch[...] = of_warps.max(axis=1) if largest else of_warps.sum(axis=1)
        return scratch[...].max(axis=0) if largest else scratch[...].sum(axis=0)
    result = plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=WGMMA_COLUMN)

    @inline_mgpu(arg_types=(WGMMA, plgpu.RefType()), return_type=result)
    def reduce(ctx, tile, scratch):
        del ctx
        combine = arith.maxnumf if largest else arith.addf
        f32 = ir.F32Type.get()
        pair_type = ir.VectorType.get((2,), f32)
        warp, lane = warp_and_lane()
        mine = arith.muli(arith.andi(lane, const(3)), const(2))
        base = mgpu_utils.memref_ptr(scratch)
        read = mgpu_utils.getelementptr(base, [mine], f32)
        at = arith.addi(arith.muli(warp, const(columns)), mine)
        write = mgpu_utils.getelementptr(base, [at], f32)
        registers = tile.registers.reshape(columns // 8, 2)
        for group, pairs in enumerate(registers):
            values = [combine(*(extract(pair, i) for pair in pairs)) for i in range(2)]
            for distance in (4, 8, 16):
                values = [combine(x, mgpu_utils.shfl_bfly(x, distance)) for x in values]
            # Eight lanes hold, and store, the same.
            pair = vector.from_elements(pair_type, values)
            llvm.store(pair, mgpu_utils.getelementptr(write, [8 * group], f32))
        mgpu_utils.warpgroup_barrier()
        layout = WGMMA_COLUMN.to_mgpu()
        out = np.empty(layout.registers_shape((columns,)), dtype=object)
        for group in range(columns // 8):
            places = [[of_warp * columns + 8 * group] for of_warp in range(WARPS)]
            pairs = [
                llvm.load(pair_type, mgpu_utils.getelementptr(read, place, f32)) for place in places
            ]
            total = pairs[0]
            for pair in pairs[1:]:
                total = combine(total, pair)
            out.flat[group] = total
        return FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    return reduce(tile, scratch)


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


def store_turned(ref: Any, tile: jax.Array, *, interpret: bool) -> None:
    """Store a float32 accumulator tile `[columns, rows]` as `ref [rows, columns]` in global
    memory: eight lanes one sector of 32 bytes."""
    if interpret:
        ref[...] = tile.T
        return

    @inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def store(ctx, ref, tile):
        del ctx
        f32 = ir.F32Type.get()
        (row_stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        warp, lane = warp_and_lane()
        row = arith.muli(arith.andi(lane, const(3)), const(2))
        column = arith.addi(arith.muli(warp, const(16)), arith.shrui(lane, const(2)))
        at = arith.addi(arith.muli(row, const(row_stride)), column)
        first = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [at], f32)
        blocks, groups = tile.shape[0] // 64, tile.shape[1] // 8
        registers = tile.registers.reshape(blocks, groups, 2)
        for block, group, half in np.ndindex(registers.shape):
            for i in range(2):
                offset = (8 * group + i) * row_stride + 64 * block + 8 * half
                value = extract(registers[block, group, half], i)
                llvm.store(value, mgpu_utils.getelementptr(first, [offset], f32))

    store(ref, tile)


def _own_place(ref: ir.Value) -> ir.Value:
    """Where this thread's first four float32 lie in `give`'s buffer."""
    warp, lane = warp_and_lane()
    thread = arith.addi(arith.muli(warp, const(32)), lane)
    place = [arith.muli(thread, const(4))]
    return mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), place, ir.F32Type.get())
