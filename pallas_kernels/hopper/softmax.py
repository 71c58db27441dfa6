"""Online softmax over key tiles, in base 2.

Sources: arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691, sec. 3.1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.inline import warp_any_below_one
from pallas_kernels.hopper.layouts import across, full

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


def rescale(acc: jax.Array, alpha: jax.Array, *, interpret: bool) -> jax.Array:
    """`acc * alpha`, row by row; skipped by every warp whose rows all have `alpha` 1."""
    scaled = lambda acc: acc * across(alpha, acc.shape[1])
    if interpret:
        return scaled(acc)
    return lax.cond(warp_any_below_one(alpha), scaled, lambda acc: acc, acc)
