"""Where the device functions of `hopper.queries` read and write, as `test_fp8_addresses.py`; and
what is quantised."""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from pallas_kernels.formats import MIN_SCALE
from pallas_kernels.hopper import queries
from tests.kernels import addresses
from tests.kernels.addresses import LANE, WARP, array, in_order_of_keys, source, swizzled


@pytest.fixture(autouse=True)
def context():
    with mlir.make_ir_context(), ir.Location.unknown():
        yield


def build(monkeypatch, function, arguments):
    return addresses.Built(monkeypatch, function, arguments, queries)


def places(columns):
    """Registers, their rows and first columns; and how many columns a register has."""
    vector = min(8, columns // 32)
    for i in range(2):
        for j in range(columns // (32 * vector)):
            yield (i, j), WARP + 4 * i, 32 * vector * j + vector * LANE, vector


@pytest.mark.parametrize("columns", [512, 256, 64, 32])
def test_load(columns, monkeypatch):
    shaped = types.SimpleNamespace(shape=(8, columns), dtype=jnp.dtype("bfloat16"))
    call = lambda: queries.load(shaped, interpret=False)
    built = build(monkeypatch, call, ((shaped.shape, "bf16", [columns, 1]),))
    registers = built.result.registers.reshape(2, -1)
    for at, row, column, vector in places(columns):
        address, loaded = built.loads[registers[at]]
        np.testing.assert_array_equal(address, 2 * (row * columns + column))
        assert loaded == 2 * vector


@pytest.mark.parametrize(
    ("dtype", "columns"),
    [*[("e4m3", n) for n in (512, 256, 64, 32)], ("bf16", 64), ("bf16", 32)],
)
def test_store(dtype, columns, monkeypatch):
    """Every byte of the eight rows."""
    itemsize = {"e4m3": 1, "bf16": 2}[dtype]
    row_bytes = min(128, columns * itemsize)
    in_tile = row_bytes // itemsize
    ref = ((1, columns // in_tile, 8, in_tile), dtype, [8 * columns, 8 * in_tile, in_tile, 1])
    values = array(queries._layout(columns), (8, columns), dtype, min(8, columns // 32))
    shaped = types.SimpleNamespace(shape=(8, columns))
    call = lambda: queries.store(None, shaped, (), interpret=False)
    built = build(monkeypatch, call, (ref, values))
    registers = built.arguments[1].registers.reshape(2, -1)
    found = {source(value): address for value, address, _ in built.stores}
    written = np.zeros(8 * columns * itemsize, int)
    for at, row, first, vector in places(columns):
        for i in range(vector):
            expected = swizzled(
                row, first + i, 8 * columns * itemsize, 8 * row_bytes, row_bytes, itemsize
            )
            address = found[registers[at]] + i * itemsize
            np.testing.assert_array_equal(address, expected)
            for byte in range(itemsize):
                np.add.at(written, address + byte, 1)
    assert (written == 1).all()


@pytest.mark.parametrize("columns", [512, 256])
def test_store_in_order_of_keys(columns, monkeypatch):
    """Every channel where `load_keys` puts the keys'."""
    in_tile = 64
    ref = ((1, columns // in_tile, 8, in_tile), "f16", [8 * columns, 8 * in_tile, in_tile, 1])
    values = array(queries._layout(columns), (8, columns), "f16", 8)
    shaped = types.SimpleNamespace(shape=(8, columns))
    call = lambda: queries.store(None, shaped, (), order_of_keys=True, interpret=False)
    built = build(monkeypatch, call, (ref, values))
    place_of = np.argsort(in_order_of_keys(np.arange(columns)))
    registers = built.arguments[1].registers.reshape(2, -1)
    first_of = {registers[at]: (row, first) for at, row, first, _ in places(columns)}
    written = np.zeros(8 * columns, int)
    for value, address, _ in built.stores:
        row, first = first_of[source(value)]
        for i, pair in enumerate(value.owner.operands):
            (which,) = ir.DenseI64ArrayAttr(pair.owner.attributes["static_position"])
            for j in range(2):
                place = place_of[first + 2 * which + j]
                expected = swizzled(row, place, 16 * columns, 1024, 128, 2)
                np.testing.assert_array_equal(address + 4 * i + 2 * j, expected)
                np.add.at(written, expected // 2, 1)
    assert (written == 1).all()


def test_store_values(monkeypatch):
    values = array(queries._layout(256).reduce(1), (8,), "f32", 1)
    call = lambda: queries.store_values(None, None, interpret=False)
    built = build(monkeypatch, call, (((8,), "f32", [1]), values))
    for i, (value, address, _) in enumerate(built.stores):
        assert value == built.arguments[1].registers.flat[i]
        np.testing.assert_array_equal(address, 4 * (WARP + 4 * i))
    assert len(built.stores) == 2


@pytest.mark.parametrize("rope_dtype", ["bfloat16", "float8_e4m3fn"])
def test_quantise(rope_dtype):
    """In e4m3 the largest value of a row becomes the format's, rows of zeros stay."""
    rng = np.random.default_rng(0)
    latent, rope = (jnp.asarray(rng.standard_normal((8, n)), jnp.bfloat16) for n in (256, 64))
    latent, rope = latent.at[3].set(0), (40 * rope).at[3].set(0)
    whole = rope_dtype == "float8_e4m3fn"
    q, r, scale = queries.quantise(
        latent, rope, -1.0, jnp.dtype("float8_e4m3fn"), jnp.dtype(rope_dtype)
    )
    assert (q.dtype, r.dtype) == (jnp.float8_e4m3fn, jnp.dtype(rope_dtype))
    amax = np.abs(np.concatenate([latent, rope], 1) if whole else latent).max(1).astype(np.float32)
    np.testing.assert_array_equal(scale, np.maximum(amax * np.float32(1 / 448), MIN_SCALE))
    steps = {"float8_e4m3fn": 2.0**-4, "bfloat16": 2.0**-8}
    for x, given in ((q, latent), (r, rope)):
        restored = -np.asarray(x, np.float32) * np.asarray(scale)[:, None]
        step, given = steps[x.dtype.name], np.asarray(given, np.float32)
        # Half a step of a normal number, or of the smallest ones.
        bound = np.maximum(np.abs(given) * step, 2.0**-10 * np.asarray(scale)[:, None]) * 1.001
        assert (np.abs(restored - given) <= bound).all()


@pytest.mark.parametrize("exponent", [-49, 0, 100])
def test_quantise_in_float16(exponent):
    """Exactly what was given, over a power of two; rows of zeros stay."""
    rng = np.random.default_rng(0)
    latent, rope = (rng.standard_normal((8, n)) * 2.0**exponent for n in (256, 64))
    latent[:, ::3] *= 2.0**-20
    latent[3], latent[5], rope[3] = 0.0, np.nan, 0.0
    latent, rope = (jnp.asarray(x, jnp.bfloat16) for x in (latent, rope))
    dtypes = jnp.dtype("float16"), jnp.dtype("bfloat16")
    q, r, scale = queries.quantise(latent, rope, -1.0, *dtypes)
    assert (q.dtype, r.dtype) == dtypes
    assert (np.frexp(scale)[0] == 0.5)[np.arange(8) != 5].all() and scale[3] == MIN_SCALE
    for x, given in ((q, latent), (r, rope)):
        restored = -np.asarray(x, np.float32) * np.asarray(scale)[:, None]
        kept = np.isfinite(np.asarray(scale))
        np.testing.assert_array_equal(restored[kept], np.asarray(given, np.float32)[kept])
    assert np.isnan(np.asarray(q[5], np.float32)).any()
    largest = np.abs(np.asarray(q, np.float32)).max(1)[[0, 1, 2, 4, 6, 7]]
    assert ((largest >= 2.0**14) & (largest < 2.0**15)).all()


@pytest.mark.parametrize("value", [0.3, 0.0, -0.3])
def test_sign_and_size(value):
    """A factor of 0 leaves scores of 0, and masked ones -inf."""
    sign, size = queries.sign_and_size(None, jnp.float32(value))
    assert sign == np.sign(value) and size > 0
    if value:
        np.testing.assert_allclose(sign * size, value * np.log2(np.e), rtol=1e-6)
        assert value < 0 or queries.sign_and_size(value, None) == (1.0, value * queries.LOG2E)
