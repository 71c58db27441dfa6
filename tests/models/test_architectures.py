"""Random small models of every kind against the float64 forward, with and without the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax import models
from mla_jax.config import MLAConfig
from mla_jax.nn import select_experts
from tests import tolerances
from tests.models import reference_model
from tests.models.checkpoints import V2, V3, random_tensors, tiny_config, write

YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}

ARCHITECTURES = {
    "v2, 3 heads, groups, no yarn, query lora": tiny_config(
        V2,
        num_attention_heads=3,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        topk_method="group_limited_greedy",
        n_routed_experts=12,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        n_shared_experts=2,
        routed_scaling_factor=16.0,
    ),
    "v3, 6 heads, latent 256, rope 32, cos/sin factor not 1, alternating layers": tiny_config(
        V3,
        num_attention_heads=6,
        kv_lora_rank=256,
        qk_rope_head_dim=32,
        q_lora_rank=24,
        rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        n_group=2,
        topk_group=1,
        norm_topk_prob=False,
        num_hidden_layers=3,
        moe_layer_freq=2,
    ),
    "dense v3, 8 heads, biases, tied embeddings, halves": tiny_config(
        V3,
        num_attention_heads=8,
        hidden_size=40,
        q_lora_rank=16,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_interleave=False,
        n_routed_experts=None,
        rope_theta=500.0,
    ),
    "v2, 8 heads, yarn without mscale, no shared experts": tiny_config(
        V2,
        num_attention_heads=8,
        rope_scaling=YARN,
        n_shared_experts=0,
        first_k_dense_replace=0,
    ),
}


@pytest.mark.parametrize("config", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_against_the_float64_forward(config, tmp_path):
    """Ragged sequences: whole, in chunks through shuffled pages, then two tokens at a time."""
    tensors = random_tensors(config)
    model = models.load(write(tmp_path / "model", config, tensors))
    rng = np.random.default_rng(1)
    lengths = np.array([29, 11])
    ids = rng.integers(2, config["vocab_size"], (2, 29)).astype(np.int32)
    expected = [
        reference_model.forward(tensors, config, row[:n]).logits
        for row, n in zip(ids, lengths, strict=True)
    ]

    logits = nnx.jit(lambda m, ids, n: m(ids, lengths=n))(model, ids, jnp.asarray(lengths))
    for found, row, n in zip(logits, expected, lengths, strict=True):
        np.testing.assert_allclose(found[:n], row, atol=tolerances.ORACLE_LOGITS_ATOL, rtol=0)

    prefill = nnx.jit(lambda m, *args, lengths: m.prefill(*args, lengths=lengths))
    caches = model.init_caches(9, page_size=8)
    # NaN wherever no token is: nothing may come of it.
    caches = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), caches)
    table = jnp.asarray(rng.permutation(8).reshape(2, 4), jnp.int32)
    chunk = 10
    prompt_lens = lengths - 2
    for start in range(0, int(prompt_lens.max()), chunk):
        seq_lens = np.minimum(prompt_lens, start + chunk)
        live = np.maximum(seq_lens - start, 0)
        part = np.zeros((2, chunk), np.int32)
        part[:, : ids.shape[1] - start] = ids[:, start : start + chunk][:, :chunk]
        seq_lens, live = jnp.asarray(seq_lens, jnp.int32), jnp.asarray(live, jnp.int32)
        logits, caches = prefill(model, jnp.asarray(part), caches, table, seq_lens, lengths=live)
        for found, row, n, new in zip(logits, expected, seq_lens, live, strict=True):
            if new:
                np.testing.assert_allclose(
                    found, row[int(n) - 1], atol=tolerances.ORACLE_LOGITS_ATOL, rtol=0
                )

    new = np.stack([row[n - 2 : n] for row, n in zip(ids, lengths, strict=True)])
    logits, _ = nnx.jit(lambda m, *args: m.decode(*args))(
        model, jnp.asarray(new), caches, table, jnp.asarray(lengths, jnp.int32)
    )
    for found, row in zip(logits, expected, strict=True):
        np.testing.assert_allclose(found, row[-2:], atol=tolerances.ORACLE_LOGITS_ATOL, rtol=0)


@pytest.mark.parametrize("family", [V2, V3], ids=["v2", "v3"])
@pytest.mark.parametrize(
    "groups",
    [(8, 1, 1, 3), (12, 4, 2, 5), (12, 12, 4, 4), (16, 2, 1, 8), (16, 4, 4, 6)],
    ids="{0[0]} experts in {0[1]} groups, {0[2]} kept, {0[3]} chosen".format,
)
@pytest.mark.parametrize("spread", [0.01, 4.0])
def test_routing_rules(family, groups, spread):
    num_experts, num_groups, kept, k = groups
    config = tiny_config(
        family,
        n_routed_experts=num_experts,
        n_group=num_groups,
        topk_group=kept,
        num_experts_per_tok=k,
        routed_scaling_factor=2.5,
    )
    if family is V2:
        config["topk_method"] = "group_limited_greedy"
    moe = MLAConfig.from_dict(config).moe
    assert moe is not None
    rng = np.random.default_rng(num_experts + k)
    logits = (spread * rng.standard_normal((64, num_experts))).astype(np.float32)
    # Biased scores of both signs: a group that is left out must not win with a 0.
    bias = rng.normal(-0.5, 0.5, num_experts).astype(np.float32) if family is V3 else None

    experts, weights = select_experts(jnp.asarray(logits), bias, moe)
    for row, chosen, values in zip(logits, np.asarray(experts), np.asarray(weights), strict=True):
        expected_experts, expected = reference_model.route(row.astype(np.float64), bias, config)
        order = np.argsort(chosen)
        np.testing.assert_array_equal(chosen[order], expected_experts)
        np.testing.assert_allclose(values[order], expected, rtol=tolerances.ROUTER_WEIGHT_RTOL)


def test_random_model_of_a_config():
    """`init` follows the seed, and makes finite logits in the dtype asked for."""
    config = MLAConfig.from_dict(tiny_config(V3, num_hidden_layers=1))
    ids = jnp.asarray([[3, 4, 5]])
    logits = models.init(config, seed=1, dtype="bfloat16")(ids)
    assert logits.shape == (1, 3, 64) and np.isfinite(logits).all()
    assert (logits == models.init(config, seed=1, dtype="bfloat16")(ids)).all()
    assert (logits != models.init(config, seed=2, dtype="bfloat16")(ids)).any()
    with pytest.raises(TypeError, match=r"^`dtype` is int8: must be bfloat16, float16 or float32$"):
        models.init(config, dtype="int8")


def test_a_cache_for_each_layer():
    model = models.init(MLAConfig.from_dict(tiny_config(V3, num_hidden_layers=1)))
    ids, table, lens = jnp.array([[3]]), jnp.array([[0]]), jnp.array([1])
    for caches in ((), model.init_caches(1) * 2):
        message = rf"^`caches` holds {len(caches)}: must hold one for each of 1 layers$"
        for step in (model.decode, model.prefill):
            with pytest.raises(ValueError, match=message):
                step(ids, caches, table, lens)
