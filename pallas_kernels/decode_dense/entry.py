"""Launch of the dense decode kernel: the arrays that it takes, padded and folded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_dense.config import Config
from pallas_kernels.decode_dense.kernel import decode
from pallas_kernels.errors import Unsupported
from pallas_kernels.hopper.limits import BLOCK_M


def tile_rows(rows: int) -> np.ndarray:
    """The row of each slot of the row tiles: 64 at a time, the last tile drawn back to end at the
    last row. Slots of a lone, partly filled tile repeat its last row."""
    tiles = -(-rows // BLOCK_M)
    starts = np.minimum(np.arange(tiles) * BLOCK_M, max(rows - BLOCK_M, 0))
    return np.minimum(starts[:, None] + np.arange(BLOCK_M), rows - 1).reshape(-1)


def untile_rows(values: jax.Array, rows: int) -> jax.Array:
    """`[B, slots]` in the order of `tile_rows` to `[B, rows]`."""
    whole = rows // BLOCK_M * BLOCK_M
    rest = values[:, values.shape[1] - (rows - whole) :] if whole else values[:, :rows]
    return jax.lax.concatenate([values[:, :whole], rest], 1) if rows > whole else values


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
    """Attend; what `kernel.decode` gives, and the sink of each slot of the row tiles.

    Raises:
        Unsupported: the config's refusal.
    """
    if refusal := config.refusal():
        raise Unsupported(refusal)
    batch = q_latent.shape[0]
    missing = config.q_tile_rows - config.tile_rows

    def fold(q):
        q = q.reshape(batch, config.rows, q.shape[-1])
        return jnp.pad(q, ((0, 0), (0, missing), (0, 0))) if missing else q

    inputs = {
        "q_latent": fold(q_latent),
        "q_rope": fold(q_rope),
        "latent": cache.latent,
        "rope": cache.rope,
        "block_table": block_table,
        "seq_lens": seq_lens,
        "parts": parts,
    }
    sink = None
    if attn_sink is not None:
        sink = attn_sink.astype(jnp.float32)[tile_rows(config.rows) % config.num_heads]
        inputs["sink"] = sink
    if run_scale is not None:
        inputs["run_scale"] = run_scale.reshape(1)
    return *decode(config, inputs, interpret), sink
