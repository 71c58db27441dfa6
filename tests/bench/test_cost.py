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


@pytest.mark.parametrize("name", GPUS)
def test_transposed_schedule_pads_less(name):
    """16 heads: the dense one multiplies for 64, and reads their queries."""
    step = {"b": 16, "s_q": 1, "h": 16, "keys": 65536}
    for format in ("bf16", "fp8_ds_mla", "fp8_token", "fp8_full"):
        times = [
            cost.schedule_us(GPUS[name], transposed=x, **step, format=format) for x in (True, False)
        ]
        (ours, own), (dense, dense_own) = times
        assert own < dense_own and own <= ours <= dense
        assert ours >= cost.roofline_us(GPUS[name], **step, format=format) * (1 - 1e-12)


def test_schedules_of_one_tile_by_hand():
    """bf16, 16 rows: bytes of shared memory and operations of a tile of 64 tokens."""
    gpu = GPUS["H200"]
    step = {"b": 1, "s_q": 1, "h": 16, "keys": 64}
    # TMA and K, V, queries; P written, and read by 8 blocks of channels.
    smem = 2 * 73_728 + 65_536 + 18_432 + 9 * 2048
    _, own = cost.schedule_us(gpu, transposed=True, **step)
    assert own == pytest.approx(smem / 30.9e6)
    # The same with 64 rows; P written and read once.
    smem = 2 * 73_728 + 65_536 + 73_728 + 2 * 8192
    _, own = cost.schedule_us(gpu, transposed=False, **step)
    assert own == pytest.approx(smem / 30.9e6)
    # fp8_ds_mla is widened by the registers here, and a P written for each scale.
    smem = 64 * 656 + 64 * (512 + 128) + 64 * 512 + 18_432 + 12 * 2048
    _, own = cost.schedule_us(gpu, transposed=True, **step, format="fp8_ds_mla")
    assert own == pytest.approx(smem / 30.9e6)
    # In the dense schedule by way of shared memory: raw bytes written and read, 16 bits stored.
    smem = 64 * 656 + 64 * 512 + 65_536 + 73_728 + 65_536 + 73_728 + 2 * 8192
    _, own = cost.schedule_us(gpu, transposed=False, **step, format="fp8_ds_mla")
    assert own == pytest.approx(smem / 30.9e6)
    # An H20's tensor cores are what takes longest: 16 rows of 1088 channels against 64 tokens.
    gpu = GPUS["H20"]
    _, own = cost.schedule_us(gpu, transposed=False, **step)
    assert own == pytest.approx(2 * 64 * 64 * 1088 / 148e6)
