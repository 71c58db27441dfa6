"""Launch of the dense decode kernel: the arrays that it takes, padded and folded."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.decode_dense.config import Config
from pallas_kernels.decode_dense.kernel import decode


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
    inputs = {
        "q_latent": config.fold(q_latent),
        "q_rope": config.fold(q_rope),
        "latent": cache.latent,
        "rope": cache.rope,
        "block_table": block_table,
        "seq_lens": seq_lens,
        "parts": parts,
    }
    if config.converts:
        # A page's scales are one row.
        inputs["scale"] = cache.scale.reshape(cache.scale.shape[0], -1)
    sink = None
    if attn_sink is not None:
        sink = config.slots(attn_sink.astype(jnp.float32))
        inputs["sink"] = sink
    if run_scale is not None:
        inputs["run_scale"] = run_scale.reshape(1)
    return *decode(config, inputs, interpret), sink
