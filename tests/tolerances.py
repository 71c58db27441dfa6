"""Every tolerance of the tests, by what is compared."""

import dataclasses
import math

import numpy as np

# Models: recorded answers of the golden checkpoints (float32) and the float64 forward.
MODEL_LOGITS_ATOL = 2e-4
MODEL_ATTN_OUT_ATOL = 5e-5
ORACLE_LOGITS_ATOL = 1e-4
LAYER_ATOL = 1e-5
INV_FREQ_RTOL = 1e-6
ROUTER_WEIGHT_RTOL = 1e-5
ROPE_NEAR_ATOL = 2e-5
# The recorded angles are float32 products: 5e-4 off at position 10000.
ROPE_FAR_ATOL = 1e-3
# What a quantised cache may do to logits of the golden models.
CACHE_FORMAT_MEDIAN_ERROR = {
    "bf16": 0.005,
    "f16": 0.001,
    "fp8_ds_mla": 0.06,
    "fp8_token": 0.06,
    "fp8_full": 0.06,
}
BF16_MODEL_MEDIAN_ERROR = 0.03
GREEDY_GAP = {"bf16": 0.06, "f16": 0.02, "fp8_ds_mla": 0.12, "fp8_token": 0.12, "fp8_full": 0.12}
"""How far a greedy token's logit may be below the largest, where their spread is 1, by the format
of the cache: three times what the jnp implementation has."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Of the contract: an element passes if `abs < atol` or `rel < rtol`, the whole if `cos`.

    `cos` bounds `1 - 2 * sum(x * y) / sum(x * x + y * y)`.
    """

    atol: float
    rtol: float
    cos: float = math.inf


OUT = {
    "bfloat16": Tolerance(8e-4, 2.01 / 128, 5e-6),
    "float16": Tolerance(8e-4, 2.01 / 128, 5e-6),
    "float32": Tolerance(1e-6, 1e-5, 1e-11),
}
"""Decode, dense and sparse, by the dtype of the output."""
LSE = Tolerance(1e-6, 8.01 / 65536)
TRANSPOSED_FP16_RMSE = 1.25e-5
E4M3_OUT = Tolerance(8e-3, 0, 5e-4)
E4M3_LSE = Tolerance(1e-2, 0)
# Sequences of a single tile, whose P has two terms: what is left is the queries' rounding.
E4M3_SHORT_OUT = Tolerance(2e-3, 2.01 / 128, 1e-5)
E4M3_TWO_TERMS_OUT = Tolerance(8e-4, 2.01 / 128, 1e-5)
PREFILL_OUT = {
    "bfloat16": Tolerance(1e-3, 8.01 / 128, 7e-6),
    "float32": Tolerance(2e-6, 1e-5, 1e-11),
}
PREFILL_LSE = Tolerance(1e-6, 2.01 / 65536)
LARGE_SCORES_OUT = Tolerance(1e-3, 1e-2)
LARGE_ROPE_LSE = {"rtol": 2**-8}
SCALE_GRADIENT = {"rtol": 1e-4}
GOLDEN_OUT = Tolerance(5e-3, 2**-7)
GOLDEN_LSE = Tolerance(1e-3, 0)
SCALE_RTOL = 1e-6
SCALE_LOG2_RTOL = 1e-6
BENCH_EXPECTED = {"atol": 1e-5, "rtol": 1e-4}
# Half a unit in the last place; for e4m3 with a scale, what is small beside the largest goes too.
STORED = {
    "float32": Tolerance(1e-30, 2**-24),
    "float16": Tolerance(2**-24, 2**-11 * 1.001),
    "bfloat16": Tolerance(1e-30, 2**-8),
    "float8_e4m3fn": Tolerance(0.1, 2**-4 * 1.001),
}
# A value rounded twice: to float32 after norm or rotation, then to the dtype.
NORM_ROPE = {
    "float32": Tolerance(2e-6, 2e-6),
    "float16": Tolerance(2e-6, 2**-11 * 1.01),
    "bfloat16": Tolerance(2e-6, 2**-8 * 1.01),
}


def check(name, found, expected, tolerance):
    """Compare as the contract does: infinities and NaNs in the same places, the rest in bounds."""
    found, expected = (np.asarray(x).astype(np.float64) for x in (found, expected))
    assert found.shape == expected.shape, f"{name}: shape {found.shape}, not {expected.shape}"
    for what in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(what(found), what(expected), f"{name}: {what.__name__}")
    finite = np.isfinite(expected)
    found, expected = found[finite], expected[finite]
    error = np.abs(found - expected)
    bad = (error >= tolerance.atol) & (error >= tolerance.rtol * np.abs(expected))
    assert not bad.any(), f"{name}: {bad.sum()} of {bad.size} off, by up to {error[bad].max()}"
    norm = np.sum(found**2 + expected**2)
    cos = 1 - 2 * np.sum(found * expected) / norm if norm else 0.0
    assert cos < tolerance.cos, f"{name}: cosine term {cos}"
