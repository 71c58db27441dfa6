"""Sparse absorbed prefill: every token attends to the rows of one array that it names."""

from mla_jax.cache import LatentCache
from mla_jax.reference.latent_attention import attend_selected
from mla_jax.reference.online_softmax import apply_sink, finish
from pallas_kernels.formats import FORMATS


def mla_sparse_prefill(q_latent, q_rope, latent, rope, indices, *, scale, topk_length, attn_sink):
    """See `mla_jax.mla_sparse_prefill`. The rows are read as a cache of one page."""
    (cache_format,) = (f.name for f in FORMATS.values() if f.latent_dtype == latent.dtype.name)
    one_page = LatentCache(latent[None], rope[None], None, format=cache_format)
    state = attend_selected(q_latent, q_rope, one_page, indices, topk_length, scale=scale)
    out, lse = finish(state)
    return apply_sink(out, lse, attn_sink).astype(q_latent.dtype), state.m, lse
