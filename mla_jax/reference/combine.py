"""Merging attention over parts of the keys (FlashAttention-2, arXiv:2307.08691, sec. 3.1)."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mla_jax.reference.online_softmax import finite_or_zero


def merge_states(
    outs: Float[Array, "n *rows d"], lses: Float[Array, "n ..."]
) -> tuple[Float[Array, "*rows d"], Float[Array, "..."]]:
    """See `mla_jax.merge_states`; here `lses` has the axes of `outs`."""
    lses = lses.astype(jnp.float32)
    shift = finite_or_zero(lax.stop_gradient(jnp.max(lses, axis=0)))
    weights = jnp.exp(lses - shift)
    # A part that saw nothing has no weight, whatever its output holds.
    values = jnp.where((lses == -jnp.inf)[..., None], 0, outs).astype(jnp.float32)
    total = jnp.sum(weights, axis=0)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    out = jnp.sum(weights[..., None] * values, axis=0) / total[..., None]
    return out.astype(outs.dtype), jnp.where(empty, -jnp.inf, shift + jnp.log(total))
