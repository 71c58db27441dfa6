"""`mla_decode` on the Hopper e4m3 kernel, against the oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from mla_jax import mla_decode, plan_decode
from pallas_kernels import decode
from pallas_kernels.decode_e4m3 import config
from pallas_kernels.formats import E4M3_FORMATS
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

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16}

# Less than a row of a swizzle atom, not whole atoms, one tile, whole tiles, tiles that overlap.
HEADS_AND_QUERIES = [
    *[(1, 1), (1, 4), (4, 1), (4, 3), (8, 2), (16, 1), (16, 4), (16, 5)],
    *[(24, 1), (24, 4), (32, 2), (32, 3), (64, 1), (33, 2), (128, 1), (128, 2), (2, 40)],
]


def decode_case(
    lens, h_q=16, s_q=1, page_size=64, c=512, r=64, format="fp8_token", dtype="bf16", seed=0
):
    """With queries as small as the contract has them: `inputs` makes them ten times as large."""
    case = inputs.decode_case(
        lens,
        h_q=h_q,
        s_q=s_q,
        page_size=page_size,
        kv_lora_rank=c,
        rope_dim=r,
        format=format,
        dtype=DTYPES[dtype],
        seed=seed,
    )
    small = lambda q: (q / 10).astype(q.dtype)
    return dataclasses.replace(case, q_latent=small(case.q_latent), q_rope=small(case.q_rope))


def compare(found, case, within=tolerances.E4M3_OUT, **kwargs):
    out, lse = found
    expected_out, expected_lse = oracle.decode(*case.args, **kwargs)
    tolerances.check("out", out, expected_out, within)
    tolerances.check("lse", lse, expected_lse, tolerances.E4M3_LSE)


def check(case, *, scale=inputs.SCALE, causal=True, attn_sink=None):
    decode = compiled(scale, causal, attn_sink)
    poison_free_memory()
    out, lse = decode(*case.args)
    assert out.dtype == case.q_latent.dtype and lse.dtype == jnp.float32
    for _ in range(3):
        assert_bitwise_equal(decode(*case.args), (out, lse))
    compare((out, lse), case, scale=scale, causal=causal, attn_sink=attn_sink)
    return out, lse


@pytest.mark.parametrize("h_q", [1, 16, 64, 128])
@pytest.mark.parametrize("lens", [(1,), (64,), (65,), (128,), (129,), (1000,)], ids=str)
@pytest.mark.parametrize("format", E4M3_FORMATS)
def test_one_sequence(format, lens, h_q):
    """The simplest first: one tile, one pair, a lone last tile, several pairs."""
    check(decode_case(lens, h_q, format=format))


@pytest.mark.parametrize("h_q", [4, 64, 128])
@pytest.mark.parametrize("format", E4M3_FORMATS)
def test_errors_of_few_tokens(format, h_q):
    """They do not average out; a lone tile is its own partner, for a second term of P."""
    case = decode_case((2,) * 24 + tuple(range(65)), h_q, page_size=16, format=format)
    compare(compiled()(*case.args), case, scale=inputs.SCALE, within=tolerances.E4M3_SHORT_OUT)


CASES = pairwise(
    HEADS_AND_QUERIES,
    page_size=(16, 32, 64, 128),
    lens=tuple(LENS),
    c=(512, 256),
    r=(64, 32),
    format=E4M3_FORMATS,
    dtype=tuple(DTYPES),
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
    sizes = {name: choice[name] for name in ("page_size", "c", "r", "format", "dtype")}
    case = decode_case(LENS[choice["lens"]], h_q, s_q, **sizes)
    check(case, causal=choice["causal"], attn_sink=sinks(h_q) if choice["sink"] else None)


@pytest.mark.slow
@pytest.mark.parametrize("format", E4M3_FORMATS)
@pytest.mark.parametrize("r", [64, 32])
@pytest.mark.parametrize("c", [512, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize(("h_q", "s_q"), [(5, 1), (16, 4), (128, 2)])
def test_full_product(h_q, s_q, page_size, c, r, format):
    check(decode_case(LENS["many"], h_q, s_q, page_size, c, r, format))


def test_long_ring():
    """Every CTA takes each stage of the ring many times, across sequences."""
    check(decode_case((3000, 1, 2900, 0, 3100, 64) * 10, h_q=128))


@pytest.mark.parametrize("length", [4096, 16384, 65536])
def test_long_sequences_in_one_part(length):
    """Products accumulate in the tensor cores over a whole piece, in less than float32: the result
    must not shrink with the length."""
    case = decode_case((length,), h_q=16)
    sizes = ("fp8_token", "bfloat16", 512, 64, 64, 16, 1, True, False)
    launch = functools.partial(decode.launch, config.Config(*sizes, scale=inputs.SCALE))
    out = jax.jit(launch)(*case.args, case.one_part)[0].reshape(case.q_latent.shape)
    expected, _ = oracle.decode(*case.args, scale=inputs.SCALE)
    tolerances.check("out", out, expected, tolerances.E4M3_OUT)


@pytest.mark.parametrize("format", E4M3_FORMATS)
def test_two_terms_of_p_are_nearly_as_good_as_16_bits(format):
    case = decode_case((300, 64, 1, 0), h_q=64, format=format)
    sizes = (format, "bfloat16", 512, 64, 64, 64, 1, True, False)
    two = config.Config(*sizes, scale=inputs.SCALE, p_terms=2)
    out = jax.jit(functools.partial(decode.launch, two))(*case.args, case.one_part)[0]
    expected, _ = oracle.decode(*case.args, scale=inputs.SCALE)
    found = out.reshape(case.q_latent.shape)
    tolerances.check("out", found, expected, tolerances.E4M3_TWO_TERMS_OUT)


@functools.cache
def typical():
    return compiled(), decode_case(LENS["split"], h_q=16, s_q=2)


def test_one_program_for_all_lengths():
    """Lengths and table change from step to step; so does what is split."""
    decode, case = typical()
    for lens in ((0, 9000, 1, 64, 0, 700), (0, 100, 1, 0, 0, 700), (0, 0, 0, 0, 0, 0)):
        changed = dataclasses.replace(case, seq_lens=jnp.asarray(lens, jnp.int32))
        compare(decode(*changed.args), changed, scale=inputs.SCALE)
    assert decode._cache_size() == 1


def test_plan_changes_nothing():
    decode, case = typical()
    plan = plan_decode(case.seq_lens, num_heads=16, q_len=2, page_size=64)
    assert_bitwise_equal(decode(*case.args, plan=plan), decode(*case.args))


def test_negative_lengths_are_empty():
    decode, case = typical()
    lens = jnp.asarray([-(2**31), 9000, -1, 64, 0, 700], jnp.int32)
    with_zeros = decode(*case.args[:4], jnp.maximum(lens, 0))
    assert_bitwise_equal(decode(*case.args[:4], lens), with_zeros)


def test_lengths_that_the_table_has_no_place_for():
    sizes = {"page_size": 64, "kv_lora_rank": 512, "rope_dim": 64, "format": "fp8_full"}
    case = inputs.decode_case((64, 640, 3), h_q=16, s_q=3, max_pages=10, **sizes)
    found = compiled(scale=0.01)(*case.args[:4], case.seq_lens.at[1].set(20_000))
    compare(found, case, scale=0.01)


@pytest.mark.parametrize("scale", [0.2, 0.0, -0.2])
def test_scale_may_be_traced(scale):
    case = decode_case(LENS["ragged"], h_q=8, s_q=2)
    decode = jax.jit(functools.partial(mla_decode, implementation="mosaic", return_lse=True))
    compare(decode(*case.args, scale=scale), case, scale=scale)


def test_it_is_what_none_chooses():
    """Few rows go to the transposed kernel."""
    decode, case = compiled(), decode_case(LENS["split"], h_q=64)
    call = functools.partial(mla_decode, scale=inputs.SCALE, return_lse=True)
    assert_bitwise_equal(call(*case.args), decode(*case.args))
