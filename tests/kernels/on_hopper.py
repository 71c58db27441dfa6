"""What the tests of all decode kernels on the GPU share."""

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax import mla_decode
from tests import inputs

LENS = {
    "ragged": (0, 1, 63, 64, 65, 300),
    "split": (0, 9000, 1, 64, 0, 700),
    "many": (*[700, 0, 65, 2000, 1, 129] * 6, 0, 0),
}


def sinks(h_q):
    sink = np.random.default_rng(1).standard_normal(h_q) * 3
    sink[1::5], sink[2::5] = np.inf, -np.inf
    return jnp.asarray(sink, jnp.float32)


def poison_free_memory():
    """What the allocator hands out next is NaN, not what an earlier test left there."""
    jax.block_until_ready(jnp.full(1 << 26, jnp.nan))


def compiled(scale=inputs.SCALE, causal=True, attn_sink=None, implementation="mosaic"):
    """Lengths, table and plan are traced."""
    kwargs = {"scale": scale, "causal": causal, "attn_sink": attn_sink, "return_lse": True}

    @jax.jit
    def decode(*args, plan=None):
        return mla_decode(*args, **kwargs, plan=plan, implementation=implementation)

    return decode


def assert_bitwise_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(
            np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8), strict=True
        )
