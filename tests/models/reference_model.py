"""A whole DeepSeek-V2 or -V3 forward in float64 numpy, from the published descriptions.

It reads a checkpoint's own tensor names and a hub-style config, shares no code with `mla_jax`, and
is written to be obviously right: attention in MHA form, one head, one token, one expert at a time.
"""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass
class Forward:
    """What the model computes on one sequence; lists have one entry per layer."""

    logits: np.ndarray
    hidden_states: list[np.ndarray]
    attn_out: list[np.ndarray]
    latents: list[np.ndarray]
    rope_keys: list[np.ndarray]
    router_logits: dict[int, np.ndarray]
    experts: dict[int, np.ndarray]
    expert_weights: dict[int, np.ndarray]


def forward(tensors: dict[str, np.ndarray], config: dict, ids: np.ndarray) -> Forward:
    """Runs the model on the token ids of one sequence, `[T]`."""
    weights = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    x = weights["model.embed_tokens.weight"][ids]
    result = Forward(x, [], [], [], [], {}, {}, {})
    eps = config["rms_norm_eps"]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        normed = rms_norm(x, weights[f"{layer}.input_layernorm.weight"], eps)
        out, latent, rope_key = attention(weights, f"{layer}.self_attn", config, normed)
        x = x + out
        normed = rms_norm(x, weights[f"{layer}.post_attention_layernorm.weight"], eps)
        is_moe = (
            config.get("n_routed_experts") is not None
            and i >= config["first_k_dense_replace"]
            and i % config.get("moe_layer_freq", 1) == 0
        )
        if is_moe:
            logits = normed @ weights[f"{layer}.mlp.gate.weight"].T
            bias = weights.get(f"{layer}.mlp.gate.e_score_correction_bias")
            chosen = [route(row, bias, config) for row in logits]
            x = x + np.stack(
                [
                    mixture(weights, f"{layer}.mlp", config, row, *choice)
                    for row, choice in zip(normed, chosen, strict=True)
                ]
            )
            result.router_logits[i] = logits
            result.experts[i] = np.array([experts for experts, _ in chosen])
            result.expert_weights[i] = np.array([values for _, values in chosen])
        else:
            x = x + mlp(weights, f"{layer}.mlp", normed)
        result.hidden_states.append(x)
        result.attn_out.append(out)
        result.latents.append(latent)
        result.rope_keys.append(rope_key)
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    result.logits = rms_norm(x, weights["model.norm.weight"], eps) @ weights[f"{head}.weight"].T
    return result


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def linear(weights, name, x):
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def mlp(weights, name, x):
    hidden = silu(linear(weights, f"{name}.gate_proj", x)) * linear(weights, f"{name}.up_proj", x)
    return linear(weights, f"{name}.down_proj", hidden)


def attention(weights, name, config, x):
    """Output, latents and rotated rope keys of one attention layer."""
    heads, nope, rope = (
        config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    if config.get("q_lora_rank") is None:
        q = linear(weights, f"{name}.q_proj", x)
    else:
        q = linear(weights, f"{name}.q_a_proj", x)
        q = rms_norm(q, weights[f"{name}.q_a_layernorm.weight"], 1e-6)
        q = linear(weights, f"{name}.q_b_proj", q)
    q = q.reshape(len(x), heads, nope + rope)

    compressed = linear(weights, f"{name}.kv_a_proj_with_mqa", x)
    rank = config["kv_lora_rank"]
    latent = rms_norm(compressed[:, :rank], weights[f"{name}.kv_a_layernorm.weight"], 1e-6)
    rope_key = rotate(compressed[:, rank:], np.arange(len(x)), config)
    kv = linear(weights, f"{name}.kv_b_proj", latent).reshape(len(x), heads, -1)

    outs = []
    for h in range(heads):
        q_rope = rotate(q[:, h, nope:], np.arange(len(x)), config)
        scores = (q[:, h, :nope] @ kv[:, h, :nope].T + q_rope @ rope_key.T) * softmax_scale(config)
        scores[np.triu_indices(len(x), 1)] = -np.inf
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        outs.append(probs / probs.sum(-1, keepdims=True) @ kv[:, h, nope:])
    return linear(weights, f"{name}.o_proj", np.concatenate(outs, -1)), latent, rope_key


def temperature(factor, mscale):
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(config):
    scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    scaling = config.get("rope_scaling")
    if scaling and scaling.get("mscale_all_dim"):
        scale *= temperature(scaling["factor"], scaling["mscale_all_dim"]) ** 2
    return scale


def inv_freq(config):
    """Radians per position of each pair, one pair at a time (YaRN, arXiv:2309.00071, sec. 3.2)."""
    dim, base, scaling = config["qk_rope_head_dim"], config["rope_theta"], config["rope_scaling"]
    freqs = [base ** (-2 * pair / dim) for pair in range(dim // 2)]
    if not scaling:
        return np.array(freqs)

    def pair_that_turns(times):
        context = scaling["original_max_position_embeddings"]
        return dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair_that_turns(scaling.get("beta_slow", 1))), dim - 1)
    for pair, freq in enumerate(freqs):
        stretched = min(max((pair - low) / (high - low), 0), 1)
        freqs[pair] = freq * (1 - stretched) + freq / scaling["factor"] * stretched
    return np.array(freqs)


def rotate(x, positions, config):
    """Turns the pairs of `x [T, d_rope]`; the order of the result is the model's own."""
    factor, scaling = 1.0, config["rope_scaling"]
    if scaling:
        stretch, mscale = scaling["factor"], scaling.get("mscale")
        all_dim = scaling.get("mscale_all_dim")
        factor = temperature(stretch, 1.0)
        if mscale and all_dim:
            factor = temperature(stretch, mscale) / temperature(stretch, all_dim)
    half = x.shape[-1] // 2
    apart = config.get("rope_interleave", True) is False
    first, second = (x[:, :half], x[:, half:]) if apart else (x[:, 0::2], x[:, 1::2])
    turn = factor * np.exp(1j * np.multiply.outer(positions, inv_freq(config)))
    turned = (first + 1j * second) * turn
    if config["model_type"] == "deepseek_v2":
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)
    return np.concatenate([turned.real, turned.imag], -1)


def route(logits, bias, config):
    """Experts of one token, by number, and their weights."""
    k, num_experts = config["num_experts_per_tok"], len(logits)
    if config["model_type"] == "deepseek_v2":
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        choice, grouped = scores.copy(), config["topk_method"] == "group_limited_greedy"
        rank_group, excluded = max, 0.0
    else:
        scores = 1 / (1 + np.exp(-logits))
        choice, grouped = scores + bias, True
        rank_group, excluded = lambda group: sum(sorted(group)[-2:]), -np.inf
    if grouped:
        size = num_experts // config["n_group"]
        ranks = [rank_group(choice[g * size : (g + 1) * size]) for g in range(config["n_group"])]
        for group in np.argsort(ranks)[: config["n_group"] - config["topk_group"]]:
            choice[group * size : (group + 1) * size] = excluded
    experts = np.sort(np.argsort(-choice, kind="stable")[:k])
    values = scores[experts]
    if config["model_type"] != "deepseek_v2" and config["norm_topk_prob"]:
        values = values / values.sum()
    return experts, values * config["routed_scaling_factor"]


def mixture(weights, name, config, x, experts, values):
    out = sum(
        value * mlp(weights, f"{name}.experts.{expert}", x)
        for expert, value in zip(experts, values, strict=True)
    )
    return out + mlp(weights, f"{name}.shared_experts", x) if config["n_shared_experts"] else out
