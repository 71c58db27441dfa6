"""Dense paged decode of absorbed MLA on Hopper for few heads: transposed ("ETAP").

For every sequence and every row r of its folded (query, head) pairs, over the keys j that the row
may see:

    s[j, r]   = latent[j] . q_latent[r] + rope[j] . q_rope[r]
    out[c, r] = sum_j latent[j, c] * softmax(scale * s[:, r])[j]

that is S^T = K Q^T, a softmax down the columns, and O^T += V^T P^T. wgmma has 64 rows (M) and any
multiple of 8 columns (N). Keys and channels, of which there are enough, are its rows here; the
queries of a device with few heads, 8 to 32, are its columns, padded to 8.

A CTA owns one tile of up to 32 rows of queries and one part of the plan: a run of key tiles (64
tokens) that may begin and end inside a sequence. A sequence's tiles are taken last to first. The
math warpgroups take them by turns, each tile as a whole, with maxima, sums and an output of its
own; they meet once per sequence, to add up.

Timeline of two tiles, time running down; `->` are the barriers below:

    load_wg                     mma_wg0                          mma_wg1
    TMA tile i     -k_full->    S^T = K Q^T
    TMA tile i+1   -k_full->    max over the tokens              S^T = K Q^T
                                P = exp2(S - m), to SMEM         max over the tokens
                                O^T *= alpha if below 1          P = exp2(S - m), to SMEM
                                O^T += V^T P^T                   O^T *= alpha if below 1
                   <-k_empty-   wait                             O^T += V^T P^T
    TMA tile i+2   <-k_empty------------------------------------ wait
    ...
    after a sequence's last tile:
                                m, l, O^T of the right half      m, l, O^T of the left half
                                to SMEM                          to SMEM
                                               <-merge_ready->
                   <-k_empty-   add, store the left half         add, store the right half

V^T is the latent part of the K tile that is there already. Which warpgroup has a tile goes by the
count of tiles since the CTA began, as the stage does: a stage always is the same one's. The halves
of O^T that are handed over, in float32, take the place of the last tiles' keys; so the last stage
of each warpgroup is released by the other one.

The maximum of a column is over all four warps of a warpgroup, by way of its own `scratch`
(`hopper.columns`).

From `fp8_token` and `fp8_full` caches both products are of e4m3 operands, as `decode_e4m3` has
them: V^T goes through registers, P has the tokens' scales in it (`products.py`). A single tile is
taken twice, by one math warpgroup each, the second P being what rounding has left of the first
one's.

From `fp8_ds_mla` caches they are of float16 operands, made of e4m3 on the way from the ring to the
registers: K and V^T both. The scales are factors of S and are in P. A stage is released as soon as
the last values are in registers.

In 16 bits `load_wg` loads the queries too. For fp8 caches the math warpgroups load them and divide
each row by a scale (`hopper.queries`), half of the rows each, while the sequence's first keys are
under way; then they meet. From `fp8_ds_mla` caches each group of channels has a scale too, for
which they meet before.

Shared memory (bf16, d_latent 512, d_rope 64, 32 rows, 2 stages):

    buffer      shape           dtype  stages    KiB
    q_latent    32 x 512        bf16   1          32
    q_rope      32 x 64         bf16   1           4
    kv_latent   64 x 512        bf16   2         128
    k_rope      64 x 64         bf16   2          16
    p           32 x 64         bf16   2           8
    staging     32 x 256        bf16   2          32
    scratch     4 x 32          f32    2           1
    m           32              f32    4           1
    l           32              f32    4           1
    barriers                                       1
    sum                                          224

In e4m3 four stages, k_scale beside them, q_factor (32 f32) and no staging: 190 KiB (fp8_token).
From fp8_ds_mla the same but 16-bit queries, q_largest (4 x 32 f32) and a P for each 128 channels of
a half: 222 KiB; with 16 rows, where all channels have theirs at once, 204.

Registers per thread: 240 (each math warpgroup: 128 accumulator, 16 S, 8 sums, in e4m3 32 V^T, from
fp8_ds_mla 16 more of S and 32 of K or V^T), 24 (load_wg).

Barriers (arrivals x count per phase; each waiter waits for every phase):

    name         guards                                   arrives x count        waits
    q_ready      q_largest; q_latent, q_rope, q_factor    mma_wg0, mma_wg1 x 1   mma_wg0, mma_wg1
    q_full       q_latent, q_rope filled                  TMA x 2                mma_wg0, mma_wg1
    q_empty      the queries may be replaced              mma_wg0, mma_wg1 x 1   load_wg
    k_full       stage filled                             TMA x 2, 3 per page    mma_wg0, mma_wg1
    k_empty      stage may be refilled                    mma_wg0, mma_wg1       load_wg
    merge_ready  m, l, halves; the last m, l read         mma_wg0, mma_wg1 x 1   mma_wg0, mma_wg1

q_ready is there for fp8 caches, for fp8_ds_mla with two phases a sequence; q_full and q_empty in 16
bits. With q_ready, who replaces the queries has met the other, at merge_ready, which then has read
them. Of k_full each waits for that
of its own stages. k_empty has one arrival, of whom the stage is, or after a sequence's last tiles
of the other. m and l have room for two sequences: who writes those of the next but one has met the
other, which then has read these.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_transposed.config import VIEWS, Config
from pallas_kernels.decode_transposed.products import In16Bits, InE4m3, Widened, by_side
from pallas_kernels.hopper import columns, fp8
from pallas_kernels.hopper.cta import DecodeCta
from pallas_kernels.hopper.decode import launch
from pallas_kernels.hopper.inline import store_zeros, sync_warps
from pallas_kernels.hopper.layouts import WGMMA, down, full_columns
from pallas_kernels.hopper.limits import BLOCK_KV
from pallas_kernels.hopper.mma import opaque_zero
from pallas_kernels.hopper.pieces import Part, Piece
from pallas_kernels.hopper.softmax import ColumnSoftmax, Softmax, with_sink


@dataclasses.dataclass(frozen=True)
class Cta(DecodeCta[Config]):
    """What one CTA works on, and its memory. Rows that two tiles share are alike in both, or stored
    once (`shared_rows`)."""

    def takes(self, piece: Piece) -> jax.Array:
        """How many tiles of a piece are taken: in e4m3 a single one is taken twice."""
        return jnp.where(piece.tiles == 1, 2, piece.tiles) if self.config.in_e4m3 else piece.tiles

    def tile(self, piece: Piece, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The one that is taken after `index` others of the piece, and whether again."""
        tile = piece.end - 1 - index
        again = tile < piece.begin
        return jnp.maximum(tile, piece.begin) if self.config.in_e4m3 else tile, again

    @property
    def views(self) -> Any:
        """The ring as `latent`, `exchange` and, in e4m3, `pairs`."""
        if self.interpret:
            return self.smem
        return SimpleNamespace(**dict(zip(VIEWS, self.smem.kv_latent, strict=False)))

    def products(self, wg: int | jax.Array) -> In16Bits | InE4m3 | Widened:
        """The math of warpgroup `wg`."""
        make = Widened if self.config.widened else InE4m3 if self.config.in_e4m3 else In16Bits
        of_cta = self.gmem, self.smem, self.bar, self.views, self.rows
        return make(self.config, wg, self.interpret, *of_cta)


@dataclasses.dataclass(frozen=True)
class Share:
    """One math warpgroup's tiles of a piece: of those that are taken every other one, `tiles` of
    them from `first` on."""

    first: jax.Array
    tiles: jax.Array

    @staticmethod
    def of(wg: int | jax.Array, count: jax.Array, tiles: jax.Array) -> "Share":
        """That of math warpgroup `wg` of `tiles` when `count` have been before these."""
        first = lax.rem(count + wg, jnp.int32(2))
        return Share(first, lax.div(tiles - first + 1, jnp.int32(2)))

    def index(self, i: jax.Array) -> jax.Array:
        """The place among the piece's tiles of this warpgroup's tile number `i`."""
        return self.first + 2 * i

    @property
    def last(self) -> jax.Array:
        """That of its last one, if it has any."""
        return self.index(self.tiles - 1)


def _load_wg(cta: Cta) -> None:
    """Keep the ring of key tiles full, across the sequences; load each one's queries."""
    config, gmem, smem, bar = cta.config, cta.gmem, cta.smem, cta.bar
    page_tokens, per_token = config.page_tokens, config.scales_per_token

    def load_q(seq, pieces):
        pl.when(pieces > 0)(lambda: plgpu.barrier_wait(bar.q_empty))
        for source, buffer in ((gmem.q_latent, smem.q_latent), (gmem.q_rope, smem.q_rope)):
            plgpu.copy_gmem_to_smem(source.at[seq, cta.rows], buffer.at[0], bar.q_full)

    def load_tile(tile, stage, pages):
        offset = lax.rem(tile * BLOCK_KV, jnp.int32(config.page_size))
        for i, page in enumerate(pages):
            tokens, into = pl.ds(offset, page_tokens), pl.ds(i * page_tokens, page_tokens)
            copies = [
                (gmem.latent.at[page, tokens], cta.views.latent.at[stage, into]),
                (gmem.rope.at[page, tokens], smem.k_rope.at[stage, into]),
            ]
            if per_token:
                scales = pl.ds(offset * per_token, page_tokens * per_token)
                into = pl.ds(0, page_tokens * per_token)
                copies.append((gmem.scale.at[page, scales], smem.k_scale.at[stage, i, into]))
            for source, target in copies:
                plgpu.copy_gmem_to_smem(source, target, bar.k_full.at[stage])

    def run(piece, carry):
        count, pieces = carry
        tiles = cta.takes(piece)
        pages_of = lambda tile: tuple(piece.pages(gmem.block_table, tile, config.page_size))

        def load(i, pages_of_tile):
            stage, (tile, _) = cta.stage(count + i), cta.tile(piece, i)
            pl.when(count + i >= config.num_stages)(
                lambda: plgpu.barrier_wait(bar.k_empty.at[stage])
            )
            load_tile(tile, stage, pages_of_tile)
            if not config.scaled:
                pl.when(i == 0)(lambda: load_q(piece.seq, pieces))
            # MEASURED: H200, (16, 65536), 16 heads: 268 us in bf16, 142 in fp8_full; 270 and 145
            # with pages looked up when the stage is free.
            return pages_of(tile - 1)

        @pl.when(tiles > 0)
        def _():
            lax.fori_loop(0, tiles, load, pages_of(piece.end - 1))

        return count + tiles, pieces + (tiles > 0).astype(jnp.int32)

    count, pieces = cta.part.each_piece(run, (jnp.int32(0), jnp.int32(0)))

    # Await the last releases too: no barrier may have a phase pending when the CTA ends.
    if not config.scaled:
        pl.when(pieces > 0)(lambda: plgpu.barrier_wait(bar.q_empty))
    lax.fori_loop(
        jnp.maximum(count - config.num_stages, 0),
        count,
        lambda i, _: plgpu.barrier_wait(bar.k_empty.at[cta.stage(i)]),
        None,
    )


def _math_wg(cta: Cta) -> None:
    """Every other key tile, from scores to output; at a sequence's end one half of the output.

    Both math warpgroups run the same loop over the tiles, and differ in data only.
    """
    config, smem, bar = cta.config, cta.smem, cta.bar
    wg = lax.axis_index("wg")
    interpret, products = cta.interpret, cta.products(wg)
    own_rows = functools.partial(columns.own_rows, interpret=interpret)
    over_rows = functools.partial(columns.over_rows, interpret=interpret)

    def run(piece, carry):
        count, pieces = carry
        tiles = cta.takes(piece)
        share = Share.of(wg, count, tiles)

        def step(i, carry, of_queries):
            halves, softmax = carry
            index = share.index(i)
            stage, (tile, again) = cta.stage(count + index), cta.tile(piece, index)
            live, last = piece.seq_len - tile * BLOCK_KV, i == share.tiles - 1
            plgpu.barrier_wait(bar.k_full.at[stage])
            zero = jnp.int32(0) if interpret else opaque_zero(piece.seq_len + index)
            before, factor = softmax, of_queries.factor

            def follow_scales():
                maxima = products.largest_scales(stage, live)
                softmax = before.follow_scales(maxima, config.scale_slack)
                factors = products.value_factors(stage, live, softmax.scales)
                return softmax, factors

            s, (softmax, factors) = products.scores(stage, zero, of_queries, follow_scales)
            products.release_queries(last)
            s = _mask(cta, live, s)
            # Another warp's wgmma may still read these as keys, whose scores are masked.
            pl.when(live < BLOCK_KV)(lambda: products.zero_dead_tokens(stage, live))
            largest = over_rows(own_rows(s, largest=True), smem.scratch.at[wg], largest=True)
            softmax = softmax.follow_scores(largest * factor, config.slack, config.headroom)
            scaled = s * (factor if isinstance(factor, float) else down(factor, BLOCK_KV))
            p = jnp.exp2(scaled - down(softmax.m, BLOCK_KV))
            halves, l = _rescale(before, softmax, halves, interpret=interpret)

            def release():
                plgpu.barrier_arrive(bar.k_empty.at[stage], predicate=jnp.logical_not(last))

            # The maxima were a meeting of the warps: none of them still multiplies with P.
            halves = products.add_values(stage, zero, halves, p, factors, again, release)
            add = lambda: l + own_rows(p, largest=False)
            l_after = lax.cond(again, lambda: l, add) if config.in_e4m3 else add()
            return halves, softmax._replace(l=l_after)

        def attend():
            of_queries = products.await_queries(piece.seq)
            one = functools.partial(step, of_queries=of_queries)
            state = ColumnSoftmax.start(config.row_tile, config.scale_groups, scaled=config.scaled)
            halves, softmax = lax.fori_loop(0, share.tiles, one, (products.zeros(), state))
            products.release_queries(share.tiles == 0)
            # Else addresses would be kept over the loop.
            again = piece.seq if interpret else piece.seq + opaque_zero(pieces)

            def finish(side):
                _finish(cta, side, count, pieces, cta.part.piece(again), halves, softmax)

            by_side(finish)

        def empty():
            store = lambda ref, first=0: store_zeros(ref.at[first:], interpret=interpret)
            _to_output(cta, piece, slice(0, config.d_latent), store)
            _store_lse(cta, piece, full_columns(config.row_tile, -jnp.inf))

        pl.when(tiles > 0)(attend)
        pl.when((tiles == 0) & (wg == 0))(empty)
        return count + tiles, pieces + (tiles > 0).astype(jnp.int32)

    cta.part.each_piece(run, (jnp.int32(0), jnp.int32(0)))


def _mask(cta: Cta, live, s: jax.Array) -> jax.Array:
    """-inf where a row may not see a key: behind the end, `live`, or, causal, behind the row's own
    token."""
    config = cta.config
    behind = config.q_len - 1 if config.causal else 0

    def mask(s):
        iota = lambda dim: plgpu.broadcasted_iota(jnp.int32, s.shape, dim, layout=WGMMA)
        limits = live - behind
        if behind:
            limits += lax.div(iota(1) + cta.first_row, jnp.int32(config.num_heads))
        return jnp.where(iota(0) < limits, s, -jnp.inf)

    return lax.cond(live - behind < BLOCK_KV, mask, lambda s: s, s)


def _rescale(before: ColumnSoftmax, after: ColumnSoftmax, halves: Any, *, interpret: bool):
    """The output so far and the sums, relative to `after`; left out where that is no other than
    `before`, in all warps alike."""
    leaves, tree = jax.tree.flatten(halves)

    def scaled(l, *leaves):
        alphas, beta = after.factors_since(before)
        of_leaves = (alpha for alpha in alphas for _ in range(len(leaves) // len(alphas)))
        factors = zip(leaves, of_leaves, strict=True)
        return l * beta, *(x * down(alpha, x.shape[0]) for x, alpha in factors)

    changed = columns.any_above(after.m, before.m, interpret=interpret)
    for old, new in zip(before.scales, after.scales, strict=True):
        changed = jnp.logical_or(changed, new > old)
    l, *leaves = lax.cond(changed, scaled, lambda *same: same, before.l, *leaves)
    return jax.tree.unflatten(tree, leaves), l


def _finish(
    cta: Cta, wg: int, count, pieces, piece: Piece, halves: Any, softmax: ColumnSoftmax
) -> None:
    """Add up what both math warpgroups have, normalise and store one half of the output."""
    config, smem, bar, interpret = cta.config, cta.smem, cta.bar, cta.interpret
    own, other = (Share.of(i, count, cta.takes(piece)) for i in (wg, 1 - wg))
    halves = cta.products(wg).true_size(halves, softmax.scales)
    l = columns.over_rows(softmax.l, smem.scratch.at[wg], largest=False, interpret=interpret)
    # The products of all warps have read V, and they the scratch.
    sync_warps(interpret=interpret)
    place = 2 * lax.rem(pieces, jnp.int32(2))
    for ref, values in ((smem.m, softmax.m), (smem.l, l)):
        columns.store_column_values(ref.at[place + wg], values, interpret=interpret)
    given = halves[1 - wg]
    pl.when(own.tiles > 0)(lambda: _give(cta, cta.stage(count + own.last), given))
    plgpu.barrier_arrive(bar.merge_ready)
    plgpu.barrier_wait(bar.merge_ready)

    load = functools.partial(fp8.load_columns, columns=config.row_tile, interpret=interpret)
    (m_other,), (l_other,) = (load(ref.at[pl.ds(place + 1 - wg, 1)]) for ref in (smem.m, smem.l))
    m = jnp.maximum(softmax.m, m_other)
    factors = jnp.exp2(softmax.m - m), jnp.exp2(m_other - m)
    inverse, lse2 = Softmax(m, l * factors[0] + l_other * factors[1]).finish()
    if wg == 0:
        _store_lse(cta, piece, lse2)
    if config.has_sink:
        # Else its address would be made before the loop over the sequences, and spilled.
        zero = jnp.int32(0) if interpret else opaque_zero(pieces)
        (sink,) = load(cta.gmem.sink.at[pl.ds(cta.row_tile + zero, 1)])
        inverse = lax.cond(piece.whole, lambda: with_sink(inverse, lse2, sink), lambda: inverse)
    mine, theirs = (down(factor * inverse, halves[wg][0].shape[0]) for factor in factors)
    stage = cta.stage(count + other.last)
    half = []
    for ref, acc in zip(_exchange(cta, stage), halves[wg], strict=True):
        add = lambda acc, ref=ref: acc + _take(cta, ref, stage, acc.shape) * theirs
        half.append(lax.cond(other.tiles > 0, add, lambda same: same, acc * mine))
    plgpu.commit_smem()  # TMA writes where that was read
    plgpu.barrier_arrive(bar.k_empty.at[stage], predicate=other.tiles > 0)
    _store(cta, wg, piece, half)


def _exchange(cta: Cta, stage) -> list[Any]:
    """The places of half an output's accumulators in a stage."""
    rows = cta.config.exchange_rows
    places = (pl.ds(i * rows, rows) for i in range(cta.config.accumulators))
    return [cta.views.exchange.at[stage, place] for place in places]


def _give(cta: Cta, stage, half: Any) -> None:
    """Half an output to the other math warpgroup, in the place of this stage's keys."""
    latent = cta.views.latent
    if cta.interpret:  # what was there is lost
        latent[stage] = jnp.full(latent.shape[1:], jnp.nan, latent.dtype)
    for ref, acc in zip(_exchange(cta, stage), half, strict=True):
        columns.give(ref, acc, interpret=cta.interpret)


def _take(cta: Cta, ref, stage, shape: tuple[int, int]) -> jax.Array:
    """What the other math warpgroup has given there."""
    acc = columns.take(ref, shape, interpret=cta.interpret)
    if cta.interpret:  # unless the stage has been filled again
        lost = jnp.isnan(cta.views.latent[stage].astype(jnp.float32)).all()
        acc = jnp.where(lost, acc, jnp.nan)
    return acc


def _store(cta: Cta, wg: int, piece: Piece, half: Any) -> None:
    """Store a normalised half."""
    to_output = functools.partial(_to_output, cta, piece, cta.config.half(wg))
    cta.products(wg).store(half, to_output)


def _to_output(cta: Cta, piece: Piece, channels: slice, store: Callable[..., None]) -> None:
    """`DecodeCta.to_output`; `store` is also called with the first row that is to be stored, where
    that is not the first one."""
    shared = cta.config.shared_rows
    is_last = cta.row_tile == cta.config.row_tiles - 1
    others = lambda ref: lax.cond(is_last, lambda: store(ref, shared), lambda: store(ref))
    cta.to_output(piece, channels, store, others if shared else None)


def _store_lse(cta: Cta, piece: Piece, lse2: jax.Array) -> None:
    """Store the log-sum-exp."""
    store = functools.partial(columns.store_column_values, interpret=cta.interpret)
    cta.to_lse(piece, lse2, store)


ROLES = (_math_wg, _math_wg, _load_wg)


def decode(config: Config, inputs: dict[str, jax.Array], interpret: Any = None):
    """Launch the kernel: `hopper.decode.launch`."""
    capacity = inputs["block_table"].shape[1] * config.page_size

    def cta(_, gmem, smem, bar, index, row_tile):
        part = Part(gmem.parts, index, gmem.seq_lens, capacity)
        return Cta(config, bool(interpret), gmem, smem, bar, part, row_tile)

    return launch(config, inputs, ROLES, cta, name="mla_decode_transposed", interpret=interpret)
