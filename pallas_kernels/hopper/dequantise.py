"""e4m3 latents with a scale for 128 channels, from global memory through registers to bf16 tiles in
shared memory that wgmma reads, by one warpgroup.

A byte `s eeee mmm` moved to the bits `s 0000eeee mmm0000` of a bfloat16 is its value times 2**-120,
subnormal ones included, for both formats have those. Two products make it the value times its
scale: by 2**120, which is exact, and by the scale, a power of two, which rounds where bfloat16 has
no more bits. Two, because their product is no bfloat16 if the scale is above 2**7. The products do
not flush subnormal numbers.

e4m3 has one NaN, all ones below the sign. Here it is 480 times the scale: looking for it takes a
fifth more instructions. A NaN or infinity that was quantised comes out as an infinity, for its
scale is 2**120; what else has such bytes is no product of this library.

A warp of the warpgroup takes 4 neighbouring tokens of 16. A load of 16 bytes a lane covers half the
channels of 2 of them (of 4, if a half is 128 channels): four neighbouring lanes take 64 channels of
an even token, the next four the same of the odd one. Eight lanes then store 16 bytes each into
different banks of a tile that is swizzled by 128 bytes.

On the simulated GPU (`interpret`) everything stays in natural order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.formats import SCALE_TILE
from pallas_kernels.hopper.fp8 import tile_strides
from pallas_kernels.hopper.inline import inline_mgpu
from pallas_kernels.hopper.layouts import tiled
from pallas_kernels.hopper.threads import const, extract, warp_and_lane

TOKENS = 16
"""Tokens that are loaded and converted together: those of the smallest page."""

_VECTOR = 16
"""Channels that a lane loads at once."""

_TWO_TO_120 = (127 + 120) << 7
"""As a bfloat16."""


def load_latents(ref: Any, *, interpret: bool) -> jax.Array:
    """Begin to load `TOKENS` rows of e4m3 from global memory; the result is in no layout but
    `store_bf16`'s."""
    if interpret:
        return ref[...]
    tokens, d_latent = ref.shape
    shape = (tokens, d_latent // 4)
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=4)
    result = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout)

    @inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(ctx, ref):
        del ctx
        (row_bytes, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        warp, token, column = _place(d_latent // 2)
        row = arith.addi(arith.muli(warp, const(4)), token)
        at = arith.addi(arith.muli(row, const(row_bytes)), arith.muli(column, const(_VECTOR)))
        first = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [at], i8)
        registers = np.empty(layout.to_mgpu().registers_shape(shape), dtype=object)
        for i in range(registers.size):
            rows, half = divmod(i, 2)
            offset = rows * _tokens_of_load(d_latent // 2) * row_bytes + half * (d_latent // 2)
            words = mgpu_utils.inline_ptx(
                "ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];",
                mgpu_utils.getelementptr(first, [offset], i8),
                result_types=[i32] * 4,
                has_side_effects=True,
            )
            registers.flat[i] = vector.from_elements(ir.VectorType.get((4,), i32), words)
        return FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)

    return load(ref)


def load_scales(ref: Any, *, interpret: bool) -> jax.Array:
    """Begin to load the float32 scales of these rows, `[TOKENS, scales]`, for `store_bf16`."""
    if interpret:
        return ref[...]
    _, per_token = ref.shape
    layout = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
    result = plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=layout)

    @inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(ctx, ref):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        warp, lane = warp_and_lane()
        mine = arith.andi(lane, const(4 * per_token - 1))
        at = arith.addi(arith.muli(warp, const(4 * per_token)), mine)
        at = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [at], i32)
        ptx = "ld.global.b32 $0, [$1];"
        bits = mgpu_utils.inline_ptx(ptx, at, result_types=i32, has_side_effects=True)
        registers = np.array([vector.from_elements(ir.VectorType.get((1,), i32), [bits])])
        return FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)

    return load(ref)


def store_bf16(
    left: Any,
    right: Any,
    first: int,
    latents: jax.Array,
    scales: jax.Array,
    live: jax.Array,
    *,
    interpret: bool,
) -> None:
    """Store loaded rows times their scales as the rows from `first` on of a key tile, whose columns
    are in two tiles; rows from number `live` of the key tile on are 0, whatever was loaded."""
    if interpret:
        factor = jnp.repeat(scales, SCALE_TILE, axis=1)
        row = first + jax.lax.broadcasted_iota(jnp.int32, factor.shape, 0)
        values = jnp.where(row < live, latents.astype(jnp.float32) * factor, 0.0)
        values = values.astype(left.dtype)
        left[first : first + TOKENS] = values[:, : left.shape[1]]
        right[first : first + TOKENS] = values[:, left.shape[1] :]
        return
    d_half = left.shape[1]
    tile = plgpu.RefType(tiled(d_half, 2))
    raw, splat = plgpu.Layout.WG_STRIDED, plgpu.Layout.WG_SPLAT(())
    layouts = raw((TOKENS, d_half // 2), vec_size=4), raw((128,), vec_size=1)

    @inline_mgpu(arg_types=(tile, tile, *layouts, splat))
    def store(ctx, left, right, latents, scales, live):
        del ctx
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        row_tile_bytes, column_tile_bytes, row_bytes = tile_strides(left)
        per_token, per_load = 2 * d_half // SCALE_TILE, _tokens_of_load(d_half)
        assert row_bytes == 128
        warp, lane = warp_and_lane()
        # Of the token whose scale this lane has loaded.
        row = arith.shrui(
            arith.andi(lane, const(4 * per_token - 1)), const(per_token.bit_length() - 1)
        )
        row = arith.addi(row, arith.addi(arith.muli(warp, const(4)), const(first)))
        alive = arith.cmpi(arith.CmpIPredicate.slt, row, live.registers.flat[0])
        scale = extract(scales.registers.flat[0], 0)
        scale = mgpu_utils.prmt(scale, scale, const(0x3232))  # as two bfloat16
        scale = arith.select(alive, scale, const(0))

        warp, token, column = _place(d_half)
        source = arith.addi(arith.muli(token, const(per_token)), arith.shrui(column, const(3)))
        row = arith.addi(arith.muli(arith.andi(warp, const(1)), const(4)), token)
        swizzled = arith.xori(arith.muli(arith.andi(column, const(3)), const(2)), row)
        swizzled = arith.muli(swizzled, const(16))
        at = arith.addi(
            arith.muli(arith.shrui(warp, const(1)), const(row_tile_bytes)),
            arith.muli(arith.shrui(column, const(2)), const(column_tile_bytes)),
        )
        at = arith.addi(at, arith.muli(row, const(row_bytes)))
        bases = [mgpu_utils.memref_ptr(ref) for ref in (left, right)]
        for i, words in enumerate(latents.registers.flat):
            load, half = divmod(i, 2)
            offset = first // 8 * row_tile_bytes + load * per_load * row_bytes
            # The scales of the halves, and of the tokens of the loads, are so far apart.
            lane_of_scale = arith.addi(
                source, const(load * per_load * per_token + half * per_token // 2)
            )
            factor = nvvm.shfl_sync(const(-1), scale, lane_of_scale, const(0x1F), nvvm.ShflKind.idx)
            pairs = [p for j in range(4) for p in _convert(extract(words, j), factor)]
            for chunk in range(2):
                place = arith.xori(swizzled, const(16 * (chunk ^ load * per_load)))
                pointer = mgpu_utils.getelementptr(bases[half], [arith.addi(at, place)], i8)
                pointer = mgpu_utils.getelementptr(pointer, [offset], i8)
                four = vector.from_elements(
                    ir.VectorType.get((4,), i32), pairs[4 * chunk : 4 * chunk + 4]
                )
                llvm.store(four, pointer)

    store(left, right, latents, scales, live)


def _convert(word: ir.Value, factor: ir.Value) -> list[ir.Value]:
    """Four e4m3 as two pairs of bfloat16, times a pair of factors."""
    low = arith.andi(arith.shli(word, const(4)), const(0xF0F0F0F0 - (1 << 32)))
    sign = arith.andi(word, const(0x80808080 - (1 << 32)))
    high = arith.ori(sign, arith.andi(arith.shrui(word, const(4)), const(0x07070707)))
    unit = const(_TWO_TO_120 << 16 | _TWO_TO_120)
    pairs = [mgpu_utils.prmt(low, high, const(selection)) for selection in (0x5140, 0x7362)]
    return [_multiply(_multiply(pair, unit), factor) for pair in pairs]


def _multiply(a: ir.Value, b: ir.Value) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return mgpu_utils.inline_ptx("mul.rn.bf16x2 $0, $1, $2;", a, b, result_types=i32)


def _tokens_of_load(d_half: int) -> int:
    return 32 * _VECTOR // d_half


def _place(d_half: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    """This thread's warp; its token among those of a load; which 16 channels of a half it has."""
    warp, lane = warp_and_lane()
    eights = d_half // _VECTOR // 4
    eight = arith.shrui(lane, const(3))
    column = arith.addi(
        arith.andi(lane, const(3)), arith.muli(arith.andi(eight, const(eights - 1)), const(4))
    )
    token = arith.addi(
        arith.andi(arith.shrui(lane, const(2)), const(1)),
        arith.muli(arith.shrui(eight, const(eights.bit_length() - 1)), const(2)),
    )
    return warp, token, column
