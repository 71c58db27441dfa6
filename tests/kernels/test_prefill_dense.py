import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax import mla_prefill
from tests import inputs, oracle, tolerances
from tests.kernels.implementations import implementations


def arguments(b=2, t=5, n=300, h=3, d=24, d_v=16, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (inputs.values(rng, *s) for s in ((b, t, h, d), (b, n, h, d), (b, n, h, d_v)))
    return tuple(x.astype(dtype) for x in (q * 10, k * 10, v))


def poison_past(x, lens):
    """NaN in the rows from `lens[b]` on."""
    if lens is None:
        return x
    past = jnp.arange(x.shape[1]) >= jnp.asarray(lens)[:, None]
    return jnp.where(past[..., None, None], jnp.nan, x)


def check(args, implementation="xla", *, grads=True, **kwargs):
    """Outputs and gradients against the oracle, with NaN past the lengths and in dead rows."""
    q_lens, kv_lens = kwargs.get("q_lens"), kwargs.get("kv_lens")
    poisoned = [
        poison_past(x, lens) for x, lens in zip(args, (q_lens, kv_lens, kv_lens), strict=True)
    ]
    prefill = lambda *args: mla_prefill(
        *args, scale=inputs.SCALE, return_lse=True, implementation=implementation, **kwargs
    )
    (out, lse), vjp = jax.vjp(prefill, *poisoned)
    rng = np.random.default_rng(1)
    d_out, d_lse = inputs.values(rng, *out.shape, dtype=out.dtype), inputs.values(rng, *lse.shape)
    expected_out, expected_lse, expected_grads = oracle.prefill(
        *args, scale=inputs.SCALE, d_out=d_out, d_lse=d_lse, **kwargs
    )
    empty = np.isneginf(lse)  # constant rows: their cotangents must not matter
    d_lse = jnp.where(empty, jnp.nan, d_lse)
    d_out = jnp.where(empty.swapaxes(1, 2)[..., None], jnp.nan, d_out)
    tolerance = tolerances.PREFILL_OUT[out.dtype.name]
    tolerances.check("out", out, expected_out, tolerance)
    tolerances.check("lse", lse, expected_lse, tolerances.PREFILL_LSE)
    if grads:
        for name, grad, expected in zip("qkv", vjp((d_out, d_lse)), expected_grads, strict=True):
            assert grad.dtype == out.dtype
            tolerances.check(f"gradient of {name}", grad, expected, tolerance)
    return out, lse


@implementations("mla_prefill")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_deepseek_sizes(dtype, causal, implementation):
    args = arguments(t=130, n=130, h=4, d=192, d_v=128, dtype=dtype)
    check(args, implementation, causal=causal)


@implementations("mla_prefill")
def test_a_later_chunk_of_a_ragged_batch(implementation):
    lens = {"q_lens": np.array([5, 3]), "kv_lens": np.array([300, 40])}
    check(arguments(), implementation, **lens)


@given(
    q_lens=st.lists(st.integers(0, 5), min_size=2, max_size=2),
    kv_lens=st.lists(st.integers(0, 130), min_size=2, max_size=2),
    causal=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_lengths(q_lens, kv_lens, causal, seed):
    lens = {"q_lens": np.array(q_lens), "kv_lens": np.array(kv_lens)}
    check(arguments(n=130, h=1, d=8, d_v=4, seed=seed), causal=causal, **lens)


def test_more_queries_than_keys():
    _, lse = check(arguments(t=5, n=3))
    assert np.isneginf(lse[..., :2]).all()


@pytest.mark.parametrize(("t", "n"), [(0, 3), (3, 0), (0, 0)])
def test_nothing(t, n):
    out, lse = check(arguments(t=t, n=n))
    assert (np.asarray(out) == 0).all() and np.isneginf(lse).all()


def test_gradient_of_the_scale():
    args = arguments(n=20)
    loss = lambda scale: jnp.sum(mla_prefill(*args, scale=scale) ** 2)
    found, step = jax.grad(loss)(jnp.float32(0.3)), 1e-3
    out = lambda scale: np.sum(oracle.prefill(*args, scale=scale)[0] ** 2)
    np.testing.assert_allclose(
        found, (out(0.3 + step) - out(0.3 - step)) / (2 * step), **tolerances.SCALE_GRADIENT
    )


def test_jit_and_reruns_are_bitwise_equal():
    args = arguments(dtype=jnp.bfloat16)
    grad = jax.grad(lambda *args: jnp.sum(mla_prefill(*args, scale=0.1)), (0, 1, 2))
    for a, b, c in zip(grad(*args), grad(*args), jax.jit(grad)(*args), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_memory_is_that_of_a_chunk():
    """Scores of all keys at once would be 2 GiB."""
    b, t, h = 1, 8192, 8
    shape = jax.ShapeDtypeStruct
    args = [shape((b, t, h, d), jnp.bfloat16) for d in (192, 192, 128)]
    loss = lambda *args: jnp.sum(mla_prefill(*args, scale=1.0).astype(jnp.float32))
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 600 * 2**20
