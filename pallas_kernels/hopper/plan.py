"""The division of a decode step's key tiles over the CTAs, by all decode kernels.

Every sequence has its key tiles (64 tokens each). Laid end to end they are one line, cut here into
as many contiguous parts as there are CTAs to work on them, so that one long sequence is split over
many SMs and many short ones share one (the idea of stream-K, arXiv:2301.03598, and of FlashMLA's
scheduler; here without a sequential loop).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.formats import FORMATS
from pallas_kernels.hopper.device import num_sms
from pallas_kernels.hopper.limits import BLOCK_KV, BLOCK_M
from pallas_kernels.hopper.row_tiles import num_tiles

SEQ, TILE, END_SEQ, END_TILE, MERGE_SEQ, MERGE_SLOT, MERGE_REST, MERGE_PIECES = range(8)
"""The columns of a plan."""

TILE_COST = 4
"""What a key tile takes. The unit is a quarter of that."""
SEQUENCE_COST = 2 * TILE_COST
"""Starting and ending a sequence: loading its queries, filling the pipeline, writing its output."""
ZERO_ROWS = 16
"""Rows of zeros that a CTA writes in a quarter of the time of a tile: all that it does for a
sequence without keys.

MEASURED: H200, one sequence of 131072 tokens and 255 without keys, attention, us, with 1, 2, 4 and
8 quarters for such a one: 64 rows a CTA 173, 94, 67.5 and 75, in `fp8_full` 186, 100, 58 and 61; 16
rows, transposed, 43.6, 43.8, 44.0 and 45.3. Not measured between 16 and 64.
"""
COMBINE_COST = 4 * TILE_COST
"""What splitting any sequence at all costs: partial results written, read and merged."""
MIN_PIECE = 2
"""Tiles. No piece of a split sequence is shorter, but where a part's share is a single tile."""


def min_share(cache_format: str | None) -> int:
    """Tiles of the smallest share that is worth a CTA, for caches of a format; without one, what
    suits all.

    In e4m3 a pair, for a lone tile is taken twice (docs/decode_e4m3.md). MEASURED: H200, attention
    + combine, us, a tile instead of two: 128 heads, bf16, (1, 2048) 10.7 instead of 11.7, (1, 4096)
    the same; fp8_token, (1, 4096) 16.9 instead of 14.9.
    """
    return MIN_PIECE if cache_format is None or FORMATS[cache_format].in_e4m3 else 1


def zeros_cost(rows: int, row_tile: int) -> int:
    """What a sequence without keys takes a CTA."""
    return -(-min(rows, row_tile) // ZERO_ROWS)


def divide(
    seq_lens: Int[Array, " b"],
    *,
    rows: int,
    row_tile: int = BLOCK_M,
    cache_format: str | None = None,
) -> Int[Array, "parts 8"]:
    """Divide a step of `rows` folded (query, head) rows per sequence over the SMs; a CTA has
    `row_tile` of them. What it gives is right for any format of the cache, and best for
    `cache_format`.

    Row `p` is `(seq, tile, end_seq, end_tile, merge_seq, merge_slot, merge_rest, merge_pieces)`.
    Part `p` starts at key tile `tile` of sequence `seq` and ends before tile `end_tile` of sequence
    `end_seq`. Its pieces of split sequences, two at most, have the slots `2 * p` (that of `seq`)
    and `2 * p + 1` for their results.

    Apart from that, the last four columns list the split sequences, then -1: sequence `merge_seq`
    has `merge_pieces` pieces, the first in slot `merge_slot`, the others in `merge_rest`,
    `merge_rest + 2` and so on.
    """
    num_parts = max(1, num_sms() // num_tiles(rows, row_tile))
    tiles = -(-jnp.maximum(seq_lens, 0) // BLOCK_KV)
    batch = tiles.shape[0]
    # No length, however wild, may make the sum overflow.
    most = ((2**31 - 1) // batch - SEQUENCE_COST) // TILE_COST - num_parts
    tiles = jnp.minimum(tiles, most)
    # One more, empty, sequence: the cuts behind the last one fall on its start.
    tiles = jnp.append(tiles, 0)
    start_costs = jnp.where(tiles > 0, SEQUENCE_COST, zeros_cost(rows, row_tile))
    costs = _sum_before(tiles * TILE_COST + start_costs)

    def longest(cut_seq, cut_tile):
        """Cost of the longest part; a part that starts inside a sequence pays for starting it
        again."""
        cost = costs[cut_seq] + jnp.where(cut_tile > 0, SEQUENCE_COST + cut_tile * TILE_COST, 0)
        return jnp.max(jnp.diff(cost) + jnp.where(cut_tile[:-1] > 0, SEQUENCE_COST, 0))

    def cut_line(counted):
        """Cuts of the line on which a sequence is so much longer than its tiles: between sequences
        only, and within them too; each with the cost of its longest part."""
        begin = _sum_before(tiles * TILE_COST + counted)
        end = begin[1:]
        share = -(-end[-1] // (num_parts * TILE_COST))  # in tiles
        share = jnp.maximum(share, min_share(cache_format))
        shortest = jnp.minimum(share, MIN_PIECE)
        goal = jnp.minimum(jnp.arange(num_parts + 1) * share * TILE_COST, end[-1])
        # Sequences of no length at the line's start are the first part's.
        seq = _count_up_to(end, goal).at[0].set(0)

        def cut(at_end, tile):
            cuts = jnp.where(at_end, seq + 1, seq), jnp.where(at_end, 0, tile)
            return longest(*cuts), cuts

        tile = jnp.clip((goal - begin[seq] - counted[seq]) // TILE_COST, 0, tiles[seq])
        rest = tiles[seq] - tile
        near_end = (rest < shortest) & (tile >= shortest)
        return cut(tile > rest, 0), cut(near_end, jnp.where(tile < shortest, 0, tile))

    # Shares of the cost are equal but for whole tiles; where they are small, those of the tiles
    # alone may be better.
    whole, split = cut_line(start_costs)
    _, of_tiles = cut_line(jnp.zeros_like(start_costs))
    choose = lambda condition, a, b: jax.tree.map(functools.partial(jnp.where, condition), a, b)
    split = choose(of_tiles[0] < split[0], of_tiles, split)
    cut_seq, cut_tile = choose(whole[0] <= split[0] + COMBINE_COST, whole[1], split[1])

    seq, tile, end_seq = cut_seq[:-1], cut_tile[:-1], cut_seq[1:]
    ends_split = jnp.cumsum((tile > 0) & (end_seq > seq))
    last = _count_up_to(ends_split, jnp.arange(num_parts))
    merge_seq = seq.at[last].get(mode="fill", fill_value=-1)
    # The last part that begins at or before a sequence's first tile holds that tile.
    first = _count_up_to(2 * seq + (tile > 0), 2 * merge_seq) - 1
    merges = [merge_seq, 2 * first + (seq[first] != merge_seq), 2 * (first + 1), last - first + 1]
    return jnp.stack([seq, tile, end_seq, cut_tile[1:], *merges], axis=1).astype(jnp.int32)


def _sum_before(values):
    """The sum of all before each of `values`."""
    return jnp.cumsum(values) - values


def _count_up_to(values, limits):
    """How many of the sorted `values` are at most each of `limits`: a search, but in one kernel."""
    return jnp.sum(values <= limits[:, None], axis=1, dtype=jnp.int32)
