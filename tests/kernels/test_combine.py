import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import merge_states, mla_decode, mla_sparse_prefill
from tests import inputs, tolerances


@pytest.mark.parametrize("stacked", [True, False])
def test_parts_of_a_sequence_merge_to_the_whole(stacked):
    """Three stretches of pages; the last is past the second sequence, and empty for it."""
    case = inputs.decode_case((90, 20), s_q=2, dtype=jnp.float32, max_pages=6)
    q_latent, q_rope, cache, table, lens = case.args
    call = lambda table, lens: mla_decode(
        q_latent, q_rope, cache, table, lens, scale=1.0, causal=False, return_lse=True
    )
    parts = [call(table[:, i : i + 2], jnp.clip(lens - 16 * i, 0, 32)) for i in (0, 2, 4)]
    outs, lses = zip(*parts, strict=True)
    if stacked:
        outs, lses = jnp.stack(outs), jnp.stack(lses)
    out, lse = merge_states(outs, lses)
    whole_out, whole_lse = call(table, lens)
    tolerances.check("out", out, whole_out, tolerances.OUT["float32"])
    tolerances.check("lse", lse, whole_lse, tolerances.LSE)


def test_prefill_layout():
    rng = np.random.default_rng(0)
    draw = lambda *shape: inputs.values(rng, *shape)
    q_latent, q_rope, latent, rope = draw(4, 3, 32), draw(4, 3, 8), draw(20, 32), draw(20, 8)
    indices = inputs.sparse_indices(rng, np.arange(20), 4, 12)
    call = lambda indices: mla_sparse_prefill(q_latent, q_rope, latent, rope, indices, scale=1.0)
    (out_0, _, lse_0), (out_1, _, lse_1) = call(indices[:, :5]), call(indices[:, 5:])
    whole_out, _, whole_lse = call(indices)
    out, lse = jax.jit(merge_states)([out_0, out_1], [lse_0, lse_1])
    tolerances.check("out", out, whole_out, tolerances.OUT["float32"])
    tolerances.check("lse", lse, whole_lse, tolerances.LSE)


def test_an_empty_part_has_no_weight_whatever_it_holds():
    outs = jnp.array([[2.0, 4.0], [jnp.nan, jnp.inf]], jnp.bfloat16).reshape(2, 1, 1, 2)
    lses = jnp.array([0.5, -jnp.inf]).reshape(2, 1, 1)
    out, lse = merge_states(outs, lses)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    np.testing.assert_array_equal(out, outs[0])
    np.testing.assert_array_equal(lse, lses[0])


def test_nothing_but_empty_parts():
    out, lse = merge_states(jnp.full((3, 2, 1, 4), jnp.nan), jnp.full((3, 2, 1), -jnp.inf))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_gradient_is_finite_with_an_empty_part():
    outs = jnp.ones((2, 1, 1, 2))
    lses = jnp.array([0.5, -jnp.inf]).reshape(2, 1, 1)
    grads = jax.grad(lambda *args: jnp.sum(merge_states(*args)[0]), (0, 1))(outs, lses)
    assert all(np.isfinite(g).all() for g in grads)
