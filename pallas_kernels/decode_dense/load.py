"""Producers of the dense decode kernel's key tiles: `load_wg` for 16-bit caches, `convert_wg` for
`fp8_ds_mla`. `kernel.py` has the timeline and the barriers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_dense.cta import Cta
from pallas_kernels.hopper import dequantise
from pallas_kernels.hopper.limits import BLOCK_KV
from pallas_kernels.hopper.pieces import Piece


def load_wg(cta: Cta) -> None:
    """Keep the ring of key tiles full, across the sequences; load each one's queries."""
    config, gmem, smem = cta.config, cta.gmem, cta.smem

    def fill(piece: Piece, tile, stage, await_stage, load_queries, state):
        await_stage()
        for i in range(config.pages_per_tile):
            page, tokens = _page(cta, piece, tile, i), _tokens(cta, tile)
            for source, ring in (
                (gmem.latent.at[page, tokens, config.left], smem.kv_left),
                (gmem.latent.at[page, tokens, config.right], smem.kv_right),
                (gmem.rope.at[page, tokens], smem.k_rope),
            ):
                _load(cta, source, ring, stage, i)
        load_queries()
        return state

    _each_tile(cta, lambda piece: None, fill)


def convert_wg(cta: Cta) -> None:
    """`load_wg` where the latents are e4m3: they take the way through registers, a tile ahead of
    the one that is stored."""
    config, gmem, smem, bar = cta.config, cta.gmem, cta.smem, cta.bar
    quarters = range(BLOCK_KV // dequantise.TOKENS)

    def sources(piece: Piece, tile):
        """Where the quarters of a tile lie; a page is looked up when its first one is asked for."""
        page: Any = None
        for quarter in quarters:
            i, token = divmod(quarter * dequantise.TOKENS, config.page_tokens)
            page = _page(cta, piece, tile, i) if token == 0 else page
            tokens = pl.ds(_tokens(cta, tile).start + token, dequantise.TOKENS)
            yield gmem.latent.at[page, tokens], gmem.scale.at[page, tokens]

    def load(latents, scales):
        return (
            dequantise.load_latents(latents, interpret=cta.interpret),
            dequantise.load_scales(scales, interpret=cta.interpret),
        )

    def begin(piece: Piece):
        return tuple(load(*source) for source in sources(piece, piece.end - 1))

    def fill(piece: Piece, tile, stage, await_stage, load_queries, loaded):
        await_stage()
        for i in range(config.pages_per_tile):
            page, tokens = _page(cta, piece, tile, i), _tokens(cta, tile)
            _load(cta, gmem.rope.at[page, tokens], smem.k_rope, stage, i)
        load_queries()
        live = piece.seq_len - tile * BLOCK_KV
        left, right = smem.kv_left.at[stage], smem.kv_right.at[stage]
        for quarter, (latents, scales) in zip(quarters, loaded, strict=True):
            first, interpret = quarter * dequantise.TOKENS, cta.interpret
            dequantise.store_bf16(left, right, first, latents, scales, live, interpret=interpret)
        plgpu.commit_smem()
        plgpu.barrier_arrive(bar.k_full.at[stage])
        # Not before: the fence of `commit_smem` may wait for loads as it does for stores. The last
        # tile is followed by itself, for nothing.
        upcoming = sources(piece, jnp.maximum(tile - 1, piece.begin))
        return tuple(load(*source) for source in upcoming)

    _each_tile(cta, begin, fill)


def _each_tile(cta: Cta, begin: Callable[..., Any], fill: Callable[..., Any]) -> None:
    """Fold `fill(piece, tile, stage, await_stage, load_queries, state)` over each piece's tiles,
    from `begin(piece)` on. It has to call the two functions once each, in that order."""
    config, bar = cta.config, cta.bar

    def run(piece: Piece, carry):
        count, pieces = carry

        def one(i, state):
            stage = cta.stage(count + i)

            def await_stage():
                pl.when(count + i >= config.num_stages)(
                    lambda: plgpu.barrier_wait(bar.k_empty.at[stage])
                )

            def load_queries():
                @pl.when(i == 0)
                def _():
                    pl.when(pieces > 0)(lambda: plgpu.barrier_wait(bar.q_empty))
                    _load_queries(cta, piece.seq)

            return fill(piece, piece.end - 1 - i, stage, await_stage, load_queries, state)

        @pl.when(piece.tiles > 0)
        def _():
            lax.fori_loop(0, piece.tiles, one, begin(piece))

        return count + piece.tiles, pieces + (piece.tiles > 0).astype(jnp.int32)

    count, pieces = cta.each_piece(run, (jnp.int32(0), jnp.int32(0)))

    # Await the last releases too: no barrier may have a phase pending when the CTA ends.
    pl.when(pieces > 0)(lambda: plgpu.barrier_wait(bar.q_empty))

    lax.fori_loop(
        jnp.maximum(count - config.num_stages, 0),
        count,
        lambda i, _: plgpu.barrier_wait(bar.k_empty.at[cta.stage(i)]),
        None,
    )


def _page(cta: Cta, piece: Piece, tile: jax.Array, i: int) -> jax.Array:
    """The `i`-th page of a tile.

    A page behind the sequence's end is replaced by its last one: entries there may be anything.
    """
    page_size = jnp.int32(cta.config.page_size)
    last_page = lax.div(piece.seq_len - 1, page_size)
    token = tile * BLOCK_KV + i * cta.config.page_tokens
    return cta.gmem.block_table[piece.seq, jnp.minimum(lax.div(token, page_size), last_page)]


def _tokens(cta: Cta, tile: jax.Array) -> Any:
    """The tokens of each of its pages that a tile takes."""
    first = lax.rem(tile * BLOCK_KV, jnp.int32(cta.config.page_size))
    return pl.ds(first, cta.config.page_tokens)


def _load(cta: Cta, source: Any, ring: Any, stage: jax.Array, i: int) -> None:
    """Begin to copy what a tile takes from its `i`-th page to its place in a ring."""
    into = pl.ds(i * cta.config.page_tokens, cta.config.page_tokens)
    plgpu.copy_gmem_to_smem(source, ring.at[stage, into], cta.bar.k_full.at[stage])


def _load_queries(cta: Cta, seq: jax.Array) -> None:
    gmem, smem = cta.gmem, cta.smem
    into = pl.ds(0, cta.config.tile_rows)
    for source, buffer in ((gmem.q_latent, smem.q_latent), (gmem.q_rope, smem.q_rope)):
        plgpu.copy_gmem_to_smem(source.at[seq, cta.rows], buffer.at[0, into], cta.bar.q_full)
