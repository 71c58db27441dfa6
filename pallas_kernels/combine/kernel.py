"""Merging the pieces of split sequences, after a decode kernel.

    lse[r] = log sum_i exp(lse_i[r])
    out[r] = sum_i exp(lse_i[r] - lse[r]) * out_i[r]

(FlashAttention-2, arXiv:2307.08691, sec. 3.1, applied once more over the pieces.) One warpgroup
takes four rows of one split sequence at a time, one per warp: of few pieces all columns, of many a
quarter of them, so that one long sequence occupies more SMs. The warpgroups of the grid stride over
all such items. A step without split sequences costs the launch only. No shared memory.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.limits import BLOCK_M
from pallas_kernels.hopper.plan import MERGE_PIECES, MERGE_REST, MERGE_SEQ, MERGE_SLOT
from pallas_kernels.hopper.row_tiles import slot_of
from pallas_kernels.hopper.softmax import LN2, with_sink

# MEASURED: H200, 128 heads, us at (128, 4096) with two queries, (16, 32768), (1, 131072): 9.7, 6.5,
# 6.2 as it is, and 1.3 where no sequence was split; entries 22, 27 and 30 of the record in
# docs/decode_dense.md have what else was tried.
GROUP = 4
"""Rows that a warpgroup merges together."""
FEW = 4
"""Pieces of a sequence, up to which a warpgroup takes all columns of its rows."""
BATCH_OF_FEW, BATCH_OF_MANY = 2, 8
"""Pieces whose loads are in flight together."""
COLUMN_PARTS = 4
"""Parts of the columns, of sequences with many pieces."""
WARPGROUPS = 2
"""Of a CTA, unless all items have an SM of their own."""
CTAS_PER_SM = 2
"""At most: no more are launched than there could be something to do for."""


def _tile(width: int) -> Any:
    """Layout of `[GROUP, width]`: a row per warp, up to 8 neighbouring columns per lane."""
    vector = min(8, width // 32)
    tiling = plgpu.Tiling(((GROUP, 32 * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def merge(
    out: jax.Array,
    lse: jax.Array,
    partial: jax.Array,
    partial_lse2: jax.Array,
    parts: jax.Array,
    sink: jax.Array | None,
    *,
    num_sms: int,
    row_tile: int = BLOCK_M,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Fill in, in place, the rows of split sequences in `out [B, rows, C]` and in `lse`.

    `lse` and the partial results are tiled by `row_tile` rows. Both numbers of rows must be
    multiples of `GROUP`, so that no group is in two tiles.
    """
    d_latent = out.shape[2]
    num_parts = parts.shape[0]
    # Where the operand is a slice, or the result goes into a loop's stack (lax.scan, lax.map), XLA
    # would make one operation of the two (a dynamic-slice fusion), forgetting that the kernel works
    # in place: rows of sequences that were not split would be lost.
    out, lse = lax.optimization_barrier((out, lse))
    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    groups = out.shape[1] // GROUP
    items_of_merge = groups * COLUMN_PARTS
    most_items = min(out.shape[0], num_parts) * items_of_merge
    warpgroups = WARPGROUPS if most_items > num_sms else 1
    num_ctas = min(num_sms * CTAS_PER_SM, pl.cdiv(most_items, warpgroups))
    workers = num_ctas * warpgroups

    def body(*refs):
        names = ("partial", "partial_lse2", "parts", "sink", "out", "lse")
        gmem = SimpleNamespace(**dict(zip(names, refs, strict=True)))
        first = lax.axis_index("cta") * warpgroups + lax.axis_index("wg")

        def merge_of(item):
            """The item's row in the list of merges, and whether there is one."""
            merge = lax.div(item, jnp.int32(items_of_merge))
            in_list = jnp.minimum(merge, num_parts - 1)
            return in_list, (merge < num_parts) & (gmem.parts[in_list, MERGE_SEQ] >= 0)

        def run(item):
            merge, _ = merge_of(item)
            columns_of_merge = (MERGE_SEQ, MERGE_SLOT, MERGE_REST, MERGE_PIECES)
            seq, first_slot, rest, pieces = (gmem.parts[merge, i] for i in columns_of_merge)
            of_merge = lax.rem(item, jnp.int32(items_of_merge))
            part, group = lax.div(of_merge, jnp.int32(groups)), lax.rem(of_merge, jnp.int32(groups))
            row = group * GROUP
            slot = slot_of(row, out.shape[1], row_tile)
            group_rows, slots = pl.ds(row, GROUP), pl.ds(slot, GROUP)

            def merge_columns(columns, width, batch):
                tile = _tile(width)
                per_row = tile.reduce(1)
                across = lambda x: lax.broadcast_in_dim(x, (GROUP, width), (0,))
                load = functools.partial(plgpu.load, optimized=False)
                full = lambda value: plgpu.layout_cast(jnp.full((GROUP,), value), per_row)

                def gather(i):
                    none = jnp.where(i < pieces, 0.0, -jnp.inf)
                    i = jnp.minimum(i, pieces - 1)
                    slot = jnp.where(i == 0, first_slot, rest + 2 * (i - 1))
                    lse2 = load(gmem.partial_lse2.at[slot, slots], layout=per_row)
                    piece = load(gmem.partial.at[slot, slots, columns], layout=tile)
                    return lse2 + none, piece

                def step(index, carry):
                    m, l, acc = carry
                    loaded = [gather(index * batch + i) for i in range(batch)]
                    m_new = functools.reduce(jnp.maximum, [lse2 for lse2, _ in loaded], m)
                    base = jnp.where(m_new == -jnp.inf, 0.0, m_new)
                    alpha = jnp.exp2(m - base)
                    l, acc = l * alpha, acc * across(alpha)
                    for lse2, piece in loaded:
                        weight = jnp.exp2(lse2 - base)
                        l, acc = l + weight, acc + across(weight) * piece.astype(jnp.float32)
                    return m_new, l, acc

                start = full(-jnp.inf), full(0.0), across(full(0.0))
                steps = lax.div(pieces + (batch - 1), jnp.int32(batch))
                m, l, acc = lax.fori_loop(0, steps, step, start)
                empty = l == 0.0
                lse2 = jnp.where(empty, -jnp.inf, m + jnp.log2(jnp.where(empty, 1.0, l)))
                factor = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, l))
                if sink is not None:
                    factor = with_sink(factor, lse2, load(gmem.sink.at[slots], layout=per_row))
                gmem.out[seq, group_rows, columns] = (acc * across(factor)).astype(out.dtype)

                @pl.when(part == 0)
                def _():
                    gmem.lse[seq, slots] = lse2 * LN2

            few, narrow = pieces <= FEW, d_latent // COLUMN_PARTS
            merge_all = functools.partial(merge_columns, pl.ds(0, d_latent), d_latent, BATCH_OF_FEW)
            part_columns = pl.ds(pl.multiple_of(part * narrow, narrow), narrow)
            merge_part = functools.partial(merge_columns, part_columns, narrow, BATCH_OF_MANY)
            pl.when(few & (part == 0))(merge_all)
            pl.when(jnp.logical_not(few))(merge_part)
            return item + workers

        lax.while_loop(lambda item: merge_of(item)[1], run, first)

    mesh = plgpu.Mesh(
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=warpgroups,
        thread_name="wg",
    )
    kernel: Any = pl.kernel(
        body,
        out_type=(),
        mesh=mesh,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        interpret=interpret,
        name="mla_decode_combine",
    )
    kernel(
        partial,
        partial_lse2,
        parts,
        jnp.zeros((1,), jnp.float32) if sink is None else sink,
        out_ref,
        lse_ref,
    )
    return lax.optimization_barrier((out_ref[...], lse_ref[...]))
