"""Dense paged decode of absorbed MLA on Hopper, both products in e4m3 (`fp8_token`, `fp8_full`).

For every sequence and every row r of its folded (query, head) pairs, over the keys j that the row
may see, with u[j] the scale of token j and w[j] that of its rope key (`fp8_token`: w = u):

    q8[r]   = e4m3(q_latent[r] / t[r]),  t[r] = amax(q_latent[r]) / 448;  qr[r] = q_rope[r] / t[r]
    s[r, j] = t[r] * (u[j] * (q8[r] . latent[j]) + w[j] * (qr[r] . rope[j]))
    p[r, j] = exp2(scale_log2 * s[r, j] - m[r])
    out[r]  = sum_j e4m3(p[r, j] * u[j] * P_MAX / v) * latent[j]  *  v / P_MAX / sum_j p[r, j]

m follows the running maximum of the scores, v that of the scales, both with slack, m with headroom
(config). qr is bfloat16 in `fp8_token`; in `fp8_full` it is e4m3, and t the scale of the whole row
of q.

A CTA owns 64 rows and one part of the plan: a run of key tiles (64 tokens) that may begin and end
inside a sequence. A sequence's tiles are taken last to first, in pairs. The math warpgroups go in
step: each has the scores and the softmax of one tile of the pair, and all rows of one half of the
output's channels, transposed (`hopper.fp8`): O^T[d, r] += V^T[d, j] P^T[j, r] over both tiles.

A last tile without a partner is its own: loaded twice, the second one's P is what rounding has left
of the first one's. So the P of such a tile has two terms: above all that of a single tile, in which
errors of few tokens do not average out.

Timeline of a pair, time running down, mma_wg0 and mma_wg1 alike (tile 0 and 1 of the pair):

    load_wg                     mma_wg0 | mma_wg1
    TMA both tiles  -k_full->   S = Q K^T of the own tile
    (two pairs in flight)       max of S, of the scales    <-max_ready->   (the other's maxima)
                                V^T of the own tile to registers, meanwhile
                                P = exp2(S - m), to e4m3 and shared memory
                                O^T *= alpha if below 1; issue O^T += V^T P^T of the own tile
                                V^T of the other tile to registers, meanwhile
                                                           <-p_ready->     (the other's P)
                                issue O^T += V^T P^T of the other tile
                  <-k_empty-    both stages released, meanwhile; wait for O^T

Shared memory (fp8_token, d_latent 512, d_rope 64, page 64, 1 term of P):

    buffer      shape           dtype  stages    KiB
    q_latent    64 x 512        e4m3   1          32
    q_rope      64 x 64         bf16   1           8
    kv_latent   64 x 512        e4m3   4         128
    k_rope      64 x 64         bf16   4          32
    k_scale     1 x 64          f32    4           1
    p           64 x 64         e4m3   2           8
    row_max     64              f32    2           1
    scale_max   64              f32    2           1
    row_sum     64              f32    2           1
    alpha       64              f32    2           1
    votes       4               f32    2           1
    barriers                                       1
    sum                                          215

A piece's output goes through the stages of its last pair. Registers per thread: 240 (each math
warpgroup: 128 accumulator, 32 S or 64 V^T), 24 (load_wg).

Barriers (arrivals x count per phase; each waiter waits for every phase):

    name         guards                                   arrives x count        waits
    k_full       stage filled                             TMA x 3 per page       mma_wg0, mma_wg1
    k_empty      stage may be refilled                    mma_wg0, mma_wg1 x 1   load_wg
    q_max_ready  row_max: of q; the last pair is over     mma_wg0, mma_wg1 x 1   mma_wg0, mma_wg1
    q_ready      q_latent, q_rope; row_max read           mma_wg0, mma_wg1 x 1   mma_wg0, mma_wg1
    max_ready    row_max, scale_max; P, alpha read        mma_wg0, mma_wg1 x 1   mma_wg0, mma_wg1
    p_ready      p; row_max, scale_max read               mma_wg0, mma_wg1 x 1   mma_wg0, mma_wg1
    sum_ready    row_sum; the last stages read            mma_wg0, mma_wg1 x 1   mma_wg0, mma_wg1

Both math warpgroups arrive at and wait for the last five, in one order: they are meetings of all.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_e4m3.config import Config
from pallas_kernels.formats import E4M3_MAX
from pallas_kernels.hopper import fp8, queries
from pallas_kernels.hopper.cta import DecodeCta
from pallas_kernels.hopper.decode import launch
from pallas_kernels.hopper.inline import any_vote, store_zeros, sync_warps, vote
from pallas_kernels.hopper.layouts import WGMMA_8BIT_ROW, WGMMA_ROW, across, down, full, tiled
from pallas_kernels.hopper.limits import BLOCK_KV, BLOCK_M
from pallas_kernels.hopper.mma import add_dots, dot, dot_after, opaque_zero
from pallas_kernels.hopper.pieces import Part, Piece
from pallas_kernels.hopper.softmax import PairedSoftmax, with_sink


@dataclasses.dataclass(frozen=True)
class Cta(DecodeCta[Config]):
    """What one CTA works on, and its memory. Rows that two tiles share are alike in both."""

    @property
    def views(self) -> tuple[Any, Any, Any]:
        """The ring as keys, as pairs of channels, and as outputs of one warpgroup a stage."""
        if self.interpret:
            return self.smem.latent, self.smem.pairs, self.smem.staging
        return self.smem.kv_latent


def _load_wg(cta: Cta) -> None:
    """Keep the ring of key tiles full, across the sequences."""
    config, gmem, smem, bar = cta.config, cta.gmem, cta.smem, cta.bar
    latent_ring, *_ = cta.views
    tokens_of_page, per_token = config.page_tokens, config.scales_per_token

    def load_tile(piece: Piece, tile, stage):
        offset = lax.rem(tile * BLOCK_KV, jnp.int32(config.page_size))
        for i, page in enumerate(piece.pages(gmem.block_table, tile, config.page_size)):
            tokens, into = pl.ds(offset, tokens_of_page), pl.ds(i * tokens_of_page, tokens_of_page)
            scales = pl.ds(offset * per_token, tokens_of_page * per_token)
            scales_into = pl.ds(0, tokens_of_page * per_token)
            for source, target in (
                (gmem.latent.at[page, tokens], latent_ring.at[stage, into]),
                (gmem.rope.at[page, tokens], smem.k_rope.at[stage, into]),
                (gmem.scale.at[page, scales], smem.k_scale.at[stage, i, scales_into]),
            ):
                plgpu.copy_gmem_to_smem(source, target, bar.k_full.at[stage])

    def run(piece, count):
        loads = 2 * lax.div(piece.tiles + 1, jnp.int32(2))

        def load(i, _):
            stage = cta.stage(count + i)
            empty = lambda: plgpu.barrier_wait(bar.k_empty.at[stage])
            pl.when(count + i >= config.num_stages)(empty)
            # A last tile without a partner is loaded twice.
            load_tile(piece, jnp.maximum(piece.end - 1 - i, piece.begin), stage)

        lax.fori_loop(0, loads, load, None)
        return count + loads

    count = cta.part.each_piece(run, jnp.int32(0))
    # Await the last releases too: no barrier may have a phase pending when the CTA ends.
    lax.fori_loop(
        jnp.maximum(count - config.num_stages, 0),
        count,
        lambda i, _: plgpu.barrier_wait(bar.k_empty.at[cta.stage(i)]),
        None,
    )


def _math_wg(wg: int, cta: Cta) -> None:
    """Scores and softmax of every other tile, and one half of the output's channels."""
    config, smem, bar = cta.config, cta.smem, cta.bar
    interpret, terms = cta.interpret, config.p_terms
    half = config.half(wg)
    half_pairs = slice(half.start // 2, half.stop // 2)
    latent, pairs, _ = cta.views
    accumulator = (config.d_half // 2, config.tile_rows)

    def value(stage):
        """This warpgroup's channels of a tile, as operands along the tokens."""
        return fp8.load_transposed(
            latent.at[stage, :, half], pairs.at[stage, :, half_pairs], interpret=interpret
        )

    def run(piece, count):
        last_pair = lax.div(piece.tiles + 1, jnp.int32(2)) - 1

        def step(pair, carry, factor):
            accs, softmax = carry
            own, other = (cta.stage(count + 2 * pair + i) for i in (wg, 1 - wg))
            index = 2 * pair + wg
            tile = piece.end - 1 - jnp.minimum(index, piece.tiles - 1)
            live = piece.seq_len - tile * BLOCK_KV
            plgpu.barrier_wait(bar.k_full.at[own])
            s, v_scale = _scores(cta, own, piece.seq_len + index)
            s, v_scale = _mask(cta, s, v_scale, live)
            pl.when(live < BLOCK_KV)(lambda: _zero_dead_tokens(cta, own, live))
            row_max = s.max(axis=1) * factor
            scale_max = fp8.max_over_columns(v_scale, interpret=interpret)
            smem.row_max[wg] = row_max
            smem.scale_max[wg] = full((BLOCK_M,), 1.0, jnp.float32) * scale_max
            plgpu.barrier_arrive(bar.max_ready)
            v_own: Any = value(own) if terms == 1 else None  # else there are no registers for it
            plgpu.barrier_wait(bar.max_ready)
            row_max = jnp.maximum(row_max, plgpu.load(smem.row_max.at[1 - wg], layout=WGMMA_ROW))
            zero = jnp.int32(0) if interpret else opaque_zero(piece.seq_len + index)
            scale_max = jnp.maximum(scale_max, smem.scale_max[1 - wg + zero, 0])
            softmax, alpha = softmax.follow(
                row_max, scale_max, config.slack, config.headroom, config.scale_slack
            )
            smem.alpha[wg] = alpha
            vote(smem.votes.at[wg], 1.0 - alpha, interpret=interpret)
            p = jnp.exp2(s * across(factor, BLOCK_KV) - across(softmax.m, BLOCK_KV))
            again = index >= piece.tiles  # mma_wg0 has the same tile
            add = lambda softmax=softmax: softmax.add(p)
            softmax = add() if wg == 0 else lax.cond(again, lambda: softmax, add)
            # Read again, rather than kept; what stands behind the end has p = 0, but may be NaN.
            v_scale = _token_scales(cta, own)[0] * (config.p_max / softmax.scale)
            v_scale = fp8.at_most(v_scale, E4M3_MAX, interpret=interpret)
            p *= down(v_scale, BLOCK_M)
            if wg == 1:
                left = functools.partial(fp8.rounding_error, terms=terms)
                p = lax.cond(again, left, lambda p: p, p)
            _publish(cta, wg, p)
            v_own = value(own) if v_own is None else v_own
            accs = _rescale(cta, wg, accs)
            p_t = lambda i, j: smem.p.at[i * terms + j + zero, pl.ds(0, config.tile_rows)].T
            operands = lambda v, i: [[(x, p_t(i, j)) for j in range(terms)] for x in v]

            def load_other():
                plgpu.barrier_wait(bar.k_full.at[other])
                v_other = value(other)
                plgpu.barrier_wait(bar.p_ready)
                return operands(v_other, 1 - wg)

            def release():
                # V is in registers: the stages are free, but the last ones, which the output needs.
                plgpu.commit_smem()
                plgpu.barrier_arrive(bar.k_empty.at[own], predicate=pair < last_pair)
                plgpu.barrier_arrive(bar.k_empty.at[other], predicate=pair < last_pair)

            add = functools.partial(add_dots, interpret=interpret, after_issue=release)
            return add(accs, operands(v_own, wg), between=load_other), softmax

        def live():
            factor = _quantise_queries(cta, wg, piece.seq)
            accs = (full(accumulator, 0.0, jnp.float32),) * 2
            one, start = functools.partial(step, factor=factor), PairedSoftmax.start(BLOCK_M)
            accs, softmax = lax.fori_loop(0, last_pair + 1, one, (accs, start))
            own, other = (cta.stage(count + 2 * last_pair + i) for i in (wg, 1 - wg))
            # The piece is read again, rather than kept over the loop.
            _finish(cta, wg, cta.part.piece(piece.seq), accs, softmax, own)
            plgpu.barrier_arrive(bar.k_empty.at[own])
            plgpu.barrier_arrive(bar.k_empty.at[other])

        def empty():
            every = slice(0, config.d_latent)
            cta.to_output(piece, every, functools.partial(store_zeros, interpret=interpret))
            _store_lse(cta, piece, full((BLOCK_M,), -jnp.inf, jnp.float32))

        pl.when(piece.tiles > 0)(live)
        if wg == 0:
            pl.when(piece.tiles == 0)(empty)
        return count + 2 * (last_pair + 1)

    cta.part.each_piece(run, jnp.int32(0))


def _quantise_queries(cta: Cta, wg: int, seq) -> jax.Array:
    """Each row of queries to e4m3 in shared memory, with one scale for its latent part (in
    `fp8_full` for all of it); what the products are to be multiplied by, row by row."""
    config, gmem, smem, bar = cta.config, cta.gmem, cta.smem, cta.bar
    half = config.half(wg)
    load = lambda ref: fp8.load_rows(ref, config.tile_rows, interpret=cta.interpret)

    q = load(gmem.q_latent.at[seq, cta.rows, half])
    amax = queries.largest(q)
    rope = load(gmem.q_rope.at[seq, cta.rows]) if wg == 0 else None
    if rope is not None and config.rope_has_scale:
        amax = jnp.maximum(amax, queries.largest(rope))
    smem.row_max[wg] = amax
    plgpu.barrier_arrive(bar.q_max_ready)
    plgpu.barrier_wait(bar.q_max_ready)

    def scale_in(layout):
        one, other = (plgpu.load(smem.row_max.at[i], layout=layout) for i in range(2))
        return queries.row_scale(jnp.maximum(one, other))

    run_scale = gmem.run_scale[0] if config.scale is None else None
    sign, size = queries.sign_and_size(config.scale, run_scale)
    inverse = sign / scale_in(WGMMA_8BIT_ROW)
    scaled = lambda x: x.astype(jnp.float32) * across(inverse, x.shape[1])
    store = functools.partial(fp8.store_operand, interpret=cta.interpret)
    q = scaled(q).astype(jnp.float8_e4m3fn)
    store(smem.q_latent.at[0, :, half], q, tiled(config.d_latent, 1))
    if rope is not None:
        rope = scaled(rope).astype(jnp.dtype(config.rope_dtype))
        store(smem.q_rope.at[0], rope, tiled(config.d_rope, rope.dtype.itemsize))
    factor = queries.score_factor(scale_in(WGMMA_ROW), size)
    plgpu.commit_smem()
    plgpu.barrier_arrive(bar.q_ready)  # `row_max` may be overwritten too
    plgpu.barrier_wait(bar.q_ready)
    return factor


def _scores(cta: Cta, stage, non_negative) -> tuple[jax.Array, jax.Array]:
    """Products of the queries with a tile's keys, less the queries' factor; the values' scales."""
    config, smem, interpret = cta.config, cta.smem, cta.interpret
    latent, *_ = cta.views
    zero = jnp.int32(0) if interpret else opaque_zero(non_negative)
    of_latent = smem.q_latent.at[zero], latent.at[stage].T
    of_rope = smem.q_rope.at[zero], smem.k_rope.at[stage].T
    shape = (BLOCK_M, BLOCK_KV)
    scaled = lambda x, scale: x * down(scale, BLOCK_M)
    if config.rope_has_scale:
        # The scales are read twice: there are no registers to keep those of the latent.
        scale_rope = lambda s: scaled(s, _token_scales(cta, stage)[1])
        rope, s = dot_after(of_rope, of_latent, shape, scale_rope, interpret=interpret)
        scale, _ = _token_scales(cta, stage)
        return scaled(s, scale) + rope, scale
    (scale,) = _token_scales(cta, stage)
    return scaled(dot([of_latent, of_rope], shape, interpret=interpret), scale), scale


def _token_scales(cta: Cta, stage) -> tuple[jax.Array, ...]:
    """The scales of a tile's tokens: of the latent, and of the rope key if it has its own."""
    config = cta.config
    load = functools.partial(fp8.load_columns, per_row=config.page_tokens, interpret=cta.interpret)
    return load(cta.smem.k_scale.at[stage], BLOCK_KV, kinds=config.scales_per_token)


def _mask(cta: Cta, s, v_scale, limit) -> tuple[jax.Array, jax.Array]:
    """-inf where a row may not see a key: behind the end, or, causal, behind the row's own token.
    Scales behind the end, which may be NaN, become 0."""
    config = cta.config
    behind = config.q_len - 1 if config.causal else 0

    def mask(s, v_scale):
        row_limit = plgpu.layout_cast(jnp.full((BLOCK_M,), limit - behind, jnp.int32), WGMMA_ROW)
        if behind:
            row = plgpu.broadcasted_iota(jnp.int32, (BLOCK_M,), 0, layout=WGMMA_ROW)
            row_limit += lax.div(row + cta.first_row, jnp.int32(config.num_heads))
        return fp8.keep_columns(s, v_scale, row_limit, limit, interpret=cta.interpret)

    return lax.cond(limit - behind < BLOCK_KV, mask, lambda *same: same, s, v_scale)


def _zero_dead_tokens(cta: Cta, stage, live) -> None:
    """Zero the rows of the tile behind the sequence's end: what lies there may be NaN, and
    0 x NaN is NaN."""
    latent, *_ = cta.views
    transforms = tiled(cta.config.d_latent, 1)
    fp8.zero_rows(latent.at[stage], live, transforms, interpret=cta.interpret)
    sync_warps(interpret=cta.interpret)


def _publish(cta: Cta, wg: int, p: jax.Array) -> None:
    """P in e4m3 to shared memory, for both warpgroups; if the config says so, what is left too."""
    config, smem = cta.config, cta.smem
    for term in range(config.p_terms):
        rounded = p.astype(jnp.float8_e4m3fn)
        place = smem.p.at[wg * config.p_terms + term]
        place[...] = fp8.as_operand(rounded, interpret=cta.interpret)
        p = fp8.rounding_error(p)
    plgpu.commit_smem()
    plgpu.barrier_arrive(cta.bar.p_ready)


def _rescale(cta: Cta, wg: int, accs):
    """The output so far times alpha; left out where alpha is 1 for all rows."""

    def scaled(*accs):
        alpha = _factors(cta, wg)
        return tuple(acc * down(alpha, acc.shape[0]) for acc in accs)

    needed = any_vote(cta.smem.votes.at[wg], interpret=cta.interpret)
    return lax.cond(needed, scaled, lambda *accs: accs, *accs)


def _factors(cta: Cta, wg: int) -> jax.Array:
    """What is in `alpha`, one value per row, for the columns of the output's accumulators."""
    rows, columns = cta.smem.alpha.at[pl.ds(wg, 1)], cta.config.tile_rows
    return fp8.load_columns(rows, columns, interpret=cta.interpret)[0]


def _finish(cta: Cta, wg: int, piece: Piece, accs, softmax: PairedSoftmax, stage) -> None:
    """Normalise and store this warpgroup's half of the output."""
    config, smem = cta.config, cta.smem
    half = config.half(wg)
    l = softmax.l.sum(axis=1)
    smem.row_sum[wg] = l
    plgpu.barrier_arrive(cta.bar.sum_ready)
    plgpu.barrier_wait(cta.bar.sum_ready)
    inverse, lse2 = softmax.finish(l + plgpu.load(smem.row_sum.at[1 - wg], layout=WGMMA_ROW))
    if config.has_sink:
        sink = fp8.load_row_values(cta.gmem.sink.at[cta.row_tile], interpret=cta.interpret)
        inverse = lax.cond(piece.whole, lambda: with_sink(inverse, lse2, sink), lambda: inverse)
    if wg == 0:
        _store_lse(cta, piece, lse2)
    smem.alpha[wg] = inverse * (softmax.scale * (1 / config.p_max))
    sync_warps(interpret=cta.interpret)
    factor = _factors(cta, wg)
    accs = tuple(acc * down(factor, acc.shape[0]) for acc in accs)
    _store(cta, piece, half, accs, stage)


def _store(cta: Cta, piece: Piece, half: slice, accs, stage: jax.Array) -> None:
    """Store a half, given as the transposed even and odd columns, by way of the memory of `stage`,
    which no one uses any more."""
    config, interpret = cta.config, cta.interpret
    latent, _, staging = cta.views
    even, odd = (acc.astype(jnp.dtype(config.dtype)) for acc in accs)
    if interpret:  # what was there is lost
        latent[stage] = jnp.full(latent.shape[1:], jnp.nan, latent.dtype)
    tile = staging.at[stage, pl.ds(0, config.tile_rows)]
    fp8.stage_transposed(tile, even, odd, config.out_transforms, interpret=interpret)
    plgpu.commit_smem()
    cta.to_output(piece, half, lambda ref: plgpu.copy_smem_to_gmem(tile, ref))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store_lse(cta: Cta, piece: Piece, lse2: jax.Array) -> None:
    """Store the log-sum-exp."""
    cta.to_lse(piece, lse2, functools.partial(fp8.store_row_values, interpret=cta.interpret))


ROLES = (functools.partial(_math_wg, 0), functools.partial(_math_wg, 1), _load_wg)


def decode(config: Config, inputs: dict[str, jax.Array], interpret: Any = None):
    """Launch the kernel: `hopper.decode.launch`."""
    capacity = inputs["block_table"].shape[1] * config.page_size

    def cta(_, gmem, smem, bar, index, row_tile):
        part = Part(gmem.parts, index, gmem.seq_lens, capacity)
        return Cta(config, bool(interpret), gmem, smem, bar, part, row_tile)

    return launch(config, inputs, ROLES, cta, name="mla_decode_e4m3", interpret=interpret)
