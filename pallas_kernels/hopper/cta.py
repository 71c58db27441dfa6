"""What a CTA of a decode kernel works on, and where that lies; all its roles ask here."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.decode import DecodeConfig
from pallas_kernels.hopper.pieces import Part, Piece
from pallas_kernels.hopper.row_tiles import first_row
from pallas_kernels.hopper.softmax import LN2


@dataclasses.dataclass(frozen=True)
class DecodeCta[C: DecodeConfig]:
    """What one CTA works on, and its memory."""

    config: C
    interpret: bool
    gmem: SimpleNamespace
    smem: SimpleNamespace
    bar: SimpleNamespace
    part: Part
    row_tile: jax.Array
    """Number of its tile of rows."""

    @property
    def first_row(self) -> jax.Array:
        """First row of the tile. Rows that two tiles share are computed twice."""
        return first_row(self.row_tile, self.config.rows, self.config.row_tile)

    @property
    def rows(self) -> Any:
        """The rows of the tile, among those of the sequence."""
        return pl.ds(self.first_row, self.config.tile_rows)

    @property
    def first_slot(self) -> jax.Array:
        """The place of the tile's first row in arrays that hold `row_tile` for each tile."""
        return pl.multiple_of(self.row_tile * self.config.row_tile, self.config.row_tile)

    @property
    def slots(self) -> Any:
        """The places of all its rows in such arrays, also of those that are not there."""
        return pl.ds(self.first_slot, self.config.row_tile)

    def stage(self, tile_count: jax.Array) -> jax.Array:
        """The stage of the ring of the tile that comes after `tile_count` others."""
        return lax.rem(tile_count, jnp.int32(self.config.num_stages))

    def to_output(
        self,
        piece: Piece,
        columns: slice,
        store: Callable[[Any], None],
        final: Callable[[Any], None] | None = None,
    ) -> None:
        """Call `store` with the place of these columns of the piece's output: of the sequence's if
        it is whole, for which `final` may be another function, else of a partial result."""
        gmem, slots = self.gmem, pl.ds(self.first_slot, self.config.tile_rows)
        whole = gmem.out.at[piece.seq, self.rows, columns]
        part = gmem.partial.at[piece.slot, slots, columns]
        pl.when(piece.whole)(lambda: (final or store)(whole))
        pl.when(jnp.logical_not(piece.whole))(lambda: store(part))

    def to_lse(
        self, piece: Piece, lse2: jax.Array, store: Callable[[Any, jax.Array], None]
    ) -> None:
        """Call `store` with the place of the piece's log-sum-exp and with that: natural for a whole
        sequence, else base 2, for the combine."""
        gmem = self.gmem
        whole = lambda: store(gmem.lse.at[piece.seq, self.slots], lse2 * LN2)
        part = lambda: store(gmem.partial_lse2.at[piece.slot, self.slots], lse2)
        pl.when(piece.whole)(whole)
        pl.when(jnp.logical_not(piece.whole))(part)
