"""Constants, vector elements and thread numbers, for device functions in Mosaic GPU's own terms."""

from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector


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
