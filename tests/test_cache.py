import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax import (
    LatentCache,
    append,
    gather,
    init_cache,
    pack_fp8_ds_mla,
    unpack_fp8_ds_mla,
)
from pallas_kernels.formats import FORMATS
from tests import inputs, oracle, tolerances

SIZES = {"kv_lora_rank": 192, "rope_dim": 16}
SCALED = [name for name, f in FORMATS.items() if f.scaling != "none"]


def bits(tree):
    """The bytes of every array: NaN payloads and signs of zero included."""
    return [np.asarray(x).view(np.uint8) for x in jax.tree.leaves(tree)]


def assert_same_bits(a, b):
    for x, y in zip(bits(a), bits(b), strict=True):
        np.testing.assert_array_equal(x, y)


def tokens(n=5, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return inputs.values(rng, n, 192, dtype=dtype), inputs.values(rng, n, 16, dtype=dtype)


@pytest.mark.parametrize(
    ("format", "bytes_per_token"),
    [
        ("bf16", 1152),
        ("f16", 1152),
        ("f32", 2304),
        ("fp8_ds_mla", 656),
        ("fp8_token", 644),
        ("fp8_full", 584),
    ],
)
def test_bytes_per_token(format, bytes_per_token):
    cache = init_cache(3, format=format)
    assert (cache.num_pages, cache.page_size, cache.kv_lora_rank, cache.rope_dim) == (
        3,
        64,
        512,
        64,
    )
    assert cache.bytes_per_token == bytes_per_token
    assert sum(x.nbytes for x in jax.tree.leaves(cache)) == 3 * 64 * bytes_per_token


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("format", FORMATS)
def test_append_stores_what_the_format_says(format, dtype):
    latent, rope = tokens(dtype=dtype)
    latent, rope = latent * 20, rope * 1000
    cache = append(init_cache(1, page_size=8, format=format, **SIZES), latent, rope, jnp.arange(5))
    values = [np.asarray(x).astype(np.float64) for x in (latent, rope)]
    dtypes = FORMATS[format].latent_dtype, FORMATS[format].rope_dtype
    for value, found, dtype in zip(values, oracle.dequantise(cache), dtypes, strict=True):
        tolerances.check(dtype, found[:5], value, tolerances.STORED[dtype])
    if format == "fp8_ds_mla":
        tiles = np.split(values[0], [128], axis=1)
        scale = np.stack([[*map(oracle.ds_mla_scale, np.abs(x).max(-1))] for x in tiles], -1)
        np.testing.assert_array_equal(cache.scale[0, :5], scale)
        codes = oracle.e4m3(values[0] / np.repeat(scale, 128, axis=1)[:, :192])
        np.testing.assert_array_equal(cache.latent[0, :5], codes)
    elif format in SCALED:
        amax = np.stack([np.abs(x).max(-1) for x in values], -1)[:, : cache.scale.shape[-1]]
        np.testing.assert_allclose(cache.scale[0, :5], amax / 448, rtol=tolerances.SCALE_RTOL)


@given(
    st.floats(0, 2.0**100, width=32)
    | st.integers(-20, 100).map(lambda e: 448 * 2.0**e)
    | st.integers(-20, 100).map(lambda e: np.nextafter(np.float32(448 * 2.0**e), np.float32(0)))
    | st.integers(-20, 100).map(lambda e: np.nextafter(np.float32(448 * 2.0**e), np.float32(1e38)))
)
def test_ds_mla_scale_is_exact(amax):
    latent = jnp.zeros((1, 192)).at[0, 3].set(-np.float32(amax))
    cache = _append(
        init_cache(1, page_size=1, format="fp8_ds_mla", **SIZES),
        latent,
        jnp.zeros((1, 16)),
        jnp.array([0]),
    )
    expected = oracle.ds_mla_scale(np.float64(np.float32(amax)))
    np.testing.assert_array_equal(cache.scale[0, 0], [expected, 2.0**-13])
    assert np.isfinite(np.asarray(cache.latent[0, 0]).astype(np.float32)).all()


_append = jax.jit(append)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e-6, 1.0, 1e4])
def test_tokens_of_any_magnitude_stay_finite(format, magnitude):
    latent, rope = tokens()
    latent, rope = latent * magnitude, rope * 1000
    cache = _append(init_cache(1, page_size=5, format=format, **SIZES), latent, rope, jnp.arange(5))
    assert all(np.isfinite(np.asarray(x).astype(np.float32)).all() for x in jax.tree.leaves(cache))
    if format in ("bf16", "fp8_token", "fp8_full"):  # their precision is relative
        found, _ = oracle.dequantise(cache)
        error = np.abs(found - np.asarray(latent, np.float64)).max(-1)
        assert (error <= 2**-4 * np.abs(np.asarray(latent)).max(-1) + 1e-19).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(format, bad):
    latent, rope = (x.at[2, 3].set(bad) for x in tokens())
    cache = _append(init_cache(1, page_size=5, format=format, **SIZES), latent, rope, jnp.arange(5))
    for found in oracle.dequantise(cache):
        finite = np.isfinite(found)
        assert finite[[0, 1, 3, 4]].all() and not finite[2, 3]


@pytest.mark.parametrize("format", FORMATS)
def test_a_nan_among_many_tokens_is_as_if_alone(format):
    """So many that XLA's CPU maximum of floats would lose it."""
    latent, rope = (x.at[31, -1].set(jnp.nan) for x in tokens(64))
    empty = init_cache(1, page_size=64, format=format, **SIZES)
    together = _append(empty, latent, rope, jnp.arange(64))
    alone = _append(empty, latent[31:32], rope[31:32], jnp.array([31]))
    for x, y in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        assert_same_bits(x[0, 31], y[0, 31])
    assert np.isfinite(oracle.dequantise(together)[0][np.arange(64) != 31]).all()


@given(
    format=st.sampled_from(list(FORMATS)),
    seed=st.integers(0, 2**31),
    exponents=st.lists(st.integers(-30, 30), min_size=2, max_size=2),
)
def test_jit_changes_no_bit(format, seed, exponents):
    latent, rope = (x * 2.0**e for x, e in zip(tokens(seed=seed), exponents, strict=True))
    cache = inputs.poisoned(2, page_size=4, format=format, **SIZES)
    args = (cache, latent, rope, jnp.array([7, -1, 0, 2, 3]))
    assert_same_bits(append(*args), _append(*args))


@pytest.mark.parametrize("format", FORMATS)
def test_tokens_without_a_slot_are_skipped(format):
    latent, rope = tokens(6)
    cache = inputs.poisoned(2, page_size=4, format=format, **SIZES)
    slots = jnp.array([-1, 5, 8, 2147483647, -2147483648, -8])
    after = append(cache, latent, rope, slots)
    assert_same_bits(after, append(cache, latent[1:2], rope[1:2], slots[1:2]))
    untouched = jnp.arange(8).reshape(2, 4) != 5
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        assert_same_bits(old[untouched], new[untouched])
    assert np.isfinite(oracle.dequantise(after)[0][5]).all()
    assert_same_bits(cache, append(cache, latent[:0], rope[:0], slots[:0]))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64"])
def test_slots_and_table_entries_beyond_int32_do_not_wrap(dtype):
    info = np.iinfo(dtype)
    beyond = [info.max, info.max - 2**31] + ([info.min] if info.min else [2**31])
    slots = np.array([3, *beyond], dtype)
    latent, rope = tokens(n=len(slots))
    cache = append(CACHE, latent, rope, slots)
    for name in ("latent", "rope"):
        rows = np.asarray(getattr(cache, name)).reshape(CACHE.num_slots, -1)
        assert np.flatnonzero(rows.any(axis=-1)).tolist() == [3]
    table, lens = np.array([beyond], dtype), np.array([3 * CACHE.page_size])
    assert not gather(cache, table, lens, dtype=jnp.float32)[0].any()


@pytest.mark.parametrize("format", FORMATS)
def test_append_to_a_donated_cache_copies_nothing(format):
    """In the compiled program: outputs alias the arguments, and neither a temporary nor a copy is
    of the size of one of the cache's arrays."""
    cache = init_cache(512, page_size=16, format=format, **SIZES)
    args = (cache, *tokens(), jnp.arange(5))
    compiled = jax.jit(append, donate_argnums=0).lower(*args).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(cache))
    assert memory.temp_size_in_bytes < 2**17 < cache.latent.nbytes
    copied = re.findall(r" (?:f\d|bf)\w*\[([\d,]+)\]\S* copy\(", text)
    sizes = {math.prod(map(int, dims.split(","))) for dims in copied}
    assert not sizes & {x.size for x in jax.tree.leaves(cache)}


def test_donation_reuses_the_buffers():
    cache = init_cache(4, **SIZES)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]
    after = jax.jit(append, donate_argnums=0)(cache, *tokens(), jnp.arange(5))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)] == pointers
    assert cache.latent.is_deleted()


@pytest.mark.parametrize("format", FORMATS)
def test_gather_is_in_order_and_zero_past_the_end(format):
    case = inputs.decode_case((0, 1, 40), format=format, dtype=jnp.float32)
    latent, rope = gather(case.cache, case.block_table, case.seq_lens, dtype=jnp.float32)
    assert latent.shape == (3, 64, 192) and rope.shape == (3, 64, 16)
    start = 0
    for b, n in enumerate((0, 1, 40)):
        slots = case.live[start : start + n]
        start += n
        for found, expected in zip((latent, rope), oracle.dequantise(case.cache), strict=True):
            np.testing.assert_allclose(found[b, :n], expected[slots], rtol=tolerances.SCALE_RTOL)
            assert (np.asarray(found[b, n:]) == 0).all()


def test_gather_dtype():
    case = inputs.decode_case((3,), format="fp8_token")
    latent, rope = gather(case.cache, case.block_table, case.seq_lens, dtype=jnp.bfloat16)
    assert latent.dtype == rope.dtype == jnp.bfloat16


def test_pack_and_unpack_are_inverse_on_all_bytes():
    packed = np.random.default_rng(0).integers(0, 256, (2, 3, 656), np.uint8)
    cache = unpack_fp8_ds_mla(packed)
    assert cache.format == "fp8_ds_mla" and cache.page_size == 3
    np.testing.assert_array_equal(pack_fp8_ds_mla(cache), packed)
    np.testing.assert_array_equal(cache.scale, packed[..., 512:528].copy().view(np.float32))
    assert_same_bits(cache, unpack_fp8_ds_mla(jax.jit(pack_fp8_ds_mla)(cache)))


def test_pack_of_other_sizes():
    cache = inputs.decode_case((40,), format="fp8_ds_mla").cache
    packed = pack_fp8_ds_mla(cache)
    assert packed.shape[-1] == 192 + 2 * 4 + 16 * 2 == cache.bytes_per_token
    assert_same_bits(cache, unpack_fp8_ds_mla(packed, **SIZES))


def test_a_cache_is_a_pytree():
    """Layers as a tuple, stacked for vmap, and scanned."""
    layers = tuple(init_cache(1, page_size=8, format="fp8_full", **SIZES) for _ in range(2))
    write = lambda cache: append(cache, *tokens(), jnp.arange(5))
    one_by_one = jax.jit(lambda layers: tuple(map(write, layers)))(layers)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    assert (stacked.num_pages, stacked.page_size, stacked.kv_lora_rank) == (1, 8, 192)
    expected = jax.tree.map(lambda *x: jnp.stack(x), *one_by_one)
    assert_same_bits(jax.vmap(write)(stacked), expected)
    assert_same_bits(
        jax.lax.scan(lambda _, cache: (None, write(cache)), None, stacked)[1], expected
    )


CACHE = LatentCache(jnp.zeros((2, 4, 192)), jnp.zeros((2, 4, 16)), None, format="f32")
FP8 = init_cache(2, page_size=4, format="fp8_token", **SIZES)


def append_to(latent, rope, scale, format):
    return append(LatentCache(latent, rope, scale, format=format), *tokens(), np.arange(5))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: init_cache(2, format="fp8"),
            ValueError,
            "`format` is 'fp8': must be one of 'bf16', 'f16', 'f32', 'fp8_ds_mla', 'fp8_token', "
            "'fp8_full'",
        ),
        (lambda: init_cache(0), ValueError, "`num_pages` is 0: must be at least 1"),
        (lambda: init_cache(1, page_size=2.0), TypeError, "`page_size` is 2.0: must be an int"),
        (
            lambda: append(
                LatentCache(FP8.latent, FP8.rope, FP8.scale, format="bf16"), *tokens(), np.arange(5)
            ),
            TypeError,
            "`cache.scale` is an array: must be None in format 'bf16'",
        ),
        (
            lambda: append(
                LatentCache(CACHE.latent, CACHE.rope, None, format="bf16"), *tokens(), np.arange(5)
            ),
            TypeError,
            "`cache.latent` is float32: must be bfloat16 in format 'bf16'; write tokens with "
            "append, which converts them",
        ),
        (
            lambda: append(
                LatentCache(CACHE.latent, FP8.rope, FP8.scale, format="fp8_token"),
                *tokens(),
                np.arange(5),
            ),
            TypeError,
            "`cache.latent` is float32: must be float8_e4m3fn in format 'fp8_token'; write tokens "
            "with append, which converts them",
        ),
        (
            lambda: append(
                LatentCache(FP8.latent, FP8.rope, None, format="fp8_token"), *tokens(), np.arange(5)
            ),
            TypeError,
            "`cache.scale` is of type NoneType: must be an array [p ps n]",
        ),
        (
            lambda: append(
                LatentCache(FP8.latent, FP8.rope, FP8.scale, format="fp8_full"),
                *tokens(),
                np.arange(5),
            ),
            ValueError,
            "`cache.scale` has shape (2, 4, 1): must be [p, ps, n] with n=2",
        ),
        (
            lambda: append((1, 2), *tokens(), np.arange(5)),
            TypeError,
            "`cache` is of type tuple: must be a LatentCache, see init_cache",
        ),
        (
            lambda: append(FP8, jnp.zeros((5, 192), jnp.float8_e4m3fn), tokens()[1], np.arange(5)),
            TypeError,
            "`latent` is float8_e4m3fn: must be bfloat16, float16 or float32",
        ),
        (
            lambda: append(CACHE, tokens()[0][:, :100], tokens()[1], np.arange(5)),
            ValueError,
            "`latent` has shape (5, 100): must be [t, c] with c=192",
        ),
        (
            lambda: append(CACHE, tokens()[0][None], tokens()[1], np.arange(5)),
            ValueError,
            "`latent` has shape (1, 5, 192): must have 2 axes, [t, c]",
        ),
        (
            lambda: append(CACHE, *tokens(), np.arange(4)),
            ValueError,
            "`slots` has shape (4,): must be [t] with t=5",
        ),
        (
            lambda: append(CACHE, *tokens(), np.zeros(5)),
            TypeError,
            "`slots` is float64: must be int32",
        ),
        (
            lambda: append(CACHE, *tokens(), [1, 2, 3, 4, 5]),
            TypeError,
            "`slots` is of type list: must be an array [t]",
        ),
        (
            lambda: gather(CACHE, np.zeros((2, 3), int), np.zeros(2, int), dtype=jnp.int32),
            TypeError,
            "`dtype` is int32: must be bfloat16, float16 or float32",
        ),
        (
            lambda: gather(CACHE, np.zeros((2, 3), int), np.zeros(2, int), dtype="half-ish"),
            TypeError,
            "`dtype` is 'half-ish': must be bfloat16, float16 or float32",
        ),
        (
            lambda: gather(CACHE, np.zeros((2, 0), int), np.zeros(2, int), dtype=jnp.float32),
            ValueError,
            "`block_table` has shape (2, 0): must have a column at least",
        ),
        (
            lambda: gather(CACHE, np.zeros((2, 3), int), np.zeros(3, int), dtype=jnp.float32),
            ValueError,
            "`seq_lens` has shape (3,): must be [b] with b=2",
        ),
        (
            lambda: pack_fp8_ds_mla(CACHE),
            ValueError,
            "`cache` has format 'f32': must be 'fp8_ds_mla'",
        ),
        (
            lambda: unpack_fp8_ds_mla(np.zeros((2, 3, 600), np.uint8)),
            ValueError,
            "`packed` has shape (2, 3, 600): must be [p, ps, bytes] with bytes=656",
        ),
        (
            lambda: unpack_fp8_ds_mla(np.zeros((2, 3, 656), np.int8)),
            TypeError,
            "`packed` is int8: must be uint8",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    assert str(raised.value) == message
