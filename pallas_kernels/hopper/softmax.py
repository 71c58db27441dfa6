"""Online softmax over key tiles, in base 2.

Sources: arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691, sec. 3.1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import MIN_SCALE
from pallas_kernels.hopper.inline import warp_any_below_one
from pallas_kernels.hopper.layouts import across, full, full_columns

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

NO_MAXIMUM = -1e30
"""Running maximum of a row that has seen no key: finite, so that masked scores (-inf) less it stay
-inf."""


class Softmax(NamedTuple):
    """Running state of the rows.

    `m` is what is subtracted from the base-2 scores, `l` the sum of `exp2(s - m)`.
    """

    m: jax.Array
    l: jax.Array

    @staticmethod
    def start(rows: int) -> "Softmax":
        """The state of rows that have seen no key."""
        return Softmax(full((rows,), NO_MAXIMUM, jnp.float32), full((rows,), 0.0, jnp.float32))

    def step(self, s, scale_log2: float, slack: float) -> tuple["Softmax", jax.Array, jax.Array]:
        """Take in a tile of scores: the new state, `p`, and `alpha`, the factor of all before.

        `m` follows the maximum only where that has grown by more than `slack` (base 2): until then
        `p` is at most `2**slack`, which costs no accuracy in floating point, and `alpha` is exactly
        1, so that the accumulators need no rescaling.
        """
        m_max = jnp.maximum(self.m, s.max(axis=1) * scale_log2)
        m = jnp.where(m_max > self.m + slack, m_max, self.m)
        alpha = jnp.exp2(self.m - m)
        p = jnp.exp2(s * scale_log2 - across(m, s.shape[1]))
        return Softmax(m, self.l * alpha + p.sum(axis=1)), p, alpha

    def finish(self) -> tuple[jax.Array, jax.Array]:
        """`(1 / l, base-2 log-sum-exp)`; a row without keys has 0 and -inf."""
        empty = self.l == 0.0
        safe = jnp.where(empty, 1.0, self.l)
        inverse = jnp.where(empty, 0.0, 1.0 / safe)
        return inverse, jnp.where(empty, -jnp.inf, self.m + jnp.log2(safe))


class PairedSoftmax(NamedTuple):
    """Running state of rows whose key tiles two warpgroups take by turns, with the same maxima.

    What they multiply with values, quantised with a scale per token, is `p` times that scale, in a
    format without much range: it is taken relative to `scale`.
    """

    m: jax.Array
    """What is subtracted from the base-2 scores."""
    l: jax.Array
    """The sums of `exp2(s - m)` over this warpgroup's tiles, each row's in 8 columns."""
    scale: jax.Array
    """0 before the first pair."""

    @staticmethod
    def start(rows: int) -> "PairedSoftmax":
        """The state of rows that have seen no key."""
        m, l = full((rows,), NO_MAXIMUM, jnp.float32), full((rows, 8), 0.0, jnp.float32)
        return PairedSoftmax(m, l, jnp.float32(0.0))

    def follow(
        self, row_max, scale_max, slack: float, headroom: float, scale_slack: float
    ) -> tuple["PairedSoftmax", jax.Array]:
        """Let `m` and `scale` follow a pair's maxima where those exceed them by more than `slack`
        (base 2) and `scale_slack` (a factor), `m` to `headroom` above its maximum: the new state,
        and the factor of the output so far, at most 1 and exactly 1 where nothing changes."""
        m = jnp.where(row_max > self.m + slack, row_max + headroom, self.m)
        grown = scale_max > self.scale * scale_slack
        scale = jnp.where(grown, jnp.maximum(scale_max, MIN_SCALE), self.scale)
        beta = jnp.exp2(self.m - m)
        alpha = beta * jnp.where(grown, self.scale / scale, 1.0)
        return PairedSoftmax(m, self.l * across(beta, self.l.shape[1]), scale), alpha

    def add(self, p: jax.Array) -> "PairedSoftmax":
        """Take the probabilities of a tile into the sums."""
        parts = [p[:, i : i + 8] for i in range(0, p.shape[1], 8)]
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return self._replace(l=self.l + parts[0])

    def finish(self, l: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`Softmax.finish`, with the sums of both warpgroups."""
        return Softmax(self.m, l).finish()


class ColumnSoftmax(NamedTuple):
    """`Softmax` of transposed scores: the rows are keys, a column is a query.

    The sums stay apart, thread by thread, until the end: taken together they would cost a way
    through shared memory for each tile.
    """

    m: jax.Array
    """What is subtracted from the base-2 scores, of each column."""
    l: jax.Array
    """The sums of `exp2(s - m)`, of each thread's own rows (`hopper.columns.own_rows`)."""
    scales: tuple[jax.Array, ...]
    """`PairedSoftmax.scale` of each group of channels; where values have no scales it stays 1."""

    @staticmethod
    def start(columns: int, groups: int, *, scaled: bool) -> "ColumnSoftmax":
        """The state of columns that have seen no key."""
        m, l = (full_columns(columns, value) for value in (NO_MAXIMUM, 0.0))
        return ColumnSoftmax(m, l, (jnp.float32(MIN_SCALE if scaled else 1.0),) * groups)

    def follow_scales(self, maxima: tuple[jax.Array, ...], scale_slack: float) -> "ColumnSoftmax":
        """`PairedSoftmax.follow`, of the scales of a single tile. Where the state is another, the
        caller has to apply `factors_since`."""
        scales = (
            jnp.where(largest > before * scale_slack, largest, before)
            for before, largest in zip(self.scales, maxima, strict=True)
        )
        return self._replace(scales=tuple(scales))

    def follow_scores(self, maximum: jax.Array, slack: float, headroom: float) -> "ColumnSoftmax":
        """The same, of its scores."""
        m = jnp.where(maximum > self.m + slack, maximum + headroom, self.m)
        return self._replace(m=m)

    def factors_since(self, before: "ColumnSoftmax") -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Of each group's output, and of `l`, that are relative to an earlier state: at most 1, and
        exactly 1 where nothing has changed."""
        beta = jnp.exp2(before.m - self.m)
        ratios = (
            jnp.where(new > old, old / new, 1.0)
            for old, new in zip(before.scales, self.scales, strict=True)
        )
        return tuple(beta * ratio for ratio in ratios), beta


def with_sink(inverse: jax.Array, lse2: jax.Array, sink: jax.Array) -> jax.Array:
    """`inverse` with the share of an attention sink taken off; 0 stays for rows without keys."""
    shared = inverse / (1.0 + jnp.exp2(sink * LOG2E - lse2))
    return jnp.where(lse2 == -jnp.inf, 0.0, shared)


def rescale(acc: jax.Array, alpha: jax.Array, *, interpret: bool) -> jax.Array:
    """`acc * alpha`, row by row; skipped by every warp whose rows all have `alpha` 1."""
    scaled = lambda acc: acc * across(alpha, acc.shape[1])
    if interpret:
        return scaled(acc)
    return lax.cond(warp_any_below_one(alpha), scaled, lambda acc: acc, acc)
