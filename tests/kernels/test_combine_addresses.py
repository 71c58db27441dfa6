"""Where the device functions of `combine.warps` read and write, as `test_fp8_addresses.py`."""

import itertools
import types

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.combine import kernel, warps
from pallas_kernels.hopper.pieces import Split
from tests.kernels import addresses
from tests.kernels.addresses import LANE, THREAD, WARP, array, source

WIDTHS = [512, 256]


@pytest.fixture(autouse=True)
def context():
    with mlir.make_ir_context(), ir.Location.unknown():
        yield


@pytest.mark.parametrize(("first", "pieces"), [(0, 17), (16, 17), (36, 38), (132, 132)])
@pytest.mark.parametrize("width", WIDTHS)
def test_load_pieces(width, first, pieces, monkeypatch):
    """A piece a warp, the last one again for those that have none; 8 columns a lane and load."""
    rows, place, first_slot, rest = 64, 37, 3, 8
    scalars = [
        array(plgpu.Layout.WG_SPLAT(()), (), "i32", None, known=[np.full(128, value)])
        for value in (first_slot, rest, place, first, pieces)
    ]
    partial = types.SimpleNamespace(shape=(300, rows, width), dtype=jnp.dtype("float16"))
    tile = kernel._tile(width)
    split = Split(*(None,) * 4)  # the scalars below, in the end
    call = lambda: warps.load_pieces(partial, None, split, None, None, tile, interpret=False)
    refs = [(partial.shape, "f16", [rows * width, width, 1]), (partial.shape[:2], "f32", [rows, 1])]
    built = addresses.Built(monkeypatch, call, (*refs, *scalars), warps)
    (lse2, out), loads = built.result, dict(built.loads)
    index = np.minimum(first + WARP, pieces - 1)
    row = np.where(index == 0, first_slot, rest + 2 * (index - 1)) * rows + place
    for i, register in enumerate(out.registers.flat):
        at, size = loads.pop(register)
        np.testing.assert_array_equal(at, 2 * (row * width + 256 * i + 8 * LANE))
        assert size == 16
    assert out.registers.size == width // 256 and lse2.registers.size == 1
    ((at, size),) = loads.values()
    np.testing.assert_array_equal(at, 4 * row)
    assert size == 4
    exists, chosen, otherwise = lse2.registers.item().owner.operands[0].owner.operands
    np.testing.assert_array_equal(built.values[exists], first + WARP < pieces)
    assert chosen in loads and "0xFF800000" in str(otherwise.owner)


@pytest.mark.parametrize("width", WIDTHS)
def test_exchange(width, monkeypatch):
    """What a warp stores is where all threads look for it, each for its own columns of all warps;
    the warps meet before and after it is stored."""
    events = []
    for name in ("load", "store"):
        function = getattr(llvm, name)
        record = lambda *args, name=name, function=function: events.append(name) or function(*args)
        monkeypatch.setattr(llvm, name, record)
    monkeypatch.setattr(mgpu_utils, "warpgroup_barrier", lambda: events.append("meet"))
    tile = kernel._tile(width)
    of_rows = [array(tile.reduce(1), (4,), "f32", 1) for _ in range(2)]
    acc = array(tile, (4, width), "f32", 8)
    stride = width + warps.MARGIN
    given = types.SimpleNamespace(shape=(4, width))
    call = lambda: warps.exchange(None, None, given, None, tile, interpret=False)
    arguments = (*of_rows, acc, ((4, stride), "f32", [stride, 1]))
    built = addresses.Built(monkeypatch, call, arguments, warps)
    assert [kind for kind, _ in itertools.groupby(events)] == ["meet", "store", "meet", "load"]
    found = {source(value): at for value, at, _ in built.stores}
    written = np.zeros(4 * stride, int)
    m, l, acc = (argument.registers for argument in built.arguments[:3])
    for i, register in enumerate(acc.flat):
        assert (found[register] % 32 == 0).all()
        np.testing.assert_array_equal(found[register], 4 * (WARP * stride + 256 * i + 8 * LANE))
        for column in range(8):
            np.add.at(written, found[register] // 4 + column, 1)
    for i, registers in enumerate((m, l)):
        (register,) = registers.flat
        np.testing.assert_array_equal(found[register], 4 * (WARP * stride + width + i))
        written[found[register] // 4] = 1
    rows = written.reshape(4, stride)
    assert (rows[:, : width + 2] == 1).all() and (rows[:, width + 2 :] == 0).all()

    ms, ls, accs = built.result[:4], built.result[4:8], built.result[8:]
    for warp in range(4):
        for i, value in enumerate((ms[warp], ls[warp])):
            at, size = built.loads[value.registers.item()]
            np.testing.assert_array_equal(at, 4 * (warp * stride + width + i))
            assert size == 4
        at, size = built.loads[accs[warp].registers.item()]
        each = width // 128
        np.testing.assert_array_equal(at, 4 * (warp * stride + each * THREAD))
        assert size == 4 * each
