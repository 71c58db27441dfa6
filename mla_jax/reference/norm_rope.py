"""The two steps between a projection and the cache: RMSNorm, and the rotation of RoPE."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

ROPE_ORDERS = ("interleaved", "halves")
"""Which channels are a pair: (0, 1), (2, 3), ...; or j and j + r / 2."""


def rms_norm(
    x: Float[Array, "*t c"], weight: Float[Array, " c"], eps: float
) -> Float[Array, "*t c"]:
    """`x / sqrt(mean(x^2) + eps) * weight` in float32, returned in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    factor = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * (factor * weight.astype(jnp.float32))).astype(x.dtype)


def rotate(
    x: Float[Array, "*t r"],
    cos: Float[Array, "*t half_r"],
    sin: Float[Array, "*t half_r"],
    *,
    pairs: str,
    order: str,
) -> Float[Array, "*t r"]:
    """Turn pair j of `x` by the angle of `cos[j]` and `sin[j]`, in float32.

    `pairs` says which channels are one, `order` where its turned members are put, in the words of
    `ROPE_ORDERS`. Returned in the dtype of `x`.
    """
    pair_axis = {"interleaved": -1, "halves": -2}
    in_axis, out_axis = pair_axis[pairs], pair_axis[order]
    pairs_shape = (-1, 2) if in_axis == -1 else (2, x.shape[-1] // 2)
    first, second = jnp.unstack(
        x.astype(jnp.float32).reshape(*x.shape[:-1], *pairs_shape), axis=in_axis
    )
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.stack(turned, axis=out_axis).reshape(x.shape).astype(x.dtype)
