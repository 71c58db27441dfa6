"""What of the plan a CTA works on: its part's share of each sequence; of the combine's, a split
sequence."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.limits import BLOCK_KV
from pallas_kernels.hopper.plan import (
    END_SEQ,
    END_TILE,
    MERGE_PIECES,
    MERGE_REST,
    MERGE_SEQ,
    MERGE_SLOT,
    SEQ,
    TILE,
)


@dataclasses.dataclass(frozen=True)
class Piece:
    """The key tiles `[begin, end)` of sequence `seq`."""

    seq: jax.Array
    seq_len: jax.Array
    begin: jax.Array
    end: jax.Array
    whole: jax.Array
    """The sequence is not split: the piece gives its final output."""
    slot: jax.Array
    """Where the piece's partial result goes if the sequence is split."""

    @property
    def tiles(self) -> jax.Array:
        """Key tiles of the piece."""
        return self.end - self.begin

    def pages(self, block_table: Any, tile: jax.Array, page_size: int) -> Iterator[jax.Array]:
        """The pages that key tile `tile` is loaded from, one if that holds all of it; before the
        piece's first tile those of that one. Each is looked up when it is asked for.

        A page behind the sequence's end is replaced by its last one: entries there may be anything.
        """
        first_token = jnp.maximum(tile, self.begin) * BLOCK_KV
        last_page = lax.div(self.seq_len - 1, jnp.int32(page_size))
        for token in range(0, BLOCK_KV, page_size):
            page = lax.div(first_token + token, jnp.int32(page_size))
            yield block_table[self.seq, jnp.minimum(page, last_page)]


@dataclasses.dataclass(frozen=True)
class Part:
    """Row `index` of the plan's parts array."""

    parts: Any
    index: jax.Array
    seq_lens: Any
    capacity: int
    """Tokens that the block table has a place for."""
    held_cut: tuple[jax.Array, ...] | None = None
    """`cut`, if there are registers for it. Else it is read whenever it is asked for: a few loads
    that hit the nearest cache, and nothing that a loop over key tiles has to keep."""

    @property
    def cut(self) -> tuple[jax.Array, ...]:
        """Where it begins and ends: `(seq, tile, end_seq, end_tile)`."""
        if self.held_cut is not None:
            return self.held_cut
        return tuple(self.parts[self.index, column] for column in (SEQ, TILE, END_SEQ, END_TILE))

    def holding_cut(self) -> "Part":
        """The same, with `held_cut`."""
        return dataclasses.replace(self, held_cut=self.cut)

    def piece(self, seq: jax.Array) -> Piece:
        """The part's share of sequence `seq`."""
        first_seq, first_tile, end_seq, end_tile = self.cut
        # Tokens that the block table has no place for do not exist; the plan may count them.
        seq_len = jnp.clip(self.seq_lens[seq], 0, self.capacity)
        tiles = lax.div(seq_len + (BLOCK_KV - 1), jnp.int32(BLOCK_KV))
        begin = jnp.where(seq == first_seq, first_tile, 0)
        whole = (begin == 0) & (seq < end_seq)
        end = jnp.where(seq == end_seq, jnp.minimum(end_tile, tiles), tiles)
        slot = 2 * self.index + (seq != first_seq).astype(jnp.int32)
        return Piece(seq, seq_len, jnp.minimum(begin, end), end, whole, slot)

    def each_piece(self, run: Callable[..., Any], init: Any) -> Any:
        """Fold `run(piece, carry)` over the part's sequences, the empty ones included."""

        def more(state):
            _, _, end_seq, end_tile = self.cut
            return state[0] < jnp.where(end_tile > 0, end_seq + 1, end_seq)

        def step(state):
            seq, carry = state
            return seq + 1, run(self.piece(seq), carry)

        first_seq, *_ = self.cut
        return lax.while_loop(more, step, (first_seq, init))[1]


class Split(NamedTuple):
    """A split sequence of the plan's list, and where the results of its pieces are."""

    seq: jax.Array
    first_slot: jax.Array
    """Of the first piece."""
    rest: jax.Array
    """Slot of the second piece; each further one's is 2 more."""
    pieces: jax.Array
    """Their number."""

    @staticmethod
    def read(parts: Any, index: jax.Array) -> "Split":
        """Number `index` of the list."""
        columns = MERGE_SEQ, MERGE_SLOT, MERGE_REST, MERGE_PIECES
        return Split(*(parts[index, column] for column in columns))

    def slot(self, piece: jax.Array) -> jax.Array:
        """The slot of a piece; of the last one if there is none of this number."""
        piece = jnp.minimum(piece, self.pieces - 1)
        return jnp.where(piece == 0, self.first_slot, self.rest + 2 * (piece - 1))
