import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import mla_sparse_prefill
from tests import inputs, oracle, tolerances
from tests.kernels.implementations import implementations


def arguments(t=5, n=90, k=70, h_q=3, c=192, r=16, dtype=jnp.bfloat16, seed=0):
    """Row 0 is NaN, and no index names it."""
    rng = np.random.default_rng(seed)
    latent, rope = (inputs.values(rng, n, d, dtype=dtype).at[0].set(jnp.nan) for d in (c, r))
    indices = inputs.sparse_indices(rng, np.arange(1, n), t, k)
    q_latent, q_rope = (inputs.values(rng, t, h_q, d, dtype=dtype) * 10 for d in (c, r))
    return q_latent, q_rope, latent, rope, indices


def check(args, implementation="xla", *, lengths=None, attn_sink=None):
    kwargs = {"scale": inputs.SCALE, "attn_sink": attn_sink}
    out, max_logits, lse = mla_sparse_prefill(
        *args, topk_length=lengths, implementation=implementation, **kwargs
    )
    arrays = [np.asarray(x).astype(np.float64) for x in args[:4]]
    expected = oracle.sparse(*arrays, args[4], lengths=lengths, **kwargs)
    tolerances.check("out", out, expected[0], tolerances.OUT[out.dtype.name])
    tolerances.check("max_logits", max_logits, expected[1], tolerances.LSE)
    tolerances.check("lse", lse, expected[2], tolerances.LSE)
    return out, max_logits, lse


@implementations("mla_sparse_prefill")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("k", [1, 64, 130])
def test_against_oracle(k, dtype, implementation):
    check(arguments(k=k, dtype=dtype), implementation)


@implementations("mla_sparse_prefill")
def test_deepseek_sizes(implementation):
    check(arguments(t=3, n=200, k=128, h_q=128, c=512, r=64), implementation)


def test_lengths_and_sinks():
    sink = np.array([0.3, np.inf, -np.inf], np.float32)
    lengths = np.array([0, 1, 69, 70, 1000])
    out, max_logits, lse = check(arguments(), lengths=lengths, attn_sink=sink)
    assert (np.asarray(out)[0] == 0).all()
    assert np.isneginf(max_logits[0]).all() and np.isneginf(lse[0]).all()


def test_no_indices():
    out, max_logits, lse = check(arguments(k=0))
    assert (np.asarray(out) == 0).all()
    assert np.isneginf(max_logits).all() and np.isneginf(lse).all()


def test_jit_is_bitwise_equal():
    args = arguments()
    sparse = lambda *args: mla_sparse_prefill(*args, scale=1.0)
    for eager, jitted in zip(sparse(*args), jax.jit(sparse)(*args), strict=True):
        np.testing.assert_array_equal(eager, jitted)
