"""Rotary position embedding (arXiv:2104.09864) as DeepSeek applies it, with YaRN's frequencies."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.config import MLAConfig
from mla_jax.reference.norm_rope import rotate


def rope_tables(
    positions: Int[Array, "*t"], config: MLAConfig
) -> tuple[Float[Array, "*t half_d_rope"], Float[Array, "*t half_d_rope"]]:
    """Cosine and sine of `positions * config.inv_freq[j]` radians for each pair j, float32.

    Both times `config.rope_attention_scaling`.
    """
    angle = positions.astype(jnp.float32)[..., None] * config.inv_freq
    scaling = config.rope_attention_scaling
    return jnp.cos(angle) * scaling, jnp.sin(angle) * scaling


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
    cos, sin = rope_tables(positions, config)
    over_heads = lambda table: jnp.expand_dims(table, range(2, x.ndim - 1))
    return rotate(
        x, over_heads(cos), over_heads(sin), pairs=config.rope_pairs, order=config.rope_order
    )
