"""FlashMLA's entry points, so that code written against that library ports by changing an import.

Names, argument order, shapes and conventions are those of DeepSeek's FlashMLA (github.com/
deepseek-ai/FlashMLA): latent and rope key are one row of 576 channels, the softmax scale may be
left out and is then `576 ** -0.5`, and a query with nothing to attend to has `lse = +inf`. Results
are those of `mla_jax.mla_decode`, `mla_sparse_decode` and `mla_sparse_prefill`.

Rows of 576 channels are split into two arrays at every call, which copies the cache; keep a
`LatentCache` and call `mla_jax` itself where that matters.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from mla_jax import ops
from mla_jax.cache import LatentCache, unpack_fp8_ds_mla
from mla_jax.checks import check_array, check_float, check_size
from pallas_kernels.formats import FORMATS, unscaled_format


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FlashMLASchedMeta:
    """What `get_mla_metadata` returns; it holds nothing, the work is divided within each call."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Return the metadata that `flash_mla_with_kvcache` takes; any arguments are ignored."""
    del args, kwargs
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Float[Array, "b s_q h_q d"],
    k_cache: Array,
    block_table: Int[Array, "b max_pages"] | None,
    cache_seqlens: Int[Array, " b"] | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Int[Array, "b s_q topk"] | None = None,
    attn_sink: Float[Array, " h_q"] | None = None,
    extra_k_cache: Array | None = None,
    extra_indices_in_kvcache: Array | None = None,
    topk_length: Int[Array, " b"] | None = None,
    extra_topk_length: Array | None = None,
    *,
    implementation: ops.Implementation = None,
) -> tuple[Float[Array, "b s_q h_q head_dim_v"], Float[Array, "b h_q s_q"]]:
    """Attend from the newest tokens of each sequence to a paged cache, densely or to `indices`.

    Args:
        q: absorbed queries, `head_dim_v` latent channels and then the rope channels (512 + 64).
        k_cache: `[pages, page_size, 1, 576]` bfloat16, float16 or float32; or, with
            `is_fp8_kvcache`, `[pages, page_size, 1, 656]` uint8 (or e4m3, as bytes) in the layout
            of `mla_jax.pack_fp8_ds_mla`.
        block_table: pages of each sequence. Not used with `indices`.
        cache_seqlens: tokens of each sequence in the cache. Not used with `indices`.
        head_dim_v: channels of the latent.
        tile_scheduler_metadata, num_splits: what `get_mla_metadata` returned.
        softmax_scale: factor of the scores; None: `d ** -0.5`. DeepSeek's models need their own.
        causal: align the last query with the last key. Not with `indices`.
        is_fp8_kvcache: the cache is in the 656-byte layout.
        indices: slots, `page * page_size + offset`, -1 for none.
        attn_sink: as in `mla_jax.mla_decode`.
        topk_length: only the first `topk_length[b]` of `indices` count.
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length: not supported.
        implementation: as in `mla_jax.mla_decode`; not an argument of FlashMLA.

    Returns:
        `out` in the dtype of `q`; `lse`, float32, natural, +inf for empty rows.

    Raises:
        NotImplementedError: `extra_*` arguments, more than one kv head, or the 448 + 64 layout.
        ValueError, TypeError: arguments that do not fit together.
    """
    _refuse(
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        extra_topk_length=extra_topk_length,
    )
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta) or num_splits is not None:
        raise TypeError(
            "`tile_scheduler_metadata`, `num_splits` are "
            f"{type(tile_scheduler_metadata).__name__}, {type(num_splits).__name__}: "
            "must be what get_mla_metadata returned"
        )
    q_latent, q_rope = _split_queries(q, "b s_q h_q d", "head_dim_v", head_dim_v)
    cache = _as_cache(k_cache, head_dim_v, q_rope.shape[-1], is_fp8_kvcache)
    common = {
        "scale": q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        "attn_sink": attn_sink,
        "return_lse": True,
        "implementation": implementation,
    }
    if indices is None:
        if block_table is None or cache_seqlens is None:
            raise ValueError(
                "`block_table` or `cache_seqlens` is None: must be given unless `indices` is"
            )
        if topk_length is not None:
            raise ValueError("`topk_length` is given: must be None unless `indices` is given")
        out, lse = ops.mla_decode(
            q_latent, q_rope, cache, block_table, cache_seqlens, causal=causal, **common
        )
    else:
        if causal:
            raise ValueError("`causal` is True: must be False with `indices`, which say it all")
        out, lse = ops.mla_sparse_decode(
            q_latent, q_rope, cache, indices, topk_length=topk_length, **common
        )
    return out, _empty_is_plus_inf(lse)


def flash_mla_sparse_fwd(
    q: Float[Array, "s_q h_q d"],
    kv: Float[Array, "s_kv 1 d"],
    indices: Int[Array, "s_q 1 topk"],
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Float[Array, " h_q"] | None = None,
    topk_length: Int[Array, " s_q"] | None = None,
    indexer_topk: int = 0,
    *,
    implementation: ops.Implementation = None,
) -> tuple[Float[Array, "s_q h_q d_v"], Float[Array, "s_q h_q"], Float[Array, "s_q h_q"]]:
    """Attend from each token to the rows of `kv` that it names.

    Args:
        q: absorbed queries, `d_v` latent channels and then the rope channels.
        kv: keys, likewise; one kv head.
        indices: rows of `kv`; -1, like any other number that is not a row, is no token.
        sm_scale: factor of the scores.
        d_v: channels of the latent.
        attn_sink: as in `mla_jax.mla_decode`.
        topk_length: only the first `topk_length[t]` indices of token `t` count.
        indexer_topk: not supported.
        implementation: as in `mla_jax.mla_decode`; not an argument of FlashMLA.

    Returns:
        `out` in the dtype of `q`; `max_logits`, the largest scaled score, -inf if there is none;
        `lse`, natural, +inf where there is nothing to attend to.

    Raises:
        NotImplementedError: `indexer_topk`, more than one kv head, or the 448 + 64 layout.
        ValueError, TypeError: arguments that do not fit together.
    """
    _refuse(indexer_topk=indexer_topk or None)
    q_latent, q_rope = _split_queries(q, "s_q h_q d", "d_v", d_v)
    (_, h_kv, _) = check_array("kv", kv, "s_kv h_kv d", d=q.shape[-1])
    _check_one_kv_head("kv", h_kv)
    check_array("indices", indices, "s_q h_kv topk", s_q=q.shape[0], h_kv=h_kv)
    out, max_logits, lse = ops.mla_sparse_prefill(
        q_latent,
        q_rope,
        kv[:, 0, :d_v],
        kv[:, 0, d_v:],
        indices[:, 0],
        scale=sm_scale,
        topk_length=topk_length,
        attn_sink=attn_sink,
        implementation=implementation,
    )
    return out, max_logits, _empty_is_plus_inf(lse)


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"`{name}` is given: not supported yet, leave it out")


def _split_queries(q: Any, layout: str, d_v_name: str, d_v: int) -> tuple[Array, Array]:
    """Return the latent and the rope part of `q`."""
    (*_, d) = check_array("q", q, layout)
    check_size(d_v_name, d_v)
    if d == d_v:
        raise NotImplementedError(
            f"`q` has {d} channels, as many as `{d_v_name}`: the 448 + 64 cache layout is not "
            "supported yet, use 512 + 64"
        )
    if d < d_v:
        raise ValueError(f"`q` has {d} channels: must be more than `{d_v_name}`, {d_v}")
    return q[..., :d_v], q[..., d_v:]


def _as_cache(k_cache: Any, d_latent: int, d_rope: int, is_fp8: bool) -> LatentCache:
    packed = FORMATS["fp8_ds_mla"]
    d = packed.bytes_per_token(d_latent, d_rope) if is_fp8 else d_latent + d_rope
    (_, _, h_kv, _) = check_array("k_cache", k_cache, "pages page_size h_kv d", d=d)
    _check_one_kv_head("k_cache", h_kv)
    rows = jnp.asarray(k_cache)[:, :, 0]
    if is_fp8:
        if rows.dtype not in (jnp.uint8, packed.latent_dtype):
            raise TypeError(f"`k_cache` is {rows.dtype}: must be uint8 when `is_fp8_kvcache`")
        rows = lax.bitcast_convert_type(rows, jnp.uint8)
        return unpack_fp8_ds_mla(rows, kv_lora_rank=d_latent, rope_dim=d_rope)
    check_float("k_cache", rows)
    cache_format = unscaled_format(rows.dtype.name)
    return LatentCache(rows[..., :d_latent], rows[..., d_latent:], None, format=cache_format.name)


def _check_one_kv_head(name: str, h_kv: int) -> None:
    if h_kv != 1:
        raise NotImplementedError(
            f"`{name}` has h_kv={h_kv}: more than one kv head is not supported"
        )


def _empty_is_plus_inf(lse: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.where(lse == -jnp.inf, jnp.inf, lse)
