"""Where the device functions of `hopper.inline` that no other test sees read and write."""

import types

import numpy as np
import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from pallas_kernels.hopper import inline
from tests.kernels import addresses

SHAPES = (128,), (200, 30)


@pytest.fixture(autouse=True)
def context():
    with mlir.make_ir_context(), ir.Location.unknown():
        yield


def test_keep_in_l2(monkeypatch):
    """Every line of every array is asked for once, by the CTAs together, and nothing behind it."""
    refs = [types.SimpleNamespace(shape=shape) for shape in SHAPES]
    arguments = [(shape, "i32", [*shape[1:], 1]) for shape in SHAPES]
    call = lambda: inline.keep_in_l2(refs, interpret=False)
    asked = [[] for _ in SHAPES]
    for block, warpgroup in np.ndindex(2, 2):
        place = {"block": block, "warpgroup": warpgroup}
        built = addresses.Built(monkeypatch, call, arguments, inline, **place)
        for lines, (text, address, active) in zip(asked, built.statements, strict=True):
            assert text.startswith("prefetch.global.L2")
            lines.extend(address[active])
    for lines, shape in zip(asked, SHAPES, strict=True):
        np.testing.assert_array_equal(np.sort(lines), np.arange(0, 4 * np.prod(shape), 128))


@pytest.mark.parametrize("shape", [(8, 256), (24, 512), (64, 512)])
def test_store_zeros(shape, monkeypatch):
    """Every element is written once, and nothing behind them."""
    call = lambda: inline.store_zeros(None, interpret=False)
    built = addresses.Built(monkeypatch, call, [(shape, "bf16", [shape[1], 1])], inline)
    written = np.concatenate([address for _, address, _ in built.stores])
    assert {addresses.size(value.type) for value, *_ in built.stores} == {16}
    np.testing.assert_array_equal(np.sort(written), np.arange(0, 2 * np.prod(shape), 16))
