"""The attention layer by itself: its three forms agree, and it is a good citizen of flax."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mla_jax
from mla_jax.config import MLAConfig
from mla_jax.nn import MultiHeadLatentAttention
from tests import tolerances
from tests.models.checkpoints import V3, tiny_config

CONFIG = MLAConfig.from_dict(tiny_config(V3, q_lora_rank=16))
B, T, PAGE = 2, 12, 4


prefill = nnx.jit(lambda layer, *args, **kwargs: layer.prefill(*args, **kwargs))
decode = nnx.jit(lambda layer, *args, **kwargs: layer.decode(*args, **kwargs))


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    """The prefix is expanded in pieces of two pages: several of them, and the last not whole."""
    monkeypatch.setattr("mla_jax.nn.mla._PREFIX_CHUNK", 2 * PAGE * B)


@pytest.fixture(scope="module")
def layer():
    return MultiHeadLatentAttention(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(1), (B, T, CONFIG.d_model))


@pytest.fixture(scope="module")
def whole(layer, x):
    return layer(x)


def empty_cache(pages=7):
    cache = mla_jax.init_cache(
        pages, page_size=PAGE, kv_lora_rank=CONFIG.d_latent, rope_dim=CONFIG.d_rope, format="f32"
    )
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)


TABLE = jnp.array([[5, 0, 3], [1, 6, 2]], jnp.int32)


def lens(*values):
    return jnp.array(values, jnp.int32)


@pytest.mark.parametrize("new", [1, 2, 3])
def test_decode_of_several_tokens(layer, x, whole, new):
    """A speculative step of `new` tokens sees what as many single steps see."""
    start = T - new
    _, cache = prefill(layer, x[:, :start], empty_cache(), TABLE, lens(start, start))
    plan = mla_jax.plan_decode(lens(T, T), num_heads=3, q_len=new, page_size=PAGE)
    out, _ = decode(layer, x[:, start:], cache, TABLE, lens(T, T), plan=plan)
    np.testing.assert_allclose(out, whole[:, start:], atol=tolerances.LAYER_ATOL, rtol=0)


@pytest.mark.parametrize("chunk", [1, 5, T])
def test_prefill_in_chunks(layer, x, whole, chunk):
    cache, outs = empty_cache(), []
    for start in range(0, T, chunk):
        part = x[:, start : start + chunk]
        end = start + part.shape[1]
        out, cache = prefill(layer, part, cache, TABLE, lens(end, end))
        outs.append(out)
    np.testing.assert_allclose(
        jnp.concatenate(outs, axis=1), whole, atol=tolerances.LAYER_ATOL, rtol=0
    )


def test_rows_that_are_not_in_use(layer, x, whole):
    """A length of 0 writes nothing, gives no NaN, and does not disturb the others."""
    table = TABLE.at[1].set(-1)
    out, cache = prefill(layer, x[:, :5], empty_cache(), table, lens(5, 0), lengths=lens(5, 0))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[0], whole[0, :5], atol=tolerances.LAYER_ATOL, rtol=0)
    out, cache = decode(layer, x[:, 5:6], cache, table, lens(6, 0))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[0], whole[0, 5:6], atol=tolerances.LAYER_ATOL, rtol=0)
    written = np.isfinite(np.asarray(cache.latent)).all(-1)
    assert written[5].all() and written[0, :2].all() and written.sum() == 6


def test_padding_of_whole_sequences(layer, x, whole):
    garbage = x.at[1, 7:].set(jnp.nan)
    out = layer(garbage, lengths=lens(T, 7))
    np.testing.assert_allclose(out[0], whole[0], atol=tolerances.LAYER_ATOL, rtol=0)
    np.testing.assert_allclose(out[1, :7], whole[1, :7], atol=tolerances.LAYER_ATOL, rtol=0)


def test_a_token_beyond_the_table_is_dropped(layer, x):
    _, cache = decode(layer, x[:, :1], empty_cache(), TABLE, lens(3 * PAGE + 1, 0))
    assert np.isnan(np.asarray(cache.latent)).all()


def test_keys_per_head_of_the_whole_cache_never_exist(layer, x):
    """Neither form makes an array with both all cached tokens and all heads."""
    table = jnp.arange(2 * 1024, dtype=jnp.int32).reshape(2, 1024)
    cache = empty_cache(2 * 1024)
    cached = 1024 * PAGE
    for run in (layer.prefill, layer.decode):
        jaxpr = jax.make_jaxpr(run)(x, cache, table, lens(cached, cached))
        sizes = [
            math.prod(getattr(var.aval, "shape", ()))
            for eqn in all_equations(jaxpr.jaxpr)
            for var in eqn.outvars
        ]
        # The cache itself is B * cached * (d_latent + d_rope) and may be written as a whole.
        assert max(sizes) <= B * cached * (CONFIG.d_latent + CONFIG.d_rope)


def all_equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
            sub = getattr(sub, "jaxpr", sub)
            if hasattr(sub, "eqns"):
                yield from all_equations(sub)


def test_injected_attention(x):
    calls = []

    def prefill_fn(q, k, v, **kwargs):
        calls.append(("prefill", q.shape, v.shape))
        return mla_jax.mla_prefill(q, k, v, **kwargs)

    def decode_fn(q_latent, q_rope, cache, block_table, seq_lens, **kwargs):
        calls.append(("decode", q_latent.shape, q_rope.shape))
        assert kwargs["scale"] == CONFIG.softmax_scale
        return mla_jax.mla_decode(q_latent, q_rope, cache, block_table, seq_lens, **kwargs)

    layer = MultiHeadLatentAttention(
        CONFIG, rngs=nnx.Rngs(0), prefill_fn=prefill_fn, decode_fn=decode_fn
    )
    nnx.jit(lambda layer, x: layer(x))(layer, x)
    decode(layer, x[:, :1], empty_cache(), TABLE, lens(1, 1))
    assert calls == [
        ("prefill", (B, T, 3, 32), (B, T, 3, 24)),
        ("decode", (B, 1, 3, 64), (B, 1, 3, 16)),
    ]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda layer, x, *state: layer(x[0]),
            ValueError,
            "`x` has shape (12, 48): must have 3 axes, [b, t, d_model]",
        ),
        (
            lambda layer, x, *state: layer(x[..., :40]),
            ValueError,
            "`x` has shape (2, 12, 40): must be [b, t, d_model] with d_model=48",
        ),
        (
            lambda layer, x, *state: layer(x, lengths=np.ones(3, int)),
            ValueError,
            "`lengths` has shape (3,): must be [b] with b=2",
        ),
        (
            lambda layer, x, *state: layer.prefill(x, *state, lengths=np.ones(2)),
            TypeError,
            "`lengths` is float64: must be int32",
        ),
        (
            lambda layer, x, cache, table, seq_lens: layer.decode(x, None, table, seq_lens),
            TypeError,
            "`cache` is of type NoneType: must be a LatentCache, see init_cache",
        ),
        (
            lambda layer, x, cache, table, seq_lens: layer.decode(x, cache, table[:1], seq_lens),
            ValueError,
            "`block_table` has shape (1, 3): must be [b, max_pages] with b=2",
        ),
        (
            lambda layer, x, cache, table, seq_lens: layer.prefill(x, cache, table, [1, 2]),
            TypeError,
            "`seq_lens` is of type list: must be an array [b]",
        ),
    ],
)
def test_wrong_arguments(layer, x, call, error, message):
    with pytest.raises(error) as raised:
        call(layer, x, empty_cache(), TABLE, lens(T, T))
    assert str(raised.value) == message


def test_gradients_reach_every_parameter(layer, x):
    grads = nnx.jit(nnx.grad(lambda layer: (layer(x) ** 2).sum()))(layer)
    for path, grad in nnx.to_flat_state(grads):
        assert np.isfinite(grad[...]).all() and (grad[...] != 0).any(), path


def test_no_parameter_is_stored_twice(layer):
    c = CONFIG
    assert c.d_q_latent is not None
    expected = (
        c.d_model * c.d_q_latent
        + c.d_q_latent
        + c.d_q_latent * c.num_heads * (c.d_nope + c.d_rope)
        + c.d_model * (c.d_latent + c.d_rope)
        + c.d_latent
        + c.num_heads * (c.d_nope + c.d_v) * c.d_latent
        + c.num_heads * c.d_v * c.d_model
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(layer))) == expected


def test_linen(x):
    """The one-liner for linen users, in all three forms."""
    module = nnx.bridge.to_linen(MultiHeadLatentAttention, CONFIG)
    variables = module.init(jax.random.key(0), x)
    whole = jnp.asarray(module.apply(variables, x))
    cache = empty_cache()
    _, cache = module.apply(
        variables, x[:, :-1], cache, TABLE, lens(T - 1, T - 1), nnx_method="prefill"
    )
    out, _ = module.apply(variables, x[:, -1:], cache, TABLE, lens(T, T), nnx_method="decode")
    np.testing.assert_allclose(out, whole[:, -1:], atol=tolerances.LAYER_ATOL, rtol=0)
