"""Reading config.json: both styles, DeepSeek's constants, and what the errors say."""

import json
import math
import re

import numpy as np
import pytest

from mla_jax.config import MLAConfig
from tests import tolerances
from tests.models import reference_model
from tests.models.checkpoints import GOLDEN, MODELS, V2, V3, tiny_config

YARN = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("name", MODELS)
def test_both_styles_give_the_golden_constants(name):
    config = MLAConfig.from_pretrained(GOLDEN / name)
    assert config == MLAConfig.from_pretrained(GOLDEN / name / "config.hub-style.json")
    recorded = np.load(GOLDEN / name / "golden.npz")
    assert config.softmax_scale == pytest.approx(float(recorded["softmax_scale"]), rel=1e-12)
    scaling = float(recorded["rope_attention_scaling"])
    assert config.rope_attention_scaling == pytest.approx(scaling, rel=1e-12)
    np.testing.assert_allclose(
        config.inv_freq, recorded["rope_inv_freq"], rtol=tolerances.INV_FREQ_RTOL
    )


@pytest.mark.parametrize(
    ("mscales", "factor"),
    [
        ({}, 0.1 * math.log(40) + 1),
        ({"mscale": 0.707}, 0.1 * math.log(40) + 1),
        ({"mscale_all_dim": 0.5}, 0.1 * math.log(40) + 1),
        ({"mscale": 0.7, "mscale_all_dim": 0}, 0.1 * math.log(40) + 1),
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, 1.0),
        (
            {"mscale": 0.5, "mscale_all_dim": 1},
            (0.05 * math.log(40) + 1) / (0.1 * math.log(40) + 1),
        ),
        ({"mscale": 0.5, "attention_factor": 1.5}, 1.5),
    ],
)
def test_yarn_temperatures(mscales, factor):
    config = MLAConfig.from_dict(tiny_config(V3, rope_scaling=YARN | mscales))
    assert config.rope_attention_scaling == pytest.approx(factor, rel=1e-12)
    expected = 32**-0.5 * (0.1 * mscales.get("mscale_all_dim", 0) * math.log(40) + 1) ** 2
    assert config.softmax_scale == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("d_rope", [16, 32, 64])
@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
@pytest.mark.parametrize("theta", [10000.0, 50000.0])
def test_inv_freq_against_the_definition(d_rope, factor, theta):
    values = tiny_config(
        V3, qk_rope_head_dim=d_rope, rope_theta=theta, rope_scaling=YARN | {"factor": factor}
    )
    expected = reference_model.inv_freq(values)
    found = MLAConfig.from_dict(values).inv_freq
    np.testing.assert_allclose(found, expected, rtol=tolerances.INV_FREQ_RTOL)


def test_no_yarn():
    config = MLAConfig.from_dict(tiny_config(V2))
    assert config.yarn is None and config.rope_attention_scaling == 1.0
    assert config.softmax_scale == 32**-0.5
    np.testing.assert_allclose(config.inv_freq[:2], [1.0, 10000 ** (-1 / 8)], rtol=1e-6)


def test_yarn_of_a_short_context_has_no_ramp():
    """Both bounds of the ramp fall on dimension 0; nothing is divided by zero."""
    scaling = YARN | {"original_max_position_embeddings": 4}
    config = MLAConfig.from_dict(tiny_config(V3, rope_scaling=scaling))
    assert np.isfinite(config.inv_freq).all()


def test_rope_parameters_win_over_rope_scaling():
    values = tiny_config(V3, rope_theta=1.5, rope_scaling={"type": "linear"})
    values["rope_parameters"] = {"rope_theta": 500.0, "rope_type": "default"}
    config = MLAConfig.from_dict(values)
    assert config.rope_theta == 500.0 and config.yarn is None


def test_what_a_file_may_leave_out():
    values = tiny_config(V3)
    for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
        del values[key]
    for key in ("v_head_dim", "rope_theta", "rms_norm_eps", "eos_token_id", "torch_dtype"):
        del values[key]
    config = MLAConfig.from_dict(values)
    assert (config.d_latent, config.d_nope, config.d_rope, config.d_v) == (512, 128, 64, 128)
    assert config.d_q_latent is None and config.eos_id is None
    assert (config.rope_theta, config.norm_eps, config.dtype) == (1e4, 1e-6, "float32")


def test_no_shared_experts_and_no_dense_layers():
    values = tiny_config(V3, n_shared_experts=0, first_k_dense_replace=0)
    config = MLAConfig.from_dict(values)
    assert config.moe is not None and config.moe.num_shared_experts == 0
    assert config.is_moe_layer(0)


def test_generations_and_their_layers():
    v2 = MLAConfig.from_dict(tiny_config(V2, n_group=4, topk_group=2, norm_topk_prob=True))
    assert v2.moe is not None and (v2.moe.num_groups, v2.moe.normalize) == (1, False)
    assert (v2.rope_pairs, v2.rope_order) == ("interleaved", "interleaved")
    kimi = MLAConfig.from_dict(tiny_config(V3, model_type="kimi_k2", moe_layer_freq=2))
    assert kimi.moe is not None and (kimi.moe.scoring, kimi.moe.normalize) == ("sigmoid", True)
    assert [kimi.is_moe_layer(i) for i in range(5)] == [False, False, True, False, True]
    assert kimi.rope_order == "halves"
    assert not MLAConfig.from_dict(tiny_config(V3, n_routed_experts=None)).is_moe_layer(1)


@pytest.mark.parametrize(("eos", "expected"), [(0, 0), (7, 7), ([5, 6], 5), ([], None)])
def test_eos_id(eos, expected):
    assert MLAConfig.from_dict(tiny_config(V3, eos_token_id=eos)).eos_id == expected


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"hidden_size": None}, ValueError, "here.json: `hidden_size` is missing"),
        (
            {"model_type": "deepseek_v32"},
            NotImplementedError,
            "here.json: `model_type` is 'deepseek_v32': its sparse-attention indexer (`indexer` "
            "weights, `index_topk`) is not built",
        ),
        (
            {"model_type": "llama"},
            NotImplementedError,
            "here.json: `model_type` is 'llama': must be one of deepseek_v2, deepseek_v3, kimi_k2",
        ),
        (
            {"rope_scaling": {"type": "yarn"}},
            ValueError,
            "here.json: `rope_scaling.factor` is missing",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            NotImplementedError,
            "here.json: `rope_scaling.type` is 'linear': must be 'default' or 'yarn'",
        ),
        (
            {"num_attention_heads": "3"},
            ValueError,
            "here.json: `num_attention_heads` is '3': must be of type int",
        ),
        (
            {"num_hidden_layers": 0},
            ValueError,
            "here.json: `num_hidden_layers` is 0: must be at least 1",
        ),
        (
            {"tie_word_embeddings": 1},
            ValueError,
            "here.json: `tie_word_embeddings` is 1: must be of type bool",
        ),
        (
            {"qk_rope_head_dim": 15},
            ValueError,
            "here.json: `qk_rope_head_dim` is 15: must be even: RoPE turns pairs of channels",
        ),
        (
            {"topk_method": "greedy"},
            NotImplementedError,
            "here.json: `topk_method` is 'greedy': must be one of noaux_tc for this model_type",
        ),
        (
            {"scoring_func": "softmax"},
            NotImplementedError,
            "here.json: `scoring_func` is 'softmax': must be 'sigmoid' for this model_type",
        ),
        (
            {"n_group": 3},
            ValueError,
            "here.json: `n_group` is 3: must divide n_routed_experts = 8",
        ),
        (
            {"n_group": 2, "topk_group": 4},
            ValueError,
            "here.json: `topk_group` is 4: must be at most n_group = 2",
        ),
        (
            {"n_group": 8, "topk_group": 1},
            ValueError,
            "here.json: `num_experts_per_tok` is 2: must be at most the 1 experts of the groups "
            "that are kept",
        ),
        (
            {"torch_dtype": "int8"},
            ValueError,
            "here.json: `torch_dtype` is 'int8': must be one of float32, bfloat16, float16",
        ),
        (
            {"quantization_config": {"quant_method": "awq"}},
            NotImplementedError,
            "here.json: `quantization_config.quant_method` is 'awq': must be 'fp8'",
        ),
        (
            {"hidden_act": "gelu"},
            NotImplementedError,
            "here.json: `hidden_act` is 'gelu': must be 'silu'",
        ),
        (
            {"rope_theta": 1},
            ValueError,
            "here.json: `rope_theta` is 1: must be above 1",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 0}},
            ValueError,
            "here.json: `rope_scaling.factor` is 0: must be above 0",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "beta_slow": -1.0}},
            ValueError,
            "here.json: `rope_scaling.beta_slow` is -1.0: must be above 0",
        ),
        (
            {"n_shared_experts": -1},
            ValueError,
            "here.json: `n_shared_experts` is -1: must be at least 0",
        ),
        (
            {"first_k_dense_replace": -1},
            ValueError,
            "here.json: `first_k_dense_replace` is -1: must be at least 0",
        ),
        *(
            (
                {"rms_norm_eps": eps},
                ValueError,
                f"here.json: `rms_norm_eps` is {eps}: must be above 0 and finite",
            )
            for eps in (0, -1e-6, math.inf, math.nan)
        ),
        (
            {"eos_token_id": "</s>"},
            ValueError,
            "here.json: `eos_token_id` is '</s>': must be an int or a list of them",
        ),
    ],
)
def test_errors_name_the_key_and_the_file(overrides, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        MLAConfig.from_dict(tiny_config(V3, **overrides), source="here.json")


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^no config\.json at .*: pass the directory"):
        MLAConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not a JSON file: "):
        MLAConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([]))
    with pytest.raises(ValueError, match=r"config\.json: is of type list, must be a JSON object$"):
        MLAConfig.from_pretrained(tmp_path)
