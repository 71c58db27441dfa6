"""The few device functions that Pallas has no primitive for, written in Mosaic GPU's own terms."""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, nvvm, scf

from pallas_kernels.hopper.layouts import WGMMA, WGMMA_ROW


@plgpu.inline_mgpu(
    arg_types=(WGMMA_ROW,), return_type=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=plgpu.Layout.WG_SPLAT(()))
)
def warp_any_below_one(ctx, values):
    """Whether any of the `values`, one per accumulator row, of *this warp's* rows is below 1.

    The answer is uniform in a warp and may differ between warps. That is enough for a branch around ordinary
    arithmetic: wgmma needs whole warps only, and no barrier may stand inside the branch.
    """
    del ctx
    one = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 1.0))
    below = [arith.cmpf(arith.CmpFPredicate.OLT, v, one) for v in values.registers.flat]
    i32 = ir.IntegerType.get_signless(32)
    all_lanes = arith.constant(i32, ir.IntegerAttr.get(i32, -1))
    mine = below[0]
    for other in below[1:]:
        mine = arith.ori(mine, other)
    vote = nvvm.vote_sync(
        all_lanes, mine, nvvm.VoteSyncKind.any, results=[ir.IntegerType.get_signless(1)]
    )
    return FragmentedArray.splat(vote, (), is_signed=False)


def store_rows(ref, tile: jax.Array, rows: int, *, interpret: bool) -> None:
    """Store the first `rows` rows of an accumulator tile to global memory; `ref` has just those."""
    if rows == tile.shape[0]:
        ref[...] = tile
        return
    if interpret:
        ref[...] = tile[:rows]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def store(ctx, ref, tile):
        del ctx
        index = ir.IndexType.get()
        limit = arith.constant(index, ir.IntegerAttr.get(index, rows))

        def store_one(value, at):
            inside = arith.cmpi(arith.CmpIPredicate.slt, at[0], limit)
            branch = scf.IfOp(inside)
            with ir.InsertionPoint(branch.then_block):
                memref.store(value, ref, list(at))
                scf.yield_([])

        tile.foreach(store_one)

    store(ref, tile)
