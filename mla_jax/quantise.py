"""Latents and rope keys to and from the stored form of each cache format.

`encode` takes float values to what the cache's arrays hold, `decode` takes them back; both act on
the last axis and on any leading axes, and `jax.jit` does not change a bit of either. The formats
themselves are in `pallas_kernels.formats`.

Quantising never saturates: a scale is at least `amax / 448`. A NaN or an infinity is stored as NaN
in e4m3, and the finite channels under the same scale are then lost.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.formats import (
    DS_MLA_MIN_SCALE_EXPONENT,
    E4M3_MAX,
    MIN_SCALE,
    SCALE_TILE,
    CacheFormat,
)


def encode(
    cache_format: CacheFormat, latent: Float[Array, "*t c"], rope: Float[Array, "*t r"]
) -> tuple[Float[Array, "*t c"], Float[Array, "*t r"], Float[Array, "*t n"] | None]:
    """Return what is stored: latent, rope key and float32 scales (None if nothing is scaled)."""
    scale = None
    if cache_format.scaling != "none":
        latent, rope = latent.astype(jnp.float32), rope.astype(jnp.float32)
        scale = _choose_scale(cache_format, latent, rope)
        latent_scale, rope_scale = _per_channel(cache_format, scale, latent.shape[-1])
        # Not a division: XLA may or may not turn one by a broadcast scale into this product.
        latent = latent * (1 / latent_scale)
        rope = rope if rope_scale is None else rope * (1 / rope_scale)
    return latent.astype(cache_format.latent_dtype), rope.astype(cache_format.rope_dtype), scale


def decode(
    cache_format: CacheFormat,
    latent: Float[Array, "*t c"],
    rope: Float[Array, "*t r"],
    scale: Float[Array, "*t n"] | None,
) -> tuple[Float[Array, "*t c"], Float[Array, "*t r"]]:
    """Return latent and rope key in one dtype that holds every stored value exactly.

    That is the stored dtype where nothing is scaled, bfloat16 for power-of-two scales, and
    otherwise float32, in which the product with the scale is rounded once.
    """
    if scale is None:
        return latent, rope
    latent_scale, rope_scale = _per_channel(cache_format, scale, latent.shape[-1])
    latent = latent.astype(jnp.float32) * latent_scale
    if rope_scale is None:
        return latent.astype(rope.dtype), rope
    return latent, rope.astype(jnp.float32) * rope_scale


def _choose_scale(
    cache_format: CacheFormat, latent: Float[Array, "*t c"], rope: Float[Array, "*t r"]
) -> Float[Array, "*t n"]:
    if cache_format.scaling == "tile":
        return _power_of_two_scale(_amax(_tiles(latent)))
    amax = _amax(latent)[..., None]
    if cache_format.scaling == "parts":
        amax = jnp.concatenate([amax, _amax(rope)[..., None]], axis=-1)
    # Not a division: XLA may or may not turn one by a constant into this product.
    return jnp.maximum(amax * jnp.float32(1 / E4M3_MAX), MIN_SCALE)


def _amax(x: Float[Array, "*t c"]) -> Float[Array, "*t"]:
    """The largest magnitude; NaN if one is.

    On the bits, which have the order of the magnitudes and NaN above them: XLA's maximum of floats
    on CPU loses the NaNs of larger arrays.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32)


def _tiles(x: Float[Array, "*t c"]) -> Float[Array, "*t n tile"]:
    """Split the channels into scale tiles, the last one filled with zeros."""
    padding = -x.shape[-1] % SCALE_TILE
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    return padded.reshape(*x.shape[:-1], -1, SCALE_TILE)


def _power_of_two_scale(amax: Float[Array, "*t"]) -> Float[Array, "*t"]:
    """`2 ** ceil(log2(max(amax / 448, 1e-4)))`, exactly: on the bits, without log2.

    448 is 1.75 * 2**8, so the exponent goes up when the mantissa of `amax` is above 1.75: adding
    what 1.75 lacks to 2, less one unit, carries into the exponent field in just that case.
    """
    mantissa_bits, bias = 23, 127
    # A NaN is taken for an infinity: which bits it has depends on the device.
    amax = jnp.where(amax < jnp.inf, amax, jnp.inf)
    carry = (1 << mantissa_bits - 2) - 1
    exponent = (lax.bitcast_convert_type(amax, jnp.int32) + carry >> mantissa_bits) - bias - 8
    exponent = jnp.maximum(exponent, DS_MLA_MIN_SCALE_EXPONENT)
    return lax.bitcast_convert_type(exponent + bias << mantissa_bits, jnp.float32)


def _per_channel(
    cache_format: CacheFormat, scale: Float[Array, "*t n"], kv_lora_rank: int
) -> tuple[Float[Array, "*t _"], Float[Array, "*t 1"] | None]:
    """The scales as factors of the latent's channels and of the rope key (None: not scaled)."""
    if cache_format.scaling == "tile":
        return jnp.repeat(scale, SCALE_TILE, axis=-1)[..., :kv_lora_rank], None
    return scale[..., :1], scale[..., -1:]
