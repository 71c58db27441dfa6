"""What of the plan a CTA works on: its part's share of each sequence."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.limits import BLOCK_KV


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
        """The pages that key tile `tile` is loaded from, one if that holds all of it; each is
        looked up when it is asked for.

        A page behind the sequence's end is replaced by its last one: entries there may be anything.
        """
        last_page = lax.div(self.seq_len - 1, jnp.int32(page_size))
        for token in range(0, BLOCK_KV, page_size):
            page = lax.div(tile * BLOCK_KV + token, jnp.int32(page_size))
            yield block_table[self.seq, jnp.minimum(page, last_page)]


@dataclasses.dataclass(frozen=True)
class Part:
    """Row `index` of the plan's parts array.

    The cut is read whenever it is asked for: a few loads that hit the nearest cache, and nothing
    that a loop over key tiles has to keep in registers.
    """

    parts: Any
    index: jax.Array
    seq_lens: Any
    capacity: int
    """Tokens that the block table has a place for."""

    def piece(self, seq: jax.Array) -> Piece:
        """The part's share of sequence `seq`."""
        first_seq, first_tile, end_seq, end_tile = (self.parts[self.index, i] for i in range(4))
        # Tokens that the block table has no place for do not exist; the plan may count them.
        seq_len = jnp.clip(self.seq_lens[seq], 0, self.capacity)
        tiles = lax.div(seq_len + (BLOCK_KV - 1), jnp.int32(BLOCK_KV))
        begin = jnp.where(seq == first_seq, first_tile, 0)
        whole = (begin == 0) & (seq < end_seq)
        end = jnp.where(seq == end_seq, jnp.minimum(end_tile, tiles), tiles)
        slot = 2 * self.index + (seq != first_seq).astype(jnp.int32)
        return Piece(seq, seq_len, jnp.minimum(begin, end), end, whole, slot)

    def each_sequence(self, run: Callable[..., Any], init: Any) -> Any:
        """Fold `run(seq, carry)` over the part's sequences, the empty ones included."""

        def more(state):
            end_seq, end_tile = self.parts[self.index, 2], self.parts[self.index, 3]
            return state[0] < jnp.where(end_tile > 0, end_seq + 1, end_seq)

        step = lambda state: (state[0] + 1, run(*state))
        return lax.while_loop(more, step, (self.parts[self.index, 0], init))[1]
