"""The two golden checkpoints: every recorded array, at the tolerances it was recorded with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax import models
from mla_jax.nn import MoE, apply_rope
from tests import tolerances
from tests.models import reference_model
from tests.models.checkpoints import GOLDEN, MODELS, golden

forward = nnx.jit(lambda model, *args: model(*args))
prefill = nnx.jit(lambda model, *args: model.prefill(*args))
decode = nnx.jit(lambda model, *args: model.decode(*args))


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@functools.cache
def load(name):
    return models.load(GOLDEN / name)


@functools.cache
def recorded(name):
    with np.load(GOLDEN / name / "golden.npz") as arrays:
        return dict(arrays)


@functools.cache
def residual_streams(name):
    """The input of every layer, and the output of the last."""
    model, x = load(name), load(name).embed(jnp.asarray(recorded(name)["input_ids"]))
    streams = [x]
    for layer in model.layers:
        streams.append(forward(layer, streams[-1]))
    return streams


def test_reference_model_agrees(name):
    """The float64 forward that other tests lean on is itself right."""
    config, tensors = golden(name)
    expected = recorded(name)
    result = reference_model.forward(tensors, config, expected["input_ids"][0])
    np.testing.assert_allclose(
        result.logits, expected["logits"][0], atol=tolerances.MODEL_LOGITS_ATOL
    )
    assert (result.experts[1] == expected["router_idx_l1"][0]).all()


def test_logits(name):
    ids = jnp.asarray(recorded(name)["input_ids"])
    logits = load(name)(ids)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(
        logits, recorded(name)["logits"], atol=tolerances.MODEL_LOGITS_ATOL, rtol=0
    )


def test_hidden_states(name):
    np.testing.assert_allclose(
        jnp.stack(residual_streams(name)[1:]),
        recorded(name)["hidden_states"],
        atol=tolerances.MODEL_LOGITS_ATOL,
        rtol=0,
    )


@pytest.mark.parametrize("i", [0, 1])
def test_attention_outputs(name, i):
    layer = load(name).layers[i]
    out = layer.attention(layer.input_norm(residual_streams(name)[i]))
    np.testing.assert_allclose(
        out, recorded(name)[f"attn_out_l{i}"], atol=tolerances.MODEL_ATTN_OUT_ATOL, rtol=0
    )


def test_cache_rows(name):
    """Also in the model's own channel order, which a score does not show."""
    layer = load(name).layers[0]
    x = layer.input_norm(residual_streams(name)[0])[:, :8]
    latent, rope = layer.attention.compress(x, jnp.broadcast_to(jnp.arange(8), (2, 8)))
    for found, array in ((latent, "cache_ckv_l0"), (rope, "cache_kpe_l0")):
        expected = recorded(name)[array]
        np.testing.assert_allclose(found, expected, atol=tolerances.MODEL_ATTN_OUT_ATOL, rtol=0)


def test_routing(name):
    layer, expected = load(name).layers[1], recorded(name)
    assert isinstance(layer.mlp, MoE)
    x = residual_streams(name)[1]
    x = x + layer.attention(layer.input_norm(x))
    tokens = layer.post_attention_norm(x).reshape(-1, x.shape[-1])
    np.testing.assert_allclose(
        layer.mlp.router.logits(tokens),
        expected["router_logits_l1"].reshape(len(tokens), -1),
        atol=tolerances.MODEL_ATTN_OUT_ATOL,
        rtol=0,
    )
    experts, weights = layer.mlp.router(tokens)
    order = np.argsort(experts, axis=-1)
    k = experts.shape[-1]
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(experts), order, -1),
        expected["router_idx_l1"].reshape(-1, k),
    )
    np.testing.assert_allclose(
        np.take_along_axis(np.asarray(weights), order, -1),
        expected["router_weight_l1"].reshape(-1, k),
        atol=tolerances.MODEL_ATTN_OUT_ATOL,
        rtol=0,
    )


@pytest.mark.parametrize("which", ["q", "k"])
def test_rope(name, which):
    arrays, config = recorded(name), load(name).config
    positions = jnp.asarray(arrays["rope_positions"], jnp.int32)[None]
    x = jnp.broadcast_to(arrays[f"rope_{which}_in"], (1, positions.size, config.d_rope))
    turned = apply_rope(x, positions, config)[0]
    expected = arrays[f"rope_{which}_out"]
    near = positions[0] < 100
    np.testing.assert_allclose(turned[near], expected[near], atol=tolerances.ROPE_NEAR_ATOL)
    np.testing.assert_allclose(turned, expected, atol=tolerances.ROPE_FAR_ATOL)
    by_head = apply_rope(x[:, :, None].repeat(2, axis=2), positions, config)
    np.testing.assert_array_equal(by_head[0, :, 1], turned)


def test_long_prompt(name):
    arrays = recorded(name)
    logits = forward(load(name), jnp.asarray(arrays["long_ids"]))[0, arrays["long_positions"]]
    np.testing.assert_allclose(
        logits, arrays["long_logits"], atol=tolerances.MODEL_LOGITS_ATOL, rtol=0
    )


def test_greedy_ids(name):
    arrays = recorded(name)
    ids = models.generate(load(name), arrays["input_ids"], max_new_tokens=24)
    np.testing.assert_array_equal(ids, arrays["gen_ids"])


def test_teacher_forced_logits_through_the_paged_cache(name):
    """Prefill, then absorbed decode of two tokens at a time, gives the recorded logits."""
    model, arrays = load(name), recorded(name)
    ids = jnp.asarray(arrays["input_ids"])
    b, t = ids.shape
    caches = model.init_caches(12, page_size=16)
    table = jnp.asarray(np.random.default_rng(0).permutation(12).reshape(b, 6), jnp.int32)

    logits, caches = prefill(model, ids, caches, table, jnp.full(b, t, jnp.int32))
    rows = [logits[:, None]]
    for i in range(0, 22, 2):
        new = jnp.asarray(arrays["gen_ids"][:, i : i + 2])
        logits, caches = decode(model, new, caches, table, jnp.full(b, t + i + 2, jnp.int32))
        rows.append(logits)
    np.testing.assert_allclose(
        jnp.concatenate(rows, axis=1),
        arrays["tf_logits"][:, :23],
        atol=tolerances.MODEL_LOGITS_ATOL,
        rtol=0,
    )


@pytest.mark.parametrize("name", ["v3-tiny"])
@pytest.mark.parametrize("cache_format", ["bf16", "f16", "fp8_ds_mla", "fp8_token", "fp8_full"])
def test_every_cache_format_follows_the_unquantised_cache(name, cache_format):
    """A whole prompt in absorbed form over a quantised cache, against the recorded logits."""
    model, arrays = load(name), recorded(name)
    ids = jnp.asarray(arrays["input_ids"])
    b, t = ids.shape
    table = jnp.arange(2 * b, dtype=jnp.int32).reshape(b, 2)
    caches = model.init_caches(2 * b, page_size=32, cache_format=cache_format)
    assert {cache.format for cache in caches} == {cache_format}
    logits, _ = decode(model, ids, caches, table, jnp.full(b, t, jnp.int32))
    error = np.abs(np.asarray(logits) - arrays["logits"])
    assert np.median(error) < tolerances.CACHE_FORMAT_MEDIAN_ERROR[cache_format]


def test_bfloat16_model_is_close(name):
    model = models.load(GOLDEN / name, dtype="bfloat16")
    params = nnx.state(model, nnx.Param)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    logits = forward(model, jnp.asarray(recorded(name)["input_ids"]))
    assert logits.dtype == jnp.float32
    error = np.abs(np.asarray(logits) - recorded(name)["logits"])
    assert np.median(error) < tolerances.BF16_MODEL_MEDIAN_ERROR
    assert model.init_caches(1)[0].format == "bf16"
