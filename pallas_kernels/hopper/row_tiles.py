"""How the folded (query, head) rows of a sequence lie in tiles of `tile` rows.

A *slot* is a place in the tiles laid end to end: arrays with one value per row of a tile have
`num_tiles(rows, tile) * tile` of them. The last tile is drawn back to end at the last row, so the
rows that it shares with the tile before have two slots; a lone, partly filled tile has slots
without a row.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.hopper.limits import BLOCK_M


def num_tiles(rows: int, tile: int = BLOCK_M) -> int:
    """Tiles that cover `rows` rows."""
    return -(-rows // tile)


def first_row(index: jax.Array | np.ndarray, rows: int, tile: int = BLOCK_M):
    """The row in the first slot of tile number `index`."""
    return jnp.minimum(index * tile, max(rows - tile, 0))


def slot_of(row: jax.Array, rows: int, tile: int = BLOCK_M) -> jax.Array:
    """A slot of `row`."""
    last = (num_tiles(rows, tile) - 1) * tile
    return row if last == 0 else jnp.where(row < last, row, row + last + tile - rows)


def row_of_slots(rows: int, tile: int = BLOCK_M) -> np.ndarray:
    """The row of every slot; slots without one repeat the last row."""
    starts = np.minimum(np.arange(num_tiles(rows, tile)) * tile, max(rows - tile, 0))
    return np.minimum(starts[:, None] + np.arange(tile), rows - 1).reshape(-1)


def untile(values: jax.Array, rows: int, tile: int = BLOCK_M) -> jax.Array:
    """`[B, slots]` to `[B, rows]`."""
    if rows % tile == 0:
        return values
    last = (num_tiles(rows, tile) - 1) * tile
    if last == 0:
        return values[:, :rows]
    return jnp.concatenate([values[:, :last], values[:, 2 * last + tile - rows :]], axis=1)
