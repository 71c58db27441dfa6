"""Absorbed MLA over tokens read from a cache a chunk at a time: the loop that the ops share.

    score = (q_latent . latent + q_rope . rope) * scale
    out   = softmax(score) . latent

(DeepSeek-V2, arXiv:2405.04434, sec. 2.1.2, with W_UK absorbed into the query and W_UV left to the
caller.) The latent is key and value at once, so a token is read once for all heads, and memory
beyond the arguments is that of one chunk.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mla_jax.cache import LatentCache, read
from mla_jax.checks import Scale
from mla_jax.manual_axes import vary_like
from mla_jax.reference import online_softmax
from mla_jax.reference.online_softmax import dot

SPARSE_CHUNK = 64
"""Selected tokens per step: each query has its own, so a chunk is about as large as the queries."""


def attend(
    q_latent: Float[Array, "n s h c"],
    q_rope: Float[Array, "n s h r"],
    cache: LatentCache,
    select: Callable[[Int[Array, ""]], tuple[Int[Array, "n k"], Bool[Array, "n _ k"]]],
    num_chunks: int | Int[Array, ""],
    *,
    scale: Scale,
) -> online_softmax.State:
    """Attend to `num_chunks` chunks of tokens.

    `select(i)` gives chunk `i`: the slots of its tokens and which queries see them, for each `s`
    or for all. A slot of -1 is no token; no query may see it.
    """

    def step(i, state):
        slots, visible = select(i)
        latent, rope = read(cache, slots)
        scores = dot("nshc,nkc->nshk", q_latent, latent) + dot("nshr,nkr->nshk", q_rope, rope)
        scores = jnp.where(visible[:, :, None], scores * scale, -jnp.inf)
        return online_softmax.update(state, scores, lambda p: dot("nshk,nkc->nshc", p, latent))

    state = online_softmax.start(q_latent.shape[:3], q_latent.shape[3])
    state = vary_like(state, q_latent, q_rope, cache, select(jnp.int32(0)), num_chunks, scale)
    return lax.fori_loop(0, num_chunks, step, state)


def attend_selected(
    q_latent: Float[Array, "n h c"],
    q_rope: Float[Array, "n h r"],
    cache: LatentCache,
    slots: Int[Array, "n k"],
    lengths: Int[Array, " n"] | None,
    *,
    scale: Scale,
) -> online_softmax.State:
    """Attend from query `n` to the first `lengths[n]` of `slots[n]`; -1 is no token."""
    k = slots.shape[1]
    chunk = min(SPARSE_CHUNK, max(k, 1))
    num_chunks = max(-(-k // chunk), 1)
    slots = jnp.where((slots >= 0) & (slots < cache.num_slots), slots, -1)
    if lengths is not None:
        slots = jnp.where(jnp.arange(k) < lengths[:, None], slots, -1)
    slots = jnp.pad(slots, ((0, 0), (0, num_chunks * chunk - k)), constant_values=-1)

    def select(i):
        chosen = lax.dynamic_slice_in_dim(slots, i * chunk, chunk, axis=1)
        return chosen, (chosen >= 0)[:, None]

    if lengths is not None:
        longest = jnp.clip(jnp.max(lengths, initial=0), 0, k)
        num_chunks = (longest + chunk - 1) // chunk
    state = attend(q_latent[:, None], q_rope[:, None], cache, select, num_chunks, scale=scale)
    return online_softmax.State(*(x[:, 0] for x in state))
