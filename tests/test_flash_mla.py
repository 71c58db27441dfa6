import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import mla_decode, mla_sparse_decode, mla_sparse_prefill, pack_fp8_ds_mla
from mla_jax.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from tests import inputs

D_V = 192


def dense_arguments(case, k_cache=None):
    q = jnp.concatenate([case.q_latent, case.q_rope], -1)
    if k_cache is None:
        k_cache = jnp.concatenate([case.cache.latent, case.cache.rope], -1)
    meta = get_mla_metadata(case.seq_lens, 3, 1)
    return [q, k_cache[:, :, None], case.block_table, case.seq_lens, D_V, *meta]


def check(found, expected):
    """Equal but for the sign of the empty rows' lse."""
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def plus(lse):
    return jnp.where(lse == -jnp.inf, jnp.inf, lse)


def test_argument_order():
    assert list(inspect.signature(flash_mla_with_kvcache).parameters) == [
        "q",
        "k_cache",
        "block_table",
        "cache_seqlens",
        "head_dim_v",
        "tile_scheduler_metadata",
        "num_splits",
        "softmax_scale",
        "causal",
        "is_fp8_kvcache",
        "indices",
        "attn_sink",
        "extra_k_cache",
        "extra_indices_in_kvcache",
        "topk_length",
        "extra_topk_length",
        "implementation",
    ]
    assert list(inspect.signature(flash_mla_sparse_fwd).parameters) == [
        "q",
        "kv",
        "indices",
        "sm_scale",
        "d_v",
        "attn_sink",
        "topk_length",
        "indexer_topk",
        "implementation",
    ]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("causal", [True, False])
def test_dense(causal, dtype):
    format = {jnp.bfloat16: "bf16", jnp.float16: "f16", jnp.float32: "f32"}[dtype]
    case = inputs.decode_case((0, 1, 40), s_q=2, dtype=dtype, format=format)
    found = flash_mla_with_kvcache(*dense_arguments(case), None, causal)
    scale = (192 + 16) ** -0.5
    out, lse = mla_decode(*case.args, scale=scale, causal=causal, return_lse=True)
    check(found, (out, plus(lse)))
    assert np.isposinf(found[1][0]).all()


@pytest.mark.parametrize("view", [jnp.uint8, jnp.float8_e4m3fn])
def test_packed(view):
    case = inputs.decode_case((0, 1, 40), format="fp8_ds_mla")
    packed = jax.lax.bitcast_convert_type(pack_fp8_ds_mla(case.cache), view)
    args = dense_arguments(case, packed)
    found = flash_mla_with_kvcache(*args, 0.1, is_fp8_kvcache=True)
    out, lse = mla_decode(*case.args, scale=0.1, causal=False, return_lse=True)
    check(found, (out, plus(lse)))

    indices = inputs.sparse_indices(np.random.default_rng(0), case.live, 3, 1, 20)
    sparse = {"topk_length": jnp.array([0, 5, 20]), "attn_sink": jnp.zeros(3)}
    args[2:4] = None, None
    found = flash_mla_with_kvcache(*args, 0.1, is_fp8_kvcache=True, indices=indices, **sparse)
    out, lse = mla_sparse_decode(*case.args[:3], indices, scale=0.1, return_lse=True, **sparse)
    check(found, (out, plus(lse)))


def sparse_arguments():
    rng = np.random.default_rng(0)
    q, kv = inputs.values(rng, 4, 3, 208), inputs.values(rng, 30, 1, 208)
    return q, kv, inputs.sparse_indices(rng, np.arange(30), 4, 1, 20)


def test_sparse_prefill():
    q, kv, indices = sparse_arguments()
    lengths = jnp.array([0, 3, 20, 20])
    found = flash_mla_sparse_fwd(q, kv, indices, 0.1, D_V, topk_length=lengths)
    out, max_logits, lse = mla_sparse_prefill(
        q[..., :D_V],
        q[..., D_V:],
        kv[:, 0, :D_V],
        kv[:, 0, D_V:],
        indices[:, 0],
        scale=0.1,
        topk_length=lengths,
    )
    check(found, (out, max_logits, plus(lse)))
    assert np.isposinf(found[2][0]).all() and np.isneginf(found[1][0]).all()


def test_under_jit_with_the_metadata_as_an_argument():
    case = inputs.decode_case((3, 40))
    *args, d_v, meta, _ = dense_arguments(case)
    call = lambda meta, *args: flash_mla_with_kvcache(*args, d_v, meta, None, 0.1, True)[0]
    np.testing.assert_array_equal(jax.jit(call)(meta, *args), call(meta, *args))


def dense(**changes):
    """A dense call with some arguments changed, by name."""
    names = list(inspect.signature(flash_mla_with_kvcache).parameters)
    kwargs = dict(zip(names, dense_arguments(inputs.decode_case((3, 40))), strict=False))
    return flash_mla_with_kvcache(**(kwargs | changes))


def sparse(**changes):
    kwargs = dict(zip(("q", "kv", "indices"), sparse_arguments(), strict=True))
    return flash_mla_sparse_fwd(**({**kwargs, "sm_scale": 0.1, "d_v": D_V} | changes))


ZEROS = np.zeros((2, 1, 4), np.int32)
GIVEN = "is given: not supported yet, leave it out"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: dense(extra_k_cache=ZEROS),
            NotImplementedError,
            f"`extra_k_cache` {GIVEN}",
        ),
        (
            lambda: dense(extra_indices_in_kvcache=ZEROS),
            NotImplementedError,
            f"`extra_indices_in_kvcache` {GIVEN}",
        ),
        (
            lambda: dense(extra_topk_length=ZEROS),
            NotImplementedError,
            f"`extra_topk_length` {GIVEN}",
        ),
        (lambda: sparse(indexer_topk=512), NotImplementedError, f"`indexer_topk` {GIVEN}"),
        (
            lambda: dense(k_cache=jnp.zeros((5, 16, 2, 208), jnp.bfloat16)),
            NotImplementedError,
            "`k_cache` has h_kv=2: more than one kv head is not supported",
        ),
        (
            lambda: sparse(kv=jnp.zeros((30, 4, 208))),
            NotImplementedError,
            "`kv` has h_kv=4: more than one kv head is not supported",
        ),
        (
            lambda: dense(head_dim_v=208),
            NotImplementedError,
            "`q` has 208 channels, as many as `head_dim_v`: the 448 + 64 cache layout is not "
            "supported yet, use 512 + 64",
        ),
        (
            lambda: sparse(d_v=512),
            ValueError,
            "`q` has 208 channels: must be more than `d_v`, 512",
        ),
        (
            lambda: dense(causal=True, indices=ZEROS),
            ValueError,
            "`causal` is True: must be False with `indices`, which say it all",
        ),
        (
            lambda: dense(block_table=None),
            ValueError,
            "`block_table` or `cache_seqlens` is None: must be given unless `indices` is",
        ),
        (
            lambda: dense(topk_length=np.zeros(2, np.int32)),
            ValueError,
            "`topk_length` is given: must be None unless `indices` is given",
        ),
        (
            lambda: dense(num_splits=np.zeros(3)),
            TypeError,
            "`tile_scheduler_metadata`, `num_splits` are FlashMLASchedMeta, ndarray: must be what "
            "get_mla_metadata returned",
        ),
        (
            lambda: dense(is_fp8_kvcache=True),
            ValueError,
            "`k_cache` has shape (6, 16, 1, 208): must be [pages, page_size, h_kv, d] with d=232",
        ),
        (
            lambda: dense(k_cache=jnp.zeros((5, 16, 1, 232), jnp.bfloat16), is_fp8_kvcache=True),
            TypeError,
            "`k_cache` is bfloat16: must be uint8 when `is_fp8_kvcache`",
        ),
        (
            lambda: dense(k_cache=jnp.zeros((5, 16, 1, 208), jnp.uint8)),
            TypeError,
            "`k_cache` is uint8: must be bfloat16, float16 or float32",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message
