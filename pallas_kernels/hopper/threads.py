"""Constants, vector elements, thread numbers and places in shared memory, for device functions in
Mosaic GPU's own terms."""

from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

ATOM_ROW = 128
"""Bytes of a row of a swizzle atom, which has eight."""


def const(value: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def extract(values: Any, i: int) -> ir.Value:
    position = ir.DenseI64ArrayAttr.get([i])
    return vector.extract(values, dynamic_position=[], static_position=position)


def warp_and_lane() -> tuple[ir.Value, ir.Value]:
    """Of this thread, in its warpgroup.

    Read anew each time: what is made of it would be hoisted out of all loops, and spilled.
    """
    i32 = ir.IntegerType.get_signless(32)
    thread = mgpu_utils.inline_ptx("mov.u32 $0, %tid.x;", result_types=i32, has_side_effects=True)
    thread = arith.andi(thread, const(127))
    return arith.shrui(thread, const(5)), arith.andi(thread, const(31))


def in_atom(row: ir.Value, chunk: ir.Value) -> ir.Value:
    """Where a chunk of 16 bytes of a row lies in a swizzle atom."""
    first = arith.muli(row, const(ATOM_ROW))
    return arith.addi(first, arith.muli(arith.xori(row, chunk), const(16)))


def pointer(ref: ir.Value, at: ir.Value, offset: int) -> ir.Value:
    """To so many bytes into shared memory; the constant ones become part of the instruction."""
    i8 = ir.IntegerType.get_signless(8)
    start = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [at], i8)
    return mgpu_utils.getelementptr(start, [offset], i8)
