"""The Hopper e4m3 decode kernel on the simulated GPU: results, races, and that each is found.

As `test_decode_dense_interpret.py` does it. What is particular here:

- The device functions of `hopper.fp8` have stand-ins; `test_fp8_addresses.py` has the real ones.
- The simulator takes the union of the key ring and the output's staging for one buffer, whatever
  the stage; they are two there, and staging an output makes the keys of its stage NaN.
- What orders the warps of a warpgroup among themselves (`sync_warps`) is not seen.
"""

import dataclasses
import functools
import re
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import decode
from pallas_kernels.decode_e4m3 import kernel
from pallas_kernels.decode_e4m3.config import Config
from pallas_kernels.formats import E4M3_FORMATS
from tests import inputs, oracle, tolerances
from tests.kernels import simulator
from tests.kernels.few_sms import limit_sms, record_plan

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(120)]

SITES = simulator.sites(kernel)
MATH, LOAD = (0, 1), (2,)
NAMES = ("mma_wg0", "mma_wg1", "load_wg")

TOLERANCES = tolerances.E4M3_OUT, tolerances.E4M3_LSE


def warpgroups(site):
    """Those that may run it."""
    return LOAD if site.function == "_load_wg" else MATH


def barrier_of(site):
    return re.search(r"\bbar\.(\w+)", site.argument).group(1)


def decode_case(lens, format, **sizes):
    """With queries as small as the contract has them: `inputs` makes them ten times as large."""
    case = inputs.decode_case(lens, format=format, **sizes)
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
    within=TOLERANCES,
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
    tolerances.check("out", out, expected_out, within[0])
    tolerances.check("lse", lse, expected_lse, within[1])
    return made(case.seq_lens)


def cuts(parts):
    """How many parts begin inside a sequence."""
    return int((parts[:, 1] > 0).sum())


@pytest.mark.parametrize("format", E4M3_FORMATS)
def test_split_and_whole_sequences_with_a_sink(format, monkeypatch):
    sizes = {"h_q": 8, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    sink = jnp.array([0.5, np.inf, -np.inf, -3.0, 1.0, 0.0, 2.0, -1.0], jnp.float32)
    case = decode_case((70, 1500, 0), format, **sizes)
    assert cuts(simulate(case, 4, monkeypatch, attn_sink=sink)) == 3


@pytest.mark.parametrize("format", E4M3_FORMATS)
def test_small_pages_odd_heads_and_f16(format, monkeypatch):
    """Six rows, four pages a tile, one page ending inside the mask, lone and paired tiles."""
    sizes = {"s_q": 2, "h_q": 3, "page_size": 16, "kv_lora_rank": 256, "rope_dim": 32}
    case = decode_case((0, 65, 3, 0, 130), format, dtype=jnp.float16, **sizes)
    simulate(case, 2, monkeypatch)


@pytest.mark.parametrize("format", E4M3_FORMATS)
def test_nothing_but_empty_sequences(format, monkeypatch):
    """No key is loaded: 0 and -inf, whatever the cache holds."""
    sizes = {"h_q": 8, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    simulate(decode_case((0, 0, 0), format, **sizes), 2, monkeypatch)


@pytest.mark.parametrize("format", E4M3_FORMATS)
def test_errors_of_few_tokens(format, monkeypatch):
    """They do not average out; a lone tile is its own partner, for a second term of P."""
    sizes = {"h_q": 16, "page_size": 16, "kv_lora_rank": 512, "rope_dim": 64}
    case = decode_case((2, 2, 3, 1, 5, 64, 30), format, **sizes)
    within = tolerances.E4M3_SHORT_OUT, tolerances.E4M3_LSE
    simulate(case, 2, monkeypatch, within=within)


def test_lengths_that_the_table_has_no_place_for(monkeypatch):
    """The tokens behind the table's last page do not exist; the plan knows nothing of that."""
    sizes = {"h_q": 8, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    case = decode_case((128, 640, 64), "fp8_token", s_q=3, max_pages=10, **sizes)
    for wild in (2000, 2**31 - 1):
        lens = jnp.array([128, wild, 64], jnp.int32)
        simulate(dataclasses.replace(case, seq_lens=lens), 4, monkeypatch, expect=case)


@pytest.mark.parametrize("scale", [0.2, 0.0, -0.2])
def test_scale_known_at_run_time(scale, monkeypatch):
    sizes = {"s_q": 2, "h_q": 4, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 32}
    case = decode_case((65, 0, 1), "fp8_token", **sizes)
    # No row's factor may underflow: masked scores times 0 are NaN.
    case = dataclasses.replace(case, q_latent=case.q_latent.at[0].set(0))
    simulate(case, 2, monkeypatch, scale=jnp.float32(scale))


def test_queries_without_a_latent_part(monkeypatch):
    """Their scores are those of the rope part, in its own size."""
    case = decode_case((200,), "fp8_token", h_q=8, kv_lora_rank=256, rope_dim=32, page_size=64)
    case = dataclasses.replace(case, q_latent=case.q_latent * 0, q_rope=case.q_rope * 20)
    simulate(case, 2, monkeypatch)


def test_tiled_rows_on_large_pages(monkeypatch):
    """Eighty rows: the second tile is drawn back over the first."""
    sizes = {"s_q": 5, "h_q": 16, "page_size": 128, "kv_lora_rank": 256, "rope_dim": 64}
    assert cuts(simulate(decode_case((1000,), "fp8_full", **sizes), 4, monkeypatch)) == 1


def rounded_queries(case):
    """The case with the queries that the kernel multiplies: e4m3 with a scale for each row."""
    q_latent, q_rope = (np.asarray(q).astype(np.float32) for q in (case.q_latent, case.q_rope))
    in_full = case.cache.format == "fp8_full"
    scaled = np.concatenate([q_latent, q_rope], -1) if in_full else q_latent
    scale = np.abs(scaled).max(-1, keepdims=True) * np.float32(1 / 448)
    rope_dtype = ml_dtypes.float8_e4m3fn if in_full else ml_dtypes.bfloat16
    inverse = np.float32(1) / scale
    rounded = lambda x, dtype: (x * inverse).astype(dtype).astype(np.float64) * scale
    return dataclasses.replace(
        case,
        q_latent=rounded(q_latent, ml_dtypes.float8_e4m3fn),
        q_rope=rounded(q_rope, rope_dtype),
    )


@pytest.mark.parametrize("format", E4M3_FORMATS)
def test_deepseek_sizes_and_a_rising_maximum(format, monkeypatch):
    """Scores of tens: the maximum rises by more than is let pass without rescaling.

    Everything but the rounding of the queries, which such scores magnify, is as good as 16 bits
    when P has two terms.
    """
    monkeypatch.setattr(decode, "E4m3Config", functools.partial(Config, p_terms=2))
    sizes = {"h_q": 64, "page_size": 32, "kv_lora_rank": 512, "rope_dim": 64}
    case = decode_case((63, 200), format, **sizes)
    expect, within = rounded_queries(case), (tolerances.OUT["bfloat16"], tolerances.LSE)
    simulate(case, 1, monkeypatch, scale=100.0, causal=False, expect=expect, within=within)


def test_tokens_of_very_different_scale(monkeypatch):
    """The scale that all are relative to rises and rises; the smallest tokens still count."""
    sizes = {"h_q": 8, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    case = decode_case((700,), "fp8_token", **sizes)
    scale = np.array(case.cache.scale).reshape(-1)
    scale[case.live] *= 10.0 ** -np.linspace(0, 3, 700, dtype=np.float32)
    scale = jnp.asarray(scale.reshape(case.cache.scale.shape))
    cache = dataclasses.replace(case.cache, scale=scale)
    simulate(dataclasses.replace(case, cache=cache), 1, monkeypatch)


@pytest.mark.parametrize("format", E4M3_FORMATS)
def test_two_terms_of_p_are_as_good_as_16_bits(format, monkeypatch):
    monkeypatch.setattr(decode, "E4m3Config", functools.partial(Config, p_terms=2))
    sizes = {"h_q": 8, "page_size": 64, "kv_lora_rank": 256, "rope_dim": 64}
    within = tolerances.OUT["bfloat16"], tolerances.E4M3_LSE
    simulate(decode_case((70, 0, 130), format, **sizes), 2, monkeypatch, within=within)


@functools.cache
def small():
    """Inputs that reach every synchronisation: short and long sequences, dead tokens, empty rows.

    One CTA takes them all, and each stage of the ring more than once.
    """
    sizes = {"h_q": 8, "page_size": 16, "kv_lora_rank": 256, "rope_dim": 64}
    case = decode_case((65, 130, 0, 1, 400), "fp8_token", **sizes)
    config = Config(
        "fp8_token", "bfloat16", 256, 64, 16, 8, 1, True, has_sink=False, scale=inputs.SCALE
    )
    launch = functools.partial(decode.launch, config, interpret=simulator.PARAMS)
    args = (*case.args, case.one_part)
    return SimpleNamespace(simulation=simulator.Simulation(launch), args=args)


def test_no_false_alarm():
    """Whatever the threads' speed: the clocks alone decide."""
    for _ in range(3):
        small().simulation.run(*small().args)


# Each tile's own warpgroup has awaited it before the two meet. Kept: what TMA has written is
# visible to those who await its barrier.
SAFE_WITHOUT = "bar.k_full.at[other]"

ABSENT = [
    simulator.Mutant((site,), warpgroup=warpgroup)
    for site in SITES
    if site.argument != SAFE_WITHOUT
    for warpgroup in warpgroups(site)
]


@pytest.mark.parametrize("mutant", ABSENT, ids=str)
def test_each_synchronisation_is_needed(mutant):
    with pytest.raises(simulator.Fault):
        small().simulation.run(*small().args, mutant=mutant)


def unordered():
    """The mutants in which one role's waits for (arrivals at) one barrier bring no order."""
    groups = {}
    for site in SITES:
        if site.is_of_barrier:
            for warpgroup in warpgroups(site):
                groups.setdefault((barrier_of(site), warpgroup, site.kind), []).append(site)
    return [
        simulator.Mutant(tuple(group), unordered=True, warpgroup=warpgroup)
        for (_, warpgroup, _), group in groups.items()
    ]


@pytest.mark.parametrize("mutant", unordered(), ids=str)
def test_the_order_that_each_barrier_brings_is_needed(mutant):
    with pytest.raises(simulator.Fault, match=r"^race$"):
        small().simulation.run(*small().args, mutant=mutant)


def header_table(first_column):
    """Rows of the table in the kernel's header whose head begins so: lists of columns."""
    lines = iter(kernel.__doc__.splitlines())
    for line in lines:
        if line.split()[:1] == [first_column]:
            return [re.split(r"\s{2,}", line.strip()) for line in iter(lambda: next(lines), "")]
    raise AssertionError(first_column)


def test_header_names_every_barrier_and_who_waits():
    config = Config("fp8_token", "bfloat16", 512, 64, 64, 128, 1, causal=True, has_sink=False)
    table = {row[0]: row for row in header_table("name")}
    assert (
        table.keys()
        == config.barriers().keys()
        == {barrier_of(s) for s in SITES if s.is_of_barrier}
    )
    for name, row in table.items():
        used = lambda kind, name=name: {
            NAMES[warpgroup]
            for s in SITES
            if s.kind == kind and barrier_of(s) == name
            for warpgroup in warpgroups(s)
        }
        assert used("barrier_wait") == set(row[-1].split(", "))
        assert all(role in row[2] for role in used("barrier_arrive")), row
