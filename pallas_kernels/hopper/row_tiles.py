"""How the folded (query, head) rows of a sequence lie in tiles of `BLOCK_M`.

A *slot* is a place in the tiles laid end to end: arrays with one value per row of a tile have
`num_tiles(rows) * BLOCK_M` of them. The last tile is drawn back to end at the last row, so the rows
that it shares with the tile before have two slots; a lone, partly filled tile has slots without a
row.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.hopper.limits import BLOCK_M


def num_tiles(rows: int) -> int:
    """Tiles that cover `rows` rows."""
    return -(-rows // BLOCK_M)


def first_row(tile: jax.Array | np.ndarray, rows: int):
    """The row in the first slot of tile number `tile`."""
    return jnp.minimum(tile * BLOCK_M, max(rows - BLOCK_M, 0))


def slot_of(row: jax.Array, rows: int) -> jax.Array:
    """A slot of `row`."""
    last = (num_tiles(rows) - 1) * BLOCK_M
    return row if last == 0 else jnp.where(row < last, row, row + last + BLOCK_M - rows)


def row_of_slots(rows: int) -> np.ndarray:
    """The row of every slot; slots without one repeat the last row."""
    starts = np.minimum(np.arange(num_tiles(rows)) * BLOCK_M, max(rows - BLOCK_M, 0))
    return np.minimum(starts[:, None] + np.arange(BLOCK_M), rows - 1).reshape(-1)


def untile(values: jax.Array, rows: int) -> jax.Array:
    """`[B, slots]` to `[B, rows]`."""
    if rows % BLOCK_M == 0:
        return values
    last = (num_tiles(rows) - 1) * BLOCK_M
    if last == 0:
        return values[:, :rows]
    return jnp.concatenate([values[:, :last], values[:, 2 * last + BLOCK_M - rows :]], axis=1)
