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
    # Keys and values of one width, and what they are made of, before it is put together or padded.
    per_head = 2 * (D_NOPE + D_ROPE) + D_NOPE + D_V
    return 2 * shape.b * shape.s_k * (D_LATENT + D_ROPE + shape.h * per_head)


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
    k_nope = jnp.einsum("bnc,hdc->bnhd", latent, w_uk)
    v = jnp.einsum("bnc,hdc->bnhd", latent, w_uv)
    rope = jnp.broadcast_to(rope[:, :, None], (*k_nope.shape[:3], rope.shape[-1]))
    k = jnp.concatenate([k_nope, rope], -1)
    # cuDNN takes keys and values of one width only.
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[-1] - v.shape[-1])))
    out = jax.nn.dot_product_attention(
        q, k, v, scale=SCALE, key_value_seq_lengths=seq_lens, implementation=implementation
    )
    return out[..., :D_V]


def absorb(q: jax.Array, args: Inputs, w_uk: jax.Array) -> Inputs:
    """The absorbed form of the same step, for `inputs.expected`."""
    return args._replace(q_latent=_absorbed(q[..., :D_NOPE], w_uk), q_rope=q[..., D_NOPE:])


@functools.partial(jax.jit, compiler_options=UNTUNED)
def _absorbed(q_nope: jax.Array, w_uk: jax.Array) -> jax.Array:
    q_nope, w_uk = (x.astype(jnp.float32) for x in (q_nope, w_uk))
    return jnp.einsum("bshd,hdc->bshc", q_nope, w_uk, precision="highest")
