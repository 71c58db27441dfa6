"""Dense paged decode of absorbed MLA on Hopper.

For every sequence and every row r of its folded (query, head) pairs, over the keys j that the row
may see:

    s[r, j] = q_latent[r] . latent[j] + q_rope[r] . rope[j]
    out[r]  = sum_j softmax(scale * s[r])[j] * latent[j]

A CTA owns one tile of 64 rows and one part of the plan: a contiguous run of key tiles (64 tokens)
that may begin and end inside a sequence. Within a sequence the tiles are taken last to first, so
that those that need a mask come first.

Timeline of a tile i (stage i % num_stages), time running down; `->` are the barriers below:

    load_wg                  mma_wg0                               mma_wg1
    TMA tile i  -k_full->    S = Q K^T  (all of K)
    TMA tile i+1             m, alpha = max(S)
                             P = exp2(S - m)
                             O_left *= alpha
                             issue O_left += P V_left
                             alpha, P to SMEM      -p_ready->      O_right *= alpha
                <-k_empty-   wait for O_left                       O_right += P V_right
                <-k_empty------------------------------------------

V is the latent part of the K tile that is there already; P enters O_left from registers and is
published for mma_wg1 while that product runs. P lies over the tile's rope keys, which no one needs
once S is there. After a sequence's last tile its scaled output, in 16 bits, takes the place of that
tile's V, from where TMA stores it; only then is the stage released. The next queries are loaded as
soon as the last scores are there (q_empty).

Shared memory (bf16, d_latent 512, d_rope 64, 2 stages):

    buffer      shape           dtype  stages    KiB
    q_latent    64 x 512        bf16   1          64
    q_rope      64 x 64         bf16   1           8
    kv_left     64 x 256        bf16   2          64
    kv_right    64 x 256        bf16   2          64
    k_rope      64 x 64         bf16   2          16
    alpha       64              f32    2           1
    inverse     64              f32    1           1
    barriers                                       1
    sum                                          219

Registers per thread: 240 (mma_wg0: 128 accumulator, 32 S, 16 P), 240 (mma_wg1), 24 (load_wg).

Barriers (arrivals x count per phase; each waiter waits for every phase):

    name           guards                         arrives x count                waits
    q_full         q_latent, q_rope filled        TMA x 2                        mma_wg0
    q_empty        the queries may be replaced    mma_wg0 x 1                    load_wg
    k_full         stage filled                   TMA x 3 per page (see below)   mma_wg0
    k_empty        stage may be refilled          mma_wg0, mma_wg1 x 1           load_wg
    p_ready        alpha and P of the stage       mma_wg0 x 1                    mma_wg1
    inverse_ready  1/l of the piece               mma_wg0 x 1                    mma_wg1
    inverse_free   `inverse` may be rewritten     mma_wg1 x 1                    mma_wg0

A cache in `fp8_ds_mla` has another producer, `convert_wg` instead of `load_wg`, and the same math.
The e4m3 bytes of a tile come to the kv_left of the stage that they will fill, where 8 tokens take
the same place as they do converted:

    convert_wg, tile i (its pages have been looked up)
    wait for k_empty
    TMA of the raw tokens 0 .. 31 and their scales    -raw_full[0]->
    TMA of the raw tokens 32 .. 63 and their scales   -raw_full[1]->
    TMA of the rope keys
    at a piece's first tile: wait for q_empty, TMA of the queries
    look up the pages of tile i+1
    wait for raw_full[0]
    32 tokens to registers; times their scales, in bf16, to kv_left and kv_right
    wait for raw_full[1]
    the other 32 tokens
    fence                                             -k_full->

It stores zeros for the tokens behind the end. Its arrivals at k_full are TMA x 1 per page and
convert_wg x 1; it waits where load_wg does. What is particular to it, 220 KiB in all; k_scale, one
place for each half of a tile, serves both stages:

    buffer      shape           dtype  stages    KiB
    raw         64 x 512        e4m3   2           (kv_left)
    k_scale     64 x 4          f32    1           1

    name           guards                         arrives x count                waits
    raw_full       32 raw tokens, their scales    TMA x 2 per page (1 or 2)      convert_wg

Registers: 232 (mma_wg0), 176 (mma_wg1), 96.
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

from pallas_kernels.decode_dense.config import Config
from pallas_kernels.decode_dense.cta import Cta
from pallas_kernels.decode_dense.load import convert_wg, load_wg
from pallas_kernels.hopper.decode import launch
from pallas_kernels.hopper.inline import store_zeros, sync_warps, zero_rows
from pallas_kernels.hopper.layouts import WGMMA, WGMMA_ROW, across, full
from pallas_kernels.hopper.limits import BLOCK_KV, BLOCK_M
from pallas_kernels.hopper.mma import add_dot, dot, opaque_zero
from pallas_kernels.hopper.pieces import Part, Piece
from pallas_kernels.hopper.softmax import LOG2E, Softmax, rescale, with_sink


def _mma_wg0(cta: Cta) -> None:
    """Scores, softmax, and the left half of the output."""
    config, gmem, smem, bar = cta.config, cta.gmem, cta.smem, cta.bar
    dtype = jnp.dtype(config.dtype)
    at_run_time = config.scale is None
    run_scale_log2 = gmem.run_scale[0] * LOG2E if at_run_time else jnp.float32(1.0)
    scale_log2 = 1.0 if config.scale is None else config.scale * LOG2E

    def run(piece: Piece, count):
        # Keys that every row sees; a tile that reaches past them needs the mask.
        seen_by_all = piece.seq_len - (config.q_len - 1 if config.causal else 0)
        first_unmasked = piece.end - lax.div(jnp.maximum(seen_by_all, 0), jnp.int32(BLOCK_KV))

        def scores(stage, zero):
            """Pairs of operands whose products add up to the scores."""
            yield smem.q_latent.at[zero, :, config.left], smem.kv_left.at[stage].T
            yield smem.q_latent.at[zero, :, config.right], smem.kv_right.at[stage].T
            yield smem.q_rope.at[zero], smem.k_rope.at[stage].T

        def tile_step(i, carry, *, mask: bool, last: bool = False):
            acc, softmax = carry
            stage = cta.stage(count + i)
            plgpu.barrier_wait(bar.k_full.at[stage])
            zero = jnp.int32(0) if cta.interpret else opaque_zero(piece.seq_len + i)
            s = dot(scores(stage, zero), (BLOCK_M, BLOCK_KV), interpret=cta.interpret)
            if config.p_in_rope:
                # The rope keys are dead for all warps. MEASURED: H200, (128, 4096), 128 heads:
                # 232.5 us; 233.4 with the warps meeting just before P is stored.
                sync_warps(interpret=cta.interpret)
            if last:
                plgpu.barrier_arrive(bar.q_empty)
            if at_run_time:
                s = s * run_scale_log2
            if mask:
                s = _mask(cta, piece, piece.end - 1 - i, s)
                _zero_dead_tokens(cta, piece, piece.end - 1 - i, smem.kv_left.at[stage])
            softmax, p, alpha = softmax.step(s, scale_log2, config.slack)
            p = p.astype(dtype)

            def publish():
                smem.alpha[stage] = alpha
                cta.p_smem(stage)[...] = p
                plgpu.commit_smem()
                plgpu.barrier_arrive(bar.p_ready.at[stage])

            # MEASURED: H200, (128, 4096), 128 heads: 231 us with P published after the product is
            # issued, 239 after a quarter of it, 235 after half.
            acc = add_dot(
                rescale(acc, alpha, interpret=cta.interpret),
                p,
                smem.kv_left.at[stage],
                interpret=cta.interpret,
                after_issue=publish,
            )
            if not last:
                plgpu.barrier_arrive(bar.k_empty.at[stage])
            return acc, softmax

        def live():
            plgpu.barrier_wait(bar.q_full)
            carry = full((BLOCK_M, config.d_half), 0.0, jnp.float32), Softmax.start(BLOCK_M)
            last = piece.tiles - 1
            split = jnp.clip(first_unmasked, 0, last)
            carry = lax.fori_loop(0, split, functools.partial(tile_step, mask=True), carry)
            carry = lax.fori_loop(split, last, functools.partial(tile_step, mask=False), carry)
            acc, softmax = tile_step(last, carry, mask=True, last=True)
            inverse, lse2 = softmax.finish()
            if config.has_sink:
                inverse = lax.cond(
                    piece.whole, lambda: _with_sink(cta, inverse, lse2), lambda: inverse
                )
            plgpu.barrier_wait(bar.inverse_free)
            smem.inverse[...] = inverse
            plgpu.barrier_arrive(bar.inverse_ready)
            stage = cta.stage(count + last)
            out = acc * across(inverse, config.d_half)
            _store_last(cta, piece, out, config.left, smem.kv_left, stage)
            _store_lse(cta, piece, lse2)

        pl.when(piece.tiles > 0)(live)
        return count + piece.tiles

    cta.part.each_piece(run, jnp.int32(0))
    plgpu.barrier_wait(bar.inverse_free)  # mma_wg1's last release


def _mma_wg1(cta: Cta) -> None:
    """The right half of the output; the whole output of sequences without keys."""
    config, smem, bar = cta.config, cta.smem, cta.bar
    plgpu.barrier_arrive(bar.inverse_free)

    def run(piece: Piece, count):
        def step(i, acc, *, last: bool = False):
            stage = cta.stage(count + i)
            plgpu.barrier_wait(bar.p_ready.at[stage])
            alpha = plgpu.load(smem.alpha.at[stage], layout=WGMMA_ROW)
            acc = rescale(acc, alpha, interpret=cta.interpret)
            _zero_dead_tokens(cta, piece, piece.end - 1 - i, smem.kv_right.at[stage])
            acc = add_dot(acc, cta.p_smem(stage), smem.kv_right.at[stage], interpret=cta.interpret)
            if not last:
                plgpu.barrier_arrive(bar.k_empty.at[stage])
            return acc

        def live():
            acc = full((BLOCK_M, config.d_half), 0.0, jnp.float32)
            last = piece.tiles - 1
            acc = lax.fori_loop(0, last, step, acc)
            acc = step(last, acc, last=True)
            plgpu.barrier_wait(bar.inverse_ready)
            inverse = plgpu.load(smem.inverse, layout=WGMMA_ROW)
            plgpu.barrier_arrive(bar.inverse_free)
            stage = cta.stage(count + last)
            out = acc * across(inverse, config.d_half)
            _store_last(cta, piece, out, config.right, smem.kv_right, stage)

        def empty():
            every = slice(0, config.d_latent)
            cta.to_output(piece, every, functools.partial(store_zeros, interpret=cta.interpret))
            _store_lse(cta, piece, full((BLOCK_M,), -jnp.inf, jnp.float32))

        pl.when(piece.tiles > 0)(live)
        pl.when(piece.tiles == 0)(empty)
        return count + piece.tiles

    cta.part.each_piece(run, jnp.int32(0))


def _mask(cta: Cta, piece: Piece, tile, s: jax.Array) -> jax.Array:
    """-inf where a row may not see a key: behind the end, or, causal, behind the row's own
    token."""
    config = cta.config
    iota = lambda dim: plgpu.broadcasted_iota(jnp.int32, s.shape, dim, layout=WGMMA)
    limit = piece.seq_len - tile * BLOCK_KV
    if config.causal and config.q_len > 1:
        query = lax.div(iota(0) + cta.first_row, jnp.int32(config.num_heads))
        limit = limit - (config.q_len - 1) + query
    return jnp.where(iota(1) < limit, s, -jnp.inf)


def _zero_dead_tokens(cta: Cta, piece: Piece, tile, v: Any) -> None:
    """Zero the rows of V behind the sequence's end: what lies there may be NaN, and 0 x NaN is
    NaN.

    Another warp's QK may still read them as keys; their scores are masked whatever they are.
    """
    if cta.config.converts:
        return  # the converter has done so
    live = piece.seq_len - tile * BLOCK_KV

    @pl.when(live < BLOCK_KV)
    def _():
        zero_rows(v, live, interpret=cta.interpret)
        plgpu.commit_smem()


def _with_sink(cta: Cta, inverse: jax.Array, lse2: jax.Array) -> jax.Array:
    """`inverse` with the sink's share taken off."""
    sink = plgpu.load(cta.gmem.sink.at[cta.row_tile], layout=WGMMA_ROW, optimized=False)
    return with_sink(inverse, lse2, sink)


def _store_last(cta: Cta, piece: Piece, out: jax.Array, cols: slice, ring: Any, stage) -> None:
    """Store a normalised half by way of the last stage's V, which only this warpgroup still uses;
    release that stage."""
    staging = ring.at[stage]
    sync_warps(interpret=cta.interpret)  # the products of all of them have read V
    staging[...] = out.astype(jnp.dtype(cta.config.dtype))
    plgpu.commit_smem()
    rows = staging.at[pl.ds(0, cta.config.tile_rows)]
    cta.to_output(piece, cols, lambda ref: plgpu.copy_smem_to_gmem(rows, ref))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(cta.bar.k_empty.at[stage])


def _store_lse(cta: Cta, piece: Piece, lse2: jax.Array) -> None:
    """Store the log-sum-exp."""

    def store(ref, lse):
        ref[...] = lse

    cta.to_lse(piece, lse2, store)


def roles(config: Config) -> tuple[Callable[[Cta], None], ...]:
    """What each warpgroup does."""
    return _mma_wg0, _mma_wg1, convert_wg if config.converts else load_wg


def decode(config: Config, inputs: dict[str, jax.Array], interpret: Any = None):
    """Launch the kernel: `hopper.decode.launch`."""
    capacity = inputs["block_table"].shape[1] * config.page_size

    def cta(role, gmem, smem, bar, index, row_tile):
        part = Part(gmem.parts, index, gmem.seq_lens, capacity)
        part = part if role is convert_wg else part.holding_cut()
        if config.converts and not interpret:
            kv_left, raw = smem.kv_left
            smem = SimpleNamespace(**vars(smem) | {"kv_left": kv_left, "raw": raw})
        return Cta(config, bool(interpret), gmem, smem, bar, part, row_tile)

    return launch(config, inputs, roles(config), cta, name="mla_decode_dense", interpret=interpret)
