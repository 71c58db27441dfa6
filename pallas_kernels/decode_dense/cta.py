"""What a CTA of the dense decode kernel works on, and where that lies; all its roles ask here."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.decode_dense.config import Config
from pallas_kernels.hopper.limits import BLOCK_KV, BLOCK_M
from pallas_kernels.hopper.pieces import Piece
from pallas_kernels.hopper.plan import END_SEQ, END_TILE, SEQ, TILE
from pallas_kernels.hopper.row_tiles import first_row


@dataclasses.dataclass(frozen=True)
class Cta:
    """What one CTA works on, and its memory."""

    config: Config
    interpret: bool
    gmem: SimpleNamespace
    smem: SimpleNamespace
    bar: SimpleNamespace
    part: jax.Array
    row_tile: jax.Array
    held_cut: tuple[jax.Array, ...] | None
    """`cut`, or None for a role without registers to keep it: then it is read when asked for."""

    @property
    def cut(self) -> tuple[jax.Array, ...]:
        """Where the part begins and ends: `(seq, tile, end_seq, end_tile)`."""
        return cut_of(self.gmem, self.part) if self.held_cut is None else self.held_cut

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

    def sequences(self) -> tuple[jax.Array, jax.Array]:
        """The range of sequences that the part touches."""
        first_seq, _, end_seq, end_tile = self.cut
        return first_seq, jnp.where(end_tile > 0, end_seq + 1, end_seq)

    def piece(self, seq: jax.Array) -> Piece:
        """The part's share of sequence `seq`."""
        first_seq, first_tile, end_seq, end_tile = self.cut
        # Tokens that the block table has no place for do not exist; the plan may count them.
        capacity = self.gmem.block_table.shape[1] * self.config.page_size
        seq_len = jnp.clip(self.gmem.seq_lens[seq], 0, capacity)
        tiles = lax.div(seq_len + (BLOCK_KV - 1), jnp.int32(BLOCK_KV))
        begin = jnp.where(seq == first_seq, first_tile, 0)
        whole = (begin == 0) & (seq < end_seq)
        end = jnp.where(seq == end_seq, jnp.minimum(end_tile, tiles), tiles)
        slot = 2 * self.part + (seq != first_seq).astype(jnp.int32)
        return Piece(seq, seq_len, jnp.minimum(begin, end), end, whole, slot)

    def each_piece(self, run: Callable[..., Any], init: Any) -> Any:
        """Fold `run(piece, carry)` over the part's sequences, the empty ones included."""
        first, end = self.sequences()
        return lax.fori_loop(first, end, lambda seq, carry: run(self.piece(seq), carry), init)


def cut_of(gmem: SimpleNamespace, part: jax.Array) -> tuple[jax.Array, ...]:
    """`Cta.cut` of a part, from the plan."""
    return tuple(gmem.parts[part, column] for column in (SEQ, TILE, END_SEQ, END_TILE))
