"""Inputs that a kernel must get right: poisoned memory, shuffled pages, ragged lengths."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax import LatentCache, dispatch, init_cache
from pallas_kernels.hopper import plan
from pallas_kernels.hopper.limits import BLOCK_M

WILD = (2147480000, -1, -2147483648, 2147483647)
"""What stands in block table entries that no token needs."""

SCALE = 0.13523
"""DeepSeek-V3's: 192 ** -0.5 * (0.1 * log(40) + 1) ** 2."""


def values(rng, *shape, dtype=jnp.float32):
    """The contract's distribution: randn / 10, clamped to +-1."""
    return jnp.asarray(np.clip(rng.standard_normal(shape) / 10, -1, 1), dtype)


def poisoned(num_pages, **sizes) -> LatentCache:
    """A cache that is NaN all over."""
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), init_cache(num_pages, **sizes))


# The reference, whatever device a test pretends to have.
_append = jax.jit(functools.partial(dispatch.call, "append", "xla"))


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """Arguments of a decode call; `live` are the slots that hold a token."""

    q_latent: jax.Array
    q_rope: jax.Array
    cache: LatentCache
    block_table: jax.Array
    seq_lens: jax.Array
    live: np.ndarray

    @property
    def args(self):
        return self.q_latent, self.q_rope, self.cache, self.block_table, self.seq_lens

    @property
    def one_part(self):
        """The parts array of a plan that splits nothing: one CTA takes all sequences."""
        # So many rows that their tiles take every SM.
        return plan.divide(self.seq_lens, rows=plan.num_sms() * BLOCK_M)


def decode_case(
    lens,
    *,
    s_q=1,
    h_q=3,
    page_size=16,
    format="bf16",
    dtype=jnp.bfloat16,
    kv_lora_rank=192,
    rope_dim=16,
    max_pages=None,
    spare_pages=2,
    seed=0,
) -> DecodeCase:
    """Sequences of these lengths on shuffled pages, everything else poisoned."""
    rng = np.random.default_rng(seed)
    pages_of = [-(-n // page_size) for n in lens]
    max_pages = max(pages_of) + 1 if max_pages is None else max_pages
    order = rng.permutation(sum(pages_of) + spare_pages)
    block_table = np.resize(np.array(WILD, np.int32), (len(lens), max_pages))
    slots, used = [], 0
    for b, n in enumerate(lens):
        pages = order[used : used + pages_of[b]]
        used += pages_of[b]
        block_table[b, : len(pages)] = pages
        slots += [pages[t // page_size] * page_size + t % page_size for t in range(n)]
    cache = poisoned(
        len(order),
        page_size=page_size,
        kv_lora_rank=kv_lora_rank,
        rope_dim=rope_dim,
        format=format,
    )
    live = np.array(slots, np.int32)
    # A few sizes only, so that few programs are compiled.
    padded = np.pad(live, (0, -len(live) % 256), constant_values=-1)
    token = lambda channels: values(rng, len(padded), channels, dtype=dtype)
    if slots:
        cache = _append(cache, token(kv_lora_rank), token(rope_dim), padded)
    q = lambda channels: values(rng, len(lens), s_q, h_q, channels, dtype=dtype) * 10
    return DecodeCase(
        q(kv_lora_rank),
        q(rope_dim),
        cache,
        jnp.asarray(block_table),
        jnp.asarray(lens, jnp.int32),
        live,
    )


def with_scales_of(case: DecodeCase, exponents) -> DecodeCase:
    """An `fp8_ds_mla` case whose i-th 128 channels are so many powers of two larger, their queries
    as much smaller."""
    factors = np.exp2(np.array(exponents, np.float32))
    by_channel = jnp.asarray(np.repeat(factors, 128), case.q_latent.dtype)
    cache = dataclasses.replace(case.cache, scale=case.cache.scale * factors)
    return dataclasses.replace(case, q_latent=case.q_latent / by_channel, cache=cache)


def sparse_indices(rng, live, *shape):
    """Slots drawn from `live`, a fifth of them -1 or no slot at all."""
    indices = rng.choice(live, shape) if len(live) else np.full(shape, -1)
    nothing = rng.choice(np.array(WILD), shape)
    return jnp.asarray(np.where(rng.random(shape) < 0.2, nothing, indices), jnp.int32)
