"""Writing tokens to the cache; and the layer's form, which norms and rotates them first."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mla_jax import quantise
from mla_jax.cache import LatentCache
from mla_jax.reference.norm_rope import rms_norm, rotate
from pallas_kernels.formats import FORMATS


def append(
    cache: LatentCache,
    latent: Float[Array, "t c"],
    rope: Float[Array, "t r"],
    slots: Int[Array, " t"],
) -> LatentCache:
    """See `mla_jax.append`."""
    # Under jit XLA would quantise what the caller had before rounding it to these dtypes.
    latent, rope = lax.optimization_barrier((latent, rope))
    stored = quantise.encode(FORMATS[cache.format], latent, rope)
    tokens = LatentCache(*stored, format=cache.format)
    # A negative index would count from the end.
    slots = jnp.where(slots >= 0, slots, cache.num_slots)
    return jax.tree.map(lambda pages, rows: _write(pages, rows, slots), cache, tokens)


def norm_rope_append(
    cache: LatentCache,
    kv_a: Float[Array, "t c_plus_r"],
    slots: Int[Array, " t"],
    *,
    norm_weight: Float[Array, " c"],
    norm_eps: float,
    cos: Float[Array, "t half_r"],
    sin: Float[Array, "t half_r"],
    rope_pairs: str,
    rope_order: str,
) -> LatentCache:
    """See `mla_jax.norm_rope_append`."""
    latent, rope = jnp.split(kv_a, [cache.kv_lora_rank], axis=-1)
    latent = rms_norm(latent, norm_weight, norm_eps)
    rope = rotate(rope, cos, sin, pairs=rope_pairs, order=rope_order)
    return append(cache, latent, rope, slots)


def _write(
    pages: Float[Array, "p ps d"], rows: Float[Array, "t d"], slots: Int[Array, " t"]
) -> Float[Array, "p ps d"]:
    """Write `rows` at `slots`; a slot past the end is skipped."""
    page, offset = jnp.divmod(slots, pages.shape[1])

    def scatter(pages, rows):
        return pages.at[page, offset].set(rows, mode="drop")

    def select(pages, rows):
        tokens = jnp.arange(rows.shape[0])
        token = jnp.full(pages.shape[:2], -1).at[page, offset].set(tokens, mode="drop")
        as_bits = lambda x: lax.bitcast_convert_type(x, jnp.uint8)
        new = jnp.where(token[..., None] >= 0, as_bits(rows)[token], as_bits(pages))
        return lax.bitcast_convert_type(new, pages.dtype)

    if pages.dtype.itemsize > 1:
        return scatter(pages, rows)
    # XLA's CPU scatter of 8-bit floats converts the whole operand to float16 and back. The select
    # passes over the whole cache as well, but in place.
    return lax.platform_dependent(pages, rows, cpu=select, default=scatter)
