"""`mla_decode` by `implementation="xla"`; `test_decode_dense_hopper.py` has the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax import append, init_cache, mla_decode, plan_decode
from pallas_kernels.formats import FORMATS
from tests import inputs, oracle, tolerances

RAGGED = (0, 1, 63, 64, 65, 300)


def check(case, *, causal=True, attn_sink=None, plan=None):
    kwargs = {"scale": inputs.SCALE, "causal": causal, "attn_sink": attn_sink}
    out, lse = mla_decode(*case.args, **kwargs, plan=plan, return_lse=True, implementation="xla")
    assert out.dtype == case.q_latent.dtype and lse.dtype == jnp.float32
    expected_out, expected_lse = oracle.decode(*case.args, **kwargs)
    tolerances.check("out", out, expected_out, tolerances.OUT[out.dtype.name])
    tolerances.check("lse", lse, expected_lse, tolerances.LSE)
    return out, lse


@pytest.mark.parametrize("format", FORMATS)
def test_deepseek_sizes(format):
    dtype = {"f16": jnp.float16, "f32": jnp.float32}.get(format, jnp.bfloat16)
    sizes = {"kv_lora_rank": 512, "rope_dim": 64, "page_size": 64, "h_q": 16}
    check(inputs.decode_case(RAGGED, format=format, dtype=dtype, **sizes))


@pytest.mark.parametrize(
    ("page_size", "s_q", "h_q", "format", "dtype", "causal"),
    [
        (16, 1, 8, "bf16", jnp.float32, True),
        (32, 2, 3, "fp8_ds_mla", jnp.bfloat16, True),
        (128, 3, 1, "bf16", jnp.bfloat16, False),
        (16, 4, 5, "fp8_token", jnp.bfloat16, True),
        (64, 2, 128, "fp8_full", jnp.float32, False),
        (32, 3, 6, "f32", jnp.bfloat16, True),
        (64, 4, 2, "f16", jnp.bfloat16, True),
    ],
)
def test_pairwise(page_size, s_q, h_q, format, dtype, causal):
    sizes = {"page_size": page_size, "s_q": s_q, "h_q": h_q}
    case = inputs.decode_case(RAGGED, format=format, dtype=dtype, **sizes)
    check(case, causal=causal)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("s_q", [1, 4])
@pytest.mark.parametrize("page_size", [1, 48, 1000])
def test_full_product(page_size, s_q, dtype, format, causal):
    case = inputs.decode_case(RAGGED, format=format, dtype=dtype, page_size=page_size, s_q=s_q)
    check(case, causal=causal)


@given(
    lens=st.lists(st.integers(0, 80), min_size=3, max_size=3),
    shape=st.sampled_from(
        [
            (1, 80, 1, "f32", True),
            (7, 12, 2, "fp8_ds_mla", True),
            (16, 5, 4, "bf16", False),
            (48, 2, 1, "fp8_token", True),
            (80, 1, 3, "fp8_full", True),
        ]
    ),
    seed=st.integers(0, 2**31),
)
def test_any_lengths_on_any_pages(lens, shape, seed):
    page_size, max_pages, s_q, format, causal = shape
    total = 80 // page_size * 3 + 3
    case = inputs.decode_case(
        lens,
        page_size=page_size,
        max_pages=max_pages,
        spare_pages=total - sum(-(-n // page_size) for n in lens),
        s_q=s_q,
        format=format,
        dtype=jnp.float32,
        kv_lora_rank=32,
        rope_dim=8,
        seed=seed,
    )
    check(case, causal=causal)


def test_more_queries_than_keys():
    out, lse = check(inputs.decode_case((2, 0, 1), s_q=4))
    assert np.isneginf(lse[0, :, :2]).all() and (np.asarray(out)[0, :2] == 0).all()


def test_many_queries():
    """A chunk of a prompt through the decode path."""
    check(inputs.decode_case((300,), s_q=257, h_q=2, kv_lora_rank=64))


def test_attn_sink():
    sink = np.array([0.5, np.inf, -np.inf], np.float32)
    case = inputs.decode_case((0, 5, 40), dtype=jnp.float32)
    out, lse = check(case, attn_sink=sink)
    without, same_lse = check(case)
    assert (np.asarray(out)[:, :, 1] == 0).all()
    np.testing.assert_array_equal(out[:, :, 2], without[:, :, 2])
    np.testing.assert_array_equal(lse, same_lse)


def test_plan_changes_nothing():
    case = inputs.decode_case((0, 5, 40), page_size=64)
    plan = plan_decode(case.seq_lens, num_heads=3, page_size=64)
    with_plan, without = check(case, plan=plan), check(case)
    np.testing.assert_array_equal(with_plan[0], without[0])


@pytest.mark.parametrize("entry", [*inputs.WILD, 5])
def test_a_page_that_is_none_holds_no_token(entry):
    """A live position whose entry is not a page: not seen, as if the sequence had a hole."""
    case = inputs.decode_case((40,), dtype=jnp.float32)
    holed = case.block_table.at[0, 1].set(entry)
    out, lse = mla_decode(
        case.q_latent,
        case.q_rope,
        case.cache,
        holed,
        case.seq_lens,
        scale=inputs.SCALE,
        return_lse=True,
    )
    latent, rope = oracle.dequantise(case.cache)
    slots = [*case.live[:16], *case.live[32:]]
    expected, expected_lse, _ = oracle.attend(
        case.q_latent[0], case.q_rope[0], latent[slots], rope[slots], True, inputs.SCALE
    )
    tolerances.check("out", out[0], expected, tolerances.OUT["float32"])
    tolerances.check("lse", lse[0], expected_lse.T, tolerances.LSE)


@pytest.mark.parametrize("causal", [True, False])
def test_lengths_that_make_no_sense_are_bounded(causal):
    """Longer than the table: as long as that. Negative: nothing."""
    case = inputs.decode_case((16, 16), s_q=3, max_pages=1, dtype=jnp.float32)
    call = lambda lens: mla_decode(*case.args[:4], jnp.array(lens), scale=1.0, causal=causal)
    np.testing.assert_array_equal(call([1000, -(2**31)])[0], call([16, 0])[0])
    np.testing.assert_array_equal(call([1000, -(2**31)])[1], 0)


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_but_empty_sequences(format):
    out, lse = check(inputs.decode_case((0, 0), format=format))
    assert (out == 0).all() and (lse == -jnp.inf).all()


def test_empty_batch():
    case = inputs.decode_case((3,))
    args = (case.q_latent[:0], case.q_rope[:0], case.cache, case.block_table[:0], case.seq_lens[:0])
    assert mla_decode(*args, scale=1.0).shape == (0, 1, 3, 192)


def test_large_scores():
    """Scores of thousands of either sign: the maximum is taken off before exp."""
    case = inputs.decode_case((0, 1, 65), dtype=jnp.float32)
    q_latent, q_rope, *rest = case.args
    args = (q_latent * 1e4, q_rope * 1e4, *rest)
    out, lse = mla_decode(*args, scale=1.0, return_lse=True)
    expected, expected_lse = oracle.decode(*args, scale=1.0)
    assert np.abs(expected_lse[1:]).max() > 1000
    tolerances.check("out", out, expected, tolerances.LARGE_SCORES_OUT)
    tolerances.check("lse", lse, expected_lse, tolerances.LSE)


def test_rope_keys_of_a_thousand():
    """fp8 formats whose rope key stays in 16 bits keep its weight in the score."""
    rng = np.random.default_rng(0)
    latent, rope = inputs.values(rng, 40, 192) * 100, inputs.values(rng, 40, 16) * 1e4
    case = inputs.decode_case((40,))
    scores = {}
    for format in ("f32", "fp8_ds_mla", "fp8_token"):
        cache = inputs.poisoned(5, page_size=16, kv_lora_rank=192, rope_dim=16, format=format)
        cache = append(cache, latent, rope, case.live)
        args = (case.q_latent * 0, case.q_rope, cache, case.block_table, case.seq_lens)
        scores[format] = mla_decode(*args, scale=1e-3, return_lse=True)[1]
    for format in ("fp8_ds_mla", "fp8_token"):
        np.testing.assert_allclose(
            scores[format], scores["f32"], **tolerances.LARGE_ROPE_LSE, err_msg=format
        )


@pytest.mark.parametrize("format", ["bf16", "fp8_token"])
def test_jit_with_traced_arguments_and_reruns_are_bitwise_equal(format):
    case = inputs.decode_case(RAGGED, format=format, s_q=2)
    decode = lambda *args: mla_decode(*args, scale=inputs.SCALE, return_lse=True)
    eager, again, jitted = decode(*case.args), decode(*case.args), jax.jit(decode)(*case.args)
    for a, b, c in zip(eager, again, jitted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        np.testing.assert_array_equal(np.asarray(a), np.asarray(c))


def test_scale_may_be_traced():
    case = inputs.decode_case((5, 20))
    decode = lambda scale: mla_decode(*case.args, scale=scale)
    np.testing.assert_array_equal(jax.jit(decode)(jnp.float32(0.5)), decode(0.5))


def test_vmap_over_layers():
    cases = [inputs.decode_case((5, 20), seed=seed) for seed in range(2)]
    decode = lambda *args: mla_decode(*args, scale=0.3)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(case.args for case in cases))
    for out, case in zip(jax.vmap(decode)(*stacked), cases, strict=True):
        np.testing.assert_array_equal(out, decode(*case.args))


@pytest.mark.parametrize("format", ["bf16", "fp8_ds_mla", "fp8_token", "fp8_full"])
def test_memory_is_that_of_a_chunk(format):
    """128 heads on 16K tokens: one score for each is 64 MiB, the latents of all tokens in 8 bits
    are 64 MiB too, their keys per head 32 GiB."""
    b, h_q, length = 8, 128, 16384
    shape = jax.ShapeDtypeStruct
    cache = jax.eval_shape(lambda: init_cache(b * length // 64, format=format))
    compiled = (
        jax.jit(lambda *args: mla_decode(*args, scale=1.0))
        .lower(
            shape((b, 1, h_q, 512), jnp.bfloat16),
            shape((b, 1, h_q, 64), jnp.bfloat16),
            cache,
            shape((b, length // 64), jnp.int32),
            shape((b,), jnp.int32),
        )
        .compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 32 * 2**20


def test_steps_follow_the_longest_sequence_not_the_table():
    case = inputs.decode_case((5, 20), max_pages=4096)
    program = str(jax.make_jaxpr(lambda *args: mla_decode(*args, scale=1.0))(*case.args))
    assert "while[" in program and "scan[" not in program
    check(case)
