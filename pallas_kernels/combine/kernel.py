"""Merging the pieces of split sequences, after a decode kernel.

    lse[r] = log sum_i exp(lse_i[r])
    out[r] = sum_i exp(lse_i[r] - lse[r]) * out_i[r]

(FlashAttention-2, arXiv:2307.08691, sec. 3.1, applied once more over the pieces.) One warpgroup
takes one row of one split sequence at a time, a few neighbouring columns a thread; the warpgroups
of the grid stride over all such rows. A step without split sequences costs the launch only. No
shared memory.
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
from pallas_kernels.hopper.softmax import LN2, LOG2E

# MEASURED: H200, 128 heads, us at (32, 32768), (8, 8192), (1, 131072): 8.4, 5.2, 8.5 as it is;
# 12.9, 7.3, 7.8 with batches of 16 and then 4; 14.8, 7.6, 7.3 with batches of 8, half the columns.
BATCH = 4
"""Pieces whose loads are in flight together."""
WARPGROUPS = 2
CTAS_PER_SM = 8


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
    """Fill in the rows of split sequences in `out [B, rows, C]` and `lse`, in place.

    `lse` and the partial results are tiled by `row_tile` rows.
    """
    rows, d_latent = out.shape[1:]
    num_parts = parts.shape[0]
    # Where the operand is a slice, or the result goes into a loop's stack (lax.scan, lax.map), XLA
    # would make one operation of the two (a dynamic-slice fusion), forgetting that the kernel works
    # in place: rows of sequences that were not split would be lost.
    out, lse = lax.optimization_barrier((out, lse))
    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    workers = num_sms * CTAS_PER_SM * WARPGROUPS
    columns = plgpu.Layout.WG_STRIDED((d_latent,), d_latent // 128)

    def body(*refs):
        names = ("partial", "partial_lse2", "parts", "sink", "out", "lse")
        gmem = SimpleNamespace(**dict(zip(names, refs, strict=True)))
        first = lax.axis_index("cta") * WARPGROUPS + lax.axis_index("wg")

        def merge_of(item):
            """The item's row in the list of merges, and whether there is one."""
            merge = lax.div(item, jnp.int32(rows))
            in_list = jnp.minimum(merge, num_parts - 1)
            return in_list, (merge < num_parts) & (gmem.parts[in_list, MERGE_SEQ] >= 0)

        def run(item):
            merge, _ = merge_of(item)
            columns_of_merge = (MERGE_SEQ, MERGE_SLOT, MERGE_REST, MERGE_PIECES)
            seq, first_slot, rest, pieces = (gmem.parts[merge, i] for i in columns_of_merge)
            row = lax.rem(item, jnp.int32(rows))
            slot_row = slot_of(row, rows, row_tile)

            def gather(i):
                i = jnp.minimum(i, pieces - 1)
                slot = jnp.where(i == 0, first_slot, rest + 2 * (i - 1))
                row_ref = gmem.partial.at[slot, slot_row]
                piece = plgpu.load(row_ref, layout=columns, optimized=False)
                return gmem.partial_lse2[slot, slot_row], piece

            def step(batch, carry):
                m, l, acc = carry
                loaded = [gather(batch * BATCH + i) for i in range(BATCH)]
                lse2s = [
                    jnp.where(batch * BATCH + i < pieces, lse2, -jnp.inf)
                    for i, (lse2, _) in enumerate(loaded)
                ]
                m_new = functools.reduce(jnp.maximum, lse2s, m)
                base = jnp.where(m_new == -jnp.inf, 0.0, m_new)
                alpha = jnp.exp2(m - base)
                l, acc = l * alpha, acc * alpha
                for lse2, (_, piece) in zip(lse2s, loaded, strict=True):
                    weight = jnp.exp2(lse2 - base)
                    l, acc = l + weight, acc + weight * piece
                return m_new, l, acc

            start = jnp.float32(-jnp.inf), jnp.float32(0.0)
            zero = plgpu.layout_cast(jnp.zeros((d_latent,), jnp.float32), columns)
            batches = lax.div(pieces + (BATCH - 1), jnp.int32(BATCH))
            m, l, acc = lax.fori_loop(0, batches, step, (*start, zero))
            empty = l == 0.0
            lse2 = jnp.where(empty, -jnp.inf, m + jnp.log2(jnp.where(empty, 1.0, l)))
            factor = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, l))
            if sink is not None:
                shared = factor / (1.0 + jnp.exp2(gmem.sink[slot_row] * LOG2E - lse2))
                factor = jnp.where(empty, 0.0, shared)
            gmem.out[seq, row] = (acc * factor).astype(out.dtype)
            gmem.lse[seq, slot_row] = lse2 * LN2
            return item + workers

        lax.while_loop(lambda item: merge_of(item)[1], run, first)

    mesh = plgpu.Mesh(
        grid=(num_sms * CTAS_PER_SM,),
        grid_names=("cta",),
        num_threads=WARPGROUPS,
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
