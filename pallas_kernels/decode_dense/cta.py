"""What a CTA of the dense decode kernel works on, and where that lies; all its roles ask here."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.decode_dense.config import Config
from pallas_kernels.hopper.limits import BLOCK_M
from pallas_kernels.hopper.pieces import Part
from pallas_kernels.hopper.row_tiles import first_row


@dataclasses.dataclass(frozen=True)
class Cta:
    """What one CTA works on, and its memory."""

    config: Config
    interpret: bool
    gmem: SimpleNamespace
    smem: SimpleNamespace
    bar: SimpleNamespace
    part: Part
    row_tile: jax.Array

    @property
    def first_row(self) -> jax.Array:
        """First row of the tile. Rows that two tiles share are computed twice, alike."""
        return first_row(self.row_tile, self.config.rows)

    @property
    def rows(self) -> Any:
        """The rows of the tile, among those of the sequence."""
        return pl.ds(self.first_row, self.config.tile_rows)

    @property
    def padded_rows(self) -> Any:
        """The place of the tile's rows in arrays that hold `BLOCK_M` for each tile."""
        return pl.ds(pl.multiple_of(self.row_tile * BLOCK_M, BLOCK_M), BLOCK_M)

    def stage(self, tile_count: jax.Array) -> jax.Array:
        """The stage of the ring of the tile that comes after `tile_count` others."""
        return lax.rem(tile_count, jnp.int32(self.config.num_stages))

    def p_smem(self, stage):
        """Where P of this stage lies."""
        return self.smem.k_rope.at[stage] if self.config.p_in_rope else self.smem.p.at[stage]
