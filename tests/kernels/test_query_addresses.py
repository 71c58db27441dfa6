"""Where the device functions of `hopper.queries` read and write, as `test_fp8_addresses.py`; and
what is quantised."""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir

from pallas_kernels.formats import MIN_SCALE, SCALE_TILE
from pallas_kernels.hopper import queries
from tests import tolerances
from tests.kernels import addresses
from tests.kernels.addresses import LANE, WARP, array, in_order_of_keys, source, swizzled


@pytest.fixture(autouse=True)
def context():
    with mlir.make_ir_context(), ir.Location.unknown():
        yield


def build(monkeypatch, function, arguments, **kwargs):
    return addresses.Built(monkeypatch, function, arguments, queries, **kwargs)


def places(columns):
    """Registers, their rows and first columns; and how many columns a register has."""
    vector = min(8, columns // 32)
    for i in range(2):
        for j in range(columns // (32 * vector)):
            yield (i, j), WARP + 4 * i, 32 * vector * j + vector * LANE, vector


@pytest.mark.parametrize("columns", [512, 256, 128, 64, 32])
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


def test_store_in_order_of_keys(monkeypatch):
    """Every channel of a group where `load_keys` puts the keys'."""
    columns, in_tile = SCALE_TILE, 64
    ref = ((1, columns // in_tile, 8, in_tile), "f16", [8 * columns, 8 * in_tile, in_tile, 1])
    values = array(queries._layout(columns), (8, columns), "f16", 4)
    shaped = types.SimpleNamespace(shape=(8, columns))
    call = lambda: queries.store(None, shaped, (), order_of_keys=True, interpret=False)
    built = build(monkeypatch, call, (ref, values))
    place_of = np.argsort(in_order_of_keys(np.arange(columns)))
    registers = built.arguments[1].registers.reshape(2, -1)
    first_of = {registers[at]: (row, first) for at, row, first, _ in places(columns)}
    written = np.zeros(8 * columns, int)
    for value, address, _ in built.stores:
        row, first = first_of[source(value)]
        (which,) = ir.DenseI64ArrayAttr(value.owner.attributes["static_position"])
        for i in range(2):
            place = place_of[first + 2 * which + i]
            expected = swizzled(row, place, 16 * columns, 1024, 128, 2)
            np.testing.assert_array_equal(address + 2 * i, expected)
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
    q, r, scale = queries.quantise(latent, rope, -1.0, jnp.dtype(rope_dtype))
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


def test_scales_of_groups(monkeypatch):
    """A lane a row, of each group; what is not finite does not count. Without the way through the
    warp each lane has the scales of its own row."""
    monkeypatch.setattr(mgpu_utils, "redux", lambda x, *_: x)
    groups, rows = 4, 24
    values = np.exp2(np.random.default_rng(0).uniform(-120, 120, (groups, rows)))
    values[0, 1], values[1, 2], values[:, 3], values[2, 4] = np.nan, np.inf, 0.0, 0.0
    values = values.astype(np.float32)
    shaped = types.SimpleNamespace(shape=(groups, rows))
    call = lambda: queries.scales_of_groups(shaped, interpret=False)
    ref = (shaped.shape, "f32", [rows, 1])
    built = build(monkeypatch, call, (ref,), memory=values.view(np.int32).ravel())
    row = np.minimum(LANE, rows - 1)
    for group, (address, loaded) in enumerate(built.loads.values()):
        np.testing.assert_array_equal(address, 4 * (group * rows + row))
        assert loaded == 4
    assert len(built.loads) == groups
    expected = [queries.scales_of_groups(values[:, i : i + 1], interpret=True) for i in row]
    for scale, of_lanes in zip(built.result, zip(*expected, strict=True), strict=True):
        bits = built.values[scale.registers.item().owner.operands[0]]
        np.testing.assert_array_equal(bits.astype(np.int32).view(np.float32), of_lanes)
    largest = jnp.asarray([[3.0, np.nan, 0.5], [0.0, np.inf, 0.0], [1.0, 2.0**41, 4.0]])
    found = queries.scales_of_groups(largest, interpret=True)
    assert [float(scale) for scale in found] == [2.0**-40, 2.0**-48, 1.0]


@pytest.mark.parametrize("exponent", [-9, 0, 100])
def test_to_float16(exponent):
    """Exactly what was given, but for powers of two: one for each row and one for each group. Rows
    of zeros stay, and one of NaN spoils no other."""
    rng = np.random.default_rng(0)
    *groups, rope = (rng.standard_normal((8, n)) * 2.0**exponent for n in (128, 128, 128, 64))
    for latent, of_group in zip(groups, (1.0, 2.0**-30, 0.0), strict=True):
        latent *= of_group
        latent[:, ::3] *= 2.0**-12
        latent[1] *= 2.0**-20
        latent[3], latent[5] = 0.0, np.nan
    groups[0][2], groups[1][4], groups[0][6] = 0.0, 0.0, groups[0][6] * 2.0**-8
    rope[3] = 0.0
    *groups, rope = (jnp.asarray(x, jnp.bfloat16) for x in (*groups, rope))
    largest = jnp.stack([queries.largest(x) for x in groups])
    scales = queries.scales_of_groups(largest, interpret=True)
    in_float16, r, scale = queries.to_float16(groups, rope, -1.0, scales)
    kept = np.arange(8) != 5
    assert scale[3] == MIN_SCALE and r.dtype == jnp.bfloat16
    restored = lambda x, factor: -np.asarray(x, np.float32) * np.asarray(factor)[:, None]
    np.testing.assert_array_equal(restored(r, scale)[kept], np.asarray(rope, np.float32)[kept])
    rows_largest = []
    for given, q, of_group in zip(groups, in_float16, scales, strict=True):
        assert q.dtype == jnp.float16
        factor = np.asarray(scale) * np.asarray(of_group)
        assert (np.frexp(factor)[0] == 0.5)[kept].all()
        given = np.asarray(given, np.float32)
        np.testing.assert_array_equal(restored(q, factor)[kept], given[kept])
        assert np.isnan(np.asarray(q[5], np.float32)).any()
        rows_largest.append(np.abs(np.asarray(q, np.float32)).max(1))
    rows_largest = np.max(rows_largest, axis=0)[[0, 1, 2, 4, 6, 7]]
    assert ((rows_largest >= 2.0**14) & (rows_largest < 2.0**15)).all()


@pytest.mark.parametrize("value", [0.3, 0.0, -0.3])
def test_sign_and_size(value):
    """A factor of 0 leaves scores of 0, and masked ones -inf."""
    sign, size = queries.sign_and_size(None, jnp.float32(value))
    assert sign == np.sign(value) and size > 0
    if value:
        expected = value * np.log2(np.e)
        np.testing.assert_allclose(sign * size, expected, rtol=tolerances.SCALE_LOG2_RTOL)
        assert value < 0 or queries.sign_and_size(value, None) == (1.0, value * queries.LOG2E)
