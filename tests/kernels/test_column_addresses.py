"""Where the device functions of `hopper.columns` read and write, as `test_fp8_addresses.py`."""

import types

import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.hopper import columns, fp8
from pallas_kernels.hopper.layouts import WGMMA, WGMMA_COLUMN
from tests.kernels import addresses
from tests.kernels.addresses import LANE, WARP, array, permuted, swizzled


@pytest.fixture(autouse=True)
def context():
    with mlir.make_ir_context(), ir.Location.unknown():
        yield


def build(monkeypatch, function, arguments):
    return addresses.Built(monkeypatch, function, arguments, columns)


def leaves(value, known):
    """Those of `known` that a value is made of, and the element taken of each."""
    if value in known:
        return [(value, None)]
    if value.owner.name == "vector.extract" and value.owner.operands[0] in known:
        (position,) = ir.DenseI64ArrayAttr(value.owner.attributes["static_position"])
        return [(value.owner.operands[0], position)]
    return [found for operand in value.owner.operands for found in leaves(operand, known)]


@pytest.mark.parametrize("largest", [True, False])
def test_own_rows(largest, monkeypatch):
    shaped = types.SimpleNamespace(shape=(64, 24))
    call = lambda: columns.own_rows(shaped, largest=largest, interpret=False)
    built = build(monkeypatch, call, (array(WGMMA, (64, 24), "f32", 2),))
    registers = built.arguments[0].registers.reshape(3, 2)
    for value, pairs in zip(built.result.registers.flat, registers, strict=True):
        assert value.owner.name == ("arith.maxnumf" if largest else "arith.addf")
        assert list(value.owner.operands) == list(pairs)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("count", [8, 24, 32])
def test_over_rows(count, largest, monkeypatch):
    """Each warp's values to its own row of the scratch, then all rows, behind a meeting."""
    events, distances = [], []
    monkeypatch.setattr(mgpu_utils, "warpgroup_barrier", lambda: events.append("meet"))
    # In place of the other lanes' values: the same one again.
    shuffle = lambda x, distance: distances.append(distance) or x
    monkeypatch.setattr(mgpu_utils, "shfl_bfly", shuffle)
    shaped = types.SimpleNamespace(shape=(count,))
    built = build(
        monkeypatch,
        lambda: columns.over_rows(shaped, None, largest=largest, interpret=False),
        (array(WGMMA_COLUMN, (count,), "f32", 2), ((4, count), "f32", [count, 1])),
    )
    assert events == ["meet"]
    # Lanes that differ in the row only: by these distances all of them are taken together.
    assert distances == [4, 4, 8, 8, 16, 16] * (count // 8)
    registers = list(built.arguments[0].registers.flat)
    for group, (pair, address, _) in enumerate(built.stores):
        np.testing.assert_array_equal(address, 4 * (WARP * count + 8 * group + LANE % 4 * 2))
        for i, value in enumerate(pair.owner.operands):
            assert set(leaves(value, set(registers))) == {(registers[group], i)}
    assert len(built.stores) == count // 8
    for group, value in enumerate(built.result.registers.flat):
        loaded = [x for x, _ in leaves(value, set(built.loads))]
        assert len(loaded) == 4
        for warp, x in enumerate(loaded):
            address, size = built.loads[x]
            np.testing.assert_array_equal(address, 4 * (warp * count + 8 * group + LANE % 4 * 2))
            assert size == 8


def test_store_column_values(monkeypatch):
    values = array(WGMMA_COLUMN, (24,), "f32", 2)
    built = build(
        monkeypatch,
        lambda: columns.store_column_values(None, None, interpret=False),
        (((24,), "f32", [1]), values),
    )
    for group, (pair, address, _) in enumerate(built.stores):
        assert pair == built.arguments[1].registers.flat[group]
        np.testing.assert_array_equal(address, 4 * (8 * group + LANE % 4 * 2))


@pytest.mark.parametrize("shape", [(256, 16), (128, 8)])
def test_what_is_given_is_taken(shape, monkeypatch):
    """By the same thread, into the same registers; no two threads use the same place."""
    rows = shape[0] * shape[1] // columns.EXCHANGE_ROW
    ref = ((rows, columns.EXCHANGE_ROW), "f32", [columns.EXCHANGE_ROW, 1])
    tile = array(WGMMA, shape, "f32", 2)
    call = lambda: columns.give(None, None, interpret=False)
    gave = build(monkeypatch, call, (ref, tile))
    places = np.stack([address for _, address, _ in gave.stores])
    assert np.unique(places).size == places.size and (places % 16 == 0).all()
    assert places.max() + 16 == rows * columns.EXCHANGE_ROW * 4
    given = gave.arguments[1].registers.reshape(-1, 2)
    call = lambda: columns.take(None, shape, interpret=False)
    took = build(monkeypatch, call, (ref,))
    taken = took.result.registers.reshape(-1, 2)
    for row, (four, address, _) in enumerate(gave.stores):
        halves = [x for x, _ in leaves(four, set(given.flat))]
        assert list(dict.fromkeys(halves)) == list(given[row])
        for half, pair in enumerate(taken[row]):
            (first, at), (second, following) = leaves(pair, set(took.loads))
            assert first == second and (at, following) == (2 * half, 2 * half + 1)
            np.testing.assert_array_equal(took.loads[first][0], address)


@pytest.mark.parametrize(
    ("per_row", "row", "kinds"),
    [(64, 64, 1), (16, 32, 1), (16, 32, 2), (32, 64, 2), (64, 128, 2), (16, 64, 4), (64, 256, 4)],
)
def test_load_token_values(per_row, row, kinds, monkeypatch):
    shaped = types.SimpleNamespace(shape=(64 // per_row, row))
    call = lambda: columns.load_token_values(shaped, per_row=per_row, kinds=kinds, interpret=False)
    built = build(monkeypatch, call, ((shaped.shape, "f32", [row, 1]),))
    for kind, values in enumerate(built.result):
        for half, value in enumerate(values.registers.flat):
            ((loaded, position),) = leaves(value, set(built.loads))
            token = 16 * WARP + LANE // 4 + 8 * half
            expected = token // per_row * row + token % per_row * kinds + kind
            np.testing.assert_array_equal(built.loads[loaded][0] + 4 * position, 4 * expected)


@pytest.mark.parametrize("rows", [8, 24, 32])
def test_store_probabilities(rows, monkeypatch):
    """Every byte, in the order of tokens that the transposed values have."""
    shuffled = {}
    p = array(WGMMA, (64, rows), "e4m3", 2)
    ref = ((rows // 8, 1, 8, 64), "e4m3", [512, 512, 64, 1])

    def shuffle(x, distance):
        assert distance == 4
        other = arith.addi(x, x)  # any value that is not x
        shuffled[other] = x
        return other

    monkeypatch.setattr(mgpu_utils, "shfl_bfly", shuffle)
    call = lambda: columns.store_probabilities(None, None, (), interpret=False)
    built = build(monkeypatch, call, (ref, p))
    registers = built.arguments[1].registers.reshape(rows // 8, 2)
    token_at = np.array(ORDER)
    written = np.zeros((rows, 64), int)
    for group, (value, address, _) in enumerate(built.stores):
        mine, theirs, chosen = permuted(value)
        assert shuffled[theirs] == mine
        made_of = dict.fromkeys(x for x, _ in leaves(mine, set(registers.flat)))
        assert list(made_of) == list(registers[group])
        selection = built.values[chosen]
        for byte in range(4):
            selected = selection >> 4 * byte & 7
            # Of a word: token t columns 0 and 1, token t + 8 columns 0 and 1.
            owner = np.where(selected < 4, LANE, LANE ^ 4)
            half, i = divmod(selected % 4, 2)
            token = 16 * WARP + owner // 4 + 8 * half
            row = 8 * group + owner % 4 * 2 + i
            places = token_at.argsort()[token % 16] + token // 16 * 16
            expected = swizzled(row, places, 512, 512, 64, 1)
            np.testing.assert_array_equal(address + byte, expected)
            np.add.at(written, (row, token), 1)
    assert (written == 1).all()


def test_zero_from(monkeypatch):
    """Which columns a thread keeps."""
    values = array(WGMMA_COLUMN, (64,), "f32", 2)
    limit = array(plgpu.Layout.WG_SPLAT(()), (), "i32", 0, [np.full(128, 37)])
    shaped = types.SimpleNamespace(shape=(64,))
    call = lambda: columns.zero_from(shaped, None, interpret=False)
    built = build(monkeypatch, call, (values, limit))
    given = built.arguments[0].registers.flat
    for group, (pair, before) in enumerate(zip(built.result.registers.flat, given, strict=True)):
        for i, kept in enumerate(pair.owner.operands):
            condition, same, _ = kept.owner.operands
            assert leaves(same, {before}) == [(before, i)]
            column = 8 * group + LANE % 4 * 2 + i
            np.testing.assert_array_equal(built.values[condition], column < 37)


ORDER = [int(word) for word in fp8.__doc__.split("into the order")[1].split("which")[0].split()]
