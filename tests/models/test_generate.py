"""Generation: ragged prompts, chunks, pages, sampling, one compiled step, donated caches."""

import functools
import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mla_jax
from mla_jax import models
from mla_jax.models.generate import _choose, _programs
from tests.models import reference_model
from tests.models.checkpoints import GOLDEN, V3, random_tensors, tiny_config, write

CONFIG = tiny_config(V3, q_lora_rank=16, n_group=2, topk_group=1, max_position_embeddings=200)
PROMPTS = [[5, 9, 2, 33, 21, 8, 40, 11, 3], [7], [20, 19, 18, 17, 16]]


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(CONFIG)


@pytest.fixture(scope="module")
def model(tensors, tmp_path_factory):
    return models.load(write(tmp_path_factory.mktemp("checkpoint"), CONFIG, tensors))


def generate(model, prompts=PROMPTS, **kwargs):
    options: dict[str, Any] = {"max_new_tokens": 8, "page_size": 4}
    return np.asarray(models.generate(model, prompts, **options | kwargs))


@pytest.fixture(scope="module")
def greedy(tensors):
    """Greedy continuations by whole forwards in float64."""
    rows = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(8):
            ids.append(reference_model.forward(tensors, CONFIG, np.array(ids)).logits[-1].argmax())
        rows.append(ids[len(prompt) :])
    return np.array(rows)


def test_ragged_prompts(model, greedy):
    ids = generate(model)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, greedy)


def test_an_array_of_prompts(model, greedy):
    np.testing.assert_array_equal(generate(model, np.array([PROMPTS[0]])), greedy[:1])


@pytest.mark.parametrize("prefill_chunk", [1, 10])
def test_prefill_in_chunks(model, greedy, prefill_chunk):
    np.testing.assert_array_equal(generate(model, prefill_chunk=prefill_chunk), greedy)


@pytest.mark.parametrize("page_size", [1, 64])
def test_page_sizes(model, greedy, page_size):
    np.testing.assert_array_equal(generate(model, page_size=page_size), greedy)


@pytest.mark.parametrize("cache_format", ["bf16", "fp8_ds_mla"])
def test_cache_formats(model, greedy, cache_format):
    """The first step sees little of the cache's rounding; later ones may branch off."""
    ids = generate(model, cache_format=cache_format)
    np.testing.assert_array_equal(ids[:, 0], greedy[:, 0])
    assert (ids == greedy).mean() > 0.5


def test_eos_fills_the_row_and_ends_the_stream(model, greedy):
    eos = int(greedy[0, 3])
    expected = greedy.copy()
    for row in expected:
        ends = np.flatnonzero(row == eos)
        if ends.size:
            row[ends[0] :] = eos
    np.testing.assert_array_equal(generate(model, eos_id=eos), expected)

    steps = list(models.stream(model, PROMPTS[:1], max_new_tokens=20, page_size=4, eos_id=eos))
    assert [int(step[0]) for step in steps] == expected[0, : len(steps)].tolist()
    assert int(steps[-1][0]) == eos and eos not in [int(step[0]) for step in steps[:-1]]
    padded = generate(model, PROMPTS[:1], max_new_tokens=20, eos_id=eos)[0]
    np.testing.assert_array_equal(padded[:8], expected[0])
    assert (padded[len(steps) :] == eos).all()


def test_a_prompt_that_ends_in_eos_goes_on(model, greedy):
    np.testing.assert_array_equal(generate(model, eos_id=PROMPTS[1][0])[1, :1], greedy[1, :1])


def test_sampling_follows_the_seed(model):
    sample = functools.partial(generate, model, temperature=1.0, max_new_tokens=16)
    np.testing.assert_array_equal(sample(seed=1), sample(seed=1))
    assert (sample(seed=1) != sample(seed=2)).any()


def test_narrow_sampling_is_greedy(model, greedy):
    np.testing.assert_array_equal(generate(model, temperature=2.0, top_p=1e-6), greedy)
    np.testing.assert_array_equal(generate(model, temperature=1e-6), greedy)
    # Beyond float32, in which the logits are divided.
    np.testing.assert_array_equal(generate(model, temperature=1e-39), greedy)
    np.testing.assert_array_equal(generate(model, temperature=1e-60), greedy)
    np.testing.assert_array_equal(generate(model, temperature=2.0, top_p=1e-60), greedy)


def test_sampling_distribution():
    """Frequencies of 20000 samples against the tempered, truncated distribution."""
    logits = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.25, 0.05]))
    rows = jnp.broadcast_to(logits, (20000, 5))
    counts = lambda *sampling: np.bincount(
        _choose(rows, jax.random.key(0), jax.tree.map(jnp.float32, sampling)), minlength=5
    )
    np.testing.assert_allclose(counts(1.0, 1.0) / 20000, jnp.exp(logits), atol=0.015)
    squared = jnp.exp(2 * logits) / jnp.exp(2 * logits).sum()
    np.testing.assert_allclose(counts(0.5, 1.0) / 20000, squared, atol=0.015)
    # 0.4 + 0.25 falls short of 0.7, so the next one belongs to the set too.
    truncated = np.array([0, 0.4, 0.2, 0.25, 0]) / 0.85
    np.testing.assert_allclose(counts(1.0, 0.7) / 20000, truncated, atol=0.015)


def count_traces(calls, function):
    def counted(*args, **kwargs):
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return counted


def test_one_compilation_serves_every_step_and_similar_prompts(model):
    """Neither a page boundary, nor other prompts of about that length, traces anything again."""
    calls = []
    model = nnx.clone(model)
    for layer in model.layers:
        layer.attention.prefill_fn = count_traces(calls, mla_jax.mla_prefill)
        layer.attention.decode_fn = count_traces(calls, mla_jax.mla_decode)
    generate(model, max_new_tokens=30)
    layers = CONFIG["num_hidden_layers"]
    # A prefill attends once to the chunk and once, in the body of a loop, to the prefix.
    assert calls.count("mla_decode") == layers
    assert calls.count("mla_prefill") == 2 * layers
    traced = len(calls)
    generate(model, [[1, 2, 3], [4] * 8, [5] * 4], max_new_tokens=30, seed=3)
    assert len(calls) == traced


def test_one_plan_serves_all_layers_of_a_step(model, monkeypatch):
    plans, of_formats = [], []

    def plan_decode(*args, cache_format, **kwargs):
        of_formats.append(cache_format)
        return mla_jax.plan_decode(*args, cache_format=cache_format, **kwargs)

    monkeypatch.setattr("mla_jax.models.deepseek.plan_decode", plan_decode)
    model = nnx.clone(model)

    def decode(*args, plan, **kwargs):
        plans.append(plan.parts)
        return mla_jax.mla_decode(*args, plan=plan, **kwargs)

    for layer in model.layers:
        layer.attention.decode_fn = decode
    generate(model, max_new_tokens=3, cache_format="fp8_full")
    assert of_formats == ["fp8_full"]
    assert len(plans) == CONFIG["num_hidden_layers"] > 1
    assert all(parts is plans[0] for parts in plans)


def step_arguments(model, cache_format="f32"):
    graphdef, state = nnx.split(model)
    params, treedef = jax.tree.flatten(state)
    step = _programs(graphdef, treedef, None)[1]
    caches = model.init_caches(4, page_size=8, cache_format=cache_format)
    carry = (jnp.array([3, 4], jnp.int32), jnp.zeros(2, bool), jax.random.key(0))
    table = jnp.arange(4, dtype=jnp.int32).reshape(2, 2)
    seq_lens = np.array([1, 1], np.int32)
    return step, (params, caches, carry, table, seq_lens, np.int32(-1), None)


def test_caches_are_donated_and_parameters_are_arguments(model):
    step, args = step_arguments(model)
    compiled = step.lower(*args).compile()
    cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(args[1]))
    param_bytes = sum(leaf.nbytes for leaf in args[0])
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.argument_size_in_bytes >= param_bytes + cache_bytes
    shape = ",".join(map(str, args[1][0].latent.shape))
    assert not re.search(rf"= f32\[{shape}\]\S* copy\(", compiled.as_text())
    step(*args)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(args[1]))
    assert not any(leaf.is_deleted() for leaf in args[0])


def test_a_named_implementation_is_passed_down(model, greedy):
    np.testing.assert_array_equal(generate(model, implementation=["mosaic", "xla"]), greedy)
    with pytest.raises(NotImplementedError, match=r"^`implementation` is 'triton': cannot serve"):
        generate(model, implementation="triton")
    with pytest.raises(ValueError, match=r"^`implementation` is 'cuda': must be None, or one"):
        generate(model, implementation="cuda")


def test_pages_are_handed_out_as_sequences_grow():
    pages = models.PageTable(2, num_pages=5, page_size=4, max_pages=3)
    assert pages.num_used == 0 and (pages.on_device() == -1).all()
    pages.grow(np.array([4, 1]))
    first = np.asarray(pages.on_device())
    assert pages.num_used == 2 and (first[:, 0] >= 0).all() and (first[:, 1:] == -1).all()
    pages.grow(np.array([4, 4]))
    assert pages.on_device() is pages.on_device() and pages.num_used == 2
    pages.grow(np.array([5, 9]))
    table = np.asarray(pages.on_device())
    np.testing.assert_array_equal(table[:, 0], first[:, 0])
    used = table[table >= 0]
    assert len(set(used.tolist())) == pages.num_used == 5
    with pytest.raises(
        ValueError, match=r"^sequence 1 has 13 tokens: must be at most 3 pages of 4"
    ):
        pages.grow(np.array([5, 13]))
    with pytest.raises(
        RuntimeError, match=r"^sequence 0 needs a page for token 9 and all 5 are in"
    ):
        pages.grow(np.array([9, 9]))


@hypothesis.given(
    page_size=st.integers(1, 5),
    growth=st.lists(st.tuples(*[st.integers(0, 7)] * 3), max_size=6),
)
def test_no_page_belongs_to_two_sequences(page_size, growth):
    lens = np.zeros(3, int)
    pages = models.PageTable(3, num_pages=3 * 42, page_size=page_size, max_pages=42)
    table = np.asarray(pages.on_device())
    for new in growth:
        lens += new
        pages.grow(lens)
        before, table = table, np.asarray(pages.on_device())
        np.testing.assert_array_equal(table[before >= 0], before[before >= 0])
        np.testing.assert_array_equal((table >= 0).sum(1), -(-lens // page_size))
        used = table[table >= 0].tolist()
        assert len(set(used)) == len(used) == pages.num_used


@pytest.mark.parametrize(
    ("prompts", "kwargs", "error", "message"),
    [
        ([], {}, ValueError, "`prompts` is empty: must hold at least one prompt"),
        ([[1], []], {}, ValueError, "`prompts[1]` has shape (0,): must be [T] with T >= 1"),
        (np.ones(2), {}, ValueError, "`prompts[0]` has shape (): must be [T] with T >= 1"),
        ([[0.5]], {}, TypeError, "`prompts[0]` is float64: must be integer token ids"),
        (
            [[3, 64]],
            {},
            ValueError,
            "`prompts[0]` has ids from 3 to 64: must lie in the vocabulary, 0 to 63",
        ),
        ([[1]], {"max_new_tokens": 0}, ValueError, "`max_new_tokens` is 0: must be at least 1"),
        ([[1]], {"page_size": 2.0}, TypeError, "`page_size` is 2.0: must be an int"),
        (
            [[1]],
            {"temperature": -1.0},
            ValueError,
            "`temperature` is -1.0: must be at least 0, and finite",
        ),
        ([[1]], {"eos_id": 64}, ValueError, "`eos_id` is 64: must lie in the vocabulary, 0 to 63"),
        ([[1]], {"temperature": "1"}, TypeError, "`temperature` is '1': must be a real number"),
        ([[1]], {"seed": 0.5}, TypeError, "`seed` is 0.5: must be an int"),
        (
            [[1]],
            {"seed": 2**63},
            ValueError,
            "`seed` is 9223372036854775808: must be an integer of 64 bits",
        ),
        (
            "abc",
            {},
            TypeError,
            "`prompts` is of type str: must be token ids, [B, T] or a list of lists",
        ),
        ([[1]], {"eos_id": 1.5}, TypeError, "`eos_id` is 1.5: must be an int"),
        (
            [[1]],
            {"implementation": "cuda"},
            ValueError,
            "`implementation` is 'cuda': must be None, or one or several of 'mosaic', "
            "'mosaic_transposed', 'triton', 'xla'",
        ),
        ([[1]], {"top_p": 0.0}, ValueError, "`top_p` is 0.0: must be above 0 and at most 1"),
        (
            [[1]],
            {"max_new_tokens": 200},
            ValueError,
            "the longest prompt and `max_new_tokens` make 201 tokens: the model takes at most 200",
        ),
    ],
)
def test_errors_come_before_anything_runs(model, prompts, kwargs, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        models.stream(model, prompts, **{"max_new_tokens": 4} | kwargs)


def test_golden_prompts_of_different_lengths():
    """Each goes on as it would alone."""
    model = models.load(GOLDEN / "v3-tiny")
    recorded = np.load(GOLDEN / "v3-tiny" / "golden.npz")
    whole, part = recorded["input_ids"][0], recorded["input_ids"][1, :20]
    together = generate(model, [whole, part])
    np.testing.assert_array_equal(together[0], recorded["gen_ids"][0, :8])
    np.testing.assert_array_equal(together[1:], generate(model, [part]))
