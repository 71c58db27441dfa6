"""Sparse absorbed decode: every query attends to the slots that it names."""

import functools

import jax
import jax.numpy as jnp

from mla_jax.reference.latent_attention import attend_selected
from mla_jax.reference.online_softmax import apply_sink, finish


@functools.partial(jax.jit, static_argnames=("return_lse",))
def mla_sparse_decode(
    q_latent, q_rope, cache, indices, *, scale, topk_length, attn_sink, return_lse
):
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
