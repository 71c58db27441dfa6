"""Queries in e4m3 or float16: each row is divided by a scale of its own, which its scores are
multiplied by; in float16 each group of channels, of all rows, by one too.

A factor of the scores that is known at run time only may be negative or 0. That part of it goes
into the queries: masked scores stay -inf.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.formats import BITS_OF_ONE, E4M3_MAX, EXPONENT, MIN_SCALE
from pallas_kernels.hopper.fp8 import tile_strides
from pallas_kernels.hopper.inline import inline_mgpu
from pallas_kernels.hopper.layouts import across
from pallas_kernels.hopper.softmax import LOG2E
from pallas_kernels.hopper.threads import const, extract, warp_and_lane

WARPS = 4
ROWS = 8
"""Rows that a warpgroup quantises together, two of each warp; those of a swizzle atom."""

BITS_OF_MIN_GROUP_SCALE = BITS_OF_ONE - (48 << 23)
"""Floor of `scales_of_groups`, 2**-48: over it and over `MIN_SCALE` a factor is still finite."""


def row_scale(amax: jax.Array) -> jax.Array:
    """The scale of rows in e4m3 whose largest magnitude is `amax`."""
    return jnp.maximum(amax * (1 / E4M3_MAX), MIN_SCALE)


def _power_of_two(amax: jax.Array) -> jax.Array:
    """The scale of rows in float16: the largest magnitude becomes 1 to 2 times 2**14, and bfloat16
    values down to 2**-31 of it keep all their bits."""
    bits = lax.bitcast_convert_type(amax, jnp.int32) & EXPONENT
    return jnp.maximum(lax.bitcast_convert_type(bits, jnp.float32) * 2.0**-14, MIN_SCALE)


def _inverse(power_of_two: jax.Array) -> jax.Array:
    """Exactly, where division is approximate."""
    bits = 2 * BITS_OF_ONE - lax.bitcast_convert_type(power_of_two, jnp.int32)
    return lax.bitcast_convert_type(bits, jnp.float32)


def sign_and_size(scale: float | None, run_scale: jax.Array | None) -> tuple[Any, Any]:
    """The sign of the scores' factor, and its size, base 2 included: that of `scale`, or if that is
    not given of `run_scale`."""
    if scale is not None:
        return 1.0, scale * LOG2E
    assert run_scale is not None
    sign = jnp.where(run_scale == 0.0, 0.0, jnp.where(run_scale < 0.0, -1.0, 1.0))
    return sign, jnp.maximum(jnp.abs(run_scale), MIN_SCALE) * LOG2E


def score_factor(scale: jax.Array, size: Any) -> jax.Array:
    """What the scores of rows with this scale are multiplied by. Never 0, not even by underflow: a
    masked score is -inf. Nor anything more: a latent part of zeros has the smallest scale, and the
    row's scores are those of its rope part."""
    return jnp.maximum(scale * size, float(jnp.finfo(jnp.float32).tiny))


def load(ref: Any, *, interpret: bool) -> jax.Array:
    """`ROWS` rows in global memory, as `quantise` and `to_float16` take them."""
    if interpret:
        return ref[...]
    rows, columns = ref.shape
    result = plgpu.ShapeDtypeStruct(ref.shape, ref.dtype, layout=_layout(columns))

    @inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load_rows(ctx, ref):
        del ctx
        element = ir.MemRefType(ref.type).element_type
        (row_stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        layout, vector = _layout(columns).to_mgpu(), _vector(columns)
        several = ir.VectorType.get((vector,), element)
        warp, lane = warp_and_lane()
        at = arith.addi(arith.muli(warp, const(row_stride)), arith.muli(lane, const(vector)))
        first = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [at], element)
        registers = np.empty((rows // WARPS, columns // (32 * vector)), dtype=object)
        for i, j in np.ndindex(registers.shape):
            place = [i * WARPS * row_stride + j * 32 * vector]
            at = mgpu_utils.getelementptr(first, place, element)
            registers[i, j] = llvm.load(several, at)
        registers = registers.reshape(layout.registers_shape((rows, columns)))
        return FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load_rows(ref)


def quantise(
    latent: jax.Array, rope: jax.Array, sign: Any, rope_dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`ROWS` rows of queries with the latent part in e4m3, and the scale of each: that of its
    latent part or, if the rope part becomes e4m3 too, of both."""
    amax, e4m3 = largest(latent), jnp.dtype(jnp.float8_e4m3fn)
    if rope_dtype == e4m3:
        amax = jnp.maximum(amax, largest(rope))
    scale = row_scale(amax)
    scaled = functools.partial(_scaled, factor=sign / scale)
    return scaled(latent, dtype=e4m3), scaled(rope, dtype=rope_dtype), scale


def scales_of_groups(ref: Any, *, interpret: bool) -> tuple[jax.Array, ...]:
    """Of the groups of channels of float16 queries: powers of two up to 1, from the `largest` of
    all rows of a tile in shared memory, `ref [groups, rows]`.

    What is not finite spoils its own row, and no other. A row that is in two tiles may have other
    bits in each.
    """
    groups, rows = ref.shape
    if interpret:
        found = jnp.where(jnp.isfinite(ref[...]), ref[...], 0.0).max(axis=1)
        bits = lax.bitcast_convert_type(found, jnp.int32) & EXPONENT
        bits = jnp.maximum(bits - bits.max() + BITS_OF_ONE, BITS_OF_MIN_GROUP_SCALE)
        found = lax.bitcast_convert_type(bits, jnp.float32)
        return tuple(found[group] for group in range(groups))
    splat = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct((), jnp.float32, layout=splat)

    @inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(result,) * groups)
    def reduce(ctx, ref):
        # As unsigned integers, which have the same order, and which a warp compares at once.
        del ctx
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        _, lane = warp_and_lane()
        row = arith.minui(lane, const(rows - 1))
        first = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [row], f32)
        found = []
        for group in range(groups):
            bits = llvm.load(i32, mgpu_utils.getelementptr(first, [group * rows], f32))
            finite = arith.cmpi(arith.CmpIPredicate.ult, bits, const(EXPONENT))
            bits = arith.select(finite, bits, const(0))
            bits = mgpu_utils.redux(bits, const(-1), nvvm.ReductionKind.UMAX)
            found.append(arith.andi(bits, const(EXPONENT)))
        to_one = arith.subi(const(BITS_OF_ONE), functools.reduce(arith.maxui, found))
        floor = const(BITS_OF_MIN_GROUP_SCALE)
        scales = (arith.maxsi(arith.addi(bits, to_one), floor) for bits in found)
        return tuple(FragmentedArray.splat(mgpu_utils.bitcast(x, f32), ()) for x in scales)

    return reduce(ref)


def to_float16(
    groups: Sequence[jax.Array], rope: jax.Array, sign: Any, scales: Sequence[jax.Array]
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """`ROWS` rows of queries with the latent part in float16, its groups of channels divided by
    their `scales`, and each row by one of its own; and that scale."""
    # Mosaic casts the bits of arrays only.
    spread = lambda scale: jnp.full((ROWS,), 1.0, jnp.float32) * scale
    inverses = [_inverse(spread(scale)) for scale in scales]
    sizes = (largest(x) * inverse for x, inverse in zip(groups, inverses, strict=True))
    scale = _power_of_two(functools.reduce(jnp.maximum, sizes))
    factor = sign * _inverse(scale)
    in_float16 = [
        _scaled(x, factor=factor * inverse, dtype=jnp.float16)
        for x, inverse in zip(groups, inverses, strict=True)
    ]
    return in_float16, _scaled(rope, factor=factor, dtype=rope.dtype), scale


def largest(rows: jax.Array) -> jax.Array:
    """The largest magnitude of each row."""
    return jnp.abs(rows.astype(jnp.float32)).max(axis=1)


def _scaled(rows: jax.Array, *, factor: jax.Array, dtype: Any) -> jax.Array:
    return (rows.astype(jnp.float32) * across(factor, rows.shape[1])).astype(dtype)


def store(
    ref: Any, values: jax.Array, transforms: Any, *, order_of_keys: bool = False, interpret: bool
) -> None:
    """Store `ROWS` quantised rows to a tile in shared memory that wgmma reads; groups of 128
    channels in float16, if asked for, with their channels in the order of `widen.load_keys`."""
    if interpret:
        ref[...] = values
        return
    layout = _layout(values.shape[1])

    @inline_mgpu(arg_types=(plgpu.RefType(transforms), layout))
    def store_rows(ctx, ref, values):
        del ctx
        i8 = ir.IntegerType.get_signless(8)
        _, column_tile_bytes, row_bytes = tile_strides(ref)
        bits = mgpu_utils.bitwidth(values.registers.flat[0].type)
        warp, lane = warp_and_lane()
        in_row = _first_place(lane) if order_of_keys else arith.muli(lane, const(bits // 8))
        tile = arith.shrui(in_row, const(row_bytes.bit_length() - 1))
        tile = arith.muli(tile, const(column_tile_bytes))
        in_tile = arith.andi(in_row, const(row_bytes - 1))
        base = mgpu_utils.memref_ptr(ref)
        registers = values.registers.reshape(values.shape[0] // WARPS, -1)
        for i, of_row in enumerate(registers):
            row = arith.muli(arith.addi(warp, const(WARPS * i)), const(row_bytes))
            # Chunks of 16 bytes trade places within a row, by the 128 bytes that the row lies in.
            swizzle = arith.andi(arith.shrui(row, const(7)), const(row_bytes // 16 - 1))
            place = arith.xori(in_tile, arith.muli(swizzle, const(16)))
            at = arith.addi(tile, arith.addi(row, place))
            starts = [mgpu_utils.getelementptr(base, [at], i8)]
            if order_of_keys:
                at = arith.xori(at, const(_PLACES_APART))
                starts.append(mgpu_utils.getelementptr(base, [at], i8))
            for j, several in enumerate(of_row):
                offset = j * (4 * bits // row_bytes) * column_tile_bytes
                # LLVM has no vectors of 8-bit floats.
                whole = [mgpu_utils.bitcast(several, ir.IntegerType.get_signless(bits))]
                words = _pairs(several) if order_of_keys else whole
                for start, word in zip(starts, words, strict=True):
                    llvm.store(word, mgpu_utils.getelementptr(start, [offset], i8))

    store_rows(ref, values)


_PLACES_APART = 16
"""Bytes from the first pair of a lane's four float16 to the other, in the order of keys."""


def _first_place(lane: ir.Value) -> ir.Value:
    """Where in a row the first pair of a lane's four channels goes, in bytes.

    Of 16 channels, which are four lanes', the pairs 0 2 4 6 come first, then 1 3 5 7.
    """
    sixteen, quarter = arith.shrui(lane, const(2)), arith.andi(lane, const(3))
    return arith.addi(arith.muli(sixteen, const(32)), arith.muli(quarter, const(4)))


def _pairs(four: ir.Value) -> list[ir.Value]:
    """Those of four float16, as words."""
    both = mgpu_utils.bitcast(four, ir.VectorType.get((2,), ir.IntegerType.get_signless(32)))
    return [extract(both, i) for i in range(2)]


def store_values(ref: Any, values: jax.Array, *, interpret: bool) -> None:
    """Store one float32 for each of `ROWS` rows to shared memory. All lanes store the same."""
    if interpret:
        ref[...] = values
        return

    @inline_mgpu(arg_types=(plgpu.RefType(), _layout(256).reduce(1)))
    def store_rows(ctx, ref, values):
        del ctx
        f32 = ir.F32Type.get()
        warp, _ = warp_and_lane()
        first = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [warp], f32)
        for i, value in enumerate(values.registers.flat):
            llvm.store(value, mgpu_utils.getelementptr(first, [WARPS * i], f32))

    store_rows(ref, values)


def _vector(columns: int) -> int:
    """Neighbouring columns of a lane."""
    return min(8, columns // 32)


def _layout(columns: int) -> Any:
    """Of `[ROWS, columns]`: a row is a warp's, so that its largest value is found by shuffles
    alone."""
    vector = _vector(columns)
    tiling = plgpu.Tiling(((WARPS, 32 * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
