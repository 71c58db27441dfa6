"""e4m3 latents with a scale for 128 channels, from shared memory through registers to bf16 tiles in
shared memory that wgmma reads, by one warpgroup.

A byte `s eeee mmm` moved to the bits `s 0000eeee mmm0000` of a bfloat16 is its value times 2**-120,
subnormal ones included, for both formats have those. Two products make it the value times its
scale: by 2**120, which is exact, and by the scale, a power of two, which rounds where bfloat16 has
no more bits. Two, because their product is no bfloat16 if the scale is above 2**7. The products do
not flush subnormal numbers.

e4m3 has one NaN, all ones below the sign. Here it is 480 times the scale: looking for it takes a
fifth more instructions. A NaN or infinity that was quantised comes out as an infinity, for its
scale is 2**120; what else has such bytes is no product of this library.

The raw tile `[64, d_latent]` may lie where its left half `[64, d_latent / 2]` will be: 8 tokens of
either take the same bytes, and a warp takes all channels of 8 tokens. So it replaces what only its
own lanes have read.

All tiles are swizzled by 128 bytes: the 16 bytes in place c of a row are in place c ^ (row % 8). A
lane loads 16 channels at once, four neighbouring lanes 64 of a token t, the next four the same of
token t ^ 5; what they store are places 2c of both, and then 2c + 1. The 4 in 5 has eight lanes meet
different banks in a load, the 1 in a store.

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
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.formats import SCALE_TILE
from pallas_kernels.hopper.fp8 import tile_strides
from pallas_kernels.hopper.inline import inline_mgpu
from pallas_kernels.hopper.layouts import tiled
from pallas_kernels.hopper.threads import ATOM_ROW, const, extract, in_atom, pointer, warp_and_lane

TOKENS = 32
"""Tokens that are loaded together: 8 a warp."""

_TWO_TO_120 = (127 + 120) << 7
"""As a bfloat16."""


def load_latents(tile: Any, first: int, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The left and the right half of `TOKENS` rows, from `first` on, of an e4m3 tile, in no layout
    but `store_bf16`'s; which may store over them."""
    d_half = tile.shape[1] // 2
    if interpret:
        rows = tile[first : first + TOKENS]
        return rows[:, :d_half], rows[:, d_half:]
    shape, groups = (TOKENS, d_half // 4), d_half // SCALE_TILE
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=4)
    result = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout)
    raw = plgpu.RefType(tiled(2 * d_half, 1))

    @inline_mgpu(arg_types=(raw,), return_type=(result, result))
    def load(ctx, tile):
        del ctx
        row_tile_bytes, column_tile_bytes, row_bytes = tile_strides(tile)
        assert row_bytes == ATOM_ROW
        warp, token, group, vector16 = _place(d_half)
        at = arith.addi(
            arith.muli(warp, const(row_tile_bytes)), arith.muli(group, const(column_tile_bytes))
        )
        place = in_atom(token, vector16)
        halves = []
        for half in range(2):
            offset = first // 8 * row_tile_bytes + half * groups * column_tile_bytes
            registers = np.empty(layout.to_mgpu().registers_shape(shape), dtype=object)
            registers.flat = [
                llvm.load(
                    _four_words(),
                    pointer(tile, arith.addi(at, _moved(place, tokens, 4 * part)), offset),
                )
                for tokens in _token_steps(d_half)
                for part in range(2)
            ]
            array = FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)
            halves.append(array)
        mgpu_utils.warp_barrier()  # all lanes have read what any of them will store over
        return tuple(halves)

    return load(tile)


def store_bf16(
    tile: Any,
    half: int,
    first: int,
    latents: jax.Array,
    scales: Any,
    live: jax.Array,
    *,
    interpret: bool,
) -> None:
    """Store loaded rows times their scales as the rows from `first` on of the left (0) or right (1)
    half of a key tile; rows from number `live` of the key tile on are 0, whatever was loaded.

    `scales`, in shared memory, are the float32 of these rows, a token's side by side.
    """
    d_half = tile.shape[1]
    groups = d_half // SCALE_TILE
    if interpret:
        of_rows = scales[...].reshape(TOKENS, 2 * groups)
        factor = jnp.repeat(of_rows[:, half * groups : (half + 1) * groups], SCALE_TILE, axis=1)
        row = first + jax.lax.broadcasted_iota(jnp.int32, factor.shape, 0)
        values = jnp.where(row < live, latents.astype(jnp.float32) * factor, 0.0)
        tile[first : first + TOKENS] = values.astype(tile.dtype)
        return
    bf16, splat = plgpu.RefType(tiled(d_half, 2)), plgpu.Layout.WG_SPLAT(())
    words_of = plgpu.Layout.WG_STRIDED((TOKENS, d_half // 4), vec_size=4)

    @inline_mgpu(arg_types=(bf16, words_of, plgpu.RefType(), splat))
    def store(ctx, tile, latents, scales, live):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        row_tile_bytes, column_tile_bytes, row_bytes = tile_strides(tile)
        assert row_bytes == ATOM_ROW
        warp, token, group, vector16 = _place(d_half)
        at = arith.addi(
            arith.muli(warp, const(row_tile_bytes)), arith.muli(group, const(2 * column_tile_bytes))
        )
        place = in_atom(token, arith.muli(vector16, const(2)))
        vectors = iter(latents.registers.flat)
        for tokens in _token_steps(d_half):
            row = arith.addi(arith.muli(warp, const(8)), arith.xori(token, const(tokens)))
            scale = arith.addi(arith.muli(row, const(2 * groups)), group)
            scale = pointer(scales, arith.muli(scale, const(4)), 4 * half * groups)
            scale = llvm.load(i32, scale)
            row = arith.addi(row, const(first))
            alive = arith.cmpi(arith.CmpIPredicate.slt, row, live.registers.flat[0])
            factor = mgpu_utils.prmt(scale, scale, const(0x3232))  # as two bfloat16
            factor = arith.select(alive, factor, const(0))
            for part in range(2):
                words = next(vectors)
                pairs = [p for j in range(4) for p in _convert(extract(words, j), factor)]
                offset = first // 8 * row_tile_bytes + part * column_tile_bytes
                for chunk in range(2):
                    there = arith.addi(at, _moved(place, tokens, chunk))
                    four = vector.from_elements(_four_words(), pairs[4 * chunk : 4 * chunk + 4])
                    llvm.store(four, pointer(tile, there, offset))

    store(tile, latents, scales, live)


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


def _place(d_half: int) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """This thread's warp, and what of a half it loads first: its token, of 8; its group of channels
    that share a scale; which 16 channels of 64."""
    groups = d_half // SCALE_TILE
    warp, lane = warp_and_lane()
    eight = arith.shrui(lane, const(3))
    odd = arith.andi(arith.shrui(lane, const(2)), const(1))
    even = arith.muli(arith.shrui(eight, const(groups.bit_length() - 1)), const(2))
    token = arith.xori(even, arith.muli(odd, const(5)))
    return warp, token, arith.andi(eight, const(groups - 1)), arith.andi(lane, const(3))


def _token_steps(d_half: int) -> range:
    """What a thread's tokens are its first one xor."""
    return range(0, 4 * d_half // SCALE_TILE, 4)


def _moved(place: ir.Value, token: int, chunk: int) -> ir.Value:
    """`in_atom` of the token xor `token` and the chunk xor `chunk`."""
    return arith.xori(place, const(token * ATOM_ROW + (token ^ chunk) * 16))


def _four_words() -> ir.Type:
    return ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
