"""Rotary position embedding (arXiv:2104.09864) as DeepSeek applies it, with YaRN's frequencies."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.config import MLAConfig


def apply_rope(
    x: Float[Array, "b t *heads d_rope"], positions: Int[Array, "b t"], config: MLAConfig
) -> Float[Array, "b t *heads d_rope"]:
    """Turns pair j of `x` by `positions * config.inv_freq[j]` radians.

    `config.rope_pairs` says which channels are a pair, `config.rope_order` in which order the
    turned channels come out. Computed in float32, returned in the dtype of `x`.

    Args:
      x: queries or keys, with any number of axes of heads.
      positions: of each token in its sequence, from 0.
      config: frequencies and conventions.

    Raises:
      ValueError, TypeError: from JAX, shapes that do not fit together; values are not checked.
    """
    angle = positions.astype(jnp.float32)[..., None] * config.inv_freq
    angle = jnp.expand_dims(angle, range(2, x.ndim - 1))
    cos = jnp.cos(angle) * config.rope_attention_scaling
    sin = jnp.sin(angle) * config.rope_attention_scaling

    pair_axis = {"interleaved": -1, "halves": -2}
    in_axis, out_axis = pair_axis[config.rope_pairs], pair_axis[config.rope_order]
    pairs_shape = (-1, 2) if in_axis == -1 else (2, config.d_rope // 2)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], *pairs_shape)
    first, second = jnp.unstack(pairs, axis=in_axis)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.stack(turned, axis=out_axis).reshape(x.shape).astype(x.dtype)
