"""What the device functions of `hopper.widen` put where, as `test_fp8_addresses.py`."""

import types

import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.formats import EXPONENT
from pallas_kernels.hopper import widen
from tests.kernels import addresses
from tests.kernels.addresses import LANE, WARP, accumulator, array, permuted, swizzled

D_LATENT = 512


@pytest.fixture(autouse=True)
def context():
    with mlir.make_ir_context(), ir.Location.unknown():
        yield


def load(monkeypatch, function, columns):
    """A function of a tile with so many of the columns of a stage, built; and for each element of
    its registers the token and the channel that it is made of."""
    ref = ((8, columns // 128, 8, 128), "e4m3", [8 * D_LATENT, 1024, 128, 1])
    shaped = types.SimpleNamespace(shape=(64, columns))
    call = lambda: function(shaped, interpret=False)
    built = addresses.Built(monkeypatch, call, (ref,), widen)
    tokens, channels = np.indices((64, columns))
    at = swizzled(tokens, channels, 8 * D_LATENT, 1024, 128, 1)
    element_at = np.full(64 * D_LATENT, -1)
    element_at[at] = tokens * columns + channels

    def elements(register):
        return [np.divmod(element_at[byte], columns) for byte in bytes_of(built, register)]

    return built.result, elements


def bytes_of(built, register):
    """The places in shared memory of the two e4m3 that a register has widened."""
    wide = register
    while wide.owner.name != "llvm.extractvalue":  # the bits of
        wide = wide.owner.operands[0]
    (which,) = position(wide)
    widening = wide.owner.operands[0].owner
    assert "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high" in str(widening)
    word, order = widening.operands[0], range(4)
    if "prmt" in str(word.owner):
        word, same, selection = permuted(word)
        assert word == same
        order = [int(built.values[selection][0]) >> 4 * i & 3 for i in range(4)]
    (matrix,), four = position(word), word.owner.operands[0]
    address, _ = built.loads[four]
    of_lane = lambda lane: address[WARP * 32 + matrix * 8 + lane]
    if "col" in str(four.owner):  # transposed: of two rows one element of 16 bits each
        rows = LANE % 4 * 2
        places = [of_lane(rows + i) + LANE // 4 * 2 + j for i in range(2) for j in range(2)]
    else:
        places = [of_lane(LANE // 4) + LANE % 4 * 4 + i for i in range(4)]
    return [places[i] for i in order[2 * which : 2 * which + 2]]


def position(value):
    """Which of several results it is."""
    return list(ir.DenseI64ArrayAttr(value.owner.attributes["position"]))


@pytest.mark.parametrize("columns", [128, 256])
def test_keys(columns, monkeypatch):
    """Each thread has of each token the channels that the queries have at its places."""
    operand, elements = load(monkeypatch, widen.load_keys, columns)
    channels = addresses.in_order_of_keys(np.arange(columns))
    assert sorted(channels) == list(range(columns))
    registers = operand.registers.reshape(1, columns // 8, 2)
    for at, token, place in accumulator((64, columns)):
        for i, (found_token, found_channel) in enumerate(elements(registers[at])):
            np.testing.assert_array_equal(found_token, token)
            np.testing.assert_array_equal(found_channel, channels[place + i])


@pytest.mark.parametrize("columns", [128, 256])
def test_values(columns, monkeypatch):
    """The even and the odd channels apart, tokens in their order."""
    operands, elements = load(monkeypatch, widen.load_values, columns)
    for odd, operand in enumerate(operands):
        registers = operand.registers.reshape(columns // 128, 8, 2)
        for at, pair, token in accumulator((columns // 2, 64)):
            for i, (found_token, found_channel) in enumerate(elements(registers[at])):
                np.testing.assert_array_equal(found_token, token + i)
                np.testing.assert_array_equal(found_channel, 2 * pair + odd)


@pytest.mark.parametrize(
    ("per_row", "row", "kinds"),
    [(64, 256, 4), (16, 64, 4), (32, 128, 4), (64, 128, 2), (16, 32, 2)],
)
@pytest.mark.parametrize("live", [0, 1, 37, 64])
def test_largest_scales(live, per_row, row, kinds, monkeypatch):
    """Every lane's two tokens, those behind the end left out."""
    monkeypatch.setattr(mgpu_utils, "redux", lambda x, *_: x)
    limit = array(plgpu.Layout.WG_SPLAT(()), (), "i32", 0, [np.full(128, live)])
    shaped = types.SimpleNamespace(shape=(64 // per_row, row))
    call = lambda: widen.largest_scales(shaped, None, per_row=per_row, kinds=kinds, interpret=False)
    ref = (shaped.shape, "f32", [row, 1])
    built = addresses.Built(monkeypatch, call, (ref, limit), widen)
    ((address, size),) = built.loads.values()
    token = 2 * LANE
    expected = token // per_row * row + token % per_row * kinds
    np.testing.assert_array_equal(address, 4 * expected)
    assert size == 8 * kinds
    for kind, largest in enumerate(built.result):
        rounded = largest.registers.item().owner.operands[0].owner
        of_warp, exponent = rounded.operands
        assert rounded.name == "arith.andi" and (built.values[exponent] == EXPONENT).all()
        for i, chosen in enumerate(of_warp.owner.operands):
            alive, bits, zero = chosen.owner.operands
            np.testing.assert_array_equal(built.values[alive], token + i < live)
            (at,) = ir.DenseI64ArrayAttr(bits.owner.attributes["static_position"])
            assert at == i * kinds + kind and (built.values[zero] == 0).all()
