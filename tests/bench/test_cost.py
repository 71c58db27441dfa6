"""Operations, bytes and rooflines, against figures worked out by hand."""

import pytest

from pallas_kernels.decode_dense import cost
from pallas_kernels.hopper.gpus import GPUS
from tests.bench.ceilings import H200_MEASURED

STEP = {"b": 128, "s_q": 1, "h": 128, "keys": 4096}


def test_flops():
    # 2 b s_q h keys (576 + 512)
    assert cost.flops(**STEP) == 146_028_888_064
    assert cost.flops(b=1, s_q=2, h=3, keys=5, d_latent=7, d_rope=11) == 2 * 2 * 3 * 5 * (18 + 7)


@pytest.mark.parametrize(
    ("format", "bytes_per_token"),
    [("bf16", 1152), ("f16", 1152), ("fp8_ds_mla", 656), ("fp8_token", 644), ("fp8_full", 584)],
)
def test_bytes(format, bytes_per_token):
    cache = cost.cache_bytes(b=128, keys=4096, format=format)
    assert cache == 128 * 4096 * bytes_per_token
    rows = 128 * 128
    rest = rows * (576 + 512) * 2 + rows * 4 + 128 * (4096 // 64) * 4 + 128 * 4
    assert cost.bytes_moved(**STEP, format=format) == cache + rest


def test_roofline_of_many_heads_is_compute_and_of_few_is_memory():
    gpu = GPUS["H200"]
    compute = cost.flops(**STEP) / 989e12 * 1e6
    assert cost.roofline_us(gpu, **STEP) == pytest.approx(compute)
    few = STEP | {"h": 16}
    memory = cost.bytes_moved(**few) / 4.8e12 * 1e6
    assert cost.roofline_us(gpu, **few) == pytest.approx(memory)
    # e4m3 products run at twice the rate; `fp8_ds_mla` is multiplied in 16 bits.
    assert cost.roofline_us(gpu, **STEP, format="fp8_token") < 0.6 * compute
    assert cost.roofline_us(gpu, **STEP, format="fp8_ds_mla") == pytest.approx(compute)


def test_floor_of_the_peers_table():
    cache = cost.cache_bytes(b=128, keys=4096)
    assert H200_MEASURED.roofline_us(0, cache) == pytest.approx(135.7, abs=0.05)
