"""What the transposed kernel's math depends on the cache's format in: scores, V^T P^T, stores.

From bf16 and f16 caches every operand is in shared memory as wgmma takes it. In e4m3 (`fp8_token`,
`fp8_full`; `decode_e4m3/kernel.py` has the formula) wgmma takes operands along the summed dimension
only: V^T goes through registers (`hopper.fp8`), its even and odd channels apart, and P, rounded to
e4m3 with the tokens' scales in it, to shared memory in the order of tokens that this brings.

From `fp8_ds_mla` caches both products are of float16 operands: K and V^T are widened on their way
through registers (`hopper.widen`), without their scales. Those, of 128 channels each, are factors
of these channels' scores, and are in a P of their own for them.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_transposed.config import Config
from pallas_kernels.hopper import columns, fp8, queries, widen
from pallas_kernels.hopper.inline import sync_warps, zero_rows
from pallas_kernels.hopper.layouts import WGMMA_ROW, across, full, tiled
from pallas_kernels.hopper.limits import BLOCK_KV
from pallas_kernels.hopper.mma import add_dots, dots
from pallas_kernels.hopper.softmax import LOG2E

Half = tuple[jax.Array, ...]
"""The accumulators of half an output's channels."""


class OfQueries(NamedTuple):
    """What the scores of a sequence's queries are to be multiplied by."""

    factor: jax.Array | float
    """Those of each column."""
    of_groups: tuple[jax.Array, ...] = ()
    """Those of each group of channels, of all columns, by which its products are multiplied before
    they are added up."""


ToOutput = Callable[[Callable[..., None]], None]
"""Calls its argument with the place where half an output goes; and, for formats whose queries go
through registers, with the first row of it that is to be stored, if that is not 0."""


def by_side[Result](function: Callable[[int], Result]) -> Result:
    """`function` of 0 in math warpgroup 0, of 1 in the other: where they differ in more than data,
    outside the loop whose code they share."""
    left, right = (functools.partial(function, side) for side in range(2))
    return lax.cond(lax.axis_index("wg") == 0, left, right)


@dataclasses.dataclass(frozen=True)
class Products:
    """Of one math warpgroup."""

    config: Config
    wg: int | jax.Array
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

    def await_queries(self, seq) -> OfQueries:
        """Wait until TMA has brought them."""
        del seq
        plgpu.barrier_wait(self.bar.q_full)
        return OfQueries(1.0 if self.config.scale is None else self.config.scale * LOG2E)

    def release_queries(self, last) -> None:
        """If these scores are the last, the next queries may be loaded."""
        plgpu.barrier_arrive(self.bar.q_empty, predicate=last)

    def _products(self, stage, zero, groups: tuple[tuple[str, ...], ...], meanwhile):
        """For each group the sum of the products of these parts of keys and queries; and what
        `meanwhile` gives."""
        smem = self.smem
        parts = {
            "latent": (self.views.latent.at[stage], smem.q_latent.at[zero].T),
            "rope": (smem.k_rope.at[stage], smem.q_rope.at[zero].T),
        }
        operands = [[parts[name] for name in names] for names in groups]
        shape = (BLOCK_KV, self.config.row_tile)
        return dots(operands, shape, meanwhile, interpret=self.interpret)


class In16Bits(Products):
    """bf16 and f16 caches."""

    def scores(self, stage, zero, of_queries, meanwhile):
        """S^T, less the factor of the queries; and what `meanwhile` gives."""
        del of_queries
        (s,), result = self._products(stage, zero, (("latent", "rope"),), meanwhile)
        # A factor that is known at run time only may not be positive.
        known = self.config.scale is not None
        return s if known else s * (self.gmem.run_scale[0] * LOG2E), result

    def largest_scales(self, stage, live) -> tuple[jax.Array, ...]:
        """Of the tile's tokens; there are none."""
        del stage, live
        return (jnp.float32(1.0),)

    def value_factors(self, stage, live, scales) -> tuple[jax.Array, ...]:
        """What P^T is to be multiplied by, for each group of channels, one per row; nothing."""
        del stage, live, scales
        return ()

    def zero_dead_tokens(self, stage, live) -> None:
        """Zero the rows of V from `live` on: what lies there may be NaN, and 0 x NaN is NaN."""
        zero_rows(self.views.latent.at[stage], live, interpret=self.interpret)

    def add_values(self, stage, zero, halves, p, factors, again, release) -> tuple[Half, Half]:
        """`halves` plus V^T P^T; `release` the stage."""
        del factors, again
        config, wg = self.config, self.wg
        self.smem.p.at[wg].T[...] = p.astype(jnp.dtype(config.dtype))
        plgpu.commit_smem()
        accs = tuple(acc for (acc,) in halves)
        values = (self.views.latent.at[stage, :, config.half(side)].T for side in range(2))
        p_t = self.smem.p.at[wg + zero].T
        left, right = add_dots(accs, [[(v_t, p_t)] for v_t in values], interpret=self.interpret)
        release()
        return (left,), (right,)

    def true_size(self, halves, scales) -> tuple[Half, Half]:
        """The output so far without what its operands were multiplied by."""
        del scales
        return halves

    def store(self, half: Half, to_output: ToOutput) -> None:
        """Store a normalised half, transposed."""
        (acc,) = half
        staging = self.smem.staging.at[self.wg]
        staging.T[...] = acc.astype(jnp.dtype(self.config.dtype))
        plgpu.commit_smem()
        to_output(functools.partial(plgpu.copy_smem_to_gmem, staging))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class ThroughRegisters(Products, abc.ABC):
    """Latents in e4m3: the even and the odd channels have accumulators of their own."""

    def await_queries(self, seq) -> OfQueries:
        """Quantise this warpgroup's rows, wait for the other's."""
        return by_side(functools.partial(self._quantise_queries, seq))

    def _quantise_queries(self, seq, side: int) -> OfQueries:
        config, gmem, smem, interpret = self.config, self.gmem, self.smem, self.interpret
        run_scale = gmem.run_scale[0] if config.scale is None else None
        sign, size = queries.sign_and_size(config.scale, run_scale)
        groups = [self._channels(i) for i in range(config.scale_groups)]
        # All are on their way before the first is waited for.
        loaded = []
        for first in range(side * queries.ROWS, config.row_tile, 2 * queries.ROWS):
            rows = pl.ds(self.rows.start + first, queries.ROWS)
            sources = [gmem.q_latent.at[seq, rows, channels] for channels in groups]
            sources.append(gmem.q_rope.at[seq, rows])
            values = [queries.load(source, interpret=interpret) for source in sources]
            loaded.append((pl.ds(first, queries.ROWS), values))
        quantised, of_groups = self._quantised(loaded, sign)
        for (rows, _), (latents, rope, scale) in zip(loaded, quantised, strict=True):
            store = functools.partial(queries.store, interpret=interpret)
            for channels, latent in zip(groups, latents, strict=True):
                transforms = tiled(config.d_latent, latent.dtype.itemsize)
                place = smem.q_latent.at[0, rows, channels]
                store(place, latent, transforms, order_of_keys=config.widened)
            store(smem.q_rope.at[0, rows], rope, tiled(config.d_rope, rope.dtype.itemsize))
            factor = queries.score_factor(scale, size)
            queries.store_values(smem.q_factor.at[0, rows], factor, interpret=interpret)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.bar.q_ready)
        plgpu.barrier_wait(self.bar.q_ready)
        (factor,) = fp8.load_columns(smem.q_factor, config.row_tile, interpret=interpret)
        return OfQueries(factor, of_groups)

    def _channels(self, group: int) -> slice:
        """Those that share a scale."""
        size = self.config.d_latent // self.config.scale_groups
        return slice(group * size, (group + 1) * size)

    @abc.abstractmethod
    def _quantised(self, loaded, sign) -> tuple[list[Any], tuple[jax.Array, ...]]:
        """Of each `queries.ROWS` rows, `(place, [*groups of channels, rope part])`, what the
        products take: groups, rope part, scale; and `OfQueries.of_groups`."""

    def release_queries(self, last) -> None:
        """Nothing: the next ones replace them after the meeting at the sequence's end."""

    def _token_scales(self, stage) -> tuple[jax.Array, ...]:
        """Of each kind that there is, one per row of S^T."""
        return columns.load_token_values(
            self.smem.k_scale.at[stage],
            per_row=self.config.page_tokens,
            kinds=self.config.scales_per_token,
            interpret=self.interpret,
        )

    def _live_scales(self, stage, live) -> tuple[jax.Array, ...]:
        """`_token_scales` of values, 0 from token `live` on: what lies there may be NaN."""
        scales = self._token_scales(stage)[: self.config.scale_groups]
        token = plgpu.broadcasted_iota(jnp.int32, (BLOCK_KV,), 0, layout=WGMMA_ROW)
        kept = lambda *scales: tuple(jnp.where(token < live, x, 0.0) for x in scales)
        return lax.cond(live < BLOCK_KV, kept, lambda *scales: scales, *scales)

    def zero_dead_tokens(self, stage, live) -> None:
        """Zero the rows of V from `live` on: what lies there may be NaN, and 0 x NaN is NaN."""
        transforms = tiled(self.config.d_latent, 1)
        latent = self.views.latent.at[stage]
        fp8.zero_rows(latent, live, transforms, interpret=self.interpret)

    def store(self, half: Half, to_output: ToOutput) -> None:
        """Store a normalised half, transposed: eight lanes one sector of 32 bytes."""
        half = tuple(acc.astype(jnp.dtype(self.config.dtype)) for acc in half)
        size = self.config.d_half // self.config.half_groups

        def store_groups(ref, first=0):
            own = [acc[:, first:] if first else acc for acc in half]
            for i in range(self.config.half_groups):
                of_group = ref.at[first:, i * size : (i + 1) * size]
                fp8.store_transposed(of_group, *own[2 * i : 2 * i + 2], interpret=self.interpret)

        to_output(store_groups)


class InE4m3(ThroughRegisters):
    """`fp8_token` and `fp8_full` caches."""

    def _quantised(self, loaded, sign):
        dtype = jnp.dtype(self.config.rope_dtype)
        of_rows = (queries.quantise(latent, rope, sign, dtype) for _, (latent, rope) in loaded)
        return [([latent], rope, scale) for latent, rope, scale in of_rows], ()

    def scores(self, stage, zero, of_queries, meanwhile):
        """S^T, less the factor of the queries; and what `meanwhile` gives."""
        del of_queries
        apart = self.config.scales_per_token > 1
        groups = (("latent",), ("rope",)) if apart else (("latent", "rope"),)
        products, result = self._products(stage, zero, groups, meanwhile)
        scaled = lambda x, scale: x * across(scale, x.shape[1])
        terms = map(scaled, products, self._token_scales(stage))
        return functools.reduce(jnp.add, terms), result

    def largest_scales(self, stage, live) -> tuple[jax.Array, ...]:
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
        return (fp8.max_over_columns(scales, interpret=self.interpret),)

    def value_factors(self, stage, live, scales) -> tuple[jax.Array, ...]:
        """The tokens' scales relative to `scales`, one per row of P^T."""
        token_scales, *_ = self._live_scales(stage, live)
        return (token_scales * (self.config.p_max / scales[0]),)

    def add_values(self, stage, zero, halves, p, factors, again, release) -> tuple[Half, Half]:
        """`halves` plus V^T P^T, P times the tokens' `factors`, or, if `again`, what rounding has
        left of that; `release` the stage."""
        config, smem, interpret = self.config, self.smem, self.interpret
        p = p * across(factors[0], config.row_tile)
        p = lax.cond(again, fp8.rounding_error, lambda p: p, p)
        place = smem.p.at[self.wg]
        p = p.astype(jnp.float8_e4m3fn)
        columns.store_probabilities(place, p, config.p_transforms, interpret=interpret)
        plgpu.commit_smem()
        p_t = smem.p.at[self.wg + zero].T
        done = []
        for side, half in enumerate(halves):
            channels = config.half(side)
            pairs = slice(channels.start // 2, channels.stop // 2)
            values = fp8.load_transposed(
                self.views.latent.at[stage, :, channels],
                self.views.pairs.at[stage, :, pairs],
                interpret=interpret,
            )
            done.append(add_dots(half, [[(v_t, p_t)] for v_t in values], interpret=interpret))
        plgpu.commit_smem()  # TMA writes where V was read
        release()
        return tuple(done)

    def true_size(self, halves, scales) -> tuple[Half, Half]:
        """The output so far without what its operands were multiplied by."""
        factor = scales[0] * (1 / self.config.p_max)
        return jax.tree.map(lambda acc: acc * factor, halves)


class Widened(ThroughRegisters):
    """`fp8_ds_mla` caches."""

    def _quantised(self, loaded, sign):
        largest = self.smem.q_largest
        for rows, (*latents, _) in loaded:
            for group, latent in enumerate(latents):
                place = largest.at[group, rows]
                queries.store_values(place, queries.largest(latent), interpret=self.interpret)
        plgpu.barrier_arrive(self.bar.q_ready)
        plgpu.barrier_wait(self.bar.q_ready)
        scales = queries.scales_of_groups(largest, interpret=self.interpret)
        of_rows = (
            queries.to_float16(latents, rope, sign, scales) for _, (*latents, rope) in loaded
        )
        return list(of_rows), scales

    def _latent(self, stage, group: int) -> Any:
        """The channels of a tile that share a scale."""
        return self.views.latent.at[stage, :, self._channels(group)]

    def scores(self, stage, zero, of_queries, meanwhile):
        """S^T, less the factor of the queries; and what `meanwhile` gives."""
        config, smem, interpret = self.config, self.smem, self.interpret
        shape = (BLOCK_KV, config.row_tile)
        rope = [(smem.k_rope.at[stage], smem.q_rope.at[zero].T)]

        def operands(group):
            keys = widen.load_keys(self._latent(stage, group), interpret=interpret)
            return [(keys, smem.q_latent.at[zero, :, self._channels(group)].T)]

        s: Any = None
        result: Any = None
        for first in range(0, config.scale_groups, config.groups_at_once):
            groups = range(first, first + config.groups_at_once)
            # Those with keys in registers first (C7513).
            pairs = [operands(group) for group in groups] + [rope] * (first == 0)
            is_last = groups.stop == config.scale_groups
            products, result = dots(
                pairs, shape, meanwhile if is_last else lambda: None, interpret=interpret
            )
            s = products[-1] if first == 0 else s
            # Not before: each of their loads brings all groups', and they would take registers.
            token_scales = self._token_scales(stage)
            for group, product in zip(groups, products, strict=False):
                factor = token_scales[group] * of_queries.of_groups[group]
                s += product * across(factor, config.row_tile)
        return s, result

    def largest_scales(self, stage, live) -> tuple[jax.Array, ...]:
        """Of each group's tokens before `live`, as powers of two; alike in all warps."""
        return widen.largest_scales(
            self.smem.k_scale.at[stage],
            live,
            per_row=self.config.page_tokens,
            kinds=self.config.scales_per_token,
            interpret=self.interpret,
        )

    def value_factors(self, stage, live, scales) -> tuple[jax.Array, ...]:
        """The tokens' scales of each group relative to `scales`, one per row of P^T."""
        inverses = (widen.inverse(scale, interpret=self.interpret) for scale in scales)
        relative = zip(self._live_scales(stage, live), inverses, strict=True)
        return tuple(of_tokens * (self.config.p_max * inverse) for of_tokens, inverse in relative)

    def add_values(self, stage, zero, halves, p, factors, again, release) -> tuple[Half, Half]:
        """`halves` plus V^T P^T, P times each group's `factors` of the tokens; `release` the
        stage."""
        del again
        config, smem, interpret = self.config, self.smem, self.interpret
        place = lambda group: self.wg * config.p_groups + group % config.p_groups
        accs = [*halves[0], *halves[1]]

        at_once = config.groups_at_once
        span = 2 * at_once if config.loads_ahead else at_once

        def load(first):
            groups = range(first, first + at_once)
            return [widen.load_values(self._latent(stage, g), interpret=interpret) for g in groups]

        def operands(first, values):
            of_groups = zip(range(first, first + at_once), values, strict=True)
            pairs = ((smem.p.at[place(g) + zero].T, v_ts) for g, v_ts in of_groups)
            return [[(v_t, p_t)] for p_t, v_ts in pairs for v_t in v_ts]

        def release_stage():
            plgpu.commit_smem()  # TMA writes where K and V were read
            release()

        for first in range(0, config.scale_groups, config.p_groups):
            # Then P's way to shared memory hides theirs.
            values = load(first) if config.loads_ahead else None
            if first:
                sync_warps(interpret=interpret)  # the products of all of them have read P
            for group in range(first, first + config.p_groups):
                of_group = p * across(factors[group], config.row_tile)
                smem.p.at[place(group) + zero].T[...] = of_group.astype(jnp.float16)
            plgpu.commit_smem()
            for at in range(first, first + config.p_groups, span):
                later = lambda at=at + at_once: operands(at, load(at))
                those = slice(2 * at, 2 * (at + span))
                accs[those] = add_dots(
                    tuple(accs[those]),
                    operands(at, values or load(at)),
                    interpret=interpret,
                    between=later if config.loads_ahead else None,
                    after_issue=release_stage if at + span == config.scale_groups else None,
                )
        return tuple(accs[: config.accumulators]), tuple(accs[config.accumulators :])

    def true_size(self, halves, scales) -> tuple[Half, Half]:
        """The output so far without what its operands were multiplied by."""
        count = self.config.half_groups
        of_group = [scale * (1 / self.config.p_max) for scale in scales]
        left, right = (
            tuple(acc * of_group[side * count + i // 2] for i, acc in enumerate(half))
            for side, half in enumerate(halves)
        )
        return left, right
