"""The operations under `jax.shard_map`, heads or sequences split over two devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mla_jax import (
    append,
    init_cache,
    merge_states,
    mla_decode,
    mla_prefill,
    mla_sparse_decode,
    mla_sparse_prefill,
)
from tests import inputs, tolerances

HEADS = P(None, None, "x")
F32 = tolerances.OUT["float32"]


def sharded(f, in_specs, out_specs):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def check(f, args, in_specs, out_specs):
    leaves = lambda x: jax.tree.leaves(x)
    expected = f(*args)
    for x, y in zip(leaves(sharded(f, in_specs, out_specs)(*args)), leaves(expected), strict=True):
        tolerances.check("sharded", x, y, F32)


@pytest.mark.parametrize("format", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize(
    ("in_specs", "out_specs"),
    [
        ((HEADS, HEADS, P(), P(), P()), (HEADS, P(None, "x"))),
        ((P("x"), P("x"), P(), P("x"), P("x")), P("x")),
    ],
    ids=["heads", "sequences"],
)
def test_decode(in_specs, out_specs, format):
    case = inputs.decode_case((40, 3), h_q=4, dtype=jnp.float32, format=format)
    decode = lambda *args: mla_decode(*args, scale=1.0, return_lse=True)
    check(decode, case.args, in_specs, out_specs)


def test_decode_of_keys_split_over_devices():
    """Each device holds the first or the second half of every sequence; the states are merged."""
    case = inputs.decode_case((60, 40), dtype=jnp.float32, max_pages=4)
    q_latent, q_rope, cache, table, lens = case.args

    def decode(q_latent, q_rope, cache, table, lens):
        first = jax.lax.axis_index("x") * 32
        part = mla_decode(
            q_latent,
            q_rope,
            cache,
            table,
            jnp.clip(lens - first, 0, 32),
            scale=1.0,
            causal=False,
            return_lse=True,
        )
        out, lse = merge_states(*jax.lax.all_gather(part, "x"))
        return out[None], lse[None]

    specs = (P(), P(), P(), P(None, "x"), P())
    out, lse = sharded(decode, specs, P("x"))(q_latent, q_rope, cache, table, lens)
    expected = mla_decode(*case.args, scale=1.0, return_lse=True)
    for device in range(2):
        tolerances.check("out", out[device], expected[0], F32)
        tolerances.check("lse", lse[device], expected[1], tolerances.LSE)


def test_sparse():
    case = inputs.decode_case((40, 3), h_q=4, dtype=jnp.float32)
    indices = inputs.sparse_indices(np.random.default_rng(0), case.live, 2, 1, 9)
    decode = lambda *args: mla_sparse_decode(*args, scale=1.0)
    args = (case.q_latent, case.q_rope, case.cache, indices)
    check(decode, args, (HEADS, HEADS, P(), P()), HEADS)
    latent, rope = case.cache.latent[0], case.cache.rope[0]
    latent, rope = (jnp.nan_to_num(x).astype(jnp.float32) for x in (latent, rope))
    prefill = lambda *args: mla_sparse_prefill(*args, scale=1.0)
    args = (case.q_latent[:, 0], case.q_rope[:, 0], latent, rope, indices[:, 0])
    check(prefill, args, (P("x"), P("x"), P(), P(), P("x")), P("x"))


def test_prefill_and_its_gradient():
    rng = np.random.default_rng(0)
    args = [inputs.values(rng, 2, 5, 4, 8) for _ in range(3)]
    lens = jnp.array([5, 3])
    loss = lambda *args: jnp.sum(mla_prefill(*args, scale=1.0, q_lens=lens, kv_lens=lens) ** 2)
    check(jax.grad(loss, (0, 1, 2)), args, HEADS, HEADS)


@pytest.mark.parametrize("format", ["bf16", "fp8_token"])
def test_append_to_pages_of_ones_own(format):
    sizes = {"page_size": 8, "kv_lora_rank": 192, "rope_dim": 16, "format": format}
    rng = np.random.default_rng(0)
    latent, rope = inputs.values(rng, 16, 192), inputs.values(rng, 16, 16)
    write = lambda cache, *tokens: append(cache, *tokens, jnp.arange(8))
    found = sharded(write, P("x"), P("x"))(init_cache(2, **sizes), latent, rope)
    expected = append(init_cache(2, **sizes), latent, rope, jnp.arange(16))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))
