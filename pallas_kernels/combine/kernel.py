"""Merging the pieces of split sequences, after a decode kernel.

    lse[r] = log sum_i exp(lse_i[r])
    out[r] = sum_i exp(lse_i[r] - lse[r]) * out_i[r]

(FlashAttention-2, arXiv:2307.08691, sec. 3.1, applied once more over the pieces.) What a warpgroup
takes at a time depends on a sequence's number of pieces: of few, four rows, one a warp; of some, a
quarter of the columns of four rows, so that more SMs have something to do; of many, one row, the
pieces over its warps, which then meet in shared memory, so that a warp waits for memory less often.
The warpgroups of the grid stride over all such items. A step without split sequences costs the
launch only.

Timeline of an item, time running down, all warps of the warpgroup alike:

    few or some pieces: a row for each warp     many pieces: one row for all warps

    load 2 (some: 8) pieces                     load 9 pieces, every fourth one for each warp
    add them to m, l, acc                       add them to m, l, acc
    ... until there are no more                 ... until there are no more
                                                meet: scratch has been read
                                                m, l, acc to the warp's row of scratch
                                                meet: scratch is full
                                                all m and l, all acc of the thread's own columns
    out = acc / l, with the sink                out of their sums, with the sink
    lse, with the first part of the columns     lse

Shared memory (d_latent 512), a stage for each warpgroup, also if only one is launched; m and l are
in the 8 columns behind those of acc:

    buffer      shape           dtype  stages    KiB
    scratch     4 x 520         f32    2          17
    sum                                           17

Registers per thread: 128 at most, for two CTAs an SM.

Barriers: none in shared memory. Warps meet at the hardware's barrier of their warpgroup
(`warps.exchange`):

    name               guards                            arrives x count        waits
    warpgroup_barrier  scratch read; scratch full        each warp x 1          each warp
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.combine import warps
from pallas_kernels.hopper import layouts
from pallas_kernels.hopper.layouts import across
from pallas_kernels.hopper.limits import BLOCK_M, SM_REGISTERS
from pallas_kernels.hopper.pieces import Split
from pallas_kernels.hopper.plan import MERGE_SEQ
from pallas_kernels.hopper.row_tiles import slot_of
from pallas_kernels.hopper.softmax import LN2, Softmax, with_sink

# MEASURED: H200, 128 heads, us at (128, 4096) with two queries, (16, 32768), (1, 131072): 9.7, 6.8,
# 4.4, and 1.3 where no sequence was split; 9.6, 6.4, 6.0 with many pieces merged as some are.
# Entries 22, 27, 30 and 32 of the record in docs/decode_dense.md have what else was tried.
GROUP = warps.WARPS
"""Rows that a warpgroup merges together, one a warp, unless there are many pieces."""
COLUMN_PARTS = 4
"""Parts of the columns, of some pieces: as many as `GROUP`, so that there is an item a row, as of
many pieces."""
FEW, SOME = 4, 16
"""Pieces of a sequence; more are many."""
BATCH_OF_FEW, BATCH_OF_SOME, BATCH_OF_MANY = 2, 8, 9
"""Pieces whose loads a warp has in flight together."""
WARPGROUPS = 2
"""Of a CTA, unless all items have an SM of their own."""
CTAS_PER_SM = 2
"""At most: no more are launched than there could be something to do for. More registers than
`REGISTERS` a thread would halve them."""
REGISTERS = SM_REGISTERS // (CTAS_PER_SM * WARPGROUPS * 128)


def _tile(width: int) -> Any:
    """Layout of `[4, width]`: a row per warp, up to 8 neighbouring columns per lane."""
    vector = min(8, width // 32)
    tiling = plgpu.Tiling(((GROUP, 32 * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _scratch(d_latent: int) -> Any:
    """Where the warps of each warpgroup meet."""
    return plgpu.SMEM((WARPGROUPS, warps.WARPS, d_latent + warps.MARGIN), jnp.float32)


def smem_bytes(d_latent: int) -> int:
    """Shared memory of a CTA."""
    return layouts.smem_bytes([_scratch(d_latent)])


def _add_up(
    pieces: jax.Array, gather: Callable[..., tuple[jax.Array, jax.Array]], width: int, batch: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Maximum `[4]`, sum `[4]` and output `[4, width]`, each warp its own, of the `pieces` that it
    gets by `gather(i)`, `batch` at a time: of a row of its own, or its share of all warps' row."""

    def step(index, carry):
        m, l, acc = carry
        loaded = [gather(index * batch + i) for i in range(batch)]
        m_new = functools.reduce(jnp.maximum, [lse2 for lse2, _ in loaded], m)
        base = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        alpha = jnp.exp2(m - base)
        l, acc = l * alpha, acc * across(alpha, width)
        for lse2, piece in loaded:
            weight = jnp.exp2(lse2 - base)
            l, acc = l + weight, acc + across(weight, width) * piece.astype(jnp.float32)
        return m_new, l, acc

    full = lambda value: plgpu.layout_cast(jnp.full((GROUP,), value), _tile(width).reduce(1))
    start = full(-jnp.inf), full(0.0), across(full(0.0), width)
    return lax.fori_loop(0, lax.div(pieces + (batch - 1), jnp.int32(batch)), step, start)


def _merge_group(
    gmem: Any,
    split: Split,
    group: jax.Array,
    part: jax.Array,
    width: int,
    batch: int,
    row_tile: int,
) -> None:
    """A group of rows, one a warp; columns number `part` of those that are `width` wide."""
    row, slot = group * GROUP, slot_of(group * GROUP, gmem.out.shape[1], row_tile)
    group_rows, slots = pl.ds(row, GROUP), pl.ds(slot, GROUP)
    columns = pl.ds(pl.multiple_of(part * width, width), width)
    tile, load = _tile(width), functools.partial(plgpu.load, optimized=False)

    def gather(i):
        none, slot = jnp.where(i < split.pieces, 0.0, -jnp.inf), split.slot(i)
        lse2 = load(gmem.partial_lse2.at[slot, slots], layout=tile.reduce(1))
        return lse2 + none, load(gmem.partial.at[slot, slots, columns], layout=tile)

    m, l, acc = _add_up(split.pieces, gather, width, batch)
    factor, lse2 = Softmax(m, l).finish()
    if gmem.sink is not None:
        factor = with_sink(factor, lse2, load(gmem.sink.at[slots], layout=tile.reduce(1)))
    gmem.out[split.seq, group_rows, columns] = (acc * across(factor, width)).astype(gmem.out.dtype)

    @pl.when(part == 0)
    def _():
        gmem.lse[split.seq, slots] = lse2 * LN2


def _merge_row(
    gmem: Any, split: Split, row: jax.Array, scratch: Any, row_tile: int, interpret: bool
) -> None:
    """One row, its pieces over the warps, which meet in `scratch`."""
    _, rows, d_latent = gmem.out.shape
    slot, tile = slot_of(row, rows, row_tile), _tile(d_latent)
    gather = lambda i: warps.load_pieces(
        gmem.partial,
        gmem.partial_lse2,
        split,
        slot,
        i * warps.WARPS,
        tile,
        interpret=interpret,
    )
    of_warp = lax.div(split.pieces + (warps.WARPS - 1), jnp.int32(warps.WARPS))
    m, l, acc = _add_up(of_warp, gather, d_latent, BATCH_OF_MANY)
    ms, ls, accs = warps.exchange(m, l, acc, scratch, tile, interpret=interpret)
    m = functools.reduce(jnp.maximum, ms)
    base = jnp.where(m == -jnp.inf, 0.0, m)
    weights = [jnp.exp2(x - base) for x in ms]
    total = lambda parts: functools.reduce(jnp.add, map(jnp.multiply, weights, parts))
    factor, lse2 = Softmax(m, total(ls)).finish()
    if gmem.sink is not None:
        factor = with_sink(factor, lse2, gmem.sink[slot])
    gmem.out[split.seq, row] = (total(accs) * factor).astype(gmem.out.dtype)
    gmem.lse[split.seq, slot] = lse2 * LN2


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
    rows = out.shape[1]
    groups = rows // GROUP
    most_items = min(out.shape[0], num_parts) * rows
    warpgroups = WARPGROUPS if most_items > num_sms else 1
    num_ctas = min(num_sms * CTAS_PER_SM, pl.cdiv(most_items, warpgroups))
    workers = num_ctas * warpgroups

    def body(*refs):
        names = ("partial", "partial_lse2", "parts", "sink", "out", "lse")
        gmem = SimpleNamespace(**dict(zip(names, refs, strict=True)))
        if sink is None:
            gmem.sink = None  # the operand in its place is not read
        pl.run_scoped(functools.partial(merge_all, gmem), _scratch(d_latent), collective_axes="wg")

    def merge_all(gmem, scratch):
        wg = lax.axis_index("wg")
        first = lax.axis_index("cta") * warpgroups + wg

        def merge_of(item):
            """The item's row in the list of merges, and whether there is one."""
            merge = lax.div(item, jnp.int32(rows))
            in_list = jnp.minimum(merge, num_parts - 1)
            return in_list, (merge < num_parts) & (gmem.parts[in_list, MERGE_SEQ] >= 0)

        def run(item):
            merge, _ = merge_of(item)
            split = Split.read(gmem.parts, merge)
            of_merge = lax.rem(item, jnp.int32(rows))

            def few():
                _merge_group(gmem, split, of_merge, jnp.int32(0), d_latent, BATCH_OF_FEW, row_tile)

            def some():
                part, group = (f(of_merge, jnp.int32(groups)) for f in (lax.div, lax.rem))
                width = d_latent // COLUMN_PARTS
                _merge_group(gmem, split, group, part, width, BATCH_OF_SOME, row_tile)

            def many():
                _merge_row(gmem, split, of_merge, scratch.at[wg], row_tile, bool(interpret))

            pl.when((split.pieces <= FEW) & (of_merge < groups))(few)
            pl.when((split.pieces > FEW) & (split.pieces <= SOME))(some)
            pl.when(split.pieces > SOME)(many)
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
