"""Sparse absorbed prefill: every token attends to the rows of one array that it names."""

import jax
from jaxtyping import Array, Float, Int

from mla_jax.cache import LatentCache
from mla_jax.checks import Scale
from mla_jax.reference.latent_attention import attend_selected
from mla_jax.reference.online_softmax import apply_sink, finish
from pallas_kernels.formats import unscaled_format


@jax.jit
def mla_sparse_prefill(
    q_latent: Float[Array, "t h_q c"],
    q_rope: Float[Array, "t h_q r"],
    latent: Float[Array, "n c"],
    rope: Float[Array, "n r"],
    indices: Int[Array, "t k"],
    *,
    scale: Scale,
    topk_length: Int[Array, " t"] | None,
    attn_sink: Float[Array, " h_q"] | None,
) -> tuple[Float[Array, "t h_q c"], Float[Array, "t h_q"], Float[Array, "t h_q"]]:
    """See `mla_jax.mla_sparse_prefill`. The rows are read as a cache of one page."""
    cache_format = unscaled_format(latent.dtype.name)
    one_page = LatentCache(latent[None], rope[None], None, format=cache_format.name)
    state = attend_selected(q_latent, q_rope, one_page, indices, topk_length, scale=scale)
    out, lse = finish(state)
    return apply_sink(out, lse, attn_sink).astype(q_latent.dtype), state.m, lse
