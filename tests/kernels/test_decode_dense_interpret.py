"""The Hopper dense decode kernel on the simulated GPU: results, races, and that each is found.

Every synchronisation in the kernel's source gives mutants, from which it is left out; all must be
caught. `tests/kernels/simulator.py` says what the simulator does not see. In this kernel:

- that every arrival and wait of a barrier is there, is found by deadlock or by the simulator's own
  count of phases. That the order which they bring is needed, is found as a race.
- what the two math warpgroups write to global memory, and the combine kernel reads, is ordered by
  the launches alone; a fault there shows in the result only.
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
from pallas_kernels.decode_dense import kernel, load
from pallas_kernels.decode_dense.config import Config
from pallas_kernels.hopper import plan
from tests import inputs, oracle, tolerances
from tests.kernels import simulator
from tests.kernels.few_sms import limit_sms, record_plan

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(120)]

CONFIG = functools.partial(Config, causal=True, has_sink=False, scale=inputs.SCALE)
CONFIGS = {
    format: CONFIG(format, "bfloat16", 256, 64, 16, 8, 1) for format in ("bf16", "fp8_ds_mla")
}
"""Of the kernels whose synchronisations are left out."""

ROLES = {
    format: {role.__name__: wg for wg, role in enumerate(kernel.roles(config))}
    for format, config in CONFIGS.items()
}
MATH = ("_mma_wg0", "_mma_wg1")
PRODUCERS = {role for roles in ROLES.values() for role in roles} - {*MATH}


def sites(format):
    """The synchronisations of a kernel: not those of the other formats' producers."""
    found = simulator.sites(kernel) + simulator.sites(load)
    others = PRODUCERS - ROLES[format].keys()
    return [site for site in found if site.function not in others]


on_each_format = pytest.mark.parametrize("format", CONFIGS)


def barrier_of(site):
    return re.search(r"\bbar\.(\w+)", site.argument).group(1)


def simulate(
    case, num_sms, monkeypatch, *, scale=inputs.SCALE, causal=True, attn_sink=None, expect=None
):
    """Run `mla_decode` on so few SMs, check out and lse against the oracle (of `expect`), and
    return the plan that it made."""
    limit_sms(monkeypatch, num_sms)
    made = record_plan(monkeypatch)
    kwargs = {"scale": scale, "causal": causal, "attn_sink": attn_sink}
    simulation = simulator.Simulation(
        lambda *args: decode.mla_decode(
            *args, **kwargs, plan=None, return_lse=True, interpret=simulator.PARAMS
        )
    )
    out, lse = simulation.run(*case.args)
    expected_out, expected_lse = oracle.decode(*(expect or case).args, **kwargs)
    tolerances.check("out", out, expected_out, tolerances.OUT[out.dtype.name])
    tolerances.check("lse", lse, expected_lse, tolerances.LSE)
    return made(case.seq_lens)


def cuts(parts):
    """How many parts begin inside a sequence."""
    return int((parts[:, 1] > 0).sum())


@on_each_format
def test_split_and_whole_sequences_with_a_sink(format, monkeypatch):
    sizes = {"h_q": 8, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64, "format": format}
    sink = jnp.array([0.5, np.inf, -np.inf, -3.0, 1.0, 0.0, 2.0, -1.0], jnp.float32)
    case = inputs.decode_case((70, 1500, 0), **sizes)
    assert cuts(simulate(case, 4, monkeypatch, attn_sink=sink)) == 3


@on_each_format
def test_pieces_of_a_tile(format, monkeypatch):
    sizes = {"h_q": 8, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64, "format": format}
    parts = simulate(inputs.decode_case((330,), **sizes), 6, monkeypatch)
    assert parts[:, plan.TILE].tolist() == [*range(6)]


@pytest.mark.parametrize(("format", "dtype"), [("f16", "float16"), ("fp8_ds_mla", "bfloat16")])
def test_small_pages_and_odd_heads(format, dtype, monkeypatch):
    """Six rows, P in a buffer of its own, four pages a tile, one page ending inside the mask."""
    sizes = {"s_q": 2, "h_q": 3, "page_size": 16, "kv_lora_rank": 256, "rope_dim": 32}
    case = inputs.decode_case((0, 65, 3, 0, 130), format=format, dtype=jnp.dtype(dtype), **sizes)
    simulate(case, 2, monkeypatch)


def test_deepseek_sizes_on_small_pages_of_an_fp8_cache(monkeypatch):
    """The converter takes its 32 raw tokens from two pages at a time."""
    sizes = {"h_q": 16, "page_size": 16, "kv_lora_rank": 512, "rope_dim": 64}
    simulate(inputs.decode_case((0, 150, 17), format="fp8_ds_mla", **sizes), 1, monkeypatch)


@on_each_format
def test_a_causal_mask_over_two_tiles(format, monkeypatch):
    """The last query's token begins a tile, so that the others see less than the one before."""
    sizes = {"page_size": 64, "kv_lora_rank": 256, "rope_dim": 64, "format": format}
    simulate(inputs.decode_case((193, 1, 2), s_q=3, h_q=4, **sizes), 1, monkeypatch)
    simulate(inputs.decode_case((256,), s_q=70, h_q=1, **sizes), 1, monkeypatch)


@on_each_format
def test_sinks_of_the_size_of_the_scores(format, monkeypatch):
    """Several queries: a row's sink is that of its head. Some sequences are split, some not."""
    sizes = {"s_q": 2, "h_q": 3, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    sizes["format"] = format
    sink = jnp.array([6.0, -4.0, 8.0], jnp.float32)
    parts = simulate(
        inputs.decode_case((1500, 65), **sizes), 3, monkeypatch, attn_sink=sink, scale=1.0
    )
    assert 0 < cuts(parts) < 3


@pytest.mark.parametrize("num_sms", [1, 2])
def test_one_part_has_neither_pieces_nor_combine(num_sms, monkeypatch):
    limit_sms(monkeypatch, num_sms)
    case = inputs.decode_case((200, 3), h_q=8, page_size=64, kv_lora_rank=256, rope_dim=64)
    run = functools.partial(
        decode.mla_decode, scale=1.0, causal=True, attn_sink=None, plan=None, return_lse=True
    )
    assert ("mla_decode_combine" in str(jax.make_jaxpr(run)(*case.args))) == (num_sms > 1)


@on_each_format
def test_lengths_that_the_table_has_no_place_for(format, monkeypatch):
    """The tokens behind the table's last page do not exist; the plan knows nothing of that."""
    sizes = {"h_q": 8, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64, "format": format}
    case = inputs.decode_case((128, 640, 64), s_q=3, max_pages=10, **sizes)
    for wild in (2000, 2**31 - 1):
        lens = jnp.array([128, wild, 64], jnp.int32)
        simulate(dataclasses.replace(case, seq_lens=lens), 4, monkeypatch, expect=case)


@pytest.mark.parametrize("scale", [0.2, 0.0, -0.2])
def test_scale_known_at_run_time(scale, monkeypatch):
    sizes = {"s_q": 2, "h_q": 4, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 32}
    simulate(inputs.decode_case((65, 0, 1), **sizes), 2, monkeypatch, scale=jnp.float32(scale))


@on_each_format
def test_tiled_rows_on_large_pages(format, monkeypatch):
    """Eighty rows: the second tile is drawn back over the first."""
    sizes = {"s_q": 5, "h_q": 16, "page_size": 128, "kv_lora_rank": 256, "rope_dim": 64}
    sizes["format"] = format
    case = inputs.decode_case((1000,), **sizes)
    assert cuts(simulate(case, 4, monkeypatch)) == 1


@on_each_format
def test_deepseek_sizes_and_a_rising_maximum(format, monkeypatch):
    """Scores of hundreds: the maximum rises by more than is let pass without rescaling."""
    sizes = {"h_q": 64, "page_size": 32, "kv_lora_rank": 512, "rope_dim": 64, "format": format}
    case = inputs.decode_case((63, 200), **sizes)
    simulate(case, 1, monkeypatch, scale=20.0, causal=False)


def test_scales_far_from_one(monkeypatch):
    sizes = {"h_q": 8, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    case = inputs.decode_case((70, 3), format="fp8_ds_mla", **sizes)
    limit_sms(monkeypatch, 1)
    kwargs = {"scale": inputs.SCALE, "causal": True, "attn_sink": None}
    decode_simulated = simulator.Simulation(
        lambda *args: decode.mla_decode(
            *args, **kwargs, plan=None, return_lse=True, interpret=simulator.PARAMS
        )
    )
    out, lse = decode_simulated.run(*inputs.with_scales_of(case, (-20, 20)).args)
    out = np.asarray(out, np.float32) / np.repeat(np.exp2([-20, 20]), 128)
    expected_out, expected_lse = oracle.decode(*case.args, **kwargs)
    tolerances.check("out", out, expected_out, tolerances.OUT["bfloat16"])
    tolerances.check("lse", lse, expected_lse, tolerances.LSE)


@functools.cache
def small(format):
    """Inputs that reach every synchronisation: short and long sequences, dead tokens, empty rows.

    One CTA takes them all, and each stage of the ring more than once.
    """
    sizes = {"h_q": 8, "kv_lora_rank": 256, "rope_dim": 64, "format": format}
    case = inputs.decode_case((65, 130, 0, 1, 250), **sizes)
    launch = functools.partial(decode.launch, CONFIGS[format], interpret=simulator.PARAMS)
    parts = jnp.array([[0, 0, 5, 0, -1, 0, 0, 0]], jnp.int32)
    return SimpleNamespace(simulation=simulator.Simulation(launch), args=(*case.args, parts))


@pytest.mark.parametrize("format", CONFIGS)
def test_no_false_alarm(format):
    """Whatever the threads' speed: the clocks alone decide."""
    for _ in range(3):
        small(format).simulation.run(*small(format).args)


def roles_of(site, format):
    """The roles that run this call: what is in no role's function is the producer's or both math
    warpgroups', by its file."""
    if site.function in ROLES[format]:
        return (site.function,)
    return MATH if site.file == kernel.__file__ else (*PRODUCERS & ROLES[format].keys(),)


def absent(format):
    """The mutants without one call: of each role that runs it."""
    return [
        (format, simulator.Mutant((site,), warpgroup=ROLES[format][role]))
        for site in sites(format)
        for role in roles_of(site, format)
    ]


def on_each(mutants):
    """Of the kernel of each format."""
    return pytest.mark.parametrize(
        ("format", "mutant"), [x for format in CONFIGS for x in mutants(format)], ids=str
    )


@on_each(absent)
def test_each_synchronisation_is_needed(format, mutant):
    if mutant.sites[0].function == "_zero_dead_tokens" and CONFIGS[format].converts:
        pytest.skip("the producer has zeroed them")
    with pytest.raises(simulator.Fault):
        small(format).simulation.run(*small(format).args, mutant=mutant)


def unordered(format):
    """The mutants in which one role's waits for (arrivals at) one barrier bring no order."""
    groups = {}
    for site in sites(format):
        if site.is_of_barrier:
            for role in roles_of(site, format):
                key = barrier_of(site), ROLES[format][role], site.kind
                groups.setdefault(key, []).append(site)
    return [
        (format, simulator.Mutant(tuple(group), unordered=True, warpgroup=warpgroup))
        for (_, warpgroup, _), group in groups.items()
    ]


@on_each(unordered)
def test_the_order_that_each_barrier_brings_is_needed(format, mutant):
    with pytest.raises(simulator.Fault, match=r"^race$"):
        small(format).simulation.run(*small(format).args, mutant=mutant)


def header_tables(first_column):
    """The tables in the kernel's header whose head begins so, as lists of columns by the first one:
    that of 16-bit caches, and what `fp8_ds_mla` has besides."""
    lines = iter(kernel.__doc__.splitlines())
    tables = [
        [re.split(r"\s{2,}", line.strip()) for line in iter(lambda: next(lines), "")]
        for line in lines
        if line.split()[:1] == [first_column]
    ]
    common, besides = ({row[0]: row for row in table} for table in tables)
    return common, besides


@on_each_format
def test_header_names_every_barrier_and_who_waits(format):
    common, besides = header_tables("name")
    table = common | (besides if CONFIGS[format].converts else {})
    found = sites(format)
    assert table.keys() == CONFIGS[format].barriers().keys()
    assert table.keys() == {barrier_of(s) for s in found if s.is_of_barrier}
    for name, row in table.items():
        used = lambda kind, name=name: {
            role.strip("_")
            for s in found
            if s.kind == kind and barrier_of(s) == name
            for role in roles_of(s, format)
        }
        waits, arrives = used("barrier_wait"), used("barrier_arrive")
        if name in common:  # what is told of load_wg; of convert_wg, below the table
            waits = {"load_wg" if role == "convert_wg" else role for role in waits}
            arrives -= {"convert_wg"} if name == "k_full" else set()
        assert waits == {row[-1]}
        assert all(role in row[2] for role in arrives), row


@on_each_format
def test_header_names_every_buffer(format):
    """The tables' sum is what the configuration asks for."""
    config = Config(format, "bfloat16", 512, 64, 64, 128, 1, causal=True, has_sink=False)
    common, besides = header_tables("buffer")
    kib = {name: int(row[-1]) for name, row in common.items()}
    total = kib.pop("sum")
    kib.pop("barriers")
    if config.converts:
        assert besides["raw"][-1] == "(kv_left)"
        total += int(besides["k_scale"][-1])
        kib |= besides
    assert kib.keys() == config.smem(interpret=True).keys()
    assert total * 1024 == config.smem_bytes()
