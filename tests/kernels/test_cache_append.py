"""`append` and `norm_rope_append`: the Hopper kernel against the reference, bit for bit.

On the simulated GPU both run on the CPU, on a GPU both there: a reciprocal is the device's own.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mla_jax import Unsupported, append, dispatch, init_cache, norm_rope_append
from mla_jax.reference.norm_rope import ROPE_ORDERS
from pallas_kernels.cache_append import entry
from pallas_kernels.formats import E4M3_MAX, FORMATS
from tests import inputs, oracle, tolerances
from tests.kernels import simulator

ON_BOTH = simulator.ON_BOTH
D_ROPE = 64
EPS = 1e-6
NOWHERE = (-1, -64, -(2**31), 2**31 - 1)
"""Slots that no cache has, besides the one behind the last."""


def caches(format, *, num_pages=3, page_size=16, d_latent=256):
    """Poisoned all over, and with a page size that no attention kernel takes if need be."""
    sizes = {"page_size": page_size, "kv_lora_rank": d_latent, "rope_dim": D_ROPE}
    return inputs.poisoned(num_pages, format=format, **sizes)


def slots_for(rng, tokens, num_slots):
    """A slot for each, some of them nowhere."""
    slots = rng.permutation(num_slots)[:tokens].astype(np.int32)
    nowhere = np.array([*NOWHERE, num_slots], np.int32)
    skipped = rng.permutation(tokens)[: len(nowhere)]
    slots[skipped] = nowhere[: len(skipped)]
    return jnp.asarray(slots)


def hostile(rng, tokens, channels, dtype):
    """Rows of every magnitude that the dtype has, zeros, NaNs and infinities."""
    info = jnp.finfo(dtype)
    exponents = rng.integers(int(np.log2(float(info.tiny))), info.maxexp, (tokens, 1))
    values = rng.standard_normal((tokens, channels)) * 2.0 ** np.where(
        np.arange(tokens)[:, None] % 2, exponents, 0
    )
    values = np.clip(values, float(info.min), float(info.max))
    values[::7] = 0
    values[1::7, 1:] *= 1e-4
    values[2::7, 3] = np.inf
    values[3::7, channels // 2] = -np.inf
    values[4::7, channels - 1] = np.nan
    values[5::7, ::2] = -0.0
    return jnp.asarray(values, dtype)


reference = jax.jit(functools.partial(dispatch.call, "append", "xla"))


def kernel(interpret):
    return run(functools.partial(entry.append, interpret=interpret), interpret)


def run(function, interpret):
    """`function` compiled; where it launches a simulated kernel, such that a race is an error."""
    return simulator.Simulation(function).run if interpret else jax.jit(function)


def assert_same_bits(found, wanted, changed=True):
    """The same bits, but for those of a NaN; and unless `changed`, in the NaNs as well."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        same = (x.view(f"u{x.itemsize}") == y.view(f"u{y.itemsize}")) | (
            changed & np.isnan(x.astype(np.float32)) & np.isnan(y.astype(np.float32))
        )
        assert same.all(), f"{(~same).sum()} of {same.size} {x.dtype} differ"


def written(cache, slots):
    """The rows of each array at the slots that the cache has."""
    slots = np.asarray(slots)
    live = slots[(slots >= 0) & (slots < cache.num_slots)]
    return [np.asarray(x).reshape(cache.num_slots, -1)[live] for x in jax.tree.leaves(cache)]


DTYPES = [("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float16")]


@ON_BOTH
@pytest.mark.parametrize(("latent_dtype", "rope_dtype"), DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_append_is_the_reference(format, latent_dtype, rope_dtype, interpret):
    rng = np.random.default_rng(0)
    tokens, d_latent = (24, 256) if interpret else (1500, 512)
    cache = caches(format, num_pages=tokens // 8, d_latent=d_latent)
    args = (
        cache,
        hostile(rng, tokens, d_latent, latent_dtype),
        hostile(rng, tokens, D_ROPE, rope_dtype),
        slots_for(rng, tokens, cache.num_slots),
    )
    found = kernel(interpret)(*args)
    assert_same_bits(found, reference(*args))
    # What was there and no token came to: the very bits, though they are NaNs.
    untouched = np.setdiff1d(np.arange(cache.num_slots), np.asarray(args[-1]))
    assert_same_bits(written(found, untouched), written(cache, untouched), changed=False)


@ON_BOTH
@pytest.mark.parametrize("format", ["fp8_ds_mla", "fp8_token", "fp8_full"])
def test_every_e4m3_value_and_every_tie(format, interpret):
    """The finite values, the midpoints between them and what is next to those; largest 448."""
    codes = np.arange(127, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    ties = (codes[1:] + codes[:-1]) / 2
    values = np.concatenate(
        [codes, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e3))]
    )
    values = np.concatenate([values, -values])
    values = np.resize(values, (9, 2, 127))
    latent = np.pad(values, ((0, 0), (0, 0), (0, 1)), constant_values=E4M3_MAX).reshape(9, 256)
    args = (caches(format), jnp.asarray(latent), jnp.asarray(latent[:, -64:]), jnp.arange(9))
    found = kernel(interpret)(*args)
    assert_same_bits(found, reference(*args))
    if format == "fp8_ds_mla":
        codes, scale, _ = (
            np.asarray(x).reshape(-1, x.shape[-1])[:9]
            for x in (found.latent, found.scale, found.rope)
        )
        np.testing.assert_array_equal(scale, 1)
        np.testing.assert_array_equal(codes, oracle.e4m3(latent))


@ON_BOTH
def test_power_of_two_scales_of_every_magnitude(interpret):
    """Largest channels of 448 * 2**e and their neighbours, of which the next one needs 2**(e+1)."""
    exact = np.float32(E4M3_MAX) * np.float32(2) ** np.arange(-24, 8).astype(np.float32)
    amax = np.concatenate(
        [np.nextafter(exact, np.float32(0)), exact, np.nextafter(exact, np.float32(np.inf))]
    )
    latent = np.zeros((len(amax) // 2, 256), np.float32)
    latent[:, 5], latent[:, 200] = -amax[::2], amax[1::2]
    args = (
        caches("fp8_ds_mla", num_pages=4),
        jnp.asarray(latent),
        jnp.zeros((len(latent), D_ROPE)),
        jnp.arange(len(latent)),
    )
    found = kernel(interpret)(*args)
    wanted = [[oracle.ds_mla_scale(np.float64(x)) for x in pair] for pair in amax.reshape(-1, 2)]
    np.testing.assert_array_equal(np.asarray(found.scale).reshape(-1, 2)[: len(latent)], wanted)
    assert_same_bits(found, reference(*args))


def projected(rng, tokens, d_latent, dtype):
    """`kv_a`, one row of it zeros and one latent a hundredfold, and what norm and rotation take."""
    positions = rng.integers(0, 1 << 17, (tokens, 1))
    angle = positions * 10000.0 ** -(np.arange(D_ROPE // 2) / (D_ROPE // 2))
    kv_a = jnp.asarray(rng.standard_normal((tokens, d_latent + D_ROPE)), dtype)
    return {
        "kv_a": kv_a.at[2].set(0).at[3, :d_latent].multiply(100),
        "norm_weight": jnp.asarray(1 + rng.standard_normal(d_latent) / 4, dtype),
        "cos": jnp.asarray(np.cos(angle), jnp.float32),
        "sin": jnp.asarray(np.sin(angle), jnp.float32),
    }


def norm_rope_append_with(function, pairs="interleaved", order="halves", **static):
    """`function` of positional arrays."""
    return lambda cache, slots, given: function(
        cache,
        given["kv_a"],
        slots,
        **{name: given[name] for name in ("norm_weight", "cos", "sin")},
        norm_eps=EPS,
        rope_pairs=pairs,
        rope_order=order,
        **static,
    )


def norm_rope_kernel(interpret, **static):
    function = norm_rope_append_with(entry.norm_rope_append, interpret=interpret, **static)
    return run(function, interpret)


def normed_and_turned(given, pairs, order):
    """In float64: what is appended, before it is rounded."""
    kv_a, weight, cos, sin = (np.asarray(x).astype(np.float64) for x in given.values())
    latent, rope = np.split(kv_a, [len(weight)], axis=1)
    latent = latent / np.sqrt(np.mean(latent**2, axis=1, keepdims=True) + EPS) * weight
    half = D_ROPE // 2
    members = {
        "interleaved": (slice(0, None, 2), slice(1, None, 2)),
        "halves": (slice(0, half), slice(half, None)),
    }
    first, second = (rope[:, at] for at in members[pairs])
    turned = np.empty_like(rope)
    into_first, into_second = members[order]
    turned[:, into_first] = first * cos - second * sin
    turned[:, into_second] = second * cos + first * sin
    return latent, turned


@ON_BOTH
@pytest.mark.parametrize(("pairs", "order"), [*itertools.product(ROPE_ORDERS, repeat=2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_norm_and_rope(dtype, pairs, order, interpret):
    """In a cache of float32, which holds every normed and turned value as it is."""
    rng = np.random.default_rng(1)
    tokens, d_latent = (8, 256) if interpret else (300, 512)
    cache = caches("f32", num_pages=tokens, d_latent=d_latent)
    given = projected(rng, tokens, d_latent, dtype)
    slots = slots_for(rng, tokens, cache.num_slots)
    found = norm_rope_kernel(interpret, pairs=pairs, order=order)(cache, slots, given)
    live = (np.asarray(slots) >= 0) & (np.asarray(slots) < cache.num_slots)
    wanted = normed_and_turned(given, pairs, order)
    for x, y in zip(written(found, slots), wanted, strict=True):
        tolerances.check(dtype, x, y[live], tolerances.NORM_ROPE[dtype])


@ON_BOTH
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("format", sorted(FORMATS.keys() - {"f32"}))
def test_norm_and_rope_are_rounded_before_they_are_quantised(format, dtype, interpret):
    """What the kernel stores is the reference's `append` of what it stores in float32."""
    rng = np.random.default_rng(2)
    tokens, d_latent = (8, 256) if interpret else (300, 512)
    given = projected(rng, tokens, d_latent, dtype)
    given["kv_a"] = given["kv_a"].at[4, 7].set(jnp.inf).at[5, -1].set(jnp.nan)
    plain, cache = (caches(f, num_pages=tokens, d_latent=d_latent) for f in ("f32", format))
    slots = jnp.arange(tokens, dtype=jnp.int32)
    write = norm_rope_kernel(interpret)
    latent, rope = (jnp.asarray(x, dtype) for x in written(write(plain, slots, given), slots))
    slots = slots_for(rng, tokens, cache.num_slots)
    assert_same_bits(write(cache, slots, given), reference(cache, latent, rope, slots))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("format", FORMATS)
def test_the_reference_is_norm_rope_and_append(format, dtype):
    """Compiled as a whole, nothing is left unrounded."""
    given = projected(np.random.default_rng(3), 8, 256, dtype)
    write = norm_rope_append_with(norm_rope_append, implementation="xla")
    plain, cache = caches("f32"), caches(format)
    slots = jnp.arange(8)
    latent, rope = (jnp.asarray(x, dtype) for x in written(write(plain, slots, given), slots))
    for x, y in zip((latent, rope), normed_and_turned(given, "interleaved", "halves"), strict=True):
        tolerances.check(dtype, x, y, tolerances.NORM_ROPE[dtype])
    assert_same_bits(jax.jit(write)(cache, slots, given), append(cache, latent, rope, slots))


@pytest.mark.hopper
@pytest.mark.parametrize("format", FORMATS)
def test_large_and_fresh_shapes(format):
    """Through the public function, of one token to a prompt's, with pages of any size."""
    rng = np.random.default_rng(4)
    for tokens, page_size, d_latent in (
        (1, 1, 128),
        (16, 48, 512),
        (128, 64, 1024),
        (9000, 64, 512),
    ):
        cache = caches(
            format, num_pages=-(-tokens // page_size) + 1, page_size=page_size, d_latent=d_latent
        )
        magnitude = 2.0 ** rng.integers(-20, 20, (tokens, 1))
        token = lambda d, m=magnitude: jnp.asarray(rng.standard_normal((len(m), d)) * m, "bfloat16")
        slots = slots_for(rng, tokens, cache.num_slots) if tokens > 8 else jnp.array([1])
        args = (cache, token(d_latent), token(D_ROPE), slots)
        found = jax.jit(append)(*args)
        assert_same_bits(found, reference(*args))
        assert_same_bits(jax.jit(append)(*args), found, changed=False)


@pytest.mark.hopper
@pytest.mark.parametrize("format", FORMATS)
def test_a_donated_cache_is_written_in_place(format):
    cache = init_cache(64, format=format)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]
    given = projected(np.random.default_rng(5), 16, 512, "bfloat16")
    write = norm_rope_append_with(norm_rope_append, implementation="mosaic")

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, slots, given):
        cache = append(cache, given["kv_a"][:, :512], given["kv_a"][:, 512:], slots + 16)
        return write(cache, slots, given)

    for _ in range(3):
        cache = step(cache, jnp.arange(16), given)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)] == pointers


@pytest.mark.hopper
def test_layers_by_vmap_and_by_scan():
    rng = np.random.default_rng(6)
    cache = caches("fp8_full", d_latent=512)
    latent = jnp.asarray(rng.standard_normal((8, 512)), "bfloat16")
    write = lambda cache, latent: append(cache, latent, latent[:, :D_ROPE], jnp.arange(8))
    two = jax.tree.map(lambda x: jnp.stack([x, -x]), (cache, latent))
    wanted = jax.tree.map(lambda *x: jnp.stack(x), *(write(cache, x) for x in two[1]))
    assert_same_bits(jax.jit(jax.vmap(write))(*two), wanted)
    scan = lambda two: jax.lax.scan(lambda _, layer: (None, write(*layer)), None, two)[1]
    assert_same_bits(jax.jit(scan)(two), wanted)


@pytest.fixture
def as_if_hopper(monkeypatch):
    """As if this process had a Hopper GPU. The launch is left out."""
    monkeypatch.setitem(dispatch._REQUIREMENTS, "mosaic", lambda: "")
    monkeypatch.setattr(entry, "write", lambda *_, **__: pytest.fail("ran"))


@pytest.mark.parametrize(
    ("d_latent", "d_rope", "reason"),
    [
        (192, 64, "takes kv_lora_rank in multiples of 128, this cache has 192"),
        (256, 32, "takes rope_dim of 64, this cache has 32"),
    ],
)
def test_refusals(d_latent, d_rope, reason, as_if_hopper):
    cache = init_cache(1, page_size=8, kv_lora_rank=d_latent, rope_dim=d_rope)
    given = {
        "kv_a": jnp.zeros((2, d_latent + d_rope)),
        "norm_weight": jnp.ones(d_latent),
        "cos": jnp.ones((2, d_rope // 2)),
        "sin": jnp.zeros((2, d_rope // 2)),
    }
    write = lambda name: norm_rope_append_with(norm_rope_append, implementation=name)
    with pytest.raises(Unsupported) as raised:
        write("mosaic")(cache, jnp.arange(2), given)
    assert str(raised.value) == (
        "`implementation` is 'mosaic': cannot serve this norm_rope_append call (mosaic: "
        f"{reason}); use implementation=None for the best that can"
    )
    write(None)(cache, jnp.arange(2), given)
    append(cache, jnp.zeros((2, d_latent)), jnp.zeros((2, d_rope)), jnp.arange(2))


@pytest.mark.parametrize("check_vma", [True, False])
def test_split_over_devices(check_vma, as_if_hopper, monkeypatch):
    """Each with its own pages. Where JAX keeps track of that, the kernel is refused."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    whole, rng = P("x"), np.random.default_rng(8)
    args = (
        caches("fp8_full", num_pages=4),
        jnp.asarray(rng.standard_normal((6, 256)), "bfloat16"),
        jnp.asarray(rng.standard_normal((6, D_ROPE)), "bfloat16"),
        jnp.array([0, 31, 7, 7, 8, 9]),
    )
    launched = []
    write = lambda *args: launched.append(True) or args[2]
    monkeypatch.setattr(entry, "write", write)
    split = jax.shard_map(
        append, mesh=mesh, in_specs=(whole,) * 4, out_specs=whole, check_vma=check_vma
    )
    found = jax.jit(split)(*args)
    assert bool(launched) == (not check_vma)
    if check_vma:
        wanted = reference(*args[:3], jnp.array([0, 31, 7, 39, 40, 41]))
        assert_same_bits(found, wanted)


def test_no_tokens(as_if_hopper):
    cache = caches("fp8_token")
    given = {
        name: x[:0] for name, x in projected(np.random.default_rng(7), 8, 256, "bfloat16").items()
    }
    given["norm_weight"] = jnp.ones(256)
    write = norm_rope_append_with(norm_rope_append)
    assert_same_bits(write(cache, jnp.zeros(0, jnp.int32), given), cache, changed=False)


GIVEN = {
    "kv_a": np.zeros((3, 256 + D_ROPE), np.float32),
    "slots": np.zeros(3, np.int32),
    "norm_weight": np.ones(256, np.float32),
    "norm_eps": EPS,
    "cos": np.ones((3, D_ROPE // 2), np.float32),
    "sin": np.zeros((3, D_ROPE // 2), np.float32),
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"kv_a": np.zeros((3, 256), np.float32)},
            ValueError,
            "`kv_a` has shape (3, 256): must be [t, c_plus_r] with c_plus_r=320",
        ),
        (
            {"kv_a": np.zeros((3, 320), np.int32)},
            TypeError,
            "`kv_a` is int32: must be bfloat16, float16 or float32",
        ),
        (
            {"slots": np.zeros(2, np.int32)},
            ValueError,
            "`slots` has shape (2,): must be [t] with t=3",
        ),
        ({"slots": np.zeros(3)}, TypeError, "`slots` is float64: must be int32"),
        (
            {"norm_weight": np.ones(64, np.float32)},
            ValueError,
            "`norm_weight` has shape (64,): must be [c] with c=256",
        ),
        (
            {"norm_eps": np.float32([1e-6])},
            TypeError,
            "`norm_eps` is array([1.e-06], dtype=float32): must be a real number, not traced",
        ),
        (
            {"cos": np.ones((3, D_ROPE), np.float32)},
            ValueError,
            "`cos` has shape (3, 64): must be [t, half_r] with half_r=32",
        ),
        (
            {"sin": np.zeros((3, D_ROPE // 2), np.float16)},
            TypeError,
            "`sin` is float16: must be float32",
        ),
        (
            {"rope_pairs": "neox"},
            ValueError,
            "`rope_pairs` is 'neox': must be one of 'interleaved', 'halves'",
        ),
        (
            {"rope_order": "pairs"},
            ValueError,
            "`rope_order` is 'pairs': must be one of 'interleaved', 'halves'",
        ),
        (
            {"cache": init_cache(1, page_size=4, kv_lora_rank=256, rope_dim=5)},
            ValueError,
            "`cache.rope` has 5 channels: must have an even number to be rotated",
        ),
    ],
)
def test_errors(changes, error, message):
    cache = init_cache(1, page_size=4, kv_lora_rank=256)
    with pytest.raises(error) as raised:
        norm_rope_append(**({"cache": cache} | GIVEN | changes))
    assert type(raised.value) is error
    assert str(raised.value) == message
