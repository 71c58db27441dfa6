"""Launch of the transposed decode kernel: the arrays that it takes, padded and folded."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.decode_transposed.config import Config
from pallas_kernels.decode_transposed.kernel import decode
from pallas_kernels.formats import SCALE_TILE
from pallas_kernels.hopper.widen import in_order_of_keys


def launch(
    config: Config,
    q_latent: jax.Array,
    q_rope: jax.Array,
    cache: Any,
    block_table: jax.Array,
    seq_lens: jax.Array,
    parts: jax.Array,
    *,
    run_scale: jax.Array | None = None,
    attn_sink: jax.Array | None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Attend as `config` says, which must have no refusal.

    Returns:
        What `kernel.decode` gives, and the sink of each slot of the row tiles.
    """
    q_latent, q_rope = config.fold(q_latent), config.fold(q_rope)
    inputs = {}
    if config.widened:
        q_latent, inputs["query_scale"] = _in_range_of_f16(q_latent)
        q_latent = in_order_of_keys(q_latent, interpret=bool(interpret))
    inputs |= {
        "q_latent": q_latent,
        "q_rope": q_rope,
        "latent": cache.latent,
        "rope": cache.rope,
        "block_table": block_table,
        "seq_lens": seq_lens,
        "parts": parts,
    }
    if config.scaled:
        # A page's scales are one row.
        inputs["scale"] = cache.scale.reshape(cache.scale.shape[0], -1)
    if run_scale is not None:
        inputs["run_scale"] = run_scale.reshape(1)
    sink = None
    if attn_sink is not None:
        sink = config.slots(attn_sink.astype(jnp.float32))
        inputs["sink"] = sink.reshape(config.row_tiles, config.row_tile)
    return *decode(config, inputs, interpret), sink


def _in_range_of_f16(q_latent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries in float16, over a power of two for each 128 channels of a sequence, `[b, groups]`.

    The largest is between 1 and 2 times 2**14: those down to 2**-28 of it keep all their bits.
    """
    groups = q_latent.astype(jnp.float32).reshape(*q_latent.shape[:2], -1, SCALE_TILE)
    finite = jnp.where(jnp.isfinite(groups), jnp.abs(groups), 0.0)  # a head's NaN is its own
    amax = jnp.maximum(finite.max(axis=(1, 3)), 2.0**-100)
    exponent_bits = lax.bitcast_convert_type(amax, jnp.int32) & 0x7F800000
    scale = lax.bitcast_convert_type(exponent_bits, jnp.float32) * 2.0**-14
    scaled = groups * (1 / scale)[:, None, :, None]
    return scaled.astype(jnp.float16).reshape(q_latent.shape), scale
