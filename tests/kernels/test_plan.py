"""`plan_decode`: the key tiles of a step, divided over the SMs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax import DecodePlan, plan_decode
from pallas_kernels.formats import E4M3_FORMATS
from pallas_kernels.formats import FORMATS as CACHE_FORMATS
from pallas_kernels.hopper import plan
from pallas_kernels.hopper.limits import BLOCK_M, NUM_SMS

SLACK = 2 * plan.MIN_PIECE * plan.TILE_COST + 2 * plan.SEQUENCE_COST + plan.COMBINE_COST
"""How much more than an equal share the longest part may cost: cuts move by up to a smallest piece,
a cut sequence is started twice, and not splitting at all is worth a little."""


@functools.cache
def planner(rows, num_sms, row_tile=BLOCK_M, cache_format=None):
    def divide(seq_lens):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "num_sms", lambda: num_sms)
            return plan.divide(seq_lens, rows=rows, row_tile=row_tile, cache_format=cache_format)

    return jax.jit(divide)


def num_tiles(lens):
    return -(-np.maximum(np.asarray(lens), 0) // 64)


def pieces_of(parts, tiles):
    """`(part, seq, begin, end)` of every piece, as the kernels read a plan."""
    for part, (seq, tile, end_seq, end_tile, *_) in enumerate(parts):
        for s in range(seq, end_seq + (end_tile > 0)):
            yield part, s, tile if s == seq else 0, end_tile if s == end_seq else tiles[s]


def check(lens, rows=1, num_sms=NUM_SMS, cache_format=None):
    """A plan keeps its promises; returns the pieces and the cost of each part."""
    of_lengths = planner(rows, num_sms, cache_format=cache_format)
    parts = np.asarray(of_lengths(jnp.asarray(lens, jnp.int32)))
    tiles = num_tiles(lens)
    num_parts = max(1, num_sms // -(-rows // 64))
    assert parts.shape == (num_parts, 8) and parts.dtype == np.int32

    pieces = list(pieces_of(parts, tiles))
    in_16_bits = cache_format not in (None, *E4M3_FORMATS)
    shortest = 1 if in_16_bits and tiles.sum() <= num_parts else 2
    covered = {s: 0 for s in range(len(lens))}
    owners = {s: [] for s in range(len(lens))}
    for part, s, begin, end in pieces:
        assert begin == covered[s], f"tiles of sequence {s} before {begin} are twice or nowhere"
        covered[s] = end
        owners[s].append(part)
        whole = (begin, end) == (0, tiles[s])
        assert whole or end - begin >= shortest, f"a piece of sequence {s} is too short"
    assert covered == dict(enumerate(tiles))
    for s, by in owners.items():
        assert by == list(range(by[0], by[0] + len(by))), f"parts of sequence {s}: {by}"

    slots = {
        s: [2 * part + (s != parts[part, plan.SEQ]) for part in by]
        for s, by in owners.items()
        if len(by) > 1
    }
    merges, rest = parts[: len(slots), plan.MERGE_SEQ :], parts[len(slots) :, plan.MERGE_SEQ]
    assert (rest == -1).all()
    assert merges[:, 0].tolist() == sorted(slots)
    for s, first, second, number in merges:
        assert [first, *(second + 2 * i for i in range(number - 1))] == slots[s], f"sequence {s}"

    start_costs = np.where(tiles > 0, plan.SEQUENCE_COST, plan.zeros_cost(rows, BLOCK_M))
    costs = np.zeros(num_parts)
    for part, s, begin, end in pieces:
        costs[part] += (end - begin) * plan.TILE_COST + start_costs[s]
    share = (tiles.sum() * plan.TILE_COST + start_costs.sum()) / num_parts
    assert costs.max() <= share + SLACK, f"the longest part is {costs.max()}, a share is {share}"
    return pieces, costs


FORMATS = st.sampled_from([None, *CACHE_FORMATS])
lengths = st.one_of(
    st.sampled_from([0, 0, 1, 63, 64, 65]), st.integers(0, 2000), st.integers(0, 200_000)
)


@given(
    st.sampled_from([1, 2, 7, 130]).flatmap(lambda b: st.lists(lengths, min_size=b, max_size=b)),
    st.sampled_from([(1, NUM_SMS), (80, NUM_SMS), (128, 3), (8, 1), (8, 5), (64 * NUM_SMS, 8)]),
    FORMATS,
)
def test_any_lengths(lens, device, cache_format):
    check(lens, *device, cache_format)


@given(st.lists(st.integers(0, 64 * 100), min_size=1, max_size=3), FORMATS)
def test_few_tiles(lens, cache_format):
    """Not enough for all SMs, or just so."""
    check(lens, 1, NUM_SMS, cache_format)


def busy(costs, share=0.5):
    """The part of the SMs whose work is at least `share` of the longest."""
    return np.mean(costs >= share * costs.max())


@pytest.mark.parametrize(
    ("lens", "rows"),
    [
        ([131072], 128),
        ([100_000] + [64] * 60, 16),
        ([64] * 60 + [100_000], 128),
        ([0] * 200 + [50_000], 16),
        ([131_072] + [0] * 255, 16),
        ([0, 60_000, 0, 0, 90_000] + [0] * 50, 16),
        ([4096] * 128, 128),
        ([300, 40_000] * 40, 16),
        ([1024] * 16, 16),
    ],
    ids=lambda value: f"{len(value)} sequences" if isinstance(value, list) else f"{value} rows",
)
@pytest.mark.parametrize("cache_format", [None, "bf16"])
def test_every_sm_has_work(lens, rows, cache_format):
    _, costs = check(lens, rows, cache_format=cache_format)
    assert busy(costs) > 0.9


def test_a_short_sequence_for_every_sm():
    """64 tiles for 66 parts, but in e4m3, where a part has two at least."""
    for cache_format, number in (("f16", 64), ("fp8_token", 32), (None, 32)):
        assert len(check([4096], 128, cache_format=cache_format)[0]) == number


@pytest.mark.parametrize(
    ("rows", "parts", "tiles"),
    [(16, NUM_SMS, 0.25), (32, NUM_SMS, 0.5), (64, NUM_SMS, 1), (128, NUM_SMS // 2, 1)],
)
@pytest.mark.parametrize("empty", [255, 1023])
@pytest.mark.parametrize("first", [True, False])
def test_zeros_are_as_much_work_as_so_many_tiles(rows, parts, tiles, empty, first):
    """The padding of a batch to a size that is compiled: no part has too many tiles, nor too many
    sequences whose output it zeroes."""
    lens = [131_072] + [0] * empty
    pieces, _ = check(lens if first else lens[::-1], rows)
    work = np.zeros(parts)
    for part, _, begin, end in pieces:
        work[part] += end - begin or tiles
    assert work.max() <= work.sum() / parts + 2


def test_few_rows_of_zeros_are_no_work_to_speak_of():
    """Most SMs have keys."""
    tiles = num_tiles([131_072]).item()
    pieces, _ = check([0] * 127 + [131_072], 16)
    assert max(end - begin for _, _, begin, end in pieces) <= tiles / NUM_SMS + 2


def test_whole_or_split():
    """Sequences stay whole until splitting saves more than it costs."""
    # Two sequences to a part: a longest part of 132 tiles where the mean is 128.
    assert len(check([4096] * 128, 128)[0]) == 128
    # One of three on two SMs: 2 x 8 tiles against 12, which is as much as the combine costs.
    cost = plan.COMBINE_COST // plan.TILE_COST
    tiles = lambda n: [64 * n] * 3
    assert len(check(tiles(2 * cost), 1, 2)[0]) == 3
    assert len(check(tiles(2 * cost + 8), 1, 2)[0]) > 3


@pytest.mark.parametrize("batch", [1, 128, 4096])
def test_wild_lengths_do_not_overflow(batch):
    """They mean nothing; but parts must stay inside what there is, without a sequence twice."""
    parts = np.asarray(planner(16, NUM_SMS)(jnp.full(batch, 2**31 - 1, jnp.int32)))
    begin, end = parts[:, [plan.SEQ, plan.TILE]], parts[:, [plan.END_SEQ, plan.END_TILE]]
    assert (begin[0] == 0).all() and (end[-1] == [batch, 0]).all()
    assert (begin[1:] == end[:-1]).all() and (parts[:, : plan.MERGE_SEQ] >= 0).all()
    order = parts[:, plan.SEQ].astype(np.int64) << 32 | parts[:, plan.TILE]
    assert (np.diff(order) > 0).all()


def test_splitting_stops_at_small_pieces():
    """A short sequence alone."""
    for cache_format, number in ((None, 8), ("fp8_full", 8), ("bf16", 16), ("fp8_ds_mla", 16)):
        assert len(check([1024], cache_format=cache_format)[0]) == number
        assert len(check([64], cache_format=cache_format)[0]) == 1
    # Shares of two tiles, and an odd number of tiles: the last one alone is no piece.
    assert len(check([64 * 65], num_sms=34, cache_format="bf16")[0]) == 32


def test_equal_short_sequences_are_not_split():
    pieces, _ = check([640] * NUM_SMS)
    assert len(pieces) == NUM_SMS


def test_nothing_but_empty_sequences():
    pieces, _ = check([0] * 300)
    assert len(pieces) == 300


def test_negative_lengths_are_empty():
    lens = jnp.array([5, -(2**31), 100], jnp.int32)
    divide = planner(1, NUM_SMS)
    np.testing.assert_array_equal(divide(lens), divide(jnp.maximum(lens, 0)))


@pytest.mark.parametrize(
    ("num_heads", "q_len", "parts"), [(1, 1, 132), (16, 4, 132), (65, 1, 66), (128, 4, 16)]
)
def test_a_part_is_a_set_of_ctas_one_for_each_tile_of_rows(num_heads, q_len, parts):
    make = functools.partial(plan_decode, num_heads=num_heads, q_len=q_len)
    assert jax.eval_shape(make, jnp.array([5000], jnp.int32)).num_parts == parts


def test_one_program_for_all_lengths():
    """Traced lengths, on the device: nothing is read on the host, and no step follows another."""
    sizes = {"num_heads": 16, "q_len": 2, "page_size": 32}
    make = functools.partial(plan_decode, **sizes, cache_format="f16")
    lens = jnp.array([5, 0, 2000], jnp.int32)
    plan = jax.jit(make)(lens)
    assert (plan.parts != plan_decode(lens, **sizes).parts).any()
    np.testing.assert_array_equal(plan.parts, planner(32, NUM_SMS, cache_format="f16")(lens))
    assert isinstance(plan, DecodePlan)
    assert (plan.batch, plan.num_heads, plan.q_len, plan.page_size) == (3, 16, 2, 32)


def test_a_plan_is_a_pytree_with_one_array():
    plan = plan_decode(jnp.array([5], jnp.int32), num_heads=16)
    (leaf,) = jax.tree.leaves(plan)
    assert leaf is plan.parts


@pytest.mark.parametrize(
    ("name", "planned", "size"),
    [("batch", 2, 3), ("num_heads", 16, 8), ("q_len", 1, 2), ("page_size", 64, 16)],
)
def test_a_plan_for_another_call(name, planned, size):
    plan = plan_decode(jnp.array([5, 6], jnp.int32), num_heads=16)
    sizes = {"batch": 2, "num_heads": 16, "q_len": 1, "page_size": 64}
    plan.check(**sizes)
    with pytest.raises(ValueError) as raised:
        plan.check(**{**sizes, name: size})
    assert str(raised.value) == (
        f"`plan` was made for {name}={planned}, this call has {name}={size}; "
        "call plan_decode with the sizes of this step"
    )


@pytest.mark.parametrize(
    ("seq_lens", "sizes", "error", "message"),
    [
        (
            jnp.zeros((2, 3), jnp.int32),
            {},
            ValueError,
            "`seq_lens` has shape (2, 3): must have 1 axes, [b]",
        ),
        (
            jnp.zeros((0,), jnp.int32),
            {},
            ValueError,
            "`seq_lens` has shape (0,): must hold a sequence at least",
        ),
        (jnp.zeros((2,)), {}, TypeError, "`seq_lens` is float32: must be int32"),
        (
            jnp.zeros((2,), jnp.int32),
            {"num_heads": 0},
            ValueError,
            "`num_heads` is 0: must be at least 1",
        ),
        (
            jnp.zeros((2,), jnp.int32),
            {"q_len": -1},
            ValueError,
            "`q_len` is -1: must be at least 1",
        ),
        (
            jnp.zeros((2,), jnp.int32),
            {"page_size": 0},
            ValueError,
            "`page_size` is 0: must be at least 1",
        ),
        (
            jnp.zeros((2,), jnp.int32),
            {"cache_format": np.array(["f32"])},
            ValueError,
            "`cache_format` is array(['f32'], dtype='<U3'): must be one of 'bf16', 'f16', 'f32', "
            "'fp8_ds_mla', 'fp8_token', 'fp8_full'",
        ),
        (
            jnp.zeros((2,), jnp.int32),
            {"cache_format": "fp4"},
            ValueError,
            "`cache_format` is 'fp4': must be one of 'bf16', 'f16', 'f32', 'fp8_ds_mla', "
            "'fp8_token', 'fp8_full'",
        ),
    ],
)
def test_wrong_arguments(seq_lens, sizes, error, message):
    with pytest.raises(error) as raised:
        plan_decode(seq_lens, **{"num_heads": 16, **sizes})
    assert str(raised.value) == message
