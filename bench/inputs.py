"""Inputs made on the device, and what a decode step must give for them."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.shapes import Shape
from mla_jax import LatentCache, append, init_cache
from pallas_kernels.formats import E4M3_FORMATS, unscaled_format
from tests.tolerances import E4M3_OUT, OUT, Tolerance

D_LATENT, D_ROPE = 512, 64
D_NOPE = D_V = 128
PAGE_SIZE = 64
SCALE = (D_NOPE + D_ROPE) ** -0.5
DISTRIBUTION = "N(0,1), pages shuffled"
_CHUNK = 1 << 16
UNTUNED = {"xla_gpu_autotune_level": "0"}
"""Compiler options of what is not timed: looking for the fastest products takes XLA ten seconds."""


class Inputs(NamedTuple):
    """Arguments of a decode call."""

    q_latent: jax.Array
    q_rope: jax.Array
    cache: LatentCache
    block_table: jax.Array
    seq_lens: jax.Array


def make(shape: Shape, format: str = "bf16", seed: int = 0) -> Inputs:
    """Queries and a cache of N(0,1), every sequence `s_k` long, on shuffled pages."""
    # XLA's own generator: threefry takes longer to compile than what is measured.
    q_key, cache_key = jax.random.split(jax.random.key(seed, impl="rbg"))
    max_pages = -(-shape.s_k // PAGE_SIZE)
    num_pages = shape.b * max_pages
    pages = np.random.default_rng(seed).permutation(num_pages)
    dtype = "float16" if format == "f16" else "bfloat16"
    q_latent, q_rope = _normal(q_key, (shape.b, shape.s_q, shape.h), dtype)
    return Inputs(
        q_latent,
        q_rope,
        _fill(cache_key, num_pages, format, dtype),
        jnp.asarray(pages.reshape(shape.b, max_pages), jnp.int32),
        jnp.full(shape.b, shape.s_k, jnp.int32),
    )


def abstract(shape: Shape, format: str = "bf16") -> Inputs:
    """Shapes and dtypes of what `make` makes."""
    array: Any = jax.ShapeDtypeStruct
    max_pages = -(-shape.s_k // PAGE_SIZE)
    make_cache = functools.partial(
        init_cache, shape.b * max_pages, page_size=PAGE_SIZE, format=format
    )
    dtype = "float16" if format == "f16" else "bfloat16"
    q = lambda d: array((shape.b, shape.s_q, shape.h, d), dtype)
    return Inputs(
        q(D_LATENT),
        q(D_ROPE),
        jax.eval_shape(make_cache),
        array((shape.b, max_pages), jnp.int32),
        array((shape.b,), jnp.int32),
    )


@jax.jit
def contract_inputs(args: Inputs) -> Inputs:
    """The same with values as the contract's tolerances take them: N(0,1) / 10, clamped to 1."""
    small = lambda x: jnp.clip(x / 10, -1, 1).astype(x.dtype)
    cache = args.cache
    if cache.scale is None:
        cache = dataclasses.replace(cache, latent=small(cache.latent), rope=small(cache.rope))
    elif cache.format in E4M3_FORMATS:  # powers of two must stay so in the others
        cache = dataclasses.replace(cache, scale=cache.scale / 10)
    return args._replace(q_latent=small(args.q_latent), q_rope=small(args.q_rope), cache=cache)


def some_sequences(args: Inputs, most: int = 4) -> tuple[np.ndarray, Inputs]:
    """Indices of a few sequences, the first and the last among them, and their arguments."""
    batch = args.q_latent.shape[0]
    chosen = np.unique(np.linspace(0, batch - 1, min(batch, most)).astype(int))
    q_latent, q_rope, cache, block_table, seq_lens = args
    return chosen, Inputs(
        q_latent[chosen], q_rope[chosen], cache, block_table[chosen], seq_lens[chosen]
    )


def _fill(key: jax.Array, num_pages: int, format: str, dtype: str) -> LatentCache:
    if format == unscaled_format(dtype).name:
        latent, rope = _normal(key, (num_pages, PAGE_SIZE), dtype)
        return LatentCache(latent=latent, rope=rope, scale=None, format=format)
    cache = init_cache(num_pages, page_size=PAGE_SIZE, format=format)
    fill = jax.jit(append, donate_argnums=0)
    for start in range(0, cache.num_slots, _CHUNK):
        slots = start + jnp.arange(min(_CHUNK, cache.num_slots - start))
        key, chunk_key = jax.random.split(key)
        cache = fill(cache, *_normal(chunk_key, (len(slots),), dtype), slots)
    return cache


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> tuple[jax.Array, jax.Array]:
    """Latents and rope keys, or the two parts of queries."""
    latent_key, rope_key = jax.random.split(key)
    # In float32: JAX draws a normal of 16 bits from so few that it has no tails.
    make = lambda key, d: jax.random.normal(key, (*shape, d), jnp.float32).astype(dtype)
    return make(latent_key, D_LATENT), make(rope_key, D_ROPE)


@functools.partial(jax.jit, static_argnames="causal", compiler_options=UNTUNED)
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

    def fault(self, dtype: str, format: str = "bf16") -> str:
        """What is wrong, empty if nothing is."""
        if self.bad:
            return f"{self.bad} elements are off, by up to {self.max_err:.3g}"
        limit = tolerance_of(dtype, format).cos
        if not self.cos < limit:
            return f"the cosine term is {self.cos:.3g}: must be below {limit:.3g}"
        return ""


def tolerance_of(dtype: str, format: str) -> Tolerance:
    """Of outputs in `dtype` from a cache in `format`."""
    return E4M3_OUT if format in E4M3_FORMATS else OUT[dtype]


def compare(found: jax.Array, wanted: jax.Array, format: str = "bf16") -> Comparison:
    """Compare on the device by the tolerance of the output's dtype and the cache's format."""
    tolerance = tolerance_of(found.dtype.name, format)
    return Comparison(*(x.item() for x in _compare(found, wanted, tolerance.atol, tolerance.rtol)))


@jax.jit
def _compare(found, wanted, atol, rtol):
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    error = jnp.abs(found - wanted)
    good = (error < atol) | (error < rtol * jnp.abs(wanted))
    # 1 - 2xy / (xx + yy) without the cancellation: the sum of (x - y)^2 over the same.
    cos = jnp.sum(error**2) / jnp.sum(found**2 + wanted**2)
    return jnp.max(error), cos, jnp.sum(~good)
