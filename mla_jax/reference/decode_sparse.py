"""Sparse absorbed decode: every query attends to the slots that it names."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.cache import LatentCache
from mla_jax.checks import Scale
from mla_jax.reference.latent_attention import attend_selected
from mla_jax.reference.online_softmax import apply_sink, finish


@functools.partial(jax.jit, static_argnames=("return_lse",))
def mla_sparse_decode(
    q_latent: Float[Array, "b s_q h_q c"],
    q_rope: Float[Array, "b s_q h_q r"],
    cache: LatentCache,
    indices: Int[Array, "b s_q k"],
    *,
    scale: Scale,
    topk_length: Int[Array, " b"] | None,
    attn_sink: Float[Array, " h_q"] | None,
    return_lse: bool,
) -> Float[Array, "b s_q h_q c"] | tuple[Float[Array, "b s_q h_q c"], Float[Array, "b h_q s_q"]]:
    """See `mla_jax.mla_sparse_decode`."""
    (b, s_q) = q_latent.shape[:2]
    one_query = lambda x: x.reshape(b * s_q, *x.shape[2:])
    lengths = None if topk_length is None else jnp.repeat(topk_length, s_q)
    state = attend_selected(
        one_query(q_latent), one_query(q_rope), cache, one_query(indices), lengths, scale=scale
    )
    out, lse = finish(state)
    out = apply_sink(out, lse, attn_sink).astype(q_latent.dtype).reshape(q_latent.shape)
    return (out, lse.reshape(b, s_q, -1).mT) if return_lse else out
