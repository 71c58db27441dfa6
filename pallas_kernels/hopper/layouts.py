"""Register and shared-memory layouts that the kernels share."""

import math
from collections.abc import Iterable
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.limits import SMEM_ALIGN

WGMMA = plgpu.Layout.WGMMA
"""Accumulator of a wgmma: warp w of the warpgroup holds rows 16w .. 16w + 15."""

WGMMA_ROW = WGMMA.reduce(1)
"""One value per accumulator row."""

WGMMA_COLUMN = WGMMA.reduce(0)
"""One value per accumulator column; every warp holds all of them."""

WGMMA_8BIT = plgpu.Layout.WGMMA_8BIT
"""An 8-bit operand of wgmma in registers: a thread holds four neighbouring columns."""

WGMMA_8BIT_ROW = WGMMA_8BIT.reduce(1)
"""One value per row of such an operand."""


def tiled(cols: int, itemsize: int) -> tuple[plgpu.Transform, ...]:
    """Transforms of a `[rows, cols]` tile that TMA writes and wgmma reads: the widest swizzle."""
    swizzle = min(128, cols * itemsize)
    # pyright takes these classes of jax 0.11 for abstract.
    return (
        plgpu.TilingTransform((8, swizzle // itemsize)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )


def smem_bytes(buffers: Iterable[Any]) -> int:
    """Shared memory of a CTA: each buffer rounded up to its alignment, and the barriers."""
    sizes = (math.prod(x.shape) * jax.numpy.dtype(x.dtype).itemsize for x in buffers)
    return sum(-(-size // SMEM_ALIGN) * SMEM_ALIGN for size in sizes) + SMEM_ALIGN


def across(row_values: jax.Array, cols: int) -> jax.Array:
    """Repeat one value per row over `cols` columns."""
    return lax.broadcast_in_dim(row_values, (row_values.shape[0], cols), (0,))


def down(column_values: jax.Array, rows: int) -> jax.Array:
    """Repeat one value per column over `rows` rows."""
    return lax.broadcast_in_dim(column_values, (rows, column_values.shape[0]), (1,))


def full(shape: tuple[int, ...], value: float, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A constant in the accumulator's layout (`[rows, cols]`) or one value per row (`[rows]`)."""
    layout = WGMMA if len(shape) == 2 else WGMMA_ROW
    return plgpu.layout_cast(jax.numpy.full(shape, value, dtype), layout)


def full_columns(columns: int, value: float) -> jax.Array:
    """A float32 constant, one per accumulator column."""
    return plgpu.layout_cast(jax.numpy.full((columns,), value, "float32"), WGMMA_COLUMN)
