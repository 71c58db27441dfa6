"""Dense absorbed decode: every query attends to its sequence's whole cache."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.cache import LatentCache, slots_of
from mla_jax.checks import Scale
from mla_jax.plan import DecodePlan
from mla_jax.reference.latent_attention import attend
from mla_jax.reference.online_softmax import apply_sink, finish

CHUNK = 256
"""Tokens of each sequence per step."""


@functools.partial(jax.jit, static_argnames=("causal", "return_lse"))
def mla_decode(
    q_latent: Float[Array, "b s_q h_q c"],
    q_rope: Float[Array, "b s_q h_q r"],
    cache: LatentCache,
    block_table: Int[Array, "b max_pages"],
    seq_lens: Int[Array, " b"],
    *,
    scale: Scale,
    causal: bool,
    attn_sink: Float[Array, " h_q"] | None,
    plan: DecodePlan | None,
    return_lse: bool,
) -> Float[Array, "b s_q h_q c"] | tuple[Float[Array, "b s_q h_q c"], Float[Array, "b h_q s_q"]]:
    """See `mla_jax.mla_decode`. The number of steps follows the longest sequence."""
    del plan  # The loop below needs no division of work.
    s_q = q_latent.shape[1]
    capacity = block_table.shape[1] * cache.page_size
    chunk = min(CHUNK, capacity)
    seq_lens = jnp.minimum(seq_lens, capacity)
    behind = jnp.arange(s_q)[::-1] if causal else jnp.zeros(s_q, jnp.int32)
    ends = seq_lens[:, None] - behind

    def select(i):
        positions = i * chunk + jnp.arange(chunk)
        slots = slots_of(block_table, positions[None], cache)
        slots = jnp.where(positions < seq_lens[:, None], slots, -1)
        return slots, (positions < ends[..., None]) & (slots >= 0)[:, None]

    num_chunks = (jnp.max(seq_lens, initial=0) + chunk - 1) // chunk
    out, lse = finish(attend(q_latent, q_rope, cache, select, num_chunks, scale=scale))
    out = apply_sink(out, lse, attn_sink).astype(q_latent.dtype)
    return (out, lse.mT) if return_lse else out
