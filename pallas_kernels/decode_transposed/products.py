"""What the transposed kernel's math depends on the cache's format in: scores, V^T P^T, stores.

In 16 bits every operand is in shared memory as wgmma takes it. In e4m3 (`fp8_token`, `fp8_full`;
`decode_e4m3/kernel.py` has the formula) wgmma takes operands along the summed dimension only: V^T
goes through registers (`hopper.fp8`), its even and odd channels apart, and P, rounded to e4m3 with
the tokens' scales in it, to shared memory in the order of tokens that this brings.
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

from pallas_kernels.decode_transposed.config import Config
from pallas_kernels.hopper import columns, fp8, queries
from pallas_kernels.hopper.inline import zero_rows
from pallas_kernels.hopper.layouts import WGMMA_ROW, across, full, tiled
from pallas_kernels.hopper.limits import BLOCK_KV
from pallas_kernels.hopper.mma import add_dots, dots
from pallas_kernels.hopper.softmax import LOG2E

Half = tuple[jax.Array, ...]
"""The accumulators of half an output's channels."""

ToOutput = Callable[[Callable[[Any], None]], None]
"""Calls its argument with the place where half an output goes."""


@dataclasses.dataclass(frozen=True)
class Products:
    """Of one math warpgroup."""

    config: Config
    wg: int
    interpret: bool
    gmem: SimpleNamespace
    smem: SimpleNamespace
    bar: SimpleNamespace
    views: SimpleNamespace
    """The ring as `latent`, `exchange` and, in e4m3, `pairs`."""
    rows: Any
    """Of the CTA, among those of a sequence: a slice."""

    def zeros(self) -> tuple[Half, Half]:
        """An output of which nothing is there yet."""
        config = self.config
        shape = (config.d_half // config.accumulators, config.row_tile)
        half = (full(shape, 0.0, jnp.float32),) * config.accumulators
        return half, half

    def _products(self, stage, zero, groups: tuple[tuple[str, ...], ...]) -> tuple[jax.Array, ...]:
        """For each group the sum of the products of these parts of keys and queries."""
        smem = self.smem
        parts = {
            "latent": (self.views.latent.at[stage], smem.q_latent.at[zero].T),
            "rope": (smem.k_rope.at[stage], smem.q_rope.at[zero].T),
        }
        operands = [[parts[name] for name in names] for names in groups]
        return dots(operands, (BLOCK_KV, self.config.row_tile), interpret=self.interpret)


class In16Bits(Products):
    """bf16 and f16 caches."""

    def await_queries(self, seq) -> jax.Array | float:
        """Wait until they are in shared memory; by what the scores are to be multiplied, base 2
        included; positive."""
        del seq
        plgpu.barrier_wait(self.bar.q_full)
        return 1.0 if self.config.scale is None else self.config.scale * LOG2E

    def release_queries(self, last) -> None:
        """If these scores are the last, the next queries may be loaded."""
        plgpu.barrier_arrive(self.bar.q_empty, predicate=last)

    def scores(self, stage, zero) -> jax.Array:
        """S^T, less the factor that `await_queries` gives."""
        (s,) = self._products(stage, zero, (("latent", "rope"),))
        return s if self.config.scale is not None else s * (self.gmem.run_scale[0] * LOG2E)

    def largest_scale(self, stage, live) -> jax.Array:
        """Of the tile's tokens; there are none."""
        del stage, live
        return jnp.float32(1.0)

    def zero_dead_tokens(self, stage, live) -> None:
        """Zero the rows of V from `live` on: what lies there may be NaN, and 0 x NaN is NaN."""
        zero_rows(self.views.latent.at[stage], live, interpret=self.interpret)

    def add_values(self, stage, zero, halves, p, scale, live) -> tuple[Half, Half]:
        """`halves` plus V^T P^T."""
        del scale, live
        config, wg = self.config, self.wg
        self.smem.p.at[wg].T[...] = p.astype(jnp.dtype(config.dtype))
        plgpu.commit_smem()
        accs = tuple(acc for (acc,) in halves)
        values = (self.views.latent.at[stage, :, config.half(half)].T for half in range(2))
        p_t = self.smem.p.at[wg + zero].T
        left, right = add_dots(accs, [[(v_t, p_t)] for v_t in values], interpret=self.interpret)
        return (left,), (right,)

    def true_size(self, halves, scale) -> tuple[Half, Half]:
        """The output so far without what its operands were multiplied by."""
        del scale
        return halves

    def store(self, half: Half, to_output: ToOutput) -> None:
        """Store a normalised half, transposed."""
        (acc,) = half
        staging = self.smem.staging.at[self.wg]
        staging.T[...] = acc.astype(jnp.dtype(self.config.dtype))
        plgpu.commit_smem()
        to_output(functools.partial(plgpu.copy_smem_to_gmem, staging))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class InE4m3(Products):
    """`fp8_token` and `fp8_full` caches."""

    def await_queries(self, seq) -> jax.Array | float:
        """Quantise this warpgroup's rows, wait for the other's; by what the scores are to be
        multiplied, base 2 included; positive."""
        config, gmem, smem, interpret = self.config, self.gmem, self.smem, self.interpret
        run_scale = gmem.run_scale[0] if config.scale is None else None
        sign, size = queries.sign_and_size(config.scale, run_scale)
        rope_dtype = jnp.dtype(config.rope_dtype)
        own = range(self.wg * queries.ROWS, config.row_tile, 2 * queries.ROWS)
        # All are on their way before the first is waited for.
        loaded = []
        for first in own:
            rows = pl.ds(self.rows.start + first, queries.ROWS)
            sources = gmem.q_latent.at[seq, rows], gmem.q_rope.at[seq, rows]
            loaded.append([queries.load(source, interpret=interpret) for source in sources])
        for first, (latent, rope) in zip(own, loaded, strict=True):
            rows = pl.ds(first, queries.ROWS)
            latent, rope, scale = queries.quantise(latent, rope, sign, rope_dtype)
            for buffer, values in ((smem.q_latent, latent), (smem.q_rope, rope)):
                transforms = tiled(buffer.shape[2], values.dtype.itemsize)
                queries.store(buffer.at[0, rows], values, transforms, interpret=interpret)
            queries.store_values(smem.q_factor.at[0, rows], scale * size, interpret=interpret)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.bar.q_ready)
        plgpu.barrier_wait(self.bar.q_ready)
        return fp8.load_columns(smem.q_factor, config.row_tile, interpret=interpret)[0]

    def release_queries(self, last) -> None:
        """Nothing: the next ones replace them after the meeting at the sequence's end."""

    def _token_scales(self, stage) -> tuple[jax.Array, ...]:
        """Of the latent and, if it has its own, of the rope key; one per row of S^T."""
        return columns.load_token_values(
            self.smem.k_scale.at[stage],
            per_row=self.config.page_tokens,
            kinds=self.config.scales_per_token,
            interpret=self.interpret,
        )

    def scores(self, stage, zero) -> jax.Array:
        """S^T, less the factor that `await_queries` gives."""
        apart = self.config.scales_per_token > 1
        groups = (("latent",), ("rope",)) if apart else (("latent", "rope"),)
        products = self._products(stage, zero, groups)
        scaled = lambda x, scale: x * across(scale, x.shape[1])
        terms = map(scaled, products, self._token_scales(stage))
        return functools.reduce(jnp.add, terms)

    def largest_scale(self, stage, live) -> jax.Array:
        """Of the tile's tokens before `live`; alike in all warps."""
        config = self.config
        scales, *_ = fp8.load_columns(
            self.smem.k_scale.at[stage],
            BLOCK_KV,
            per_row=config.page_tokens,
            kinds=config.scales_per_token,
            interpret=self.interpret,
        )
        kept = functools.partial(columns.zero_from, limit=live, interpret=self.interpret)
        scales = lax.cond(live < BLOCK_KV, kept, lambda scales: scales, scales)
        return fp8.max_over_columns(scales, interpret=self.interpret)

    def zero_dead_tokens(self, stage, live) -> None:
        """Zero the rows of V from `live` on: what lies there may be NaN, and 0 x NaN is NaN."""
        transforms = tiled(self.config.d_latent, 1)
        latent = self.views.latent.at[stage]
        fp8.zero_rows(latent, live, transforms, interpret=self.interpret)

    def add_values(self, stage, zero, halves, p, scale, live) -> tuple[Half, Half]:
        """`halves` plus V^T P^T, P times the tokens' scales, relative to `scale`."""
        config, smem, interpret = self.config, self.smem, self.interpret
        scales, *_ = self._token_scales(stage)
        token = plgpu.broadcasted_iota(jnp.int32, (BLOCK_KV,), 0, layout=WGMMA_ROW)
        kept = lambda scales: jnp.where(token < live, scales, 0.0)  # behind may be NaN
        scales = lax.cond(live < BLOCK_KV, kept, lambda scales: scales, scales)
        p = p * across(scales * (config.p_max / scale), config.row_tile)
        place = smem.p.at[self.wg]
        p = p.astype(jnp.float8_e4m3fn)
        columns.store_probabilities(place, p, config.p_transforms, interpret=interpret)
        plgpu.commit_smem()
        p_t = smem.p.at[self.wg + zero].T
        done = []
        for wg, half in enumerate(halves):
            channels = config.half(wg)
            pairs = slice(channels.start // 2, channels.stop // 2)
            values = fp8.load_transposed(
                self.views.latent.at[stage, :, channels],
                self.views.pairs.at[stage, :, pairs],
                interpret=interpret,
            )
            done.append(add_dots(half, [[(v_t, p_t)] for v_t in values], interpret=interpret))
        plgpu.commit_smem()  # TMA writes where V was read
        return tuple(done)

    def true_size(self, halves, scale) -> tuple[Half, Half]:
        """The output so far without what its operands were multiplied by."""
        factor = scale * (1 / self.config.p_max)
        return jax.tree.map(lambda acc: acc * factor, halves)

    def store(self, half: Half, to_output: ToOutput) -> None:
        """Store a normalised half, transposed: eight lanes one sector of 32 bytes."""
        even, odd = (acc.astype(jnp.dtype(self.config.dtype)) for acc in half)
        to_output(lambda ref: fp8.store_transposed(ref, even, odd, interpret=self.interpret))
