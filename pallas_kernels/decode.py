"""`implementation="mosaic"` and `"mosaic_transposed"` of `mla_decode`: plan, attention kernel,
combine kernel."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from pallas_kernels.combine.kernel import merge
from pallas_kernels.decode_dense import entry
from pallas_kernels.decode_dense.config import CACHE_FORMATS as DENSE_FORMATS
from pallas_kernels.decode_dense.config import Config
from pallas_kernels.decode_e4m3 import entry as e4m3_entry
from pallas_kernels.decode_e4m3.config import CACHE_FORMATS as E4M3_FORMATS
from pallas_kernels.decode_e4m3.config import Config as E4m3Config
from pallas_kernels.decode_transposed import entry as transposed_entry
from pallas_kernels.decode_transposed.config import CACHE_FORMATS as TRANSPOSED_FORMATS
from pallas_kernels.decode_transposed.config import Config as TransposedConfig
from pallas_kernels.errors import Unsupported
from pallas_kernels.hopper.device import num_sms
from pallas_kernels.hopper.plan import divide
from pallas_kernels.hopper.row_tiles import untile

FORMATS = (*DENSE_FORMATS, *E4M3_FORMATS)


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
    make: Any = Config
    kernel: Any = entry
    if transposed:
        make, kernel = TransposedConfig, transposed_entry
    elif cache.format in E4M3_FORMATS:
        make, kernel = E4m3Config, e4m3_entry
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
    divided = lambda: divide(seq_lens, rows=config.rows, row_tile=config.row_tile)
    parts = divided() if plan is None else plan.parts
    if any(jax.typeof(x).manual_axis_type.varying for x in (block_table, seq_lens, parts)):
        raise Unsupported(
            "takes no block_table, seq_lens or plan that vary over a mesh axis, for Pallas cannot "
            "type its loops then; give jax.shard_map check_vma=False"
        )
    attend = functools.partial(_attend, kernel.launch, config, interpret)
    if interpret is None:
        # One program for all layers of a model; and, for vmap, which Pallas cannot do to `merge`,
        # one call after the other.
        attend = sequential_vmap(functools.partial(_attend_jit, kernel.launch, config, None))
    run_scale = None if is_number else jnp.asarray(scale, jnp.float32)
    out, lse = attend(q_latent, q_rope, cache, block_table, seq_lens, parts, attn_sink, run_scale)
    return (out, lse) if return_lse else out


def _attend(launch: Any, config: Any, interpret: Any, *arrays: Any):
    q_latent, q_rope, cache, block_table, seq_lens, parts, attn_sink, run_scale = arrays
    out, lse, partial, partial_lse2, sink = launch(
        config,
        q_latent,
        q_rope,
        cache,
        block_table,
        seq_lens,
        parts,
        run_scale=run_scale,
        attn_sink=attn_sink,
        interpret=interpret,
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


_attend_jit = jax.jit(_attend, static_argnums=(0, 1, 2))
