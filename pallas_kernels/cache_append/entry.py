"""`implementation="mosaic"` of `append` and `norm_rope_append`: what it refuses, and the launch."""

import dataclasses
import functools
from typing import Any

import jax
from jax.custom_batching import sequential_vmap

from pallas_kernels.cache_append.kernel import write
from pallas_kernels.errors import Unsupported
from pallas_kernels.formats import FORMATS, SCALE_TILE

D_ROPE = 64


def append(
    cache: Any, latent: jax.Array, rope: jax.Array, slots: jax.Array, *, interpret: Any = None
) -> Any:
    """`mla_jax.append` on Hopper; the arguments are that function's.

    Raises:
        Unsupported: saying which requirement the call does not meet.
    """
    tokens = {"slots": slots, "latent": latent, "rope": rope}
    return _launch(cache, tokens, interpret)


def norm_rope_append(
    cache: Any,
    kv_a: jax.Array,
    slots: jax.Array,
    *,
    norm_weight: jax.Array,
    norm_eps: float,
    cos: jax.Array,
    sin: jax.Array,
    rope_pairs: str,
    rope_order: str,
    interpret: Any = None,
) -> Any:
    """`mla_jax.norm_rope_append` on Hopper; the arguments are that function's.

    Raises:
        Unsupported: saying which requirement the call does not meet.
    """
    tokens = {
        "slots": slots,
        "kv_a": kv_a,
        "pairs": _paired(kv_a, rope_pairs),
        "norm_weight": norm_weight[None],
        "cos": cos,
        "sin": sin,
    }
    return _launch(cache, tokens, interpret, norm_eps=norm_eps, rope_order=rope_order)


def _paired(x: jax.Array, order: str) -> jax.Array:
    """`x`; with neighbouring channels apart if they are the pairs."""
    return x.reshape(len(x), -1, 2) if order == "interleaved" else x


def _launch(
    cache: Any,
    tokens: dict[str, jax.Array],
    interpret: Any,
    norm_eps: float | None = None,
    rope_order: str = "halves",
) -> Any:
    if cache.kv_lora_rank % SCALE_TILE:
        raise Unsupported(
            f"takes kv_lora_rank in multiples of {SCALE_TILE}, this cache has {cache.kv_lora_rank}"
        )
    if cache.rope_dim != D_ROPE:
        raise Unsupported(f"takes rope_dim of {D_ROPE}, this cache has {cache.rope_dim}")
    if tokens["slots"].size == 0:
        raise Unsupported("takes a token at least")
    arrays = jax.tree.leaves((cache, tokens))
    if any(jax.typeof(x).manual_axis_type.varying for x in arrays):
        raise Unsupported(
            "takes no arrays that vary over a mesh axis, which Pallas cannot write in place; "
            "give jax.shard_map check_vma=False"
        )
    static = (cache.format, norm_eps, rope_order, interpret)
    run = functools.partial(_write, *static)
    if interpret is None:
        # One program for all layers of a model; and, for vmap, which Pallas cannot do to arrays
        # that it writes in place, one call after the other.
        run = sequential_vmap(functools.partial(_write_jit, *static))
    return run(cache, tokens)


def _write(
    format: str,
    norm_eps: float | None,
    rope_order: str,
    interpret: Any,
    cache: Any,
    tokens: dict[str, jax.Array],
) -> Any:
    names = ("latent", "rope") if cache.scale is None else ("latent", "rope", "scale")
    pages = {name: getattr(cache, name) for name in names}
    by_slot = {name: array.reshape(-1, array.shape[-1]) for name, array in pages.items()}
    if norm_eps is not None:
        by_slot["rope"] = _paired(by_slot["rope"], rope_order)
    written = write(FORMATS[format], norm_eps, by_slot, tokens, interpret)
    return dataclasses.replace(
        cache, **{name: array.reshape(pages[name].shape) for name, array in written.items()}
    )


_write_jit = jax.jit(_write, static_argnums=(0, 1, 2, 3))
