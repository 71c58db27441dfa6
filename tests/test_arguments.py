"""Wrong arguments of the operations: the error names the argument, what it was, what it must be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import (
    LatentCache,
    merge_states,
    mla_decode,
    mla_prefill,
    mla_sparse_decode,
    mla_sparse_prefill,
    plan_decode,
)

ZEROS = {
    "q_latent": np.zeros((2, 1, 3, 192), np.float32),
    "q_rope": np.zeros((2, 1, 3, 16), np.float32),
    "block_table": np.zeros((2, 2), np.int32),
    "seq_lens": np.zeros(2, np.int32),
    "indices": np.zeros((2, 1, 5), np.int32),
}
CACHE = LatentCache(jnp.zeros((4, 16, 192)), jnp.zeros((4, 16, 16)), None, format="f32")
FLOATS = "must be bfloat16, float16 or float32"


def decode(**changes):
    names = ("q_latent", "q_rope", "block_table", "seq_lens")
    kwargs = {name: ZEROS[name] for name in names} | {"cache": CACHE, "scale": 1.0}
    return mla_decode(**(kwargs | changes))


def sparse_decode(**changes):
    kwargs = {name: ZEROS[name] for name in ("q_latent", "q_rope", "indices")}
    return mla_sparse_decode(**(kwargs | {"cache": CACHE, "scale": 1.0} | changes))


def sparse_prefill(**changes):
    zeros = {name: ZEROS[name][:, 0] for name in ("q_latent", "q_rope", "indices")}
    rows = {"latent": np.zeros((9, 192), np.float32), "rope": np.zeros((9, 16), np.float32)}
    return mla_sparse_prefill(**(zeros | rows | {"scale": 1.0} | changes))


def prefill(**changes):
    q, k, v = (np.zeros((2, n, 3, d), np.float32) for n, d in ((4, 24), (6, 24), (6, 16)))
    return mla_prefill(**({"q": q, "k": k, "v": v, "scale": 1.0} | changes))


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize("call", [decode, sparse_decode, sparse_prefill, prefill])
def test_numpy_arguments_are_fine(call):
    jax.block_until_ready(call())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: decode(q_latent=zeros(2, 3, 192)),
            ValueError,
            "`q_latent` has shape (2, 3, 192): must have 4 axes, [b, s_q, h_q, c]",
        ),
        (
            lambda: decode(q_latent=zeros(2, 1, 3, 512)),
            ValueError,
            "`q_latent` has shape (2, 1, 3, 512): must be [b, s_q, h_q, c] with c=192",
        ),
        (
            lambda: decode(q_rope=zeros(2, 1, 4, 16)),
            ValueError,
            "`q_rope` has shape (2, 1, 4, 16): must be [b, s_q, h_q, r] with h_q=3",
        ),
        (
            lambda: decode(q_latent=zeros(2, 1, 3, 192, dtype=np.float64)),
            TypeError,
            f"`q_latent` is float64: {FLOATS}",
        ),
        (
            lambda: decode(q_rope=zeros(2, 1, 3, 16, dtype=np.float16)),
            TypeError,
            "`q_rope` is float16: must be float32 as `q_latent`, cast one of them",
        ),
        (
            lambda: decode(cache=CACHE.latent),
            TypeError,
            "`cache` is of type ArrayImpl: must be a LatentCache, see init_cache",
        ),
        (
            lambda: decode(cache=LatentCache(CACHE.latent, CACHE.rope, None, format="fp8_full")),
            TypeError,
            "`cache.scale` is of type NoneType: must be an array [p ps n]",
        ),
        (
            lambda: decode(cache=jax.tree.map(lambda x: jnp.stack([x, x]), CACHE)),
            ValueError,
            "`cache.latent` has shape (2, 4, 16, 192): must have 3 axes, [p, ps, c]",
        ),
        (
            lambda: decode(block_table=zeros(2, 2)),
            TypeError,
            "`block_table` is float32: must be int32",
        ),
        (
            lambda: decode(block_table=zeros(3, 2, dtype=int)),
            ValueError,
            "`block_table` has shape (3, 2): must be [b, max_pages] with b=2",
        ),
        (
            lambda: decode(seq_lens=[1, 2]),
            TypeError,
            "`seq_lens` is of type list: must be an array [b]",
        ),
        (
            lambda: decode(seq_lens=zeros(2, 1, dtype=int)),
            ValueError,
            "`seq_lens` has shape (2, 1): must have 1 axes, [b]",
        ),
        (lambda: decode(scale=None), TypeError, "`scale` is None: must be a real number"),
        (lambda: decode(scale=np.nan), ValueError, "`scale` is nan: must be finite"),
        (
            lambda: decode(scale=zeros(3)),
            ValueError,
            "`scale` has shape (3,): must have 0 axes, []",
        ),
        (
            lambda: decode(scale=jnp.int32(3)),
            TypeError,
            "`scale` is int32: an array must be of a floating dtype, cast it to float32",
        ),
        (
            lambda: jax.jit(lambda c: decode(causal=c))(True),
            TypeError,
            "`causal` is of type DynamicJaxprTracer: must be True or False, not traced",
        ),
        (
            lambda: decode(attn_sink=zeros(4)),
            ValueError,
            "`attn_sink` has shape (4,): must be [h_q] with h_q=3",
        ),
        (
            lambda: decode(attn_sink=zeros(3, dtype=int)),
            TypeError,
            f"`attn_sink` is int64: {FLOATS}",
        ),
        (lambda: decode(plan=3), TypeError, "`plan` is of type int: must be a DecodePlan"),
        (
            lambda: decode(plan=plan_decode(ZEROS["seq_lens"], num_heads=5, page_size=16)),
            ValueError,
            "`plan` was made for num_heads=5, this call has num_heads=3; call plan_decode with "
            "the sizes of this step",
        ),
        (
            lambda: sparse_decode(indices=zeros(2, 5, dtype=int)),
            ValueError,
            "`indices` has shape (2, 5): must have 3 axes, [b, s_q, k]",
        ),
        (
            lambda: sparse_decode(indices=zeros(2, 1, 5)),
            TypeError,
            "`indices` is float32: must be int32",
        ),
        (
            lambda: sparse_decode(topk_length=zeros(3, dtype=int)),
            ValueError,
            "`topk_length` has shape (3,): must be [b] with b=2",
        ),
        (
            lambda: sparse_prefill(latent=zeros(9, 192, dtype=np.float16)),
            TypeError,
            "`rope` is float32: must be float16 as `latent`, cast one of them",
        ),
        (
            lambda: sparse_prefill(latent=zeros(0, 192), rope=zeros(0, 16)),
            ValueError,
            "`latent` has shape (0, 192): must hold a row at least",
        ),
        (
            lambda: sparse_prefill(rope=zeros(8, 16)),
            ValueError,
            "`rope` has shape (8, 16): must be [n, r] with n=9",
        ),
        (
            lambda: prefill(k=zeros(2, 6, 1, 24)),
            ValueError,
            "`k` has shape (2, 6, 1, 24): must be [b, n, h, d] with h=3",
        ),
        (
            lambda: prefill(v=zeros(2, 5, 3, 16)),
            ValueError,
            "`v` has shape (2, 5, 3, 16): must be [b, n, h, d_v] with n=6",
        ),
        (
            lambda: prefill(k=zeros(2, 6, 3, 24, dtype=np.float16)),
            TypeError,
            "`k` is float16: must be float32 as `q`, cast one of them",
        ),
        (
            lambda: prefill(kv_lens=zeros(2)),
            TypeError,
            "`kv_lens` is float32: must be int32",
        ),
        (
            lambda: merge_states(zeros(2, 3, 4), zeros(2, 3)),
            ValueError,
            "`outs` has shape (2, 3, 4): must have 4 axes, [n, t, h, d]",
        ),
        (
            lambda: merge_states(zeros(2, 1, 5, 3, 4), zeros(2, 1, 5, 3)),
            ValueError,
            "`lses` has shape (2, 1, 5, 3): must be [n, b, h, s] with h=3",
        ),
        (
            lambda: merge_states(1, zeros(2, 3)),
            TypeError,
            "`outs` is of type int: must be an array or a list of them",
        ),
        (lambda: merge_states([], []), ValueError, "`outs` is empty: must hold a part at least"),
        (
            lambda: merge_states([zeros(2, 3, 4), zeros(1, 3, 4)], [zeros(2, 3)] * 2),
            ValueError,
            "`outs[1]` has shape (1, 3, 4): must be (2, 3, 4) as `outs[0]`",
        ),
        (
            lambda: merge_states(zeros(2, 5, 3, 4), zeros(2, 5, 3, dtype=int)),
            TypeError,
            f"`lses` is int64: {FLOATS}",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    assert str(raised.value) == message
