"""The operations: signatures, argument checks; `mla_jax.dispatch` finds who computes.

Conventions, for all of them:

* `scale` multiplies the scores. For DeepSeek it is `(qk_nope + qk_rope) ** -0.5 * mscale ** 2`
  (YaRN, arXiv:2309.00071), whichever form of attention is computed; never `(c + r) ** -0.5`.
* `out` has the dtype of the queries. `lse` is float32, the natural log of the sum of the
  exponentials of the scaled scores. Sums are float32.
* A query with nothing to attend to has `out = 0` and `lse = -inf`.
* Lengths, tables and indices may be traced; their values are never read on the host.
* Reverse-mode gradients: `mla_prefill` and `merge_states` alone, the others are for inference.
* `implementation` is None (the best that can serve the call), `"mosaic"`, `"mosaic_transposed"`,
  `"triton"`, `"xla"`, or a sequence of these to try in order. If none of those named can serve
  the call, `NotImplementedError` says which requirement failed.
* Wrong shapes raise `ValueError`, wrong dtypes and kinds `TypeError`, before anything is compiled.
"""

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mla_jax import dispatch
from mla_jax.cache import LatentCache, check_cache, check_table
from mla_jax.checks import (
    Scale,
    as_int32,
    check_array,
    check_choice,
    check_float,
    check_integer,
    check_same_dtype,
    check_scale,
)
from mla_jax.plan import DecodePlan
from mla_jax.reference import combine
from mla_jax.reference.norm_rope import ROPE_ORDERS

type Implementation = str | Sequence[str] | None


def append(
    cache: LatentCache,
    latent: Float[Array, "t c"],
    rope: Float[Array, "t r"],
    slots: Int[Array, " t"],
) -> LatentCache:
    """Write tokens into their slots, in the cache's format.

    In place when `cache` is donated to the `jax.jit` that calls this: no copy of it is made. There
    is no `implementation` to choose: on a device, all of them store the same bits.

    Args:
        cache: the cache; it is not changed, unless donated.
        latent: the normed latents, bfloat16, float16 or float32.
        rope: the rotated rope keys, of any of these dtypes.
        slots: where each token goes, `page * page_size + offset`. A token with a slot of -1, or
            any other that the cache does not have, is skipped. If two tokens name one slot, what
            it then holds is undefined.

    Returns:
        The cache with the tokens in it. fp8 formats store a NaN or an infinity as NaN.

    Raises:
        ValueError: shapes that do not fit `cache`.
        TypeError: data that is quantised already, `slots` that are not integers, or a `cache`
            whose arrays are not what its format declares.
    """
    check_cache(cache)
    (t, _) = check_array("latent", latent, "t c", c=cache.kv_lora_rank)
    check_array("rope", rope, "t r", t=t, r=cache.rope_dim)
    check_array("slots", slots, "t", t=t)
    check_float("latent", latent)
    check_float("rope", rope)
    check_integer("slots", slots)
    if t == 0:
        return cache
    return dispatch.call(
        "append", None, cache, jnp.asarray(latent), jnp.asarray(rope), as_int32(slots)
    )


def norm_rope_append(
    cache: LatentCache,
    kv_a: Float[Array, "t c_plus_r"],
    slots: Int[Array, " t"],
    *,
    norm_weight: Float[Array, " c"],
    norm_eps: float,
    cos: Float[Array, "t half_r"],
    sin: Float[Array, "t half_r"],
    rope_pairs: str = "interleaved",
    rope_order: str = "interleaved",
    implementation: Implementation = None,
) -> LatentCache:
    """Norm, rotate and append what the `kv_a` projection gives: RMSNorm, RoPE, `append` in one.

    In place when `cache` is donated, as `append`. Norm and rotation are computed in float32 and
    rounded to the dtype of `kv_a`, as if `append` were given the results. Implementations sum the
    squares in another order, so a latent may differ in the last bit before it is quantised;
    quantising is exact given that.

    Args:
        cache: the cache; it is not changed, unless donated.
        kv_a: latents before the norm and rope keys before the rotation, side by side (the output
            of DeepSeek's `kv_a_proj_with_mqa`), bfloat16, float16 or float32.
        slots: as in `append`.
        norm_weight: of the latent's RMSNorm.
        norm_eps: added to the mean square, a number known when compiling.
        cos, sin: of each token's angle for each pair of rope channels, float32, with whatever
            factor YaRN wants on them. Made once per step, they serve all layers.
        rope_pairs: which channels turn together: (0, 1), (2, 3), ... ("interleaved") or j and
            j + r / 2 ("halves").
        rope_order: how the turned channels are stored, in the same words. DeepSeek-V3 takes
            interleaved pairs and stores halves.
        implementation: see the module.

    Returns:
        The cache with the tokens in it.

    Raises:
        ValueError, TypeError: as `append`.
        NotImplementedError: no implementation of those named can serve the call.
    """
    check_cache(cache)
    c, r = cache.kv_lora_rank, cache.rope_dim
    if r % 2:
        raise ValueError(f"`cache.rope` has {r} channels: must have an even number to be rotated")
    (t, _) = check_array("kv_a", kv_a, "t c_plus_r", c_plus_r=c + r)
    check_array("slots", slots, "t", t=t)
    check_array("norm_weight", norm_weight, "c", c=c)
    check_float("kv_a", kv_a)
    check_float("norm_weight", norm_weight)
    check_integer("slots", slots)
    for name, table in (("cos", cos), ("sin", sin)):
        check_array(name, table, "t half_r", t=t, half_r=r // 2)
        if table.dtype != jnp.float32:
            raise TypeError(f"`{name}` is {table.dtype}: must be float32")
    if isinstance(norm_eps, bool) or not isinstance(norm_eps, numbers.Real):
        raise TypeError(f"`norm_eps` is {norm_eps!r}: must be a real number, not traced")
    check_choice("rope_pairs", rope_pairs, ROPE_ORDERS)
    check_choice("rope_order", rope_order, ROPE_ORDERS)
    if t == 0:
        return cache
    return dispatch.call(
        "norm_rope_append",
        implementation,
        cache,
        jnp.asarray(kv_a),
        as_int32(slots),
        norm_weight=jnp.asarray(norm_weight),
        norm_eps=float(norm_eps),
        cos=jnp.asarray(cos),
        sin=jnp.asarray(sin),
        rope_pairs=rope_pairs,
        rope_order=rope_order,
    )


def mla_decode(
    q_latent: Float[Array, "b s_q h_q c"],
    q_rope: Float[Array, "b s_q h_q r"],
    cache: LatentCache,
    block_table: Int[Array, "b max_pages"],
    seq_lens: Int[Array, " b"],
    *,
    scale: Scale,
    causal: bool = True,
    attn_sink: Float[Array, " h_q"] | None = None,
    plan: DecodePlan | None = None,
    return_lse: bool = False,
    implementation: Implementation = None,
) -> Float[Array, "b s_q h_q c"] | tuple[Float[Array, "b s_q h_q c"], Float[Array, "b h_q s_q"]]:
    """Attend from the newest tokens of each sequence to its cache, in absorbed form.

    `out = softmax((q_latent . latent + q_rope . rope) * scale) . latent` (DeepSeek-V2,
    arXiv:2405.04434, sec. 2.1.2); the caller applies W_UV to `out`.

    Args:
        q_latent: queries with W_UK absorbed.
        q_rope: rotated queries, of the same dtype.
        cache: the cache, in any format, the new tokens appended already.
        block_table: page of the i-th `page_size` tokens of each sequence. Entries that no token
            needs may hold anything. A token whose entry is not a page of the cache is not seen by
            the reference; what a kernel sees in its place is undefined.
        seq_lens: tokens of each sequence in the cache, the `s_q` new ones included; 0 is legal. A
            sequence has no more of them than its row of `block_table` has places for.
        scale: factor of the scores.
        causal: query `i` sees the keys before `seq_lens - (s_q - 1 - i)`; otherwise all see all.
        attn_sink: logit per head that takes part in the softmax and has no value:
            `out *= 1 / (1 + exp(attn_sink - lse))`. `lse` is without it.
        plan: `plan_decode` of this step, for kernels that divide the work by it; it changes no
            result.
        return_lse: return `lse` too.
        implementation: see the module.

    Returns:
        `out`, or `(out, lse)`.

    Raises:
        ValueError: shapes that do not fit together, or a plan for another `b`, `s_q`, `h_q` or page
            size. That it was made from these `seq_lens` is not checked.
        TypeError: wrong dtypes or kinds; a cache whose arrays are not what its format declares.
        NotImplementedError: no implementation of those named can serve the call.
    """
    check_cache(cache)
    (b, _, h_q, _) = _check_queries(q_latent, q_rope, "b s_q h_q", cache)
    block_table, seq_lens = check_table(block_table, seq_lens, b=b)
    check_scale("scale", scale)
    _check_flag("causal", causal)
    _check_flag("return_lse", return_lse)
    if plan is not None:
        if not isinstance(plan, DecodePlan):
            raise TypeError(f"`plan` is of type {type(plan).__name__}: must be a DecodePlan")
        s_q = q_latent.shape[1]
        plan.check(batch=b, num_heads=h_q, q_len=s_q, page_size=cache.page_size)
    return dispatch.call(
        "mla_decode",
        implementation,
        jnp.asarray(q_latent),
        jnp.asarray(q_rope),
        cache,
        block_table,
        seq_lens,
        scale=scale,
        causal=bool(causal),
        attn_sink=_as_sink(attn_sink, h_q),
        plan=plan,
        return_lse=bool(return_lse),
    )


def mla_sparse_decode(
    q_latent: Float[Array, "b s_q h_q c"],
    q_rope: Float[Array, "b s_q h_q r"],
    cache: LatentCache,
    indices: Int[Array, "b s_q k"],
    *,
    scale: Scale,
    topk_length: Int[Array, " b"] | None = None,
    attn_sink: Float[Array, " h_q"] | None = None,
    return_lse: bool = False,
    implementation: Implementation = None,
) -> Float[Array, "b s_q h_q c"] | tuple[Float[Array, "b s_q h_q c"], Float[Array, "b h_q s_q"]]:
    """Attend from each query to the cache slots that it names, in absorbed form.

    `mla_decode` over chosen tokens (DeepSeek sparse attention). The indices say all about what a
    query sees: there is no causal mask on top.

    Args:
        q_latent: queries with W_UK absorbed.
        q_rope: rotated queries, of the same dtype.
        cache: the cache, in any format.
        indices: slots, `page * page_size + offset`, in any order. -1, like any other number that
            is not a slot of the cache, is no token. A slot named twice counts twice.
        scale: factor of the scores.
        topk_length: only the first `topk_length[b]` indices of sequence `b` count.
        attn_sink: as in `mla_decode`.
        return_lse: return `lse` too.
        implementation: see the module.

    Returns:
        `out`, or `(out, lse)`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `mla_decode`.
    """
    check_cache(cache)
    (b, s_q, h_q, _) = _check_queries(q_latent, q_rope, "b s_q h_q", cache)
    check_array("indices", indices, "b s_q k", b=b, s_q=s_q)
    check_integer("indices", indices)
    check_scale("scale", scale)
    _check_flag("return_lse", return_lse)
    return dispatch.call(
        "mla_sparse_decode",
        implementation,
        jnp.asarray(q_latent),
        jnp.asarray(q_rope),
        cache,
        as_int32(indices),
        scale=scale,
        topk_length=_as_lengths("topk_length", topk_length, "b", b),
        attn_sink=_as_sink(attn_sink, h_q),
        return_lse=bool(return_lse),
    )


def mla_sparse_prefill(
    q_latent: Float[Array, "t h_q c"],
    q_rope: Float[Array, "t h_q r"],
    latent: Float[Array, "n c"],
    rope: Float[Array, "n r"],
    indices: Int[Array, "t k"],
    *,
    scale: Scale,
    topk_length: Int[Array, " t"] | None = None,
    attn_sink: Float[Array, " h_q"] | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "t h_q c"], Float[Array, "t h_q"], Float[Array, "t h_q"]]:
    """Attend from each token to the rows of `latent` and `rope` that it names, in absorbed form.

    Args:
        q_latent: queries with W_UK absorbed.
        q_rope: rotated queries, of the same dtype.
        latent: latents, not paged; bfloat16, float16 or float32.
        rope: rotated rope keys, of the same dtype.
        indices: rows, in any order. -1, like any other number that is not a row, is no token.
        scale: factor of the scores.
        topk_length: only the first `topk_length[t]` indices of token `t` count.
        attn_sink: as in `mla_decode`.
        implementation: see the module.

    Returns:
        `out`; `max_logits`, the largest scaled score of each query, -inf if there is none; `lse`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `mla_decode`.
    """
    (n, c) = check_array("latent", latent, "n c")
    (_, r) = check_array("rope", rope, "n r", n=n)
    check_float("latent", latent)
    check_same_dtype("rope", rope, "latent", latent)
    if n == 0:
        raise ValueError(f"`latent` has shape {latent.shape}: must hold a row at least")
    (t, h_q, _) = _check_query_pair(q_latent, q_rope, "t h_q", c=c, r=r)
    check_array("indices", indices, "t k", t=t)
    check_integer("indices", indices)
    check_scale("scale", scale)
    return dispatch.call(
        "mla_sparse_prefill",
        implementation,
        jnp.asarray(q_latent),
        jnp.asarray(q_rope),
        jnp.asarray(latent),
        jnp.asarray(rope),
        as_int32(indices),
        scale=scale,
        topk_length=_as_lengths("topk_length", topk_length, "t", t),
        attn_sink=_as_sink(attn_sink, h_q),
    )


def mla_prefill(
    q: Float[Array, "b t h d"],
    k: Float[Array, "b n h d"],
    v: Float[Array, "b n h d_v"],
    *,
    scale: Scale,
    causal: bool = True,
    q_lens: Int[Array, " b"] | None = None,
    kv_lens: Int[Array, " b"] | None = None,
    return_lse: bool = False,
    implementation: Implementation = None,
) -> Float[Array, "b t h d_v"] | tuple[Float[Array, "b t h d_v"], Float[Array, "b h t"]]:
    """Multi-head attention with keys and values expanded from the latents; differentiable.

    The form for many queries (DeepSeek-V2, arXiv:2405.04434, sec. 2.1): `d` is
    `qk_nope + qk_rope` (192), `d_v` 128, and neither is padded to the other. Gradients reach `q`,
    `k`, `v` and `scale`, through `out` and through `lse`, in reverse mode.

    Args:
        q, k, v: of one dtype. Keys before the first query (an earlier chunk, a cached prefix) make
            `n` larger than `t`.
        scale: factor of the scores.
        causal: query `i` sees the keys before `kv_lens - (q_lens - 1 - i)`: the last query and
            the last key are the same token. Otherwise every query sees every key.
        q_lens: queries of each sequence, the first ones of `t`; None: all. `out` is 0 past them.
        kv_lens: keys of each sequence, the first ones of `n`; None: all. Rows past either length
            may hold anything, and have no gradient.
        return_lse: return `lse` too.
        implementation: see the module.

    Returns:
        `out`, or `(out, lse)`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `mla_decode`.
    """
    (b, _, h, d) = check_array("q", q, "b t h d")
    (_, n, _, _) = check_array("k", k, "b n h d", b=b, h=h, d=d)
    check_array("v", v, "b n h d_v", b=b, n=n, h=h)
    check_float("q", q)
    check_same_dtype("k", k, "q", q)
    check_same_dtype("v", v, "q", q)
    check_scale("scale", scale)
    _check_flag("causal", causal)
    _check_flag("return_lse", return_lse)
    return dispatch.call(
        "mla_prefill",
        implementation,
        jnp.asarray(q),
        jnp.asarray(k),
        jnp.asarray(v),
        scale=scale,
        causal=bool(causal),
        q_lens=_as_lengths("q_lens", q_lens, "b", b),
        kv_lens=_as_lengths("kv_lens", kv_lens, "b", b),
        return_lse=bool(return_lse),
    )


def merge_states(
    outs: Float[Array, "n *rows d"] | Sequence[Float[Array, "*rows d"]],
    lses: Float[Array, "n ..."] | Sequence[Float[Array, "..."]],
) -> tuple[Float[Array, "*rows d"], Float[Array, "..."]]:
    """Merge attention over parts of the keys: chunks, splits, or ranks of a mesh.

    `lse = log(sum_i exp(lse_i))`, `out = sum_i exp(lse_i - lse) * out_i` (FlashAttention-2,
    arXiv:2307.08691, sec. 3.1). Merge before an attention sink is applied.

    Args:
        outs: `n` outputs, stacked or as a sequence: `[b, s, h, d]` each, or `[t, h, d]`.
        lses: their log-sum-exps: `[b, h, s]` each, or `[t, h]`. A part with -inf has weight 0,
            whatever its `out` holds.

    Returns:
        `out` in the dtype of `outs`; `lse` float32; 0 and -inf where all parts are empty.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit together; no parts at all.
    """
    out_parts, lse_parts = _stack("outs", outs), _stack("lses", lses)
    batched = out_parts.ndim == 5
    layout = "n b s h d" if batched else "n t h d"
    sizes = dict(zip(layout.split(), check_array("outs", out_parts, layout), strict=True))
    del sizes["d"]
    check_array("lses", lse_parts, "n b h s" if batched else "n t h", **sizes)
    check_float("outs", out_parts)
    check_float("lses", lse_parts)
    swap = lambda x: x.mT if batched else x
    out, lse = combine.merge_states(jnp.asarray(out_parts), swap(jnp.asarray(lse_parts)))
    return out, swap(lse)


def _stack(name: str, parts: Any) -> Array | np.ndarray:
    if isinstance(parts, list | tuple):
        if not parts:
            raise ValueError(f"`{name}` is empty: must hold a part at least")
        for i, part in enumerate(parts):
            check_array(f"{name}[{i}]", part, " ".join(["_"] * np.ndim(parts[0])))
            if part.shape != parts[0].shape:
                raise ValueError(
                    f"`{name}[{i}]` has shape {part.shape}: must be {parts[0].shape} as `{name}[0]`"
                )
            check_same_dtype(f"{name}[{i}]", part, f"{name}[0]", parts[0])
        return jnp.stack(parts)
    if not isinstance(parts, jax.Array | np.ndarray):
        raise TypeError(
            f"`{name}` is of type {type(parts).__name__}: must be an array or a list of them"
        )
    return parts


def _check_queries(q_latent: Any, q_rope: Any, rows: str, cache: LatentCache) -> tuple[int, ...]:
    return _check_query_pair(q_latent, q_rope, rows, c=cache.kv_lora_rank, r=cache.rope_dim)


def _check_query_pair(q_latent: Any, q_rope: Any, rows: str, *, c: int, r: int) -> tuple[int, ...]:
    """Check the two parts of the queries against each other and the keys; return the shape."""
    shape = check_array("q_latent", q_latent, f"{rows} c", c=c)
    sizes = dict(zip(rows.split(), shape, strict=False))
    check_array("q_rope", q_rope, f"{rows} r", r=r, **sizes)
    check_float("q_latent", q_latent)
    check_same_dtype("q_rope", q_rope, "q_latent", q_latent)
    return shape


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"`{name}` is of type {type(value).__name__}: must be True or False, not traced"
        )


def _as_sink(attn_sink: Any, h_q: int) -> Float[Array, " h_q"] | None:
    if attn_sink is None:
        return None
    check_array("attn_sink", attn_sink, "h_q", h_q=h_q)
    check_float("attn_sink", attn_sink)
    return jnp.asarray(attn_sink, jnp.float32)


def _as_lengths(name: str, lengths: Any, axis: str, size: int) -> Int[Array, " b"] | None:
    if lengths is None:
        return None
    check_array(name, lengths, axis, **{axis: size})
    check_integer(name, lengths)
    return as_int32(lengths)
