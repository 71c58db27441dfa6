"""The few device functions that Pallas has no primitive for, written in Mosaic GPU's own terms."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

from pallas_kernels.hopper.layouts import WGMMA, WGMMA_ROW

inline_mgpu: Any = plgpu.inline_mgpu  # its type does not say that it drops the argument `ctx`


@inline_mgpu(
    arg_types=(WGMMA_ROW,),
    return_type=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=plgpu.Layout.WG_SPLAT(())),
)
def warp_any_below_one(ctx, values):
    """Whether any of the `values`, one per accumulator row, of *this warp's* rows is below 1.

    The answer is uniform in a warp and may differ between warps. That is enough for a branch around
    ordinary arithmetic: wgmma needs whole warps only, and no barrier may stand inside the branch.
    """
    del ctx
    one = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 1.0))
    scalars = [
        vector.extract(v, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
        for v in values.registers.flat
    ]
    below = [arith.cmpf(arith.CmpFPredicate.OLT, v, one) for v in scalars]
    i32 = ir.IntegerType.get_signless(32)
    all_lanes = arith.constant(i32, ir.IntegerAttr.get(i32, -1))
    mine = below[0]
    for other in below[1:]:
        mine = arith.ori(mine, other)
    vote = nvvm.vote_sync(
        all_lanes, mine, nvvm.VoteSyncKind.any, results=[ir.IntegerType.get_signless(1)]
    )
    return FragmentedArray.splat(vote, (), is_signed=False)


def sync_warps(*, interpret: bool) -> None:
    """Let the four warps of a warpgroup, which the simulated GPU takes for one thread, meet."""
    if interpret:
        return

    @inline_mgpu(arg_types=())
    def sync(ctx):
        del ctx
        mgpu_utils.warpgroup_barrier()

    sync()


def store_rows(ref, tile: jax.Array, rows: int, *, interpret: bool) -> None:
    """Store the first `rows` rows of an accumulator tile to global memory; `ref` has just those."""
    if interpret:
        ref[...] = tile[:rows]
        return

    @inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def store(ctx, ref, tile):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        const = lambda value: arith.constant(i32, ir.IntegerAttr.get(i32, value))
        element = ir.VectorType(tile.registers.flat[0].type).element_type
        (row_stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        row, col = (
            arith.index_cast(i32, at) for at in next(iter(tile.layout.thread_idxs(tile.shape)))
        )
        first = arith.addi(arith.muli(row, const(row_stride)), col)
        first = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [first], element)
        # A thread holds pairs of columns, 8 apart, of two rows, 8 apart. Addresses are one pointer
        # and constants: as Pallas finds them, pair by pair, they are hoisted, and spilled.
        _, pairs, *_ = tile.registers.shape

        def store_half(half):
            for pair in range(pairs):
                offset = 8 * half * row_stride + 8 * pair
                at = mgpu_utils.getelementptr(first, [offset], element)
                llvm.store(tile.registers[0, pair, 0, 0, half, 0, 0, 0, 0], at)

        for half in range(2):
            if rows == tile.shape[0]:
                store_half(half)
                continue
            inside = arith.cmpi(arith.CmpIPredicate.slt, row, const(rows - 8 * half))
            branch = scf.IfOp(inside)
            with ir.InsertionPoint(branch.then_block):
                store_half(half)
                scf.yield_([])

    store(ref, tile)
