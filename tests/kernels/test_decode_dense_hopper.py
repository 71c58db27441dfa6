"""`mla_decode` on the Hopper kernel, against the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import LatentCache, mla_decode, plan_decode
from tests import inputs, oracle, tolerances
from tests.kernels.on_hopper import (
    LENS,
    assert_bitwise_equal,
    compiled,
    poison_free_memory,
    sinks,
)
from tests.kernels.pairwise import pairwise

pytestmark = pytest.mark.hopper

FORMATS = {"bf16": jnp.bfloat16, "f16": jnp.float16, "fp8_ds_mla": jnp.bfloat16}
"""With the dtype of the queries."""

on_each_kernel = pytest.mark.parametrize("format", ["bf16", "fp8_ds_mla"])

# Less than a row of a swizzle atom, not whole atoms, one tile, whole tiles, tiles that overlap.
HEADS_AND_QUERIES = [
    *[(1, 1), (1, 4), (4, 1), (4, 3), (8, 2), (16, 1), (16, 4), (16, 5)],
    *[(24, 1), (24, 4), (32, 2), (32, 3), (64, 1), (33, 2), (128, 1), (128, 2), (2, 40)],
]


def decode_case(lens, h_q=16, s_q=1, page_size=64, c=512, r=64, format="bf16", seed=0):
    return inputs.decode_case(
        lens,
        h_q=h_q,
        s_q=s_q,
        page_size=page_size,
        kv_lora_rank=c,
        rope_dim=r,
        format=format,
        dtype=FORMATS[format],
        seed=seed,
    )


def check(case, *, scale=inputs.SCALE, causal=True, attn_sink=None):
    decode = compiled(scale, causal, attn_sink)
    poison_free_memory()
    out, lse = decode(*case.args)
    assert out.dtype == case.q_latent.dtype and lse.dtype == jnp.float32
    for _ in range(3):
        assert_bitwise_equal(decode(*case.args), (out, lse))
    expected_out, expected_lse = oracle.decode(
        *case.args, scale=scale, causal=causal, attn_sink=attn_sink
    )
    tolerances.check("out", out, expected_out, tolerances.OUT[out.dtype.name])
    tolerances.check("lse", lse, expected_lse, tolerances.LSE)
    return out, lse


CASES = pairwise(
    HEADS_AND_QUERIES,
    page_size=(16, 32, 64, 128),
    lens=tuple(LENS),
    c=(512, 256),
    r=(64, 32),
    format=tuple(FORMATS),
    causal=(True, False),
    sink=(False, True),
)


@pytest.mark.parametrize(
    ("rows", "choice"),
    CASES,
    ids=lambda x: "-".join(map(str, x if type(x) is tuple else x.values())),
)
def test_pairwise(rows, choice):
    h_q, s_q = rows
    sizes = {name: choice[name] for name in ("page_size", "c", "r", "format")}
    case = decode_case(LENS[choice["lens"]], h_q, s_q, **sizes)
    check(case, causal=choice["causal"], attn_sink=sinks(h_q) if choice["sink"] else None)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("r", [64, 32])
@pytest.mark.parametrize("c", [512, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize(("h_q", "s_q"), [(5, 1), (16, 4), (128, 2)])
def test_full_product(h_q, s_q, page_size, c, r, format):
    check(decode_case(LENS["many"], h_q, s_q, page_size, c, r, format))


@on_each_kernel
def test_a_chunk_of_a_prompt(format):
    """Thousands of rows; a sequence shorter than the chunk has queries that see nothing."""
    out, lse = check(decode_case((1500, 1024, 300, 0), h_q=2, s_q=1024, format=format))
    assert (np.asarray(out)[2, :724] == 0).all() and np.isneginf(lse[2, :, :724]).all()


@on_each_kernel
def test_pieces_of_a_tile(format):
    for h_q in (16, 128):
        check(decode_case((1000,), h_q=h_q, format=format))


@on_each_kernel
def test_long_ring(format):
    """Every CTA takes each stage of the ring ten times and more, across sequences."""
    check(decode_case((3000, 1, 2900, 0, 3100, 64) * 10, h_q=128, format=format))


@on_each_kernel
def test_rising_maximum(format):
    """Scores of hundreds: the running maximum rises by more than is let pass without rescaling."""
    check(decode_case(LENS["many"], h_q=64, format=format), scale=20.0)


@pytest.mark.parametrize("exponents", [(-20, 20, 7, 8), (20, -20, 0, -13)])
def test_scales_far_from_one(exponents):
    case = decode_case(LENS["many"], format="fp8_ds_mla")
    expected_out, expected_lse = oracle.decode(*case.args, scale=inputs.SCALE)
    out, lse = compiled()(*inputs.with_scales_of(case, exponents).args)
    out = np.asarray(out, np.float32) / np.repeat(np.exp2(np.array(exponents, np.float32)), 128)
    tolerances.check("out", out, expected_out, tolerances.OUT["bfloat16"])
    tolerances.check("lse", lse, expected_lse, tolerances.LSE)


def test_it_attends_to_the_dequantised_cache():
    """Conversion is exact: the same bits as from a bf16 cache of the converted values."""
    case = decode_case(LENS["many"], format="fp8_ds_mla")
    latent = case.cache.latent.astype(jnp.float32) * jnp.repeat(case.cache.scale, 128, axis=-1)
    converted = LatentCache(latent.astype(jnp.bfloat16), case.cache.rope, None, "bf16")
    q_latent, q_rope, _, *rest = case.args
    assert_bitwise_equal(compiled()(*case.args), compiled()(q_latent, q_rope, converted, *rest))


def test_large_scores_of_either_sign():
    case = decode_case((0, 1, 65, 5000))
    q_latent, q_rope, *rest = case.args
    args = (q_latent * 1e4, q_rope * 1e4, *rest)
    out, lse = compiled(scale=1.0)(*args)
    expected_out, expected_lse = oracle.decode(*args, scale=1.0)
    assert np.abs(expected_lse[1:]).max() > 1000
    tolerances.check("out", out, expected_out, tolerances.LARGE_SCORES_OUT)
    tolerances.check("lse", lse, expected_lse, tolerances.LSE)


@functools.cache
def typical(format="bf16"):
    return compiled(), decode_case(LENS["split"], h_q=16, s_q=2, format=format)


def test_one_program_for_all_lengths():
    """Lengths and table change from step to step; so does what is split."""
    decode, case = typical()
    for lens in ((0, 9000, 1, 64, 0, 700), (0, 100, 1, 0, 0, 700), (0, 0, 0, 0, 0, 0)):
        args = (*case.args[:4], jnp.asarray(lens, jnp.int32))
        out, lse = decode(*args)
        expected_out, expected_lse = oracle.decode(*args, scale=inputs.SCALE)
        tolerances.check("out", out, expected_out, tolerances.OUT["bfloat16"])
        tolerances.check("lse", lse, expected_lse, tolerances.LSE)
    assert decode._cache_size() == 1


@on_each_kernel
def test_plan_changes_nothing(format):
    decode, case = typical(format)
    plan = plan_decode(case.seq_lens, num_heads=16, q_len=2, page_size=64)
    assert_bitwise_equal(decode(*case.args, plan=plan), decode(*case.args))


@on_each_kernel
def test_negative_lengths_are_empty(format):
    decode, case = typical(format)
    lens = jnp.asarray([-(2**31), 9000, -1, 64, 0, 700], jnp.int32)
    with_zeros = decode(*case.args[:4], jnp.maximum(lens, 0))
    assert_bitwise_equal(decode(*case.args[:4], lens), with_zeros)


@on_each_kernel
def test_lengths_that_the_table_has_no_place_for(format):
    sizes = {"h_q": 16, "page_size": 64, "kv_lora_rank": 512, "rope_dim": 64, "format": format}
    case = inputs.decode_case((64, 640, 3), s_q=3, max_pages=10, **sizes)
    out, lse = compiled()(*case.args[:4], case.seq_lens.at[1].set(20_000))
    wanted_out, wanted_lse = oracle.decode(*case.args, scale=inputs.SCALE)
    tolerances.check("out", out, wanted_out, tolerances.OUT[out.dtype.name])
    tolerances.check("lse", lse, wanted_lse, tolerances.LSE)


@pytest.mark.parametrize("scale", [0.2, 0.0, -0.2])
def test_scale_may_be_traced(scale):
    case = decode_case(LENS["ragged"], h_q=8, s_q=2)
    decode = jax.jit(functools.partial(mla_decode, implementation="mosaic", return_lse=True))
    out, lse = decode(*case.args, scale=scale)
    wanted_out, wanted_lse = oracle.decode(*case.args, scale=scale)
    tolerances.check("out", out, wanted_out, tolerances.OUT[out.dtype.name])
    tolerances.check("lse", lse, wanted_lse, tolerances.LSE)


def test_vmap_is_one_call_after_the_other():
    case = decode_case((65, 0, 300), h_q=16)
    q_latent, q_rope, *rest = case.args
    double = lambda x: jnp.stack([x, -x])
    decode = jax.jit(jax.vmap(lambda a, b: compiled()(a, b, *rest)))
    out, lse = decode(double(q_latent), double(q_rope))
    for i, sign in enumerate((1, -1)):
        alone = compiled()(sign * q_latent, sign * q_rope, *rest)
        assert jnp.array_equal(out[i], alone[0])
        assert jnp.array_equal(lse[i], alone[1])


@on_each_kernel
def test_in_a_loop(format):
    """What a loop stacks is what each of its calls gives, split sequences or not."""
    decode, case = typical(format)
    q_latent, *rest = case.args
    body = lambda q, _: (-q, compiled()(q, *rest))
    _, stacked = jax.jit(lambda q: jax.lax.scan(body, q, length=3))(q_latent)
    for i, sign in enumerate((1, -1, 1)):
        assert_bitwise_equal([x[i] for x in stacked], decode(sign * q_latent, *rest))


@on_each_kernel
@pytest.mark.parametrize("h_q", [1, 3, 8])
@pytest.mark.parametrize("seq_len", [1, 100, 5000])
def test_one_sequence_with_few_heads(h_q, seq_len, format):
    """The output is a slice of what the kernel stores, with nothing between its rows."""
    check(decode_case((seq_len,), h_q=h_q, format=format))


def test_output_alone_is_the_same():
    decode, case = typical()
    out = mla_decode(*case.args, scale=inputs.SCALE, implementation="mosaic")
    assert_bitwise_equal([out], decode(*case.args)[:1])


@on_each_kernel
def test_it_is_what_none_chooses(format):
    """`implementation=None` serves what this kernel can by it, and the rest by another."""
    case = decode_case(LENS["split"], h_q=64, format=format)
    call = functools.partial(mla_decode, scale=inputs.SCALE, return_lse=True)
    assert_bitwise_equal(call(*case.args), compiled()(*case.args))
    other = inputs.decode_case((40,), page_size=48)
    assert_bitwise_equal(call(*other.args), call(*other.args, implementation="xla"))
