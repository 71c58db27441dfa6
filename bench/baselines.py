"""What a JAX user has for a decode step without this package: keys and values per head, cuDNN."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from bench.inputs import D_LATENT, D_NOPE, D_ROPE, D_V, SCALE, UNTUNED, Inputs
from bench.shapes import Shape
from mla_jax import LatentCache, gather

NAME = "expand+cudnn"


def expand_bytes(shape: Shape) -> int:
    """Bytes that expanding takes at its peak: the latents, keys and values per head."""
    latents = 2 * (D_LATENT + D_ROPE)  # as gathered, and with both parts in one array
    return 2 * shape.b * shape.s_k * (latents + shape.h * 2 * (D_NOPE + D_ROPE))


def free_bytes() -> int:
    """Bytes that JAX may still take on its first device."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)


def why_not(shape: Shape) -> str:
    """Why the baseline cannot run here, empty if it can."""
    needed, free = expand_bytes(shape), free_bytes()
    gib = lambda size: f"{size / 2**30:.0f} GiB"
    if needed > free:
        return f"needs {gib(needed)} for keys and values per head, {gib(free)} are free"
    return ""


def weights(h: int, seed: int = 1) -> tuple[jax.Array, jax.Array]:
    """Random W_UK and W_UV, `[h, d, d_latent]`, such that keys and values are N(0,1) again."""
    keys = jax.random.split(jax.random.key(seed))
    make = lambda key, d: jax.random.normal(key, (h, d, D_LATENT), jnp.bfloat16) * D_LATENT**-0.5
    return make(keys[0], D_NOPE), make(keys[1], D_V)


def queries(shape: Shape, seed: int = 2) -> jax.Array:
    """N(0,1) queries in expanded form."""
    sizes = (shape.b, shape.s_q, shape.h, D_NOPE + D_ROPE)
    return jax.random.normal(jax.random.key(seed), sizes, jnp.bfloat16)


@functools.partial(jax.jit, static_argnames="implementation")
def attend(
    q: jax.Array,
    cache: LatentCache,
    block_table: jax.Array,
    seq_lens: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    *,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Gather the latents, expand them, attend with cuDNN; `q [b, s_q, h, 192]`, out `[.., 128]`.

    The queries of a step see all keys: cuDNN's causal mask would put them at the start.
    """
    latent, rope = gather(cache, block_table, seq_lens, dtype=q.dtype)
    whole = jnp.concatenate([latent, rope], -1)
    # Each product writes what cuDNN reads, without a copy: the rope's channels pass through, and
    # values are padded, since cuDNN takes keys and values of one width only.
    w_k, w_v = _with_rope(w_uk), jnp.pad(w_uv, ((0, 0), (0, D_NOPE + D_ROPE - D_V), (0, 0)))
    k = jnp.einsum("bnc,hdc->bnhd", whole, w_k)
    v = jnp.einsum("bnc,hdc->bnhd", latent, w_v)
    out = jax.nn.dot_product_attention(
        q, k, v, scale=SCALE, key_value_seq_lengths=seq_lens, implementation=implementation
    )
    return out[..., :D_V]


def _with_rope(w_uk: jax.Array) -> jax.Array:
    """W_UK for whole keys from whole latents, `[h, 192, 576]`: rope passes through an identity."""
    w_uk = jnp.pad(w_uk, ((0, 0), (0, D_ROPE), (0, D_ROPE)))
    index = jnp.arange(D_ROPE)
    return w_uk.at[:, D_NOPE + index, D_LATENT + index].set(1)


def absorb(q: jax.Array, args: Inputs, w_uk: jax.Array) -> Inputs:
    """The absorbed form of the same step, for `inputs.expected`."""
    return args._replace(q_latent=_absorbed(q[..., :D_NOPE], w_uk), q_rope=q[..., D_NOPE:])


@functools.partial(jax.jit, compiler_options=UNTUNED)
def _absorbed(q_nope: jax.Array, w_uk: jax.Array) -> jax.Array:
    q_nope, w_uk = (x.astype(jnp.float32) for x in (q_nope, w_uk))
    return jnp.einsum("bshd,hdc->bshc", q_nope, w_uk, precision="highest")
