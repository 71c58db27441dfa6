"""The few device functions that Pallas has no primitive for, written in Mosaic GPU's own terms."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, scf

from pallas_kernels.hopper.layouts import WGMMA_ROW, tiled
from pallas_kernels.hopper.threads import const, extract, warp_and_lane

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
    below = [arith.cmpf(arith.CmpFPredicate.OLT, extract(v, 0), one) for v in values.registers.flat]
    return FragmentedArray.splat(any_of_warp(below), (), is_signed=False)


VOTES = 4
"""Float32 that `vote` writes: one of each warp."""


def vote(ref, values: jax.Array, *, interpret: bool) -> None:
    """Store, for `any_vote`, whether any of the `values`, one per accumulator row, is positive."""
    if interpret:
        ref[...] = jnp.full((VOTES,), jnp.any(values > 0.0), jnp.float32)
        return

    @inline_mgpu(arg_types=(plgpu.RefType(), WGMMA_ROW))
    def store(ctx, ref, values):
        del ctx
        f32 = ir.F32Type.get()
        zero, one = (arith.constant(f32, ir.FloatAttr.get(f32, x)) for x in (0.0, 1.0))
        positive = [
            arith.cmpf(arith.CmpFPredicate.OGT, extract(v, 0), zero) for v in values.registers.flat
        ]
        # All lanes store the same.
        warp, _ = warp_and_lane()
        at = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [warp], f32)
        llvm.store(arith.select(any_of_warp(positive), one, zero), at)

    store(ref, values)


def any_vote(ref, *, interpret: bool) -> jax.Array:
    """Whether any warp has cast its vote in `ref`: alike in all threads. The warps must have met
    since."""
    if interpret:
        return jnp.any(ref[...] > 0.0)

    @inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def load(ctx, ref):
        del ctx
        f32 = ir.F32Type.get()
        votes = llvm.load(ir.VectorType.get((VOTES,), f32), mgpu_utils.memref_ptr(ref))
        most = functools.reduce(arith.maxnumf, [extract(votes, i) for i in range(VOTES)])
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        return FragmentedArray.splat(
            arith.cmpf(arith.CmpFPredicate.OGT, most, zero), (), is_signed=False
        )

    return load(ref)


def any_of_warp(conditions):
    """Whether any of a thread's conditions holds in any thread of its warp."""
    mine = functools.reduce(arith.ori, conditions)
    return nvvm.vote_sync(
        const(-1), mine, nvvm.VoteSyncKind.any, results=[ir.IntegerType.get_signless(1)]
    )


def sync_warps(*, interpret: bool) -> None:
    """Let the four warps of a warpgroup, which the simulated GPU takes for one thread, meet."""
    if interpret:
        return

    @inline_mgpu(arg_types=())
    def sync(ctx):
        del ctx
        mgpu_utils.warpgroup_barrier()

    sync()


LINE = 128
"""Bytes that memory is read by."""
ASKING = 256
"""Threads of a CTA that call `keep_in_l2`."""


def keep_in_l2(refs: Sequence[Any], *, interpret: bool) -> None:
    """Have arrays in global memory brought to L2, to stay there when others stream through it.

    The threads of two warpgroups of every CTA of a one-dimensional grid ask for one line of each
    array, and do not wait: with 132 CTAs for its first 4.3 MB.
    """
    if interpret:
        return

    @inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def prefetch(ctx, *refs):
        del ctx
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        block, thread = (
            arith.index_cast(i32, of(gpu.Dimension.x)) for of in (gpu.block_id, gpu.thread_id)
        )
        thread = arith.andi(thread, const(ASKING - 1))
        at = arith.muli(arith.addi(arith.muli(block, const(ASKING)), thread), const(LINE))
        for ref in refs:
            memory = ir.MemRefType(ref.type)
            size = math.prod(memory.shape) * mgpu_utils.bytewidth(memory.element_type)
            inside = scf.IfOp(arith.cmpi(arith.CmpIPredicate.slt, at, const(size)))
            with ir.InsertionPoint(inside.then_block):
                line = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [at], i8)
                mgpu_utils.inline_ptx(
                    "prefetch.global.L2::evict_last [$0];",
                    line,
                    result_types=[],
                    has_side_effects=True,
                )
                scf.yield_([])

    prefetch(*refs)


ZEROS = 8
"""16-bit elements that a thread stores at a time, the most that an instruction takes."""


def _zeros(element: ir.Type) -> ir.Value:
    vector_type = ir.VectorType.get((ZEROS,), element)
    zero = ir.FloatAttr.get(element, 0.0)
    return arith.constant(vector_type, ir.DenseElementsAttr.get_splat(vector_type, zero))


def zero_rows(ref, first: jax.Array, *, interpret: bool) -> None:
    """Zero the rows of a 16-bit tile in shared memory from `first` on."""
    if interpret:
        row = jax.lax.broadcasted_iota(jnp.int32, ref.shape, 0)
        ref[...] = jnp.where(row < first, ref[...], jnp.zeros(ref.shape, ref.dtype))
        return
    transforms = tiled(ref.shape[1], 2)

    @inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.Layout.WG_SPLAT(())))
    def zero(ctx, ref, first):
        del ctx
        div, rem = arith.divui, arith.remui
        memory = ir.MemRefType(ref.type)
        element, (_, segments, atom_rows, atom_cols) = memory.element_type, memory.shape
        (atom_row_stride, segment_stride, row_stride, _), _ = memory.get_strides_and_offset()
        # A swizzle only changes the order within a row of an atom, and all of it becomes zero: a
        # thread takes 16 bytes of it, the warpgroup several rows at a time.
        chunks = atom_cols // ZEROS
        rows = 128 // (chunks * segments)
        thread = rem(
            arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x)),
            const(128),
        )
        chunk, segment = (
            rem(thread, const(chunks)),
            rem(div(thread, const(chunks)), const(segments)),
        )
        own_segment = arith.muli(segment, const(segment_stride))
        base = arith.addi(arith.muli(chunk, const(ZEROS)), own_segment)
        zeros = _zeros(element)
        own_row = div(thread, const(chunks * segments))
        num_rows = const(memory.shape[0] * atom_rows)
        # The same number of turns for all threads: they meet at a barrier afterwards.
        loop = scf.ForOp(first.registers.item(), num_rows, const(rows), [])
        with ir.InsertionPoint(loop.body):
            row = arith.addi(loop.induction_variable, own_row)
            inside = scf.IfOp(arith.cmpi(arith.CmpIPredicate.slt, row, num_rows))
            scf.yield_([])
        with ir.InsertionPoint(inside.then_block):
            at = arith.addi(
                arith.muli(div(row, const(atom_rows)), const(atom_row_stride)),
                arith.muli(rem(row, const(atom_rows)), const(row_stride)),
            )
            llvm.store(
                zeros,
                mgpu_utils.getelementptr(
                    mgpu_utils.memref_ptr(ref), [arith.addi(base, at)], element
                ),
            )
            scf.yield_([])

    zero(ref, first)


def store_zeros(ref, *, interpret: bool) -> None:
    """Zero rows of 16-bit elements in global memory, by one warpgroup. They lie one after the
    other, and are a multiple of the 2 KiB that it stores at a time."""
    if interpret:
        ref[...] = jnp.zeros(ref.shape, ref.dtype)
        return

    @inline_mgpu(arg_types=(plgpu.RefType(),))
    def store(ctx, ref):
        del ctx
        memory = ir.MemRefType(ref.type)
        strides, _ = memory.get_strides_and_offset()
        assert list(strides) == [memory.shape[1], 1]
        at_a_time = 128 * ZEROS
        assert math.prod(memory.shape) % at_a_time == 0
        warp, lane = warp_and_lane()
        thread = arith.addi(arith.muli(warp, const(32)), lane)
        own = [arith.muli(thread, const(ZEROS))]
        first = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), own, memory.element_type)
        zeros = _zeros(memory.element_type)
        for offset in range(0, math.prod(memory.shape), at_a_time):
            llvm.store(zeros, mgpu_utils.getelementptr(first, [offset], memory.element_type))

    store(ref)
