"""Producers of the dense decode kernel's key tiles: `load_wg` for 16-bit caches, `convert_wg` for
`fp8_ds_mla`. `kernel.py` has the timeline and the barriers."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_dense.config import RAW_PARTS
from pallas_kernels.decode_dense.cta import Cta
from pallas_kernels.hopper import dequantise
from pallas_kernels.hopper.limits import BLOCK_KV
from pallas_kernels.hopper.pieces import Piece


def load_wg(cta: Cta) -> None:
    """Keep the ring of key tiles full, across the sequences; load each one's queries."""
    config, gmem, smem = cta.config, cta.gmem, cta.smem
    ahead = config.pages_per_tile <= 2  # more do not fit the registers

    def fill(piece: Piece, tile, stage, await_stage, load_queries, pages):
        await_stage()
        tokens = _tokens(cta, tile)
        for i, page in enumerate(pages or _pages(cta, piece, tile)):
            for source, ring in (
                (gmem.latent.at[page, tokens, config.left], smem.kv_left),
                (gmem.latent.at[page, tokens, config.right], smem.kv_right),
                (gmem.rope.at[page, tokens], smem.k_rope),
            ):
                _load(cta, source, ring, stage, i)
        load_queries()
        # MEASURED: H200, (128, 4096), 64 heads: 145.7 us, 146.4 with pages looked up when the stage
        # is free.
        return tuple(_pages(cta, piece, tile - 1)) if ahead else ()

    _each_tile(cta, ahead, fill)


def convert_wg(cta: Cta) -> None:
    """`load_wg` where the latents are e4m3: their bytes come to the stage that they will fill, and
    go through registers, in two parts of `dequantise.TOKENS`."""
    config, gmem, smem, bar = cta.config, cta.gmem, cta.smem, cta.bar

    def load_raw(tile, stage, pages):
        """Begin to copy raw latents and their scales, no more than a page or a part at a time."""
        if cta.interpret:  # what was there is lost
            smem.kv_left[stage] = jnp.full(smem.kv_left.shape[1:], jnp.nan, smem.kv_left.dtype)
        tokens, per_token = config.raw_tokens, config.scales_per_token
        for first in range(0, BLOCK_KV, tokens):
            page, token = divmod(first, config.page_tokens)
            part, token_of_part = divmod(first, dequantise.TOKENS)
            token = _tokens(cta, tile).start + token
            for source, target in (
                (
                    gmem.latent.at[pages[page], pl.ds(token, tokens)],
                    smem.raw.at[stage, pl.ds(first, tokens)],
                ),
                (
                    gmem.scale.at[pages[page], pl.ds(token * per_token, tokens * per_token)],
                    smem.k_scale.at[part, token_of_part // tokens],
                ),
            ):
                plgpu.copy_gmem_to_smem(source, target, bar.raw_full.at[part])

    def fill(piece: Piece, tile, stage, await_stage, load_queries, pages):
        await_stage()
        load_raw(tile, stage, pages)
        for i, page in enumerate(pages):
            _load(cta, gmem.rope.at[page, _tokens(cta, tile)], smem.k_rope, stage, i)
        load_queries()
        # Looked up while the raw bytes are on their way.
        upcoming = tuple(_pages(cta, piece, tile - 1))
        live = piece.seq_len - tile * BLOCK_KV
        for part in range(RAW_PARTS):
            plgpu.barrier_wait(bar.raw_full.at[part])
            first, interpret = part * dequantise.TOKENS, cta.interpret
            latents = dequantise.load_latents(smem.raw.at[stage], first, interpret=interpret)
            for half, ring in enumerate((smem.kv_left, smem.kv_right)):
                into, scales = ring.at[stage], smem.k_scale.at[part]
                dequantise.store_bf16(
                    into, half, first, latents[half], scales, live, interpret=interpret
                )
        # A meeting too: all warps have read the scales. Those of the next tile take their place,
        # which has no stages.
        plgpu.commit_smem()
        plgpu.barrier_arrive(bar.k_full.at[stage])
        return upcoming

    _each_tile(cta, True, fill)


def _each_tile(cta: Cta, ahead: bool, fill: Callable[..., Any]) -> None:
    """Call `fill(piece, tile, stage, await_stage, load_queries, pages)` for each piece's tiles. It
    has to call the two functions once each, in that order, and give the next tile's `pages`; none,
    if they are not looked up `ahead`."""
    config, bar = cta.config, cta.bar

    def run(piece: Piece, carry):
        count, pieces = carry

        def one(i, pages):
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

            return fill(piece, piece.end - 1 - i, stage, await_stage, load_queries, pages)

        @pl.when(piece.tiles > 0)
        def _():
            first = tuple(_pages(cta, piece, piece.end - 1)) if ahead else ()
            lax.fori_loop(0, piece.tiles, one, first)

        return count + piece.tiles, pieces + (piece.tiles > 0).astype(jnp.int32)

    count, pieces = cta.part.each_piece(run, (jnp.int32(0), jnp.int32(0)))

    # Await the last releases too: no barrier may have a phase pending when the CTA ends.
    pl.when(pieces > 0)(lambda: plgpu.barrier_wait(bar.q_empty))

    lax.fori_loop(
        jnp.maximum(count - config.num_stages, 0),
        count,
        lambda i, _: plgpu.barrier_wait(bar.k_empty.at[cta.stage(i)]),
        None,
    )


def _pages(cta: Cta, piece: Piece, tile: jax.Array) -> Iterator[jax.Array]:
    """The pages of a tile, each looked up when it is asked for."""
    return piece.pages(cta.gmem.block_table, tile, cta.config.page_size)


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
