"""A row's pieces over the warps of a warpgroup: how each warp loads its own, and how they meet."""

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
from pallas_kernels.hopper.pieces import Split
from pallas_kernels.hopper.threads import const, warp_and_lane

WARPS = 4
MARGIN = 8
"""Float32 behind the columns of a row of `exchange`'s scratch, two of them used: rows begin at
multiples of 32 bytes, as vectors of 8 have to."""


def load_pieces(
    partial: Any,
    partial_lse2: Any,
    split: Split,
    place: jax.Array,
    first: jax.Array,
    tile: Any,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Pieces `first` to `first + 3` of one row, which is number `place` of their slots, one a warp:
    log-sum-exp `[4]`, -inf behind the last piece, and output `[4, C]`."""
    _, _, width = partial.shape
    if interpret:
        index = first + jnp.arange(WARPS)
        of_pieces = split.slot(index)
        lse2 = jnp.stack([partial_lse2[of_pieces[i], place] for i in range(WARPS)])
        out = jnp.stack([partial[of_pieces[i], place] for i in range(WARPS)])
        return jnp.where(index < split.pieces, lse2, -jnp.inf), out
    splat, per_row = plgpu.Layout.WG_SPLAT(()), tile.reduce(1)
    results = (
        plgpu.ShapeDtypeStruct((WARPS,), jnp.float32, layout=per_row),
        plgpu.ShapeDtypeStruct((WARPS, width), partial.dtype, layout=tile),
    )

    @inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *(splat,) * 5), return_type=results)
    def load(ctx, partial, partial_lse2, *scalars):
        del ctx
        first_slot, rest, place, first, pieces = (x.registers.item() for x in scalars)
        f32, element = ir.F32Type.get(), ir.MemRefType(partial.type).element_type
        _, rows, _ = ir.MemRefType(partial.type).shape
        warp, lane = warp_and_lane()
        index = arith.addi(first, warp)  # `Split.slot`
        exists = arith.cmpi(arith.CmpIPredicate.slt, index, pieces)
        index = arith.minsi(index, arith.subi(pieces, const(1)))
        later = arith.addi(rest, arith.muli(arith.subi(index, const(1)), const(2)))
        is_first = arith.cmpi(arith.CmpIPredicate.eq, index, const(0))
        row = arith.muli(arith.select(is_first, first_slot, later), const(rows))
        row = arith.addi(row, place)
        lse2 = llvm.load(
            f32, mgpu_utils.getelementptr(mgpu_utils.memref_ptr(partial_lse2), [row], f32)
        )
        none = arith.constant(f32, ir.FloatAttr.get(f32, -np.inf))
        lse2 = arith.select(exists, lse2, none)
        one = vector.from_elements(ir.VectorType.get((1,), f32), [lse2])
        of_row = per_row.to_mgpu()
        lse2s = np.full(of_row.registers_shape((WARPS,)), one, dtype=object)
        layout = tile.to_mgpu()
        out = np.empty(layout.registers_shape((WARPS, width)), dtype=object)
        words = layout.registers_element_type(element)
        at = arith.addi(arith.muli(row, const(width)), arith.muli(lane, const(words.shape[0])))
        start = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(partial), [at], element)
        for i in range(out.size):
            out.flat[i] = llvm.load(
                words, mgpu_utils.getelementptr(start, [32 * words.shape[0] * i], element)
            )
        return (
            FragmentedArray(_registers=lse2s, _layout=of_row, _is_signed=None),
            FragmentedArray(_registers=out, _layout=layout, _is_signed=None),
        )

    return load(partial, partial_lse2, split.first_slot, split.rest, place, first, split.pieces)


def exchange(
    m: jax.Array, l: jax.Array, acc: jax.Array, scratch: Any, tile: Any, *, interpret: bool
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """The four warps' `m [4]`, `l [4]`, `acc [4, C]`, for all threads: scalars, scalars, and `[C]`.

    `scratch [4, C + MARGIN]`, float32, is this warpgroup's alone.
    """
    width = acc.shape[1]
    if interpret:
        scratch[:, :width], scratch[:, width], scratch[:, width + 1] = acc, m, l
        rows = scratch[...]
        split = lambda x: [x[i] for i in range(WARPS)]
        return split(rows[:, width]), split(rows[:, width + 1]), split(rows[:, :width])
    splat, strided = plgpu.Layout.WG_SPLAT(()), plgpu.Layout.WG_STRIDED((width,), width // 128)
    per_row = tile.reduce(1)
    scalar = plgpu.ShapeDtypeStruct((), jnp.float32, layout=splat)
    columns = plgpu.ShapeDtypeStruct((width,), jnp.float32, layout=strided)

    @inline_mgpu(
        arg_types=(per_row, per_row, tile, plgpu.RefType()),
        return_type=(scalar,) * 8 + (columns,) * WARPS,
    )
    def meet(ctx, m, l, acc, scratch):
        del ctx
        f32 = ir.F32Type.get()
        stride = width + MARGIN
        warp, lane = warp_and_lane()
        base = mgpu_utils.memref_ptr(scratch)
        words = acc.registers.flat[0].type
        count = ir.VectorType(words).shape[0]
        mgpu_utils.warpgroup_barrier()  # what was there has been read
        row = arith.muli(warp, const(stride))
        start = mgpu_utils.getelementptr(
            base, [arith.addi(row, arith.muli(lane, const(count)))], f32
        )
        for i, value in enumerate(acc.registers.flat):
            llvm.store(value, mgpu_utils.getelementptr(start, [32 * count * i], f32))
        of_row = mgpu_utils.getelementptr(base, [row], f32)
        for i, value in enumerate((m, l)):  # all lanes store the same
            llvm.store(value.registers.item(), mgpu_utils.getelementptr(of_row, [width + i], f32))
        mgpu_utils.warpgroup_barrier()
        layout = strided.to_mgpu()
        each = width // 128
        mine = ir.VectorType.get((each,), f32)
        thread = arith.addi(arith.muli(warp, const(32)), lane)
        own = mgpu_utils.getelementptr(base, [arith.muli(thread, const(each))], f32)
        scalars, rows = [], []
        for i in range(2):
            for of_warp in range(WARPS):
                at = mgpu_utils.getelementptr(base, [of_warp * stride + width + i], f32)
                scalars.append(FragmentedArray.splat(llvm.load(f32, at), (), is_signed=None))
        for of_warp in range(WARPS):
            registers = np.empty(layout.registers_shape((width,)), dtype=object)
            registers.flat[0] = llvm.load(
                mine, mgpu_utils.getelementptr(own, [of_warp * stride], f32)
            )
            rows.append(FragmentedArray(_registers=registers, _layout=layout, _is_signed=None))
        return (*scalars, *rows)

    found = meet(m, l, acc, scratch)
    return list(found[:4]), list(found[4:8]), list(found[8:])
