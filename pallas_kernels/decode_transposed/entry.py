"""Launch of the transposed decode kernel: the arrays that it takes, padded and folded."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.decode_transposed.config import Config
from pallas_kernels.decode_transposed.kernel import decode
from pallas_kernels.formats import E4M3_MAX, MIN_SCALE
from pallas_kernels.hopper.row_tiles import row_of_slots
from pallas_kernels.hopper.softmax import LOG2E


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
    slots = row_of_slots(config.rows, config.row_tile)
    in_tiles = lambda x: x.reshape(*x.shape[:-1], config.row_tiles, config.row_tile)
    q_latent, q_rope = config.fold(q_latent), config.fold(q_rope)
    inputs = {}
    if config.in_e4m3:
        q_latent, q_rope, factor = _quantise(config, q_latent, q_rope, run_scale)
        inputs["q_factor"] = in_tiles(factor[:, slots])
        # A page's scales are one row.
        inputs["scale"] = cache.scale.reshape(cache.scale.shape[0], -1)
    elif run_scale is not None:
        inputs["run_scale"] = run_scale.reshape(1)
    inputs |= {
        "q_latent": q_latent,
        "q_rope": q_rope,
        "latent": cache.latent,
        "rope": cache.rope,
        "block_table": block_table,
        "seq_lens": seq_lens,
        "parts": parts,
    }
    sink = None
    if attn_sink is not None:
        sink = config.slots(attn_sink.astype(jnp.float32))
        inputs["sink"] = in_tiles(sink)
    return *decode(config, inputs, interpret), sink


def _quantise(
    config: Config, q_latent: jax.Array, q_rope: jax.Array, run_scale: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each row of queries in e4m3, with one scale for its latent part (in `fp8_full` for all of
    it), and what its products are to be multiplied by, base 2 included."""
    q_latent, q_rope = (q.astype(jnp.float32) for q in (q_latent, q_rope))
    largest = lambda q: jnp.abs(q).max(axis=-1)
    amax = largest(q_latent)
    if config.scales_per_token > 1:
        amax = jnp.maximum(amax, largest(q_rope))
    scale = jnp.maximum(amax * (1 / E4M3_MAX), MIN_SCALE)
    if config.scale is not None:
        sign, scale_log2 = 1.0, config.scale * LOG2E
    else:
        assert run_scale is not None
        # Its sign, or its being 0, goes into the queries: masked scores stay -inf.
        sign = jnp.sign(run_scale)
        scale_log2 = jnp.maximum(jnp.abs(run_scale), MIN_SCALE) * LOG2E
    inverse = (sign / scale)[..., None]
    rounded = lambda q, dtype: (q * inverse).astype(jnp.dtype(dtype))
    return (
        rounded(q_latent, config.operand_dtype),
        rounded(q_rope, config.rope_dtype),
        scale * scale_log2,
    )
