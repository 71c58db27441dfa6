"""Where the device functions of `hopper.fp8` read and write, thread by thread.

The simulated GPU leaves them out. Here each is built as on the GPU, with its thread as an unknown;
then the addresses that it has made are worked out for every thread, and compared with the layouts
that Mosaic GPU and the hardware define.
"""

import types

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.hopper import fp8
from pallas_kernels.hopper.layouts import WGMMA, WGMMA_8BIT, WGMMA_COLUMN, WGMMA_ROW
from tests.kernels import addresses
from tests.kernels.addresses import LANE, WARP, accumulator, array, permuted, source, swizzled


@pytest.fixture(autouse=True)
def context():
    with mlir.make_ir_context(), ir.Location.unknown():
        yield


def build(monkeypatch, function, arguments):
    return addresses.Built(monkeypatch, function, arguments, fp8, "_warp_and_lane")


def eight_bit(shape):
    """Rows and first columns of an 8-bit operand's registers: PTX's A fragment of m64k32."""
    for group in range(shape[1] // 16):
        for half in range(2):
            yield (group, half), 16 * WARP + LANE // 4 + 8 * half, 16 * group + LANE % 4 * 4


@pytest.mark.parametrize(
    ("dtype", "full", "columns"),
    [
        *[("e4m3", 512, 256), ("e4m3", 256, 128), ("e4m3", 64, 64), ("e4m3", 32, 32)],
        *[("bf16", 64, 64), ("bf16", 32, 32)],
    ],
)
def test_store_operand(dtype, full, columns, monkeypatch):
    itemsize = {"e4m3": 1, "bf16": 2}[dtype]
    row_bytes = min(128, full * itemsize)
    tile_columns = row_bytes // itemsize
    strides = [8 * full, 8 * tile_columns, tile_columns, 1]
    ref = ((8, columns // tile_columns, 8, tile_columns), dtype, strides)
    values = array(WGMMA_8BIT, (64, columns), dtype, 4)
    built = build(
        monkeypatch,
        lambda: fp8.store_operand(None, None, (), interpret=False),
        (ref, values),
    )
    registers = built.arguments[1].registers.reshape(columns // 16, 2)
    found = {}
    for value, address, _ in built.stores:
        found[source(value)] = address
    for at, rows, first in eight_bit((64, columns)):
        for i in (0, 3):
            expected = swizzled(
                rows, first + i, 8 * full * itemsize, 8 * row_bytes, row_bytes, itemsize
            )
            np.testing.assert_array_equal(found[registers[at]] + i * itemsize, expected)
    assert len(found) == columns // 8


@pytest.mark.parametrize("rows", [1, 24, 64])
def test_load_rows(rows, monkeypatch):
    ref = ((rows, 128), "bf16", [512, 1])
    shaped = types.SimpleNamespace(shape=(rows, 128), dtype=jnp.bfloat16)
    built = build(monkeypatch, lambda: fp8.load_rows(shaped, rows, interpret=False), (ref,))
    registers = built.result.registers.reshape(8, 2)
    for at, row, column in eight_bit((64, 128)):
        address, loaded = built.loads[registers[at]]
        np.testing.assert_array_equal(address, (np.minimum(row, rows - 1) * 512 + column) * 2)
        assert loaded == 8


@pytest.mark.parametrize(
    ("columns", "per_row", "row", "kinds"),
    [(64, 64, 64, 1), (64, 16, 32, 1), (64, 16, 32, 2), (64, 64, 128, 2), (24, 24, 64, 1)],
)
def test_load_columns(columns, per_row, row, kinds, monkeypatch):
    shaped = types.SimpleNamespace(shape=(-(-columns // per_row), row))
    call = lambda: fp8.load_columns(shaped, columns, per_row=per_row, kinds=kinds, interpret=False)
    built = build(monkeypatch, call, ((shaped.shape, "f32", [row, 1]),))
    for kind, values in enumerate(built.result):
        for group, pair in enumerate(values.registers.flat):
            for i, value in enumerate(pair.owner.operands):
                column = 8 * group + LANE % 4 * 2 + i
                address, _ = built.loads[value.owner.operands[0]]
                (position,) = ir.DenseI64ArrayAttr(value.owner.attributes["static_position"])
                expected = column // per_row * row + column % per_row * kinds + kind
                np.testing.assert_array_equal(address + 4 * position, 4 * expected)


@pytest.mark.parametrize(("rows", "columns"), [(64, 256), (64, 128), (8, 256)])
@pytest.mark.parametrize("staged", [True, False])
def test_stores_of_the_transposed_output(staged, rows, columns, monkeypatch):
    shape = (columns // 2, rows)
    tiles = array(WGMMA, shape, "bf16", 2)
    if staged:
        ref = ((rows // 8, columns // 64, 8, 64), "bf16", [8 * columns, 512, 64, 1])
        call = lambda: fp8.stage_transposed(None, None, None, (), interpret=False)
    else:
        ref = ((rows, columns), "bf16", [512, 1])
        call = lambda: fp8.store_transposed(None, None, None, interpret=False)
    built = build(monkeypatch, call, (ref, tiles, tiles))
    even, odd = (x.registers.reshape(columns // 128, rows // 8, 2) for x in built.arguments[1:])
    written = np.zeros((rows, columns), int)
    stores = iter(built.stores)
    for at, pair, first in accumulator(shape):
        for i in range(2):
            value, address, _ = next(stores)
            low, high, selection = permuted(value)
            assert (source(low), source(high)) == (even[at], odd[at])
            assert built.values[selection][0] == (0x5410, 0x7632)[i]  # prmt: both low, both high
            row, column = first + i, 2 * pair
            if staged:
                expected = swizzled(row, column, 16 * columns, 1024, 128, 2)
            else:
                expected = (row * 512 + column) * 2
            np.testing.assert_array_equal(address, expected)
            written[row, column] += 1
    assert (written[:, ::2] == 1).all()


@pytest.mark.parametrize("columns", [512, 256])
@pytest.mark.parametrize("first", [0, 1, 63])
def test_zero_rows(first, columns, monkeypatch):
    ref = ((8, columns // 128, 8, 128), "e4m3", [8 * columns, 1024, 128, 1])
    limit = array(plgpu.Layout.WG_SPLAT(()), (), "i32", 0, [np.full(128, first)])
    built = build(monkeypatch, lambda: fp8.zero_rows(None, None, (), interpret=False), (ref, limit))
    memory = np.ones(64 * columns, int)
    for _, address, active in built.stores:
        for start in address[active]:
            memory[start : start + 16] = 0
    rows = memory.reshape(8, columns // 128, 8, 128).swapaxes(1, 2).reshape(64, columns)
    np.testing.assert_array_equal(rows, np.arange(64)[:, None] < first + np.zeros(columns, int))


def test_keep_columns(monkeypatch):
    """Which columns of which rows a thread keeps."""
    row_limit = np.random.default_rng(0).integers(-3, 70, 64)
    rows = lambda half: 16 * WARP + LANE // 4 + 8 * half
    arguments = (
        array(WGMMA, (64, 64), "f32", 2),
        array(WGMMA_COLUMN, (64,), "f32", 2),
        array(WGMMA_ROW, (64,), "i32", 1, [row_limit[rows(half)] for half in range(2)]),
        array(plgpu.Layout.WG_SPLAT(()), (), "i32", 0, [np.full(128, 37)]),
    )
    shaped = [types.SimpleNamespace(shape=x.shape) for x in arguments]
    built = build(monkeypatch, lambda: fp8.keep_columns(*shaped, interpret=False), arguments)
    tile, values = built.result

    def check(pair, given, limit, column):
        for i, kept in enumerate(pair.owner.operands):
            condition, same, _ = kept.owner.operands
            assert same.owner.operands[0] == given
            (position,) = ir.DenseI64ArrayAttr(same.owner.attributes["static_position"])
            assert position == i
            np.testing.assert_array_equal(built.values[condition], column + i < limit)

    before, after = (x.registers.reshape(1, 8, 2) for x in (built.arguments[0], tile))
    for at, row, column in accumulator((64, 64)):
        check(after[at], before[at], row_limit[row], column)
    for group, pair in enumerate(values.registers.flat):
        check(pair, built.arguments[1].registers.flat[group], 37, 8 * group + LANE % 4 * 2)


def test_tokens_have_one_order_in_both_operands(monkeypatch):
    """The transposed values' and the probabilities': a product over tokens needs no more."""
    p = array(WGMMA, (64, 64), "e4m3", 2)
    shaped = types.SimpleNamespace(shape=(64, 64))
    built = build(monkeypatch, lambda: fp8.as_operand(shaped, interpret=False), (p,))
    pairs = built.arguments[0].registers.reshape(8, 2)
    fours = built.result.registers.reshape(4, 2)
    for group, half in np.ndindex(4, 2):
        expected = [pairs[2 * group + i, half] for i in range(2)]
        assert parts(fours[group, half], set(pairs.flat)) == expected

    pairs_t = array(WGMMA, (128, 64), "i16", 2)
    monkeypatch.setattr(plgpu, "load", lambda *_, **__: types.SimpleNamespace(shape=(128, 64)))
    ref = types.SimpleNamespace(T=None)
    built = build(monkeypatch, lambda: fp8.load_transposed(None, ref, interpret=False), (pairs_t,))
    pairs = built.arguments[0].registers.reshape(2, 8, 2)
    for out, selection in zip(built.result, (0x6420, 0x7531), strict=True):
        fours = out.registers.reshape(2, 4, 2)
        for m, group, half in np.ndindex(fours.shape):
            *both, chosen = permuted(fours[m, group, half])
            expected = [pairs[m, 2 * group + i, half] for i in range(2)]
            assert [source(x) for x in both] == expected
            assert built.values[chosen][0] == selection


def parts(value, known):
    """Those of `known` that a value is put together of, in order."""
    if value in known:
        return [value]
    found = []
    for operand in value.owner.operands:
        found += [x for x in parts(operand, known) if x not in found]
    return found
