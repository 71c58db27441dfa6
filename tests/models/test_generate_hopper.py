"""Generation on a Hopper GPU: the kernels in the compiled step, for every format of the cache."""

import numpy as np
import pytest

from mla_jax import models
from pallas_kernels import decode
from tests import tolerances
from tests.models import reference_model
from tests.models.checkpoints import V3, random_tensors, tiny_config, write

pytestmark = pytest.mark.hopper

PROMPTS = [[5, 9, 2, 33, 21, 8, 40, 11, 3], [7], list(range(2, 62))]
NEW_TOKENS = 70
"""More than a page."""


def config_of(num_heads, dtype):
    """Latents and rope keys of the sizes that the kernels take."""
    return tiny_config(
        V3,
        num_attention_heads=num_heads,
        hidden_size=128,
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        n_routed_experts=None,
        torch_dtype=dtype,
    )


@pytest.mark.parametrize("num_heads, transposed", [(16, True), (64, False)])
@pytest.mark.parametrize("format", decode.FORMATS)
def test_greedy_tokens(format, num_heads, transposed, tmp_path, monkeypatch):
    """Each is one of the likeliest by the float64 forward of all before it."""
    schedules = set()
    kernel = decode.mla_decode

    def recorded(*args, **kwargs):
        schedules.add(kwargs.get("transposed", False))
        return kernel(*args, **kwargs)

    monkeypatch.setattr(decode, "mla_decode", recorded)
    config = config_of(num_heads, "float16" if format == "f16" else "bfloat16")
    tensors = random_tensors(config)
    model = models.load(write(tmp_path / "model", config, tensors))
    ids = models.generate(model, PROMPTS, max_new_tokens=NEW_TOKENS, cache_format=format)
    assert schedules == {transposed}
    for prompt, new in zip(PROMPTS, np.asarray(ids), strict=True):
        row = np.array([*prompt, *new])
        logits = reference_model.forward(tensors, config, row).logits[len(prompt) - 1 : -1]
        gap = logits.max(axis=1) - logits[np.arange(NEW_TOKENS), new]
        assert (gap / logits.std(axis=1)).max() < tolerances.GREEDY_GAP[format]
