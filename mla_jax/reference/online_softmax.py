"""Softmax-weighted sums over keys that arrive a chunk at a time (arXiv:1805.02867).

The state after some keys is their largest score `m`, `l = sum(exp(score - m))` and
`acc = sum(exp(score - m) * value)`, all float32. Keys that must not be seen have the score -inf;
rows that have seen none have `m = -inf`, and end as `out = 0`, `lse = -inf`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


class State(NamedTuple):
    """What is known of each row after some keys, float32: see the module."""

    m: Float[Array, "*rows"]
    l: Float[Array, "*rows"]
    acc: Float[Array, "*rows d"]


def start(rows: tuple[int, ...], d: int) -> State:
    """The state of `rows` (a shape) that have seen no key, for values of `d` channels."""
    return State(
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, d), jnp.float32),
    )


def update(
    state: State,
    scores: Float[Array, "*rows k"],
    weigh: Callable[[Float[Array, "*rows k"]], Float[Array, "*rows d"]],
) -> State:
    """Add keys with these scores; `weigh(p)` is the sum of their values with weights `p`."""
    m = jnp.maximum(state.m, jnp.max(scores, axis=-1))
    shift = finite_or_zero(m)
    p = jnp.exp(scores - shift[..., None])
    alpha = jnp.exp(state.m - shift)
    return State(m, state.l * alpha + jnp.sum(p, -1), state.acc * alpha[..., None] + weigh(p))


def finish(state: State) -> tuple[Float[Array, "*rows d"], Float[Array, "*rows"]]:
    """Return the weighted mean of the values and the log-sum-exp of the scores."""
    empty = state.l == 0
    l = jnp.where(empty, 1, state.l)
    return state.acc / l[..., None], jnp.where(empty, -jnp.inf, state.m + jnp.log(l))


def finite_or_zero(x: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """`x`, but 0 for -inf: subtracted from -inf it then gives -inf and not NaN."""
    return jnp.where(x == -jnp.inf, 0, x)


def apply_sink(
    out: Float[Array, "*rows h d"], lse: Float[Array, "*rows h"], sink: Float[Array, " h"] | None
) -> Float[Array, "*rows h d"]:
    """Scale `out` by `1 / (1 + exp(sink - lse))`; rows that attend to nothing stay 0."""
    if sink is None:
        return out
    return out * jax.nn.sigmoid(finite_or_zero(lse) - sink)[..., None]


def dot(spec: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """`einsum` of exact products in float32.

    Two operands of the same 16-bit dtype stay in it (their products are exact in float32, and
    tensor cores take them); others are multiplied as float32.
    """
    dtype = jnp.promote_types(a.dtype, b.dtype)
    return jnp.einsum(
        spec,
        a.astype(dtype),
        b.astype(dtype),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
