"""What the Hopper dense decode refuses, and in which words; no GPU is needed for that."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mla_jax import Unsupported, dispatch, mla_decode
from pallas_kernels import decode
from pallas_kernels.decode_dense import config
from pallas_kernels.decode_e4m3 import config as e4m3_config
from pallas_kernels.decode_transposed import config as transposed_config
from pallas_kernels.formats import E4M3_FORMATS, FORMATS
from pallas_kernels.hopper import decode as hopper_decode
from pallas_kernels.hopper.limits import LAUNCH_REGISTERS
from tests import inputs

SIZES = {"h_q": 4, "page_size": 64, "kv_lora_rank": 512, "rope_dim": 64}


@pytest.fixture
def hopper(monkeypatch):
    """As if this process had a Hopper GPU. The launch is left out."""
    monkeypatch.setitem(dispatch._REQUIREMENTS, "mosaic", lambda: "")
    monkeypatch.setattr(decode, "launch", lambda *_, **__: pytest.fail("ran"))


def refusal(case, *, implementation="mosaic", scale=1.0):
    with pytest.raises(Unsupported) as raised:
        mla_decode(*case.args, scale=scale, implementation=implementation)
    return str(raised.value)


def message(reason):
    return (
        f"`implementation` is 'mosaic': cannot serve this mla_decode call (mosaic: {reason}); "
        "use implementation=None for the best that can"
    )


def test_without_the_gpu():
    if not dispatch._lacks_hopper():
        pytest.skip("this process has one")
    case = inputs.decode_case((3,), **SIZES)
    found = getattr(jax.devices()[0], "platform", "")
    assert refusal(case).startswith(
        "`implementation` is 'mosaic': cannot serve this mla_decode call (mosaic: needs an NVIDIA "
        f"Hopper GPU (compute capability 9.0), this process has: {found}"
    )


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"page_size": 48}, "takes page_size of 16 or 32 or 64 or 128, this call has 48"),
        ({"page_size": 256}, "takes page_size of 16 or 32 or 64 or 128, this call has 256"),
        ({"kv_lora_rank": 384}, "takes kv_lora_rank of 256 or 512, this call has 384"),
        ({"rope_dim": 48}, "takes rope_dim of 32 or 64, this call has 48"),
    ],
)
def test_sizes(sizes, reason, hopper):
    assert refusal(inputs.decode_case((3,), **{**SIZES, **sizes})) == message(reason)


@pytest.mark.parametrize("format", sorted(FORMATS.keys() - {*decode.FORMATS}))
def test_cache_formats(format, hopper):
    case = inputs.decode_case((3,), format=format, **SIZES)
    taken = "bf16 or f16 or fp8_ds_mla or fp8_token or fp8_full"
    assert refusal(case) == message(f"takes a cache in {taken}, this one is {format}")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_queries_that_fp8_ds_mla_is_not_converted_to(dtype, hopper):
    case = inputs.decode_case((3,), format="fp8_ds_mla", dtype=jnp.dtype(dtype), **SIZES)
    reason = f"takes bfloat16 queries with fp8_ds_mla, these are {dtype}"
    assert refusal(case) == message(reason)


@pytest.mark.parametrize("implementation", [None, "mosaic"])
@pytest.mark.parametrize("format", ["bf16", "fp8_ds_mla"])
def test_what_it_serves(format, implementation, monkeypatch):
    """Under its name, and where the best is asked for."""
    monkeypatch.setitem(dispatch._REQUIREMENTS, "mosaic", lambda: "")
    served = []
    monkeypatch.setattr(decode, "launch", lambda config, *_, **__: served.append(config) or 1 / 0)
    case = inputs.decode_case((3,), format=format, **SIZES)
    with pytest.raises(ZeroDivisionError):
        mla_decode(*case.args, scale=1.0, implementation=implementation)
    assert served[0].cache_format == format


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"page_size": 48}, "takes page_size of 16 or 32 or 64 or 128, this call has 48"),
        ({"kv_lora_rank": 384}, "takes kv_lora_rank of 256 or 512, this call has 384"),
        ({"rope_dim": 48}, "takes rope_dim of 32 or 64, this call has 48"),
        ({"dtype": jnp.float32}, "takes dtype of bfloat16 or float16, this call has float32"),
    ],
)
@pytest.mark.parametrize("format", E4M3_FORMATS)
def test_what_the_e4m3_kernel_refuses(format, sizes, reason, hopper):
    case = inputs.decode_case((3,), format=format, **{**SIZES, **sizes})
    assert refusal(case) == message(reason)


@pytest.mark.parametrize(
    ("format", "cache_dtype", "dtype"),
    [("bf16", "bfloat16", "float16"), ("f16", "float16", "float32")],
)
def test_queries_of_another_dtype(format, cache_dtype, dtype, hopper):
    case = inputs.decode_case((3,), format=format, dtype=jnp.dtype(dtype), **SIZES)
    reason = f"takes queries of the cache's dtype, {cache_dtype}, these are {dtype}"
    assert refusal(case) == message(reason)


@pytest.mark.parametrize("axis", [0, 1])
def test_no_sequences_or_queries(axis, hopper):
    q_latent, q_rope, cache, table, lens = inputs.decode_case((0, 0), **SIZES).args
    args = q_latent[:0], q_rope[:0], cache, table[:0], lens[:0]
    if axis:
        args = q_latent[:, :0], q_rope[:, :0], cache, table, lens
    with pytest.raises(Unsupported) as raised:
        mla_decode(*args, scale=1.0, implementation="mosaic")
    assert str(raised.value) == message(
        "takes a sequence, a query, a head and a page of each at least"
    )
    assert mla_decode(*args, scale=1.0).size == 0


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("by", ["heads", "sequences"])
def test_under_shard_map(by, check_vma, monkeypatch):
    """Traced only. Shards of heads are taken, of sequences unless their types are checked."""
    monkeypatch.setitem(dispatch._REQUIREMENTS, "mosaic", lambda: "")
    heads = P(None, None, "x")
    specs = {
        "heads": ((heads, heads, P(), P(), P()), heads),
        "sequences": ((P("x"), P("x"), P(), P("x"), P("x")), P("x")),
    }
    case = inputs.decode_case((3, 70), **SIZES)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    in_specs, out_specs = specs[by]
    decode = lambda *args: mla_decode(*args, scale=1.0, implementation="mosaic")
    mapped = jax.jit(
        jax.shard_map(
            decode, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
        )
    )
    if by == "sequences" and check_vma:
        with pytest.raises(Unsupported, match="check_vma=False"):
            jax.eval_shape(mapped, *case.args)
    else:
        assert jax.eval_shape(mapped, *case.args).shape == case.q_latent.shape


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (
            {"format": "f32"},
            "takes a cache in bf16 or f16 or fp8_ds_mla or fp8_token or fp8_full, this one is f32",
        ),
        (
            {"format": "fp8_ds_mla", "dtype": jnp.float16},
            "takes bfloat16 queries with fp8_ds_mla, these are float16",
        ),
        ({"page_size": 48}, "takes page_size of 16 or 32 or 64 or 128, this call has 48"),
        ({"rope_dim": 48}, "takes rope_dim of 32 or 64, this call has 48"),
    ],
)
def test_what_the_transposed_schedule_refuses(sizes, reason, hopper, monkeypatch):
    monkeypatch.setitem(dispatch._REQUIREMENTS, "mosaic_transposed", lambda: "")
    case = inputs.decode_case((3,), **{**SIZES, **sizes})
    said = message(reason).replace("mosaic", "mosaic_transposed")
    assert refusal(case, implementation="mosaic_transposed") == said


@pytest.mark.parametrize("num_heads", [1, 16, 128])
@pytest.mark.parametrize("cache_format", transposed_config.CACHE_FORMATS)
@pytest.mark.parametrize("page_size", hopper_decode.PAGE_SIZES)
def test_every_size_of_the_transposed_schedule_fits(page_size, cache_format, num_heads):
    accepted = transposed_config.Config(
        cache_format, "bfloat16", 512, 64, page_size, num_heads, 1, causal=True, has_sink=True
    )
    assert accepted.refusal() == ""


def test_what_is_refused_is_served_by_another(hopper):
    case = inputs.decode_case((3,), **{**SIZES, "page_size": 48})
    for implementation in (None, ("mosaic", "xla")):
        mla_decode(*case.args, scale=1.0, implementation=implementation)


@pytest.mark.parametrize("num_heads", [1, 128])
@pytest.mark.parametrize(
    ("dtype", "format"), [("bfloat16", "bf16"), ("float16", "f16"), ("bfloat16", "fp8_ds_mla")]
)
@pytest.mark.parametrize("page_size", hopper_decode.PAGE_SIZES)
@pytest.mark.parametrize("d_rope", hopper_decode.D_ROPE)
@pytest.mark.parametrize("d_latent", hopper_decode.D_LATENT)
def test_every_accepted_size_fits_the_shared_memory(
    d_latent, d_rope, page_size, dtype, format, num_heads
):
    sizes = d_latent, d_rope, page_size, num_heads, 1
    accepted = config.Config(format, dtype, *sizes, causal=True, has_sink=True)
    assert sum(accepted.registers) == 3 * LAUNCH_REGISTERS
    assert not accepted.refusal()


@pytest.mark.parametrize("p_terms", [1, 2])
@pytest.mark.parametrize("dtype", hopper_decode.DTYPES)
@pytest.mark.parametrize("page_size", hopper_decode.PAGE_SIZES)
@pytest.mark.parametrize("d_rope", hopper_decode.D_ROPE)
@pytest.mark.parametrize("d_latent", hopper_decode.D_LATENT)
@pytest.mark.parametrize("format", E4M3_FORMATS)
def test_every_accepted_size_fits_e4m3(format, d_latent, d_rope, page_size, dtype, p_terms):
    accepted = e4m3_config.Config(
        format, dtype, d_latent, d_rope, page_size, 128, 1, True, True, p_terms=p_terms
    )
    assert not accepted.refusal()
