"""Small random checkpoints, written as Hugging Face writes them."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
MODELS = ("v2lite-tiny", "v3-tiny")

V2 = {
    "model_type": "deepseek_v2",
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "first_k_dense_replace": 1,
}
V3 = {
    "model_type": "deepseek_v3",
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}


def tiny_config(family: dict, **overrides) -> dict:
    """A hub-style config of a model that runs in no time."""
    sizes: dict = {
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
        "eos_token_id": 1,
    }
    return sizes | family | overrides


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights under the names of the hub."""
    rng = np.random.default_rng(seed)
    tensors = {}

    def normal(name: str, *shape: int, around: float = 0.0, spread: float = 0.0):
        spread = spread or float(shape[-1]) ** -0.5
        tensors[name] = (around + spread * rng.standard_normal(shape)).astype(np.float32)

    def norm(name: str, size: int):
        normal(f"{name}.weight", size, around=1.0, spread=0.2)

    def linear(name: str, d_in: int, d_out: int, bias: bool = False):
        normal(f"{name}.weight", d_out, d_in)
        if bias:
            normal(f"{name}.bias", d_out, spread=0.5)

    def mlp(name: str, hidden: int):
        linear(f"{name}.gate_proj", d_model, hidden)
        linear(f"{name}.up_proj", d_model, hidden)
        linear(f"{name}.down_proj", hidden, d_model)

    d_model, heads, rank = (
        config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    nope, rope, d_v = (
        config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    normal("model.embed_tokens.weight", config["vocab_size"], d_model, spread=1.0)
    norm("model.norm", d_model)
    if not config["tie_word_embeddings"]:
        linear("lm_head", d_model, config["vocab_size"])
    for i in range(config["num_hidden_layers"]):
        layer, bias = f"model.layers.{i}", config["attention_bias"]
        norm(f"{layer}.input_layernorm", d_model)
        norm(f"{layer}.post_attention_layernorm", d_model)
        if config["q_lora_rank"] is None:
            linear(f"{layer}.self_attn.q_proj", d_model, heads * (nope + rope))
        else:
            linear(f"{layer}.self_attn.q_a_proj", d_model, config["q_lora_rank"], bias)
            norm(f"{layer}.self_attn.q_a_layernorm", config["q_lora_rank"])
            linear(f"{layer}.self_attn.q_b_proj", config["q_lora_rank"], heads * (nope + rope))
        linear(f"{layer}.self_attn.kv_a_proj_with_mqa", d_model, rank + rope, bias)
        norm(f"{layer}.self_attn.kv_a_layernorm", rank)
        linear(f"{layer}.self_attn.kv_b_proj", rank, heads * (nope + d_v))
        linear(f"{layer}.self_attn.o_proj", heads * d_v, d_model, bias)
        num_experts = config["n_routed_experts"] or 0
        in_turn = i % config.get("moe_layer_freq", 1) == 0
        if not (num_experts and i >= config["first_k_dense_replace"] and in_turn):
            mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        linear(f"{layer}.mlp.gate", d_model, num_experts)
        if config["model_type"] != "deepseek_v2":
            name = f"{layer}.mlp.gate.e_score_correction_bias"
            normal(name, num_experts, around=-1.0, spread=0.5)
        for expert in range(num_experts):
            mlp(f"{layer}.mlp.experts.{expert}", config["moe_intermediate_size"])
        if config["n_shared_experts"]:
            shared = config["n_shared_experts"] * config["moe_intermediate_size"]
            mlp(f"{layer}.mlp.shared_experts", shared)
    return tensors


def write(path: Path, config: dict, tensors: dict[str, np.ndarray], *, shards: int = 1) -> Path:
    """Writes a checkpoint directory, with an index if there are several shards."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        names = sorted(tensors)[i::shards]
        save_file({name: tensors[name] for name in names}, path / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def golden(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """Config (hub style) and tensors of a golden checkpoint."""
    config = json.loads((GOLDEN / name / "config.hub-style.json").read_text())
    return config, load_file(GOLDEN / name / "model.safetensors")


def to_block_fp8(tensors: dict[str, np.ndarray]) -> tuple[dict, dict[str, np.ndarray]]:
    """Quantises the matrices of the layers in 128x128 blocks; also gives what they stand for."""
    stored, meant = {}, {}
    for name, weight in tensors.items():
        stored[name] = meant[name] = weight
        is_quantised = name.startswith("model.layers") and weight.ndim == 2 and ".gate." not in name
        if not is_quantised:
            continue
        codes = np.empty(weight.shape, ml_dtypes.float8_e4m3fn)
        scales = np.empty([-(-size // 128) for size in weight.shape], np.float32)
        meant[name] = np.empty_like(weight)
        for row, column in np.ndindex(scales.shape):
            block = np.s_[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]
            scales[row, column] = np.abs(weight[block]).max() / 448
            codes[block] = (weight[block] / scales[row, column]).astype(codes.dtype)
            meant[name][block] = codes[block].astype(np.float32) * scales[row, column]
        stored[name], stored[f"{name}_scale_inv"] = codes, scales
    return stored, meant
