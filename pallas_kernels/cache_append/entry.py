"""`implementation="mosaic"` of `append` and `norm_rope_append`: what it refuses, and the launch."""

import dataclasses
import functools
from typing import Any

import jax
from jax.custom_batching import sequential_vmap

from pallas_kernels.cache_append.kernel import NormRope, write
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
    return _launch(cache, tokens, None, interpret)


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
    norm_weight = norm_weight[None]
    tokens = {"slots": slots, "kv_a": kv_a, "norm_weight": norm_weight, "cos": cos, "sin": sin}
    return _launch(cache, tokens, NormRope(norm_eps, rope_pairs, rope_order), interpret)


def _launch(
    cache: Any, tokens: dict[str, jax.Array], norm_rope: NormRope | None, interpret: Any
) -> Any:
    if cache.kv_lora_rank % SCALE_TILE:
        raise Unsupported(
            f"takes kv_lora_rank in multiples of {SCALE_TILE}, this cache has {cache.kv_lora_rank}"
        )
    if cache.rope_dim != D_ROPE:
        raise Unsupported(f"takes rope_dim of {D_ROPE}, this cache has {cache.rope_dim}")
    if tokens["slots"].size == 0:
        raise Unsupported("takes a token at least")
    run = functools.partial(_write, cache.format, norm_rope, interpret)
    if interpret is None:
        # One program for all layers of a model; and, for vmap, which Pallas cannot do to arrays
        # that it writes in place, one call after the other.
        run = sequential_vmap(functools.partial(_write_jit, cache.format, norm_rope, None))
    return run(cache, tokens)


def _write(format: str, norm_rope: NormRope | None, interpret: Any, cache: Any, tokens: Any) -> Any:
    pages = {
        name: array
        for name in ("latent", "rope", "scale")
        if (array := getattr(cache, name)) is not None
    }
    by_slot = {name: array.reshape(-1, array.shape[-1]) for name, array in pages.items()}
    written = write(FORMATS[format], norm_rope, by_slot, tokens, interpret)
    return dataclasses.replace(
        cache, **{name: array.reshape(pages[name].shape) for name, array in written.items()}
    )


_write_jit = jax.jit(_write, static_argnums=(0, 1, 2))
