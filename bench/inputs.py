"""Inputs made on the device, and what a decode step must give for them."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from bench.shapes import Shape
from mla_jax import LatentCache, append, init_cache
from pallas_kernels.formats import FORMATS, unscaled_format
from tests.tolerances import OUT

D_LATENT, D_ROPE = 512, 64
D_NOPE = D_V = 128
PAGE_SIZE = 64
SCALE = (D_NOPE + D_ROPE) ** -0.5
DISTRIBUTION = "N(0,1), pages shuffled"
_CHUNK = 1 << 16


class Inputs(NamedTuple):
    """Arguments of a decode call."""

    q_latent: jax.Array
    q_rope: jax.Array
    cache: LatentCache
    block_table: jax.Array
    seq_lens: jax.Array


def make(shape: Shape, format: str = "bf16", seed: int = 0) -> Inputs:
    """Queries and a cache of N(0,1), every sequence `s_k` long, on shuffled pages."""
    keys = jax.random.split(jax.random.key(seed), 4)
    max_pages = -(-shape.s_k // PAGE_SIZE)
    num_pages = shape.b * max_pages
    dtype = FORMATS[format].rope_dtype
    dtype = jnp.float16 if dtype == "float16" else jnp.bfloat16
    q = jax.random.normal(keys[0], (shape.b, shape.s_q, shape.h, D_LATENT + D_ROPE), dtype)
    return Inputs(
        q[..., :D_LATENT],
        q[..., D_LATENT:],
        _fill(keys[1], num_pages, format, dtype),
        jax.random.permutation(keys[2], num_pages).reshape(shape.b, max_pages).astype(jnp.int32),
        jnp.full(shape.b, shape.s_k, jnp.int32),
    )


def _fill(key: jax.Array, num_pages: int, format: str, dtype) -> LatentCache:
    if unscaled_format(jnp.dtype(dtype).name).name == format:
        pages = lambda key, cols: _normal(key, num_pages, cols, dtype)
        latent_key, rope_key = jax.random.split(key)
        return LatentCache(pages(latent_key, D_LATENT), pages(rope_key, D_ROPE), None, format)
    cache = init_cache(num_pages, page_size=PAGE_SIZE, format=format)
    fill = jax.jit(append, donate_argnums=0)
    for start in range(0, cache.num_slots, _CHUNK):
        slots = start + jnp.arange(min(_CHUNK, cache.num_slots - start))
        key, *token_keys = jax.random.split(key, 3)
        latent, rope = (
            jax.random.normal(k, (len(slots), cols), dtype)
            for k, cols in zip(token_keys, (D_LATENT, D_ROPE), strict=True)
        )
        cache = fill(cache, latent, rope, slots)
    return cache


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: jax.Array, num_pages: int, cols: int, dtype) -> jax.Array:
    return jax.random.normal(key, (num_pages, PAGE_SIZE, cols), dtype)


@functools.partial(jax.jit, static_argnames="causal")
def expected(
    q_latent: jax.Array,
    q_rope: jax.Array,
    cache: LatentCache,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float = SCALE,
    causal: bool = True,
) -> jax.Array:
    """`mla_decode` straight from its formula, in float32, one sequence at a time."""
    s_q = q_latent.shape[1]
    dot = functools.partial(
        jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )

    def one(args):
        q, pages, seq_len = args
        rows = lambda x: x[pages].reshape(-1, x.shape[-1]).astype(jnp.float32)
        latent, rope = rows(cache.latent), rows(cache.rope)
        if cache.scale is not None:
            factors = rows(cache.scale)
            tiled = cache.format == "fp8_ds_mla"
            latent = latent * (jnp.repeat(factors, 128, 1) if tiled else factors[:, :1])
            rope = rope if tiled else rope * factors[:, -1:]
        keys = jnp.concatenate([latent, rope], 1)
        scores = dot("shd,nd->shn", q, keys) * scale
        end = seq_len - (jnp.arange(s_q)[::-1] if causal else jnp.zeros(s_q, jnp.int32))
        visible = jnp.arange(keys.shape[0]) < end[:, None, None]
        p = jax.nn.softmax(jnp.where(visible, scores, -math.inf), axis=-1)
        return dot("shn,nc->shc", p, latent)

    q = jnp.concatenate([q_latent, q_rope], -1).astype(jnp.float32)
    return lax.map(one, (q, block_table, seq_lens))


class Comparison(NamedTuple):
    """How far an output is from what it must be; the terms are those of `tests.tolerances`."""

    max_err: float
    cos: float
    bad: int
    """Elements outside both bounds; NaN is."""

    def fault(self, dtype: str) -> str:
        """What is wrong, empty if nothing is."""
        if self.bad:
            return f"{self.bad} elements are off, by up to {self.max_err:.3g}"
        if not self.cos < OUT[dtype].cos:
            return f"the cosine term is {self.cos:.3g}: must be below {OUT[dtype].cos:.3g}"
        return ""


def compare(found: jax.Array, wanted: jax.Array) -> Comparison:
    """Compare on the device by the tolerance of the output's dtype."""
    tolerance = OUT[found.dtype.name]
    return Comparison(*(x.item() for x in _compare(found, wanted, tolerance.atol, tolerance.rtol)))


@jax.jit
def _compare(found, wanted, atol, rtol):
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    error = jnp.abs(found - wanted)
    good = (error < atol) | (error < rtol * jnp.abs(wanted))
    # 1 - 2xy / (xx + yy) without the cancellation: the sum of (x - y)^2 over the same.
    cos = jnp.sum(error**2) / jnp.sum(found**2 + wanted**2)
    return jnp.max(error), cos, jnp.sum(~good)
