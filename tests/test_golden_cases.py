"""The recorded decode and fp8 cases of tests/data/golden (its README says how they were made)."""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mla_jax import (
    LatentCache,
    append,
    flash_mla,
    gather,
    mla_decode,
    mla_sparse_decode,
    pack_fp8_ds_mla,
    unpack_fp8_ds_mla,
)
from tests import tolerances

GOLDEN = Path(__file__).parent / "data" / "golden"
D_LATENT = 512


@functools.cache
def load(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


def case(name, i):
    """The arrays of case `i`; bfloat16 bit patterns as bfloat16."""
    prefix = f"case{i}_"
    arrays = {k.removeprefix(prefix): v for k, v in load(name).items() if k.startswith(prefix)}
    return {
        k: lax.bitcast_convert_type(jnp.asarray(v), jnp.bfloat16) if v.dtype == np.uint16 else v
        for k, v in arrays.items()
    }


def split(x):
    return x[..., :D_LATENT], x[..., D_LATENT:]


def check(c, out, lse, empty_lse=-np.inf):
    expected_lse = np.where(np.isposinf(c["lse"]), empty_lse, c["lse"])
    tolerances.check("out", out, c["out"], tolerances.GOLDEN_OUT)
    tolerances.check("lse", lse, expected_lse, tolerances.GOLDEN_LSE)


def flash(c, k_cache, **kwargs):
    return flash_mla.flash_mla_with_kvcache(
        c["q"],
        k_cache[:, :, None],
        c["block_table"],
        c["seqlens"],
        D_LATENT,
        *flash_mla.get_mla_metadata(),
        softmax_scale=float(c["softmax_scale"]),
        **kwargs,
    )


CASES = [
    (name, i) for name in ("decode_public", "fp8_public") for i in range(load(name)["num_cases"])
]
FP8_CASES = [i for name, i in CASES if name == "fp8_public"]


@pytest.mark.parametrize(("name", "i"), CASES)
def test_attention(name, i):
    c = case(name, i)
    if name == "fp8_public":
        cache = unpack_fp8_ds_mla(c["packed"])
    else:
        cache = LatentCache(*split(c["kv_pages"]), None, format="bf16")
    common = {"scale": float(c["softmax_scale"]), "return_lse": True}
    if "indices" in c:
        sparse = {k: c.get(k) for k in ("topk_length", "attn_sink")}
        found = mla_sparse_decode(*split(c["q"]), cache, c["indices"], **sparse, **common)
    else:
        causal = bool(c["causal"])
        args = (*split(c["q"]), cache, c["block_table"], c["seqlens"])
        found = mla_decode(*args, causal=causal, **common)
    check(c, *found)


@pytest.mark.parametrize(("name", "i"), CASES)
def test_flash_mla(name, i):
    c = case(name, i)
    kwargs = {k: c[k] for k in ("indices", "topk_length", "attn_sink") if k in c}
    if "causal" in c:
        kwargs["causal"] = bool(c["causal"])
    fp8 = name == "fp8_public"
    found = flash(c, c["packed" if fp8 else "kv_pages"], is_fp8_kvcache=fp8, **kwargs)
    check(c, *found, empty_lse=np.inf)


@pytest.mark.parametrize("i", FP8_CASES)
def test_packed_bytes(i):
    """Appended token by token onto 0xFF bytes, the cache packs to the recorded bytes."""
    c = case("fp8_public", i)
    cache = unpack_fp8_ds_mla(np.full_like(c["packed"], 0xFF))
    slots = np.where(c["valid"].ravel(), np.arange(c["valid"].size), -1)
    cache = append(cache, *(x.reshape(slots.size, -1) for x in split(c["latents"])), slots)
    np.testing.assert_array_equal(pack_fp8_ds_mla(cache), c["packed"])


@pytest.mark.parametrize("i", FP8_CASES)
def test_dequantised_values(i):
    c = case("fp8_public", i)
    pages, page_size, _ = c["packed"].shape
    table, lens = np.arange(pages)[:, None], np.full(pages, page_size)
    found = gather(unpack_fp8_ds_mla(c["packed"]), table, lens, dtype=jnp.bfloat16)
    found = jnp.concatenate(found, axis=-1)[c["valid"]]
    np.testing.assert_array_equal(found, c["dequant"][c["valid"]])
