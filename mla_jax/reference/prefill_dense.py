"""Expanded (multi-head) prefill attention, a chunk of keys at a time, and its gradient.

Forward: online softmax over chunks of keys. Backward: the probabilities of a chunk are made again
from the scores and the saved `lse` (FlashAttention-2, arXiv:2307.08691, algorithm 2), with `lse` an
output of its own:

    p = exp(score - lse)
    d_score = p * (d_out . v - (d_out . out - d_lse))

Neither keeps more than a chunk of scores, `b * h * t * CHUNK`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mla_jax.checks import Scale
from mla_jax.manual_axes import vary_like
from mla_jax.reference import online_softmax
from mla_jax.reference.online_softmax import dot, finite_or_zero

CHUNK = 128
"""Keys per step."""


@functools.partial(jax.jit, static_argnames=("causal", "return_lse"))
def mla_prefill(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b n h d"],
    v: Float[Array, "b n h d_v"],
    *,
    scale: Scale,
    causal: bool,
    q_lens: Int[Array, " b"] | None,
    kv_lens: Int[Array, " b"] | None,
    return_lse: bool,
) -> Float[Array, "b t h d_v"] | tuple[Float[Array, "b t h d_v"], Float[Array, "b h t"]]:
    """See `mla_jax.mla_prefill`."""
    (b, t), n = q.shape[:2], k.shape[1]
    q_lens = jnp.full(b, t, jnp.int32) if q_lens is None else jnp.clip(q_lens, 0, t)
    kv_lens = jnp.full(b, n, jnp.int32) if kv_lens is None else jnp.clip(kv_lens, 0, n)
    behind = q_lens[:, None] - 1 - jnp.arange(t) if causal else jnp.zeros((b, t), jnp.int32)
    live_q, live_kv = (
        jnp.arange(size) < lens[:, None] for size, lens in ((t, q_lens), (n, kv_lens))
    )
    ends = jnp.where(live_q, kv_lens[:, None] - behind, 0)

    # What stands behind a sequence's end must not reach a sum, nor the sums of the gradient.
    keep = lambda x, rows: jnp.where(rows[..., None, None], x, 0)
    chunk = min(CHUNK, max(n, 1))
    padding = ((0, 0), (0, -n % chunk if n else chunk), (0, 0), (0, 0))
    k, v = (jnp.pad(keep(x, live_kv), padding) for x in (k, v))
    args = (keep(q, live_q), k, v, jnp.asarray(scale, jnp.float32), ends)
    out, lse = _attend(chunk, *vary_like(args, *args))
    return (out, lse) if return_lse else out


def _forward(chunk, q, k, v, scale, ends):
    """Query `t` of sequence `b` sees the keys before `ends[b, t]`; `k` and `v` are whole chunks."""

    def step(i, state):
        k_chunk, v_chunk = _chunk_of(k, i, chunk), _chunk_of(v, i, chunk)
        scores = _scores(q, k_chunk, scale, ends, i * chunk)
        return online_softmax.update(state, scores, lambda p: dot("bhtn,bnhd->bhtd", p, v_chunk))

    (b, t, h, _) = q.shape
    state = vary_like(online_softmax.start((b, h, t), v.shape[-1]), q)
    state = lax.fori_loop(0, _num_chunks(ends, chunk), step, state)
    out, lse = online_softmax.finish(state)
    return out.swapaxes(1, 2).astype(q.dtype), lse


def _forward_and_residuals(chunk, *args):
    out, lse = _forward(chunk, *args)
    return (out, lse), (*args, out, lse)


def _backward(chunk, residuals, cotangents):
    q, k, v, scale, ends, out, lse = residuals
    seen = lse != -jnp.inf  # the other rows are constant, whatever their cotangents
    d_out = jnp.where(seen.swapaxes(1, 2)[..., None], cotangents[0], 0)
    d_lse = jnp.where(seen, cotangents[1], 0)
    base = dot("bthd,bthd->bht", d_out, out) - d_lse

    def step(i, grads):
        d_q, d_k, d_v = grads
        k_chunk, v_chunk = _chunk_of(k, i, chunk), _chunk_of(v, i, chunk)
        scores = _scores(q, k_chunk, scale, ends, i * chunk)
        p = jnp.exp(scores - finite_or_zero(lse)[..., None])
        d_score = p * (dot("bthd,bnhd->bhtn", d_out, v_chunk) - base[..., None])
        put = lambda x, part: lax.dynamic_update_slice_in_dim(x, part, i * chunk, axis=1)
        d_q = d_q + dot("bhtn,bnhd->bthd", d_score, k_chunk)
        d_k = put(d_k, scale * dot("bhtn,bthd->bnhd", d_score, q))
        return d_q, d_k, put(d_v, dot("bhtn,bthd->bnhd", p, d_out))

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    d_q, d_k, d_v = lax.fori_loop(0, _num_chunks(ends, chunk), step, vary_like(zeros, q))
    d_scale = jnp.sum(d_q * q.astype(jnp.float32))
    d_q, d_k, d_v = (d.astype(q.dtype) for d in (scale * d_q, d_k, d_v))
    return d_q, d_k, d_v, d_scale, None


_attend = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_attend.defvjp(_forward_and_residuals, _backward)


def _scores(q, k_chunk, scale, ends, first):
    """Scores `[b, h, t, n]` of the keys from position `first` on; -inf where they are not seen."""
    positions = first + jnp.arange(k_chunk.shape[1])
    visible = positions < ends[..., None]
    return jnp.where(visible[:, None], dot("bthd,bnhd->bhtn", q, k_chunk) * scale, -jnp.inf)


def _chunk_of(x, i, chunk):
    return lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis=1)


def _num_chunks(ends, chunk):
    return (jnp.max(ends, initial=0) + chunk - 1) // chunk
