"""The kernel that merges the pieces of split sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.combine import kernel
from pallas_kernels.hopper.limits import BLOCK_M
from pallas_kernels.hopper.row_tiles import row_of_slots, untile
from tests import oracle, tolerances
from tests.kernels import simulator
from tests.kernels.test_plan import num_tiles, pieces_of, planner


def inputs(lens, rows, d_latent, num_sms, row_tile=BLOCK_M, dtype=jnp.bfloat16):
    """Partial results of each piece of a split sequence; all else is poisoned.

    Row 1 has seen no key at all, every fifth row none in the last piece.
    """
    rng = np.random.default_rng(0)
    parts = np.asarray(planner(rows, num_sms, row_tile)(jnp.asarray(lens, jnp.int32)))
    order = row_of_slots(rows, row_tile)
    partial = np.full((2 * len(parts), len(order), d_latent), np.nan, np.float32)
    partial_lse2 = np.full((2 * len(parts), len(order)), np.nan, np.float32)
    split = {}
    for part, seq, begin, end in pieces_of(parts, num_tiles(lens)):
        if (begin, end) == (0, num_tiles(lens)[seq]):
            continue
        piece = np.clip(rng.standard_normal((rows, d_latent)), -3, 3).astype(np.float32)
        lse2 = (rng.standard_normal(rows) * 4).astype(np.float32)
        if end == num_tiles(lens)[seq]:
            lse2[1::5] = -np.inf
        lse2[1] = -np.inf
        piece[np.isneginf(lse2)] = 0
        slot = 2 * part + (seq != parts[part, 0])
        partial[slot], partial_lse2[slot] = piece[order], lse2[order]
        split.setdefault(seq, []).append((piece, lse2))
    out = np.full((len(lens), rows, d_latent), 7, np.float32)
    lse = np.full((len(lens), len(order)), 7, np.float32)
    for seq in split:
        out[seq] = lse[seq] = np.nan
    arrays = (jnp.asarray(out, dtype), *map(jnp.asarray, (lse, partial, partial_lse2, parts)))
    return arrays, split


def expected(split, sink):
    """`{sequence: (out, lse)}` in float64."""
    merged = {}
    for seq, pieces in split.items():
        outs, lse2s = (np.stack(x).astype(np.float64) for x in zip(*pieces, strict=True))
        lses = lse2s * np.log(2)
        with np.errstate(divide="ignore", invalid="ignore"):
            lse = np.logaddexp.reduce(lses, axis=0)
            weights = np.where(np.isneginf(lses), 0, np.exp(lses - lse))
        out = (weights[..., None] * outs).sum(0) * oracle.sink_weight(lse, sink)[:, None]
        merged[seq] = out, lse
    return merged


MIXED = (70, 6000, 0, 1500, 500)


@simulator.ON_BOTH
@pytest.mark.parametrize(
    ("lens", "pieces", "rows", "row_tile", "d_latent", "with_sink"),
    [
        pytest.param(MIXED, (31, 8, 3), 8, 64, 256, True, id="many pieces, some and few"),
        pytest.param(MIXED, (31, 8, 3), 8, 64, 256, False, id="no sink"),
        pytest.param(MIXED, (31, 8, 3), 8, 64, 512, True, id="512 channels"),
        pytest.param((6000,), (47,), 8, 64, 256, True, id="an SM for each item, two batches"),
        pytest.param((2000, 64), (16,), 88, 64, 512, False, id="row tiles that overlap"),
        pytest.param((2000, 64), (16,), 72, 64, 256, True, id="tiles that overlap by all but 8"),
        pytest.param((5000, 64), (20,), 72, 64, 256, True, id="that overlap, many pieces"),
        pytest.param((5000, 64), (20,), 40, 32, 256, False, id="smaller ones, many pieces"),
        pytest.param((2000, 64), (16,), 40, 24, 512, True, id="smaller ones, some pieces"),
    ],
)
def test_against_float64(lens, pieces, rows, row_tile, d_latent, with_sink, interpret, monkeypatch):
    num_sms = 48
    monkeypatch.setattr(kernel, "CTAS_PER_SM", 1)
    arrays, split = inputs(lens, rows, d_latent, num_sms, row_tile)
    assert tuple(len(of_sequence) for of_sequence in split.values()) == pieces
    sink, slots = None, row_of_slots(rows, row_tile)
    if with_sink:
        sink = np.random.default_rng(2).standard_normal(rows).astype(np.float32) * 3
        sink[3], sink[4] = np.inf, -np.inf
    sizes = {"num_sms": num_sms, "row_tile": row_tile}
    merge = functools.partial(kernel.merge, **sizes, interpret=interpret)
    run = simulator.Simulation(merge).run if interpret else jax.jit(merge)
    args = (*arrays, None if sink is None else jnp.asarray(sink[slots]))
    out, lse = map(np.asarray, run(*args))
    for seq in range(len(lens)):
        if seq not in split:
            assert (out[seq] == 7).all() and (lse[seq] == 7).all(), f"sequence {seq} was touched"
    for seq, (expected_out, expected_lse) in expected(split, sink).items():
        tolerances.check("out", out[seq], expected_out, tolerances.OUT["bfloat16"])
        found = untile(lse[seq : seq + 1], rows, row_tile)[0]
        tolerances.check("lse", found, expected_lse, tolerances.LSE)
    for again, first in zip(map(np.asarray, run(*args)), (out, lse), strict=True):
        np.testing.assert_array_equal(again, first)


@simulator.ON_BOTH
def test_nothing_to_merge(interpret):
    arrays, split = inputs((64, 0, 30), 8, 256, 12)
    assert not split
    merge = functools.partial(kernel.merge, num_sms=2, interpret=interpret)
    run = simulator.Simulation(merge).run if interpret else jax.jit(merge)
    out, lse = run(*arrays, None)
    assert (np.asarray(out) == 7).all() and (np.asarray(lse) == 7).all()
