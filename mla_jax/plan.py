"""The division of one decode step's work over the SMs: made on the device, once per step, shared by all layers.

A decode step reads, for every sequence, all its key tiles (64 tokens each) once per tile of 64 folded
(query, head) rows. The plan lays the sequences end to end and cuts that line into as many contiguous parts as
there are CTAs to work on them, so that one long sequence is split over many SMs and many short ones share one
(the idea of FlashMLA's tile scheduler and of stream-K, arXiv:2301.03598, here without a sequential loop).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.hopper.device import num_sms
from pallas_kernels.hopper.limits import BLOCK_KV, BLOCK_M

# Costs in units of one key tile.
SEQUENCE_COST = 3
"""Starting and ending a sequence: loading its queries, filling the pipeline, writing its output."""
COMBINE_COST = 4
"""What splitting any sequence at all costs: partial results written, read and merged."""
MIN_PIECE = 4
"""No piece of a split sequence is shorter."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """How one decode step is divided; made by `plan_decode`, read by the kernels.

    `parts[p]` is `(seq, tile, end_seq, end_tile, head)`: part `p` starts at key tile `tile` of sequence `seq` and
    ends before tile `end_tile` of sequence `end_seq`. Sequence `seq` itself starts in part `head`; `head == p`
    unless it was split.
    """

    parts: Int[Array, "parts 5"]
    batch: int = dataclasses.field(metadata={"static": True})
    num_heads: int = dataclasses.field(metadata={"static": True})
    q_len: int = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})

    @property
    def num_parts(self) -> int:
        return self.parts.shape[0]

    def check(self, *, batch: int, num_heads: int, q_len: int, page_size: int) -> None:
        """Raise `ValueError` unless the plan was made for a call of these sizes."""
        call = {"batch": batch, "num_heads": num_heads, "q_len": q_len, "page_size": page_size}
        for name, size in call.items():
            planned = getattr(self, name)
            if planned != size:
                raise ValueError(
                    f"`plan` was made for {name}={planned}, this call has {name}={size}; "
                    "call plan_decode with the sizes of this step"
                )


def plan_decode(
    seq_lens: Int[Array, " b"], *, num_heads: int, q_len: int = 1, page_size: int = 64
) -> DecodePlan:
    """Divide a decode step over the SMs of the GPU; pure jnp, so it runs on the device and under `jax.jit`.

    Args:
      seq_lens: `[B]` int32, tokens in the cache of each sequence, the new ones included; 0 is legal.
      num_heads: query heads on this device.
      q_len: query tokens per sequence in this step.
      page_size: tokens per cache page.

    Returns:
      A `DecodePlan`, valid for every layer of the step and for any implementation (those that need none ignore it).

    Raises:
      ValueError: `seq_lens` is not `[B]`, or a size is not positive.
      TypeError: `seq_lens` is not int32.
    """
    if seq_lens.ndim != 1 or seq_lens.shape[0] == 0:
        raise ValueError(f"`seq_lens` has shape {seq_lens.shape}: it must be [B] with B >= 1")
    if seq_lens.dtype != jnp.int32:
        raise TypeError(f"`seq_lens` is {seq_lens.dtype}: it must be int32")
    for name, size in (("num_heads", num_heads), ("q_len", q_len), ("page_size", page_size)):
        if size < 1:
            raise ValueError(f"`{name}` is {size}: it must be at least 1")
    row_tiles = -(-num_heads * q_len // BLOCK_M)
    num_parts = max(1, num_sms() // row_tiles)
    return DecodePlan(
        parts=_divide(-(-jnp.maximum(seq_lens, 0) // BLOCK_KV), num_parts),
        batch=seq_lens.shape[0],
        num_heads=num_heads,
        q_len=q_len,
        page_size=page_size,
    )


def _divide(tiles: Int[Array, " b"], num_parts: int) -> Int[Array, "parts 5"]:
    """Cut the sequences, `tiles` key tiles each, into `num_parts` contiguous parts of nearly equal cost."""
    batch = tiles.shape[0]
    end = jnp.cumsum(tiles + SEQUENCE_COST)
    begin = end - tiles - SEQUENCE_COST
    share = jnp.maximum(-(-end[-1] // num_parts), SEQUENCE_COST + MIN_PIECE)
    goal = jnp.minimum(jnp.arange(num_parts + 1) * share, end[-1])
    seq = jnp.searchsorted(end, goal, side="right")
    # One more, empty, sequence: the cuts behind the last one fall on its start.
    begin = jnp.append(begin, end[-1])
    tiles = jnp.append(tiles, 0)

    def cut(at_end, tile):
        return jnp.where(at_end, seq + 1, seq), jnp.where(at_end, 0, tile)

    def longest(cut_seq, cut_tile):
        """Cost of the longest part; a part that starts inside a sequence pays for starting it again."""
        cost = begin[cut_seq] + jnp.where(cut_tile > 0, SEQUENCE_COST + cut_tile, 0)
        return jnp.max(jnp.diff(cost) + jnp.where(cut_tile[:-1] > 0, SEQUENCE_COST, 0))

    tile = jnp.clip(goal - begin[seq] - SEQUENCE_COST, 0, tiles[seq])
    rest = tiles[seq] - tile
    whole = cut(tile > rest, 0)
    split = cut((rest < MIN_PIECE) & (tile >= MIN_PIECE), jnp.where(tile < MIN_PIECE, 0, tile))
    keep_whole = longest(*whole) <= longest(*split) + COMBINE_COST
    cut_seq, cut_tile = (jnp.where(keep_whole, w, s) for w, s in zip(whole, split, strict=True))

    # The last part that begins at or before a sequence's first tile holds that tile.
    order = 2 * cut_seq[:-1] + (cut_tile[:-1] > 0)
    head = jnp.searchsorted(order, 2 * cut_seq[:-1], side="right") - 1
    head = jnp.where(cut_seq[:-1] < batch, head, jnp.arange(num_parts))
    parts = [cut_seq[:-1], cut_tile[:-1], cut_seq[1:], cut_tile[1:], head]
    return jnp.stack(parts, axis=1).astype(jnp.int32)
