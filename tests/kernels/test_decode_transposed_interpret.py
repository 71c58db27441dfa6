"""The transposed decode kernel on the simulated GPU: results, races, and that each is found.

As `test_decode_dense_interpret.py` does it. What is particular here:

- The device functions of `hopper.columns` have stand-ins; `test_column_addresses.py` has the real
  ones.
- The simulator takes the union of the key ring and what the math warpgroups exchange for one
  buffer, whatever the stage; they are two there, and giving half an output makes the keys of its
  stage NaN, which taking it verifies.
- What orders the warps of a warpgroup among themselves (`sync_warps`) is not seen.
"""

import dataclasses
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode
from pallas_kernels.decode_transposed import kernel, products
from pallas_kernels.decode_transposed.config import Config
from pallas_kernels.formats import E4M3_FORMATS
from pallas_kernels.hopper import plan
from tests import inputs, oracle, tolerances
from tests.kernels import simulator
from tests.kernels.few_sms import limit_sms, record_plan

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(120)]

SITES = [*simulator.sites(kernel), *simulator.sites(products)]
FORMATS = {
    "bf16": {"In16Bits"},
    "fp8_ds_mla": {"Widened", "ThroughRegisters"},
    "fp8_token": {"InE4m3", "ThroughRegisters"},
}
"""One of each kind, and the classes that have its products."""
MATH, LOAD = (0, 1), (2,)
NAMES = ("mma_wg0", "mma_wg1", "load_wg")


def warpgroups(site):
    """Those that may run it."""
    return LOAD if site.function == "_load_wg" else MATH


def barrier_of(site):
    return re.search(r"\bbar\.(\w+)", site.argument).group(1)


def config(format):
    return Config(format, "bfloat16", 256, 64, 16, 16, 1, True, has_sink=False, scale=inputs.SCALE)


def sites_of(format):
    """Those in the kernel for caches in this format."""
    others = set.union(*FORMATS.values()) - FORMATS[format]
    barriers = config(format).barriers()
    return [
        site
        for site in SITES
        if site.function not in others and (not site.is_of_barrier or barrier_of(site) in barriers)
    ]


def decode_case(lens, format, **sizes):
    """In e4m3 with queries as small as the contract has them: `inputs` makes them ten times as
    large."""
    case = inputs.decode_case(lens, format=format, **sizes)
    if format not in E4M3_FORMATS:
        return case
    small = lambda q: (q / 10).astype(q.dtype)
    return dataclasses.replace(case, q_latent=small(case.q_latent), q_rope=small(case.q_rope))


def simulate(
    case,
    num_sms,
    monkeypatch,
    *,
    scale=inputs.SCALE,
    causal=True,
    attn_sink=None,
    expect=None,
    given_plan=None,
    within=None,
):
    """`run`, check out and lse against the oracle (of `expect`), and return the plan that was made,
    if none is given."""
    made = record_plan(monkeypatch)
    kwargs = {"scale": scale, "causal": causal, "attn_sink": attn_sink}
    out, lse = run(case, num_sms, monkeypatch, **kwargs, given_plan=given_plan)
    expected_out, expected_lse = oracle.decode(*(expect or case).args, **kwargs)
    if within is None:
        in_e4m3 = case.cache.format in E4M3_FORMATS
        of_16_bits = tolerances.OUT[out.dtype.name], tolerances.LSE
        within = (tolerances.E4M3_OUT, tolerances.E4M3_LSE) if in_e4m3 else of_16_bits
    tolerances.check("out", out, expected_out, within[0])
    tolerances.check("lse", lse, expected_lse, within[1])
    return made(case.seq_lens) if given_plan is None else None


def run(
    case,
    num_sms,
    monkeypatch,
    *,
    scale=inputs.SCALE,
    causal=True,
    attn_sink=None,
    given_plan=None,
):
    """`mla_decode` on so few SMs: out and lse."""
    limit_sms(monkeypatch, num_sms)
    simulation = simulator.Simulation(
        lambda *args: decode.mla_decode(
            *args,
            scale=scale,
            causal=causal,
            attn_sink=attn_sink,
            plan=given_plan,
            return_lse=True,
            transposed=True,
            interpret=simulator.PARAMS,
        )
    )
    return simulation.run(*case.args)


def cuts(parts):
    """How many parts begin inside a sequence."""
    return int((parts[:, 1] > 0).sum())


ALL_FORMATS = pytest.mark.parametrize("format", ["bf16", "fp8_ds_mla", *E4M3_FORMATS])


@ALL_FORMATS
def test_split_and_whole_sequences_with_a_sink(format, monkeypatch):
    sizes = {"h_q": 8, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    sink = jnp.array([0.5, np.inf, -np.inf, -3.0, 1.0, 0.0, 2.0, -1.0], jnp.float32)
    case = decode_case((70, 1500, 0), format, **sizes)
    assert cuts(simulate(case, 4, monkeypatch, attn_sink=sink)) == 3


@ALL_FORMATS
def test_pieces_of_a_tile(format, monkeypatch):
    """In e4m3 of two, for a lone one is taken twice."""
    sizes = {"h_q": 8, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    parts = simulate(decode_case((500,), format, **sizes), 8, monkeypatch)
    begins = {*parts[:, plan.TILE].tolist()}
    assert begins == {*range(0, 8, 2 if format in E4M3_FORMATS else 1)}


@pytest.mark.parametrize("format", ["f16", "fp8_ds_mla", *E4M3_FORMATS])
def test_small_pages_odd_heads_and_f16(format, monkeypatch):
    """Six rows, four pages a tile, one page ending inside the mask, odd and even counts of
    tiles."""
    sizes = {"s_q": 2, "h_q": 3, "page_size": 16, "kv_lora_rank": 256, "rope_dim": 32}
    dtype = jnp.bfloat16 if format == "fp8_ds_mla" else jnp.float16
    case = decode_case((0, 65, 3, 0, 130), format, dtype=dtype, **sizes)
    simulate(case, 2, monkeypatch)


def test_a_causal_mask_over_two_tiles(monkeypatch):
    """The last query's token begins a tile, so that the others see less than the one before."""
    sizes = {"s_q": 3, "h_q": 4, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    simulate(inputs.decode_case((193, 1, 2), **sizes), 1, monkeypatch)
    sizes = {"s_q": 70, "h_q": 1, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    simulate(inputs.decode_case((256,), **sizes), 1, monkeypatch)


def test_sinks_of_the_size_of_the_scores(monkeypatch):
    """Several queries: a row's sink is that of its head. Some sequences are split, some not."""
    sizes = {"s_q": 2, "h_q": 3, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    sink = jnp.array([6.0, -4.0, 8.0], jnp.float32)
    parts = simulate(
        inputs.decode_case((1500, 65), **sizes), 3, monkeypatch, attn_sink=sink, scale=1.0
    )
    assert 0 < cuts(parts) < 3


@pytest.mark.parametrize("format", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("rows", [24, 32])
def test_rows_that_fill_one_tile(rows, format, monkeypatch):
    sizes = {"h_q": rows, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    simulate(decode_case((64, 300, 129), format, **sizes), 2, monkeypatch)


@ALL_FORMATS
def test_tiled_rows_on_large_pages(format, monkeypatch):
    """Eighty rows: the third tile is drawn back over the second."""
    sizes = {"s_q": 5, "h_q": 16, "page_size": 128, "kv_lora_rank": 256, "rope_dim": 64}
    case = decode_case((1000,), format, **sizes)
    assert cuts(simulate(case, 6, monkeypatch)) == 1


def test_a_plan_for_larger_row_tiles(monkeypatch):
    """Forty rows are one tile of the other schedule, whose plan serves this one too."""
    sizes = {"h_q": 40, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    case = inputs.decode_case((500, 64), **sizes)
    limit_sms(monkeypatch, 2)
    parts = plan.divide(case.seq_lens, rows=40)
    assert parts.shape[0] == 2
    simulate(case, 2, monkeypatch, given_plan=SimpleNamespace(parts=parts))


@pytest.mark.parametrize("format", E4M3_FORMATS)
def test_errors_of_few_tokens_in_e4m3(format, monkeypatch):
    """They do not average out; a single tile is taken twice, for a second term of P."""
    sizes = {"h_q": 16, "page_size": 16, "kv_lora_rank": 512, "rope_dim": 64}
    case = decode_case((2, 2, 3, 1, 5, 64, 30), format, **sizes)
    within = tolerances.E4M3_SHORT_OUT, tolerances.E4M3_LSE
    simulate(case, 2, monkeypatch, within=within)


def test_lengths_that_the_table_has_no_place_for(monkeypatch):
    """The tokens behind the table's last page do not exist; the plan knows nothing of that."""
    sizes = {"h_q": 8, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    case = inputs.decode_case((128, 640, 64), s_q=3, max_pages=10, **sizes)
    for wild in (2000, 2**31 - 1):
        lens = jnp.array([128, wild, 64], jnp.int32)
        simulate(dataclasses.replace(case, seq_lens=lens), 4, monkeypatch, expect=case)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scale", [0.2, 0.0, -0.2])
def test_scale_known_at_run_time(scale, format, monkeypatch):
    sizes = {"s_q": 2, "h_q": 4, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 32}
    case = decode_case((65, 0, 1), format, **sizes)
    # No row's factor may underflow: masked scores times 0 are NaN.
    case = dataclasses.replace(case, q_latent=case.q_latent.at[0].set(0))
    simulate(case, 2, monkeypatch, scale=jnp.float32(scale))


@pytest.mark.parametrize("format", FORMATS)
def test_queries_without_a_latent_part(format, monkeypatch):
    """Their scores are those of the rope part, in its own size."""
    case = decode_case((200,), format, h_q=8, kv_lora_rank=256, rope_dim=32, page_size=64)
    case = dataclasses.replace(case, q_latent=case.q_latent * 0, q_rope=case.q_rope * 20)
    simulate(case, 2, monkeypatch)


@pytest.mark.parametrize("format", ["bf16", "fp8_ds_mla"])
def test_deepseek_sizes_and_a_rising_maximum(format, monkeypatch):
    """Scores of hundreds: the maximum rises by more than is let pass without rescaling, and the two
    warpgroups end with different ones."""
    sizes = {"h_q": 16, "page_size": 32, "kv_lora_rank": 512, "rope_dim": 64}
    case = decode_case((63, 400), format, **sizes)
    simulate(case, 1, monkeypatch, scale=20.0, causal=False)


@pytest.mark.parametrize("format", E4M3_FORMATS)
def test_deepseek_sizes_in_e4m3(format, monkeypatch):
    """Thirty-two rows, all stages, scores whose maximum rises by more than is let pass."""
    sizes = {"h_q": 32, "page_size": 32, "kv_lora_rank": 512, "rope_dim": 64}
    case = decode_case((63, 500), format, **sizes)
    simulate(case, 1, monkeypatch, scale=2.0, causal=False)


@pytest.mark.parametrize("format", ["fp8_ds_mla", "fp8_token"])
def test_tokens_of_very_different_scale(format, monkeypatch):
    """The scale that all are relative to rises and rises; the smallest tokens still count."""
    sizes = {"h_q": 8, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    case = decode_case((700,), format, **sizes)
    num_scales = case.cache.scale.shape[-1]
    scale = np.array(case.cache.scale).reshape(-1, num_scales)
    fall = np.linspace(0, 10, 700, dtype=np.float32)
    scale[case.live] *= np.exp2(-np.round(fall) if format == "fp8_ds_mla" else -fall)[:, None]
    scale = jnp.asarray(scale.reshape(case.cache.scale.shape))
    cache = dataclasses.replace(case.cache, scale=scale)
    simulate(dataclasses.replace(case, cache=cache), 1, monkeypatch)


@pytest.mark.parametrize("exponents", [(-20, 20), (20, -20)])
def test_groups_of_channels_of_very_different_scale(exponents, monkeypatch):
    """Queries and values are float16 on the way: each group in a range of its own."""
    sizes = {"h_q": 8, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    case = decode_case((70, 3), "fp8_ds_mla", **sizes)
    out, lse = run(inputs.with_scales_of(case, exponents), 1, monkeypatch)
    out = np.asarray(out, np.float32) / np.repeat(np.exp2(np.array(exponents, np.float32)), 128)
    expected_out, expected_lse = oracle.decode(*case.args, scale=inputs.SCALE)
    tolerances.check("out", out, expected_out, tolerances.OUT["bfloat16"])
    tolerances.check("lse", lse, expected_lse, tolerances.LSE)


def test_rows_of_two_tiles_are_of_the_first(monkeypatch):
    """Which has other scales for their queries: who stores last must not matter."""
    sizes = {"page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    case = decode_case((70, 3), "fp8_ds_mla", h_q=40, **sizes)
    q_latent = case.q_latent.at[:, :, 32:, :128].multiply(2.0**30)
    first = dataclasses.replace(case, q_latent=q_latent[:, :, :32], q_rope=case.q_rope[:, :, :32])
    out, lse = run(dataclasses.replace(case, q_latent=q_latent), 2, monkeypatch)
    expected_out, expected_lse = run(first, 1, monkeypatch)
    np.testing.assert_array_equal(out[:, :, :32], expected_out)
    np.testing.assert_array_equal(lse[:, :32], expected_lse)


@pytest.mark.parametrize("format", ["fp8_ds_mla", "fp8_token", "fp8_full"])
def test_tokens_that_were_never_written(format, monkeypatch):
    """A new cache's scales are 0."""
    sizes = {"h_q": 8, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    case = decode_case((130,), format, **sizes)
    cache = dataclasses.replace(case.cache, scale=jnp.zeros_like(case.cache.scale))
    simulate(dataclasses.replace(case, cache=cache), 1, monkeypatch)


PARTS = jnp.array([[0, 0, 7, 0, -1, 0, 0, 0]], jnp.int32)


def simulation(format):
    launch = functools.partial(decode.launch, config(format), interpret=simulator.PARAMS)
    return simulator.Simulation(launch)


@functools.cache
def small(format):
    """Inputs that reach every synchronisation: odd and even counts of tiles, single ones of either
    warpgroup, dead tokens, empty rows; rows of queries for both.

    One CTA takes them all, and each stage of the ring more than once.
    """
    lens = (65, 130, 0, 1, 250, 2, 300)
    case = decode_case(lens, format, h_q=16, kv_lora_rank=256, rope_dim=64)
    return SimpleNamespace(simulation=simulation(format), args=(*case.args, PARTS))


@pytest.mark.parametrize("format", FORMATS)
def test_no_false_alarm(format):
    """Whatever the threads' speed: the clocks alone decide. And the same bits every time."""
    run = lambda: small(format).simulation.run(*small(format).args)[:2]
    first = run()
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, run(), first)


ABSENT = [
    (format, simulator.Mutant((site,), warpgroup=warpgroup))
    for format in FORMATS
    for site in sites_of(format)
    for warpgroup in warpgroups(site)
]


@pytest.mark.parametrize(("format", "mutant"), ABSENT, ids=str)
def test_each_synchronisation_is_needed(format, mutant):
    with pytest.raises(simulator.Fault):
        small(format).simulation.run(*small(format).args, mutant=mutant)


def unordered(format):
    """The mutants in which one role's waits for (arrivals at) one barrier bring no order."""
    groups = {}
    for site in sites_of(format):
        if site.is_of_barrier:
            for warpgroup in warpgroups(site):
                groups.setdefault((barrier_of(site), warpgroup, site.kind), []).append(site)
    return [
        simulator.Mutant(tuple(group), unordered=True, warpgroup=warpgroup)
        for (_, warpgroup, _), group in groups.items()
    ]


UNORDERED = [(format, mutant) for format in FORMATS for mutant in unordered(format)]


@pytest.mark.parametrize(("format", "mutant"), UNORDERED, ids=str)
def test_the_order_that_each_barrier_brings_is_needed(format, mutant):
    with pytest.raises(simulator.Fault, match=r"^race$"):
        small(format).simulation.run(*small(format).args, mutant=mutant)


@pytest.mark.parametrize("format", FORMATS)
def test_one_scratch_for_both_warpgroups_is_a_race(format, monkeypatch):
    """What Pallas' `max(axis=0)` does, and what made a prototype wrong now and then."""
    over_rows = kernel.columns.over_rows
    shared = lambda values, scratch, **kwargs: over_rows(values, scratch.ref.at[0], **kwargs)
    monkeypatch.setattr(kernel.columns, "over_rows", shared)
    with pytest.raises(simulator.Fault, match=r"^race$"):
        simulation(format).run(*small(format).args)


def header_table(first_column):
    """Rows of the table in the kernel's header whose head begins so: lists of columns."""
    lines = iter(kernel.__doc__.splitlines())
    for line in lines:
        if line.split()[:1] == [first_column]:
            return [re.split(r"\s{2,}", line.strip()) for line in iter(lambda: next(lines), "")]
    raise AssertionError(first_column)


DEEPSEEK = Config("bf16", "bfloat16", 512, 64, 64, 32, 1, causal=True, has_sink=False)


def test_header_names_every_barrier_and_who_waits():
    table = {row[0]: row for row in header_table("name")}
    assert table.keys() == {name for format in FORMATS for name in config(format).barriers()}
    assert table.keys() == {barrier_of(s) for s in SITES if s.is_of_barrier}
    for name, row in table.items():
        used = lambda kind, name=name: {
            NAMES[warpgroup]
            for s in SITES
            if s.kind == kind and barrier_of(s) == name
            for warpgroup in warpgroups(s)
        }
        assert used("barrier_wait") == set(row[-1].split(", "))
        assert all(role in row[2] for role in used("barrier_arrive")), row


def test_header_names_every_buffer():
    """The table's sum is what the configuration asks for."""
    table = {row[0]: int(row[-1]) for row in header_table("buffer")}
    total = table.pop("sum")
    table.pop("barriers")
    assert table.keys() == DEEPSEEK.smem().keys()
    assert total * 1024 == DEEPSEEK.smem_bytes()
