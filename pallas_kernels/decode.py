"""`implementation="mosaic"` and `"mosaic_transposed"` of `mla_decode`: plan, attention kernel,
combine kernel."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from pallas_kernels.combine.kernel import merge
from pallas_kernels.decode_dense.config import CACHE_FORMATS as DENSE_FORMATS
from pallas_kernels.decode_dense.config import Config
from pallas_kernels.decode_dense.kernel import decode as decode_dense
from pallas_kernels.decode_e4m3.config import Config as E4m3Config
from pallas_kernels.decode_e4m3.kernel import decode as decode_e4m3
from pallas_kernels.decode_transposed.config import CACHE_FORMATS as TRANSPOSED_FORMATS
from pallas_kernels.decode_transposed.config import Config as TransposedConfig
from pallas_kernels.decode_transposed.kernel import decode as decode_transposed
from pallas_kernels.errors import Unsupported
from pallas_kernels.formats import E4M3_FORMATS
from pallas_kernels.hopper.decode import DecodeConfig
from pallas_kernels.hopper.device import num_sms
from pallas_kernels.hopper.plan import divide
from pallas_kernels.hopper.row_tiles import untile

FORMATS = (*DENSE_FORMATS, *E4M3_FORMATS)
KERNELS: dict[type[DecodeConfig], Any] = {
    Config: decode_dense,
    E4m3Config: decode_e4m3,
    TransposedConfig: decode_transposed,
}


def mla_decode(
    q_latent: jax.Array,
    q_rope: jax.Array,
    cache: Any,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: Any,
    causal: bool,
    attn_sink: jax.Array | None,
    plan: Any,
    return_lse: bool,
    transposed: bool = False,
    interpret: Any = None,
) -> Any:
    """`mla_jax.mla_decode` on Hopper; the arguments are that function's,
    and which schedule of the attention kernel to take.

    Raises:
        Unsupported: saying which requirement the call does not meet.
    """
    formats = TRANSPOSED_FORMATS if transposed else FORMATS
    if cache.format not in formats:
        raise Unsupported(f"takes a cache in {' or '.join(formats)}, this one is {cache.format}")
    if cache.scale is None and q_latent.dtype != cache.latent.dtype:
        raise Unsupported(
            f"takes queries of the cache's dtype, {cache.latent.dtype}, these are {q_latent.dtype}"
        )
    if 0 in q_latent.shape or 0 in block_table.shape:
        raise Unsupported("takes a sequence, a query, a head and a page of each at least")
    _, q_len, num_heads, d_latent = q_latent.shape
    # A positive number is compiled in; anything else costs the kernel a product per score.
    is_number = not isinstance(scale, jax.Array) and 0.0 < float(scale) < math.inf
    make = E4m3Config if cache.format in E4M3_FORMATS else Config
    make = TransposedConfig if transposed else make
    config = make(
        cache_format=cache.format,
        dtype=str(q_latent.dtype),
        d_latent=d_latent,
        d_rope=q_rope.shape[-1],
        page_size=cache.page_size,
        num_heads=num_heads,
        q_len=q_len,
        causal=causal,
        has_sink=attn_sink is not None,
        scale=float(scale) if is_number else None,
    )
    if refusal := config.refusal():
        raise Unsupported(refusal)
    # A plan that is given may be for larger row tiles; its parts are right for any.
    parts = (
        divide(seq_lens, rows=config.rows, row_tile=config.row_tile, cache_format=cache.format)
        if plan is None
        else plan.parts
    )
    if any(jax.typeof(x).manual_axis_type.varying for x in (block_table, seq_lens, parts)):
        raise Unsupported(
            "takes no block_table, seq_lens or plan that vary over a mesh axis, for Pallas cannot "
            "type its loops then; give jax.shard_map check_vma=False"
        )
    attend = functools.partial(_attend, config, interpret)
    if interpret is None:
        # One program for all layers of a model; and, for vmap, which Pallas cannot do to `merge`,
        # one call after the other.
        attend = sequential_vmap(functools.partial(_attend_jit, config, None))
    run_scale = None if is_number else jnp.asarray(scale, jnp.float32)
    out, lse = attend(q_latent, q_rope, cache, block_table, seq_lens, parts, attn_sink, run_scale)
    return (out, lse) if return_lse else out


def launch(
    config: DecodeConfig,
    q_latent: jax.Array,
    q_rope: jax.Array,
    cache: Any,
    block_table: jax.Array,
    seq_lens: jax.Array,
    parts: jax.Array,
    *,
    sink: jax.Array | None = None,
    run_scale: jax.Array | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The attention kernel alone, as `config` says, which must have no refusal.

    `sink` holds one float32 for each slot of the row tiles.

    Returns:
        What `hopper.decode.launch` gives.
    """
    inputs = {
        "q_latent": config.fold(q_latent),
        "q_rope": config.fold(q_rope),
        "latent": cache.latent,
        "rope": cache.rope,
        "block_table": block_table,
        "seq_lens": seq_lens,
        "parts": parts,
    }
    if cache.scale is not None:
        # A page's scales are one row.
        inputs["scale"] = cache.scale.reshape(cache.scale.shape[0], -1)
    if sink is not None:
        inputs["sink"] = sink.reshape(config.row_tiles, config.row_tile)
    if run_scale is not None:
        inputs["run_scale"] = run_scale.reshape(1)
    return KERNELS[type(config)](config, inputs, interpret)


def _attend(config: DecodeConfig, interpret: Any, *arrays: Any):
    *call, attn_sink, run_scale = arrays
    q_latent, *_, parts = call
    sink = None if attn_sink is None else config.slots(attn_sink.astype(jnp.float32))
    out, lse, partial, partial_lse2 = launch(
        config, *call, sink=sink, run_scale=run_scale, interpret=interpret
    )
    if parts.shape[0] > 1:
        sizes = {"row_tile": config.row_tile, "num_sms": num_sms()}
        out, lse = merge(out, lse, partial, partial_lse2, parts, sink, **sizes, interpret=interpret)
    rows = slice(config.query_rows)
    out, lse = (
        out[:, rows],
        untile(lse, config.rows, config.row_tile)[:, rows].reshape(q_latent.shape[:3]),
    )
    return out.reshape(q_latent.shape), lse.transpose(0, 2, 1)


_attend_jit = jax.jit(_attend, static_argnums=(0, 1))
