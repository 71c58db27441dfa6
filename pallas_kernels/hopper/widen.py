"""e4m3 tiles in shared memory as float16 operands of wgmma in registers.

float16 holds every e4m3 exactly, and there is an instruction that makes two of two. The tokens'
scales are none of its business: a power of two for 128 channels is as well a factor of the scores
of those channels, or of the probabilities that multiply their values.

A word of four e4m3, as `ldmatrix` brings it to a thread, becomes two words of a 16-bit operand:

- Of keys `[tokens, channels]` it is the channels 4i to 4i + 3 of 16 of a token. The operand has for
  the thread the places 2i, 2i + 1, 2i + 8 and 2i + 9 of 16: the channels are summed in another
  order, in which the queries must have them too (`queries.store`).
- Of values, transposed, it is two channels of two tokens. A byte permutation brings the tokens of a
  channel together; the even and the odd channels are an operand each, as in `hopper.fp8`. Tokens
  stay in their order.

On the simulated GPU (`interpret`) everything stays in natural order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.formats import BITS_OF_ONE, EXPONENT
from pallas_kernels.hopper.fp8 import tile_strides
from pallas_kernels.hopper.inline import inline_mgpu
from pallas_kernels.hopper.layouts import WGMMA, tiled
from pallas_kernels.hopper.threads import ATOM_ROW, const, extract, in_atom, pointer, warp_and_lane


def load_keys(tile: Any, *, interpret: bool) -> jax.Array:
    """An e4m3 tile `[64 tokens, channels]`, swizzled by 128 bytes, as an operand of that shape."""
    if interpret:
        return tile[...].astype(jnp.float16)
    shape = tile.shape
    tiles = shape[1] // ATOM_ROW
    result = plgpu.ShapeDtypeStruct(shape, jnp.float16, layout=WGMMA)

    @inline_mgpu(arg_types=(plgpu.RefType(tiled(ATOM_ROW, 1)),), return_type=result)
    def load(ctx, tile):
        # Four matrices are 64 channels of eight tokens.
        del ctx
        row_tile_bytes, column_tile_bytes, _ = tile_strides(tile)
        warp, matrix, row = _warp_matrix_and_row()
        at = arith.addi(arith.muli(warp, const(2 * row_tile_bytes)), in_atom(row, matrix))
        layout = WGMMA.to_mgpu()
        wide = np.empty((tiles, 2, 4, 2, 2), dtype=object)
        for column_tile, part, half in np.ndindex(tiles, 2, 2):
            offset = column_tile * column_tile_bytes + half * row_tile_bytes
            words = _load_matrices(tile, at, 64 * part, offset, nvvm.MMALayout.row)
            for i, word in enumerate(words):
                wide[column_tile, part, i, :, half] = _widened(word)
        wide = wide.reshape(layout.registers_shape(shape))
        return FragmentedArray(_registers=wide, _layout=layout, _is_signed=None)

    return load(tile)


def load_values(tile: Any, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The even and the odd columns of an e4m3 tile `[64 tokens, columns]`, swizzled by 128 bytes,
    as operands `[columns / 2, 64]`."""
    if interpret:
        values = tile[...].T.astype(jnp.float16)
        return values[0::2], values[1::2]
    tokens, columns = tile.shape
    shape, tiles = (columns // 2, tokens), columns // ATOM_ROW
    result = plgpu.ShapeDtypeStruct(shape, jnp.float16, layout=WGMMA)

    @inline_mgpu(arg_types=(plgpu.RefType(tiled(ATOM_ROW, 1)),), return_type=(result, result))
    def load(ctx, tile):
        # Four matrices are 8 pairs of channels of 32 tokens.
        del ctx
        row_tile_bytes, column_tile_bytes, _ = tile_strides(tile)
        warp, matrix, row = _warp_matrix_and_row()
        chunk = arith.muli(warp, const(2))
        at = arith.addi(arith.muli(matrix, const(row_tile_bytes)), in_atom(row, chunk))
        layout = WGMMA.to_mgpu()
        parted = np.empty((2, tiles, 2, 4, 2), dtype=object)
        for column_tile, part, half in np.ndindex(tiles, 2, 2):
            offset = column_tile * column_tile_bytes + 4 * part * row_tile_bytes
            words = _load_matrices(tile, at, 16 * half, offset, nvvm.MMALayout.col)
            for i, word in enumerate(words):
                word = mgpu_utils.prmt(word, word, const(0x3120))
                parted[:, column_tile, part, i, half] = _widened(word)
        return tuple(
            FragmentedArray(
                _registers=out.reshape(layout.registers_shape(shape)),
                _layout=layout,
                _is_signed=None,
            )
            for out in parted
        )

    return load(tile)


def _warp_matrix_and_row() -> tuple[ir.Value, ir.Value, ir.Value]:
    """This thread's warp; the matrix of four, and its row, whose address it gives to `ldmatrix`."""
    warp, lane = warp_and_lane()
    return warp, arith.shrui(lane, const(3)), arith.andi(lane, const(7))


def _load_matrices(
    tile: ir.Value, at: ir.Value, in_row: int, offset: int, layout: nvvm.MMALayout
) -> list[ir.Value]:
    """The words of four 8 x 8 matrices of 16-bit elements: those at the threads' places, or so many
    bytes, a power of two, further on in their row, and `offset` further on in the tile."""
    i32 = ir.IntegerType.get_signless(32)
    at = arith.xori(at, const(in_row)) if in_row else at
    four = nvvm.ldmatrix(
        pointer(tile, at, offset),
        layout=layout,
        num=4,
        shape=ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
        elt_type=nvvm.LdStMatrixEltType.B16,
    )
    return [llvm.extractvalue(i32, four, [i]) for i in range(4)]


def _widened(word: ir.Value) -> list[ir.Value]:
    """Two pairs of float16: the low two of four e4m3 and the high two."""
    i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.F16Type.get())
    words = mgpu_utils.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
        "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        word,
        result_types=[i32, i32],
    )
    return [mgpu_utils.bitcast(wide, pair) for wide in words]


def largest_scales(
    ref: Any, live: jax.Array, *, per_row: int, kinds: int, interpret: bool
) -> tuple[jax.Array, ...]:
    """The largest of each kind of scale of the tokens before `live`, of 64, in shared memory,
    rounded down to a power of two; alike in all warps, 0 if there are none.

    `ref [rows, ...]` holds those of `per_row` tokens in each row, the kinds side by side. They are
    not negative.
    """
    if interpret:
        scales = ref[...][:, : per_row * kinds].reshape(64, kinds)
        token = jax.lax.broadcasted_iota(jnp.int32, scales.shape, 0)
        largest = jnp.where(token < live, scales, 0.0).max(axis=0)
        bits = jax.lax.bitcast_convert_type(largest, jnp.int32) & EXPONENT
        largest = jax.lax.bitcast_convert_type(bits, jnp.float32)
        return tuple(largest[kind] for kind in range(kinds))
    row_stride = ref.shape[1]
    splat = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct((), jnp.float32, layout=splat)

    @inline_mgpu(arg_types=(plgpu.RefType(), splat), return_type=(result,) * kinds)
    def reduce(ctx, ref, live):
        # As unsigned integers, which have the same order, and which a warp compares at once. A lane
        # has two neighbouring tokens.
        del ctx
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        loaded = ir.VectorType.get((2 * kinds,), i32)
        _, lane = warp_and_lane()
        lanes = per_row // 2
        row = arith.shrui(lane, const(lanes.bit_length() - 1))
        at = arith.addi(
            arith.muli(row, const(row_stride)),
            arith.muli(arith.andi(lane, const(lanes - 1)), const(2 * kinds)),
        )
        bits = llvm.load(loaded, mgpu_utils.getelementptr(mgpu_utils.memref_ptr(ref), [at], f32))
        limit = arith.subi(live.registers.flat[0], arith.muli(lane, const(2)))
        alive = [arith.cmpi(arith.CmpIPredicate.sgt, limit, const(i)) for i in range(2)]
        found = []
        for kind in range(kinds):
            both = (
                arith.select(alive[i], extract(bits, i * kinds + kind), const(0)) for i in range(2)
            )
            largest = functools.reduce(arith.maxui, both)
            largest = mgpu_utils.redux(largest, const(-1), nvvm.ReductionKind.UMAX)
            largest = arith.andi(largest, const(EXPONENT))
            found.append(FragmentedArray.splat(mgpu_utils.bitcast(largest, f32), ()))
        return tuple(found)

    return reduce(ref, live)


def inverse(power_of_two: jax.Array, *, interpret: bool) -> jax.Array:
    """1 over a power of two between 2**-126 and 2**126: division would take a dozen instructions,
    and Mosaic casts the bits of arrays only."""
    if interpret:
        return 1 / power_of_two
    splat = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct((), jnp.float32, layout=splat)

    @inline_mgpu(arg_types=(splat,), return_type=result)
    def negate_exponent(ctx, power_of_two):
        del ctx
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        bits = mgpu_utils.bitcast(power_of_two.registers.flat[0], i32)
        bits = arith.subi(const(2 * BITS_OF_ONE), bits)
        return FragmentedArray.splat(mgpu_utils.bitcast(bits, f32), ())

    return negate_exponent(power_of_two)
