"""What the decode kernels multiply with values fits its format, however scores and scales grow."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_e4m3.config import Config as E4m3Config
from pallas_kernels.decode_transposed.config import Config as TransposedConfig
from pallas_kernels.formats import MIN_SCALE
from pallas_kernels.hopper.softmax import NO_MAXIMUM, ColumnSoftmax, PairedSoftmax

LARGEST = {"fp8_ds_mla": 65504.0, "fp8_token": 448.0, "fp8_full": 448.0, "f16": 65504.0}
STEP = st.floats(-3, 7, width=32) | st.sampled_from([3.25, 3.75, 4.25, 4.75, 7.75])
TILES = st.lists(st.tuples(STEP, st.floats(-1, 3.25, width=32)), min_size=1, max_size=12)
"""How much larger each tile's largest score is than that of the one before, and its largest scale,
both base 2: about the slacks, so that they are used to the full."""


def config(cls, format):
    dtype = "float16" if format == "f16" else "bfloat16"
    return cls(format, dtype, 512, 64, 64, 16, 1, True, has_sink=False, scale=1.0)


def paired(chosen, tiles):
    """The reference of the scores and that of the scales, tile by tile."""
    state = PairedSoftmax(jnp.float32([NO_MAXIMUM]), jnp.zeros((1, 8)), jnp.float32(0))
    for largest, scale in tiles:
        state, alpha = state.follow(
            jnp.float32([largest]), scale, chosen.slack, chosen.headroom, chosen.scale_slack
        )
        assert 0 <= alpha[0] <= 1
        yield state.m[0], state.scale


def by_column(chosen, tiles):
    first = jnp.float32(MIN_SCALE if chosen.scaled else 1.0)
    state = ColumnSoftmax(jnp.float32([NO_MAXIMUM]), jnp.zeros(1), (first,))
    for largest, scale in tiles:
        state = state.follow_scales((scale,), chosen.scale_slack)
        state = state.follow_scores(jnp.float32([largest]), chosen.slack, chosen.headroom)
        yield state.m[0], state.scales[0]


KERNELS = [
    *((E4m3Config, format, paired) for format in ("fp8_token", "fp8_full")),
    *((TransposedConfig, format, by_column) for format in LARGEST),
]


@pytest.mark.parametrize(("cls", "format", "follow"), KERNELS)
@hypothesis.settings(max_examples=100)
@hypothesis.given(tiles=TILES)
def test_operands_fit_their_format(cls, format, follow, tiles):
    chosen = config(cls, format)
    # `fp8_ds_mla` compares scales rounded down to powers of two.
    compared = lambda scale: 2.0 ** np.floor(np.log2(scale)) if format == "fp8_ds_mla" else scale
    maxima, exponents = np.cumsum(tiles, axis=0).T
    scales = np.exp2(exponents) if chosen.scales_per_token else np.ones(len(tiles))
    followed = follow(
        chosen,
        [(m, jnp.float32(compared(scale))) for m, scale in zip(maxima, scales, strict=True)],
    )
    p_max = 1.0 if format == "f16" else chosen.p_max
    highest = -np.inf
    for i, (m, scale) in enumerate(followed):
        operand = p_max * np.exp2(maxima[i] - float(m)) * scales[i] / float(scale)
        assert operand <= LARGEST[format] * (1 + 1e-5)
        # Nor is what weighs most pushed to where the format has few bits.
        highest = max(highest, maxima[i])
        assert float(m) <= highest + chosen.headroom + 1e-4
