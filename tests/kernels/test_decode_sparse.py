import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax import mla_decode, mla_sparse_decode
from pallas_kernels.formats import FORMATS
from tests import inputs, oracle, tolerances
from tests.kernels.implementations import implementations


def check(case, indices, implementation="xla", **kwargs):
    args = (case.q_latent, case.q_rope, case.cache, indices)
    out, lse = mla_sparse_decode(
        *args, scale=inputs.SCALE, return_lse=True, implementation=implementation, **kwargs
    )
    (b, s_q, h_q) = out.shape[:3]
    one_query = lambda x: np.asarray(x).reshape(b * s_q, *x.shape[2:])
    lengths = kwargs.get("topk_length")
    expected, _, expected_lse = oracle.sparse(
        one_query(case.q_latent),
        one_query(case.q_rope),
        *oracle.dequantise(case.cache),
        one_query(indices),
        scale=inputs.SCALE,
        lengths=None if lengths is None else np.repeat(lengths, s_q),
        attn_sink=kwargs.get("attn_sink"),
    )
    expected_lse = expected_lse.reshape(b, s_q, h_q).swapaxes(1, 2)
    tolerances.check("out", out, expected.reshape(out.shape), tolerances.OUT[out.dtype.name])
    tolerances.check("lse", lse, expected_lse, tolerances.LSE)
    return out, lse


def indices_of(case, k, seed=0):
    b, s_q = case.q_latent.shape[:2]
    return inputs.sparse_indices(np.random.default_rng(seed), case.live, b, s_q, k)


@implementations("mla_sparse_decode")
@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format, implementation):
    case = inputs.decode_case((0, 70, 200), s_q=2, h_q=4, format=format, page_size=64)
    check(case, indices_of(case, 130), implementation)


@implementations("mla_sparse_decode")
def test_deepseek_sizes(implementation):
    sizes = {"kv_lora_rank": 512, "rope_dim": 64, "page_size": 64, "h_q": 128}
    case = inputs.decode_case((300, 100), format="fp8_ds_mla", **sizes)
    check(case, indices_of(case, 256), implementation)


@given(
    k=st.sampled_from([1, 64, 65]),
    lengths=st.lists(st.integers(-1, 70), min_size=2, max_size=2),
    sinks=st.lists(st.floats(width=32, allow_nan=False), min_size=3, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_any_length_and_sink(k, lengths, sinks, seed):
    case = inputs.decode_case((30, 50), s_q=2, dtype=jnp.float32, kv_lora_rank=32, seed=seed)
    check(
        case,
        indices_of(case, k, seed),
        topk_length=np.array(lengths),
        attn_sink=np.array(sinks, np.float32),
    )


def test_nothing_to_attend_to():
    case = inputs.decode_case((30,), h_q=2)
    sink = np.array([-np.inf, np.inf], np.float32)
    for indices in (jnp.full((1, 1, 5), -1), jnp.zeros((1, 1, 0), jnp.int32)):
        out, lse = check(case, indices, attn_sink=sink)
        assert (np.asarray(out) == 0).all() and np.isneginf(lse).all()


def test_a_slot_named_twice_counts_twice():
    case = inputs.decode_case((30,), dtype=jnp.float32)
    check(case, jnp.tile(jnp.asarray(case.live[:1]), (1, 1, 3)))


def test_all_slots_of_a_sequence_are_dense_decode():
    case = inputs.decode_case((50,), dtype=jnp.float32)
    indices = jnp.asarray(case.live)[::-1][None, None]
    sparse = check(case, indices)
    dense = mla_decode(*case.args, scale=inputs.SCALE, return_lse=True)
    tolerances.check("out", sparse[0], dense[0], tolerances.OUT["float32"])
    tolerances.check("lse", sparse[1], dense[1], tolerances.LSE)


def test_jit_and_reruns_are_bitwise_equal():
    case = inputs.decode_case((30, 50), format="fp8_ds_mla")
    args = (case.q_latent, case.q_rope, case.cache, indices_of(case, 40))
    sparse = lambda *args: mla_sparse_decode(
        *args[:4], scale=1.0, topk_length=args[4], attn_sink=args[5]
    )
    args = (*args, jnp.array([10, 40]), jnp.zeros(3))
    np.testing.assert_array_equal(sparse(*args), sparse(*args))
    np.testing.assert_array_equal(sparse(*args), jax.jit(sparse)(*args))
