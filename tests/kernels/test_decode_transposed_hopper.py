"""`implementation="mosaic_transposed"` on the GPU, against the oracle.

What the schedules have in common (`plan`, traced lengths, loops, vmap) is in
`test_decode_dense_hopper.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import mla_decode, plan_decode
from pallas_kernels.formats import E4M3_FORMATS
from tests import inputs, oracle, tolerances
from tests.kernels import on_hopper
from tests.kernels.on_hopper import LENS, assert_bitwise_equal, poison_free_memory, sinks
from tests.kernels.pairwise import pairwise

pytestmark = pytest.mark.hopper

compiled = functools.partial(on_hopper.compiled, implementation="mosaic_transposed")

# Less than a row of a swizzle atom, each count of columns, whole tiles, tiles that overlap.
HEADS_AND_QUERIES = [
    *[(1, 1), (4, 1), (8, 1), (3, 3), (16, 1), (8, 2), (24, 1), (5, 4), (32, 1), (16, 2)],
    *[(11, 3), (40, 1), (64, 1), (16, 4), (13, 5), (128, 1), (2, 1), (12, 1), (20, 1), (6, 4)],
    *[(2, 12), (7, 1), (10, 3), (28, 1)],
]

FORMATS = ("bf16", "f16", "fp8_ds_mla", *E4M3_FORMATS)


def decode_case(lens, h_q=16, s_q=1, page_size=64, c=512, r=64, format="bf16", seed=0, dtype=None):
    """In e4m3 with queries as small as the contract has them: `inputs` makes them ten times as
    large."""
    case = inputs.decode_case(
        lens,
        h_q=h_q,
        s_q=s_q,
        page_size=page_size,
        kv_lora_rank=c,
        rope_dim=r,
        format=format,
        dtype=dtype or (jnp.float16 if format == "f16" else jnp.bfloat16),
        seed=seed,
    )
    if format not in E4M3_FORMATS:
        return case
    small = lambda q: (q / 10).astype(q.dtype)
    return dataclasses.replace(case, q_latent=small(case.q_latent), q_rope=small(case.q_rope))


def compare(case, out, lse, expected_out, expected_lse):
    within = tolerances.OUT[out.dtype.name], tolerances.LSE
    if case.cache.format in E4M3_FORMATS:
        within = tolerances.E4M3_OUT, tolerances.E4M3_LSE
    tolerances.check("out", out, expected_out, within[0])
    tolerances.check("lse", lse, expected_lse, within[1])


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
    compare(case, out, lse, expected_out, expected_lse)
    return out, lse


@pytest.mark.parametrize("h_q", [4, 16, 32])
@pytest.mark.parametrize("format", E4M3_FORMATS)
def test_errors_of_few_tokens_in_e4m3(format, h_q):
    """They do not average out; a single tile is taken twice, for a second term of P."""
    case = decode_case((2,) * 24 + tuple(range(65)), h_q, page_size=16, format=format)
    out, lse = compiled()(*case.args)
    expected_out, expected_lse = oracle.decode(*case.args, scale=inputs.SCALE)
    tolerances.check("out", out, expected_out, tolerances.E4M3_SHORT_OUT)
    tolerances.check("lse", lse, expected_lse, tolerances.E4M3_LSE)


CASES = pairwise(
    HEADS_AND_QUERIES,
    page_size=(16, 32, 64, 128),
    lens=tuple(LENS),
    c=(512, 256),
    r=(64, 32),
    format=FORMATS,
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


@pytest.mark.parametrize("format", FORMATS)
def test_pieces_of_a_tile(format):
    """In e4m3 of two."""
    check(decode_case((1000,), h_q=16, format=format))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("r", [64, 32])
@pytest.mark.parametrize("c", [512, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize(("h_q", "s_q"), [(5, 1), (16, 2), (13, 5)])
def test_full_product(h_q, s_q, page_size, c, r, format):
    check(decode_case(LENS["many"], h_q, s_q, page_size, c, r, format))


@pytest.mark.parametrize("format", ["bf16", "fp8_ds_mla", "fp8_token"])
@pytest.mark.parametrize("h_q", [8, 16, 32])
@pytest.mark.parametrize("tiles", [(1,), (2, 3), (4, 15, 16)], ids=str)
def test_odd_and_even_counts_of_tiles(tiles, h_q, format):
    """One sequence for each SM and more: single tiles of either warpgroup, and none."""
    lens = [n for t in tiles for n in (64 * t, 64 * t - 1, 64 * (t - 1) + 1, 0)]
    check(decode_case(lens * (50 // len(tiles)), h_q, format=format))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("h_q", [16, 32])
def test_long_sequences(h_q, format):
    """Where a prototype was wrong now and then: many tiles, both warpgroups at their own pace."""
    check(decode_case((9000, 20_000, 64, 12_345), h_q, format=format))


@pytest.mark.parametrize("format", ["bf16", "fp8_ds_mla", "fp8_full"])
def test_long_ring(format):
    """Every CTA takes each stage of the ring many times, across sequences."""
    check(decode_case((3000, 1, 2900, 0, 3100, 64) * 20, h_q=16, format=format))


@pytest.mark.parametrize("format", E4M3_FORMATS)
def test_f16_queries_of_an_fp8_cache(format):
    check(decode_case(LENS["split"], h_q=16, format=format, dtype=jnp.float16))


@pytest.mark.parametrize("format", ["fp8_ds_mla", *E4M3_FORMATS])
def test_as_the_other_schedule(format):
    """The same operands, in another order, but for the last bit of what queries are divided by; of
    `fp8_ds_mla` but for the rounding of the probabilities."""
    case = decode_case(LENS["split"], h_q=16, format=format)
    kwargs = {"scale": inputs.SCALE, "return_lse": True}
    other = mla_decode(*case.args, **kwargs, implementation="mosaic")
    ours = compiled()(*case.args)
    compare(case, *ours, *map(np.asarray, other))


@pytest.mark.parametrize("format", ["fp8_ds_mla", "fp8_token"])
def test_tokens_of_very_different_scale(format):
    """The scale that all are relative to rises and rises; the smallest tokens still count."""
    case = decode_case((5000,), 8, format=format)
    scale = np.array(case.cache.scale).reshape(-1, case.cache.scale.shape[-1])
    fall = np.linspace(0, 10, 5000, dtype=np.float32)
    scale[case.live] *= np.exp2(-np.round(fall) if format == "fp8_ds_mla" else -fall)[:, None]
    scale = jnp.asarray(scale.reshape(case.cache.scale.shape))
    check(dataclasses.replace(case, cache=dataclasses.replace(case.cache, scale=scale)))


@pytest.mark.parametrize("exponents", [(-20, 20, 7, 8), (20, -20, 0, -13)])
@pytest.mark.parametrize("h_q", [16, 32])
def test_groups_of_channels_of_very_different_scale(h_q, exponents):
    """Queries and values are float16 on the way: each group in a range of its own."""
    case = decode_case(LENS["many"], h_q, format="fp8_ds_mla")
    expected_out, expected_lse = oracle.decode(*case.args, scale=inputs.SCALE)
    out, lse = compiled()(*inputs.with_scales_of(case, exponents).args)
    out = np.asarray(out, np.float32) / np.repeat(np.exp2(np.array(exponents, np.float32)), 128)
    tolerances.check("out", out, expected_out, tolerances.OUT["bfloat16"])
    tolerances.check("lse", lse, expected_lse, tolerances.LSE)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_query_that_is_not_finite_spoils_no_other(value, format):
    case = decode_case(LENS["split"], h_q=16, format=format)
    spoiled = case.q_latent.at[:, :, 3, 5].set(value)
    args = (spoiled, *case.args[1:])
    others = np.arange(16) != 3
    out, lse = compiled()(*args)
    expected_out, expected_lse = compiled()(*case.args)
    assert_bitwise_equal(out[:, :, others], expected_out[:, :, others])
    assert_bitwise_equal(lse[:, others], expected_lse[:, others])


@pytest.mark.parametrize("h_q", [16, 32])
def test_one_token_gives_its_latent(h_q):
    """Bit for bit: the probability is a power of two, and widening is exact."""
    case = decode_case((1,) * 200, h_q, format="fp8_ds_mla")
    out, _ = compiled()(*case.args)
    cache = case.cache
    latent = cache.latent.astype(jnp.float32) * jnp.repeat(cache.scale, 128, axis=-1)
    latent = latent.reshape(-1, latent.shape[-1])[case.live].astype(jnp.bfloat16)
    assert_bitwise_equal(out[:, 0], jnp.broadcast_to(latent[:, None], out[:, 0].shape))


@pytest.mark.parametrize("format", ["bf16", "fp8_ds_mla"])
def test_rising_maximum(format):
    """Scores of hundreds: the running maximum rises by more than is let pass without rescaling."""
    check(decode_case(LENS["many"], h_q=16, format=format), scale=20.0)


def test_large_scores_of_either_sign():
    case = decode_case((0, 1, 65, 5000))
    q_latent, q_rope, *rest = case.args
    args = (q_latent * 1e4, q_rope * 1e4, *rest)
    out, lse = compiled(scale=1.0)(*args)
    expected_out, expected_lse = oracle.decode(*args, scale=1.0)
    assert np.abs(expected_lse[1:]).max() > 1000
    tolerances.check("out", out, expected_out, tolerances.LARGE_SCORES_OUT)
    tolerances.check("lse", lse, expected_lse, tolerances.LSE)


@pytest.mark.parametrize("format", ["bf16", "fp8_ds_mla", "fp8_token"])
@pytest.mark.parametrize("scale", [0.2, 0.0, -0.2])
def test_scale_may_be_traced(scale, format):
    case = decode_case(LENS["ragged"], h_q=8, s_q=2, format=format)
    decode = jax.jit(
        functools.partial(mla_decode, implementation="mosaic_transposed", return_lse=True)
    )
    out, lse = decode(*case.args, scale=scale)
    compare(case, out, lse, *oracle.decode(*case.args, scale=scale))


@pytest.mark.parametrize("h_q", [16, 40])
def test_plan_changes_nothing_but_who_adds_up(h_q):
    """With up to 32 rows the plan is the kernel's own; with more it is made for larger tiles."""
    case = decode_case(LENS["split"], h_q=h_q)
    plan = plan_decode(case.seq_lens, num_heads=h_q, page_size=64)
    found, own = compiled()(*case.args, plan=plan), compiled()(*case.args)
    if h_q <= 32:
        assert_bitwise_equal(found, own)
    tolerances.check("out", found[0], own[0], tolerances.OUT["bfloat16"])
    tolerances.check("lse", found[1], own[1], tolerances.LSE)


def test_lengths_that_the_table_has_no_place_for():
    sizes = {"h_q": 16, "page_size": 64, "kv_lora_rank": 512, "rope_dim": 64}
    case = inputs.decode_case((64, 640, 3), s_q=3, max_pages=10, **sizes)
    out, lse = compiled()(*case.args[:4], case.seq_lens.at[1].set(20_000))
    wanted_out, wanted_lse = oracle.decode(*case.args, scale=inputs.SCALE)
    tolerances.check("out", out, wanted_out, tolerances.OUT[out.dtype.name])
    tolerances.check("lse", lse, wanted_lse, tolerances.LSE)


@pytest.mark.parametrize("seq_len", [1024, 4096, 16384])
def test_error_in_fp16(seq_len, record_property):
    """The measure of the ETAP paper (arXiv:2506.01969): the root of the mean square error, with
    queries of N(0, 1) / 10 and keys of N(0, 1). A sequence of 1024 tokens has the largest outputs:
    1.0e-5 on the simulated GPU, most of it the rounding of the output."""
    case = decode_case((seq_len,) * 16, h_q=16, format="f16")
    grown = jax.tree.map(lambda x: x * 10, case.cache)
    args = (case.q_latent / 10, case.q_rope / 10, grown, case.block_table, case.seq_lens)
    out, _ = compiled()(*args)
    expected, _ = oracle.decode(*args, scale=inputs.SCALE)
    rmse = float(np.sqrt(np.mean((np.asarray(out).astype(np.float64) - expected) ** 2)))
    record_property("rmse", rmse)
    assert rmse <= tolerances.TRANSPOSED_FP16_RMSE


@pytest.mark.slow
def test_error_in_fp16_of_very_long_sequences(record_property):
    test_error_in_fp16(65536, record_property)


@pytest.mark.parametrize("format", FORMATS)
def test_it_is_what_none_chooses(format):
    """For few rows, where it is predicted to be the faster."""
    case = decode_case(LENS["split"], h_q=8, s_q=2, format=format)
    found = mla_decode(*case.args, scale=inputs.SCALE, return_lse=True)
    assert_bitwise_equal(found, compiled()(*case.args))
