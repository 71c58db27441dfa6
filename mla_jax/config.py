"""The configuration of a DeepSeek model, read from a Hugging Face `config.json`.

This module is the only one that knows the names a checkpoint uses for its sizes (`kv_lora_rank`,
`qk_rope_head_dim`, ...); everything else uses the names of `MLAConfig`. It reads what transformers
5 writes (`rope_parameters`, `dtype`) and what the checkpoints on the hub hold (`rope_theta`,
`rope_scaling`, `torch_dtype`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

# model_type -> the architecture generation it belongs to.
_ARCHITECTURES = {"deepseek_v2": 2, "deepseek_v3": 3, "kimi_k2": 3}
# What the published configuration classes take for routing keys that a file leaves out.
_ROUTING_DEFAULTS = {
    2: {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
    3: {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
}
_DTYPES = ("float32", "bfloat16", "float16")
_REQUIRED: Any = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN context extension (arXiv:2309.00071).

    `factor` stretches a context of `original_max_positions` tokens. Dimensions that turn more than
    `beta_fast` times over that context keep their frequency, those that turn less than `beta_slow`
    times are interpolated, with a linear ramp between the two. `mscale` and `mscale_all_dim` are
    DeepSeek's attention temperatures; 0 means not given.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def temperature(self, mscale: float) -> float:
        """`0.1 * mscale * ln(factor) + 1` (YaRN sec. 3.4); 1 where `factor` is at most 1."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def inv_freq(self, d_rope: int, theta: float) -> np.ndarray:
        """Radians per position of the `d_rope / 2` pairs, float64: NTK-by-parts (sec. 3.2)."""
        extrapolated = _inv_freq(d_rope, theta)
        turns = np.array([self.beta_fast, self.beta_slow], np.float64)
        bounds = np.log(self.original_max_positions / (turns * 2 * np.pi))
        low, high = d_rope * bounds / (2 * math.log(theta))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d_rope - 1)
        width = high - low or 0.001
        ramp = np.clip((np.arange(d_rope // 2) - low) / width, 0, 1)
        return extrapolated / self.factor * ramp + extrapolated * (1 - ramp)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes and routing rule of the mixture-of-experts layers.

    `scoring="softmax"` is DeepSeek-V2 (arXiv:2405.04434 sec. 2.2), `"sigmoid"` with a selection
    bias is DeepSeek-V3 (arXiv:2412.19437 sec. 2.1.2). With `num_groups > 1` the experts of a token
    come from its best `num_groups_kept` groups. A layer is a mixture of experts from `first_layer`
    on, where `layer_freq` divides its number.
    """

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    d_expert: int
    scoring: Literal["softmax", "sigmoid"]
    num_groups: int = 1
    num_groups_kept: int = 1
    normalize: bool = False
    routed_scale: float = 1.0
    first_layer: int = 0
    layer_freq: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """A DeepSeek-V2 or -V3 model: attention sizes, RoPE, feed-forward layers.

    Attributes:
      d_model: width of the residual stream.
      num_heads: query heads.
      d_q_latent: rank of the query LoRA, None where queries are projected directly.
      d_latent: width of the cached latent (`kv_lora_rank`).
      d_nope, d_rope: the parts of a query or key head without and with position. All heads share
        one rope key, which the cache holds next to the latent.
      d_v: width of a value head.
      d_ff: hidden width of the dense feed-forward layers.
      rope_pairs: which channels turn together: (0, 1), (2, 3), ... ("interleaved") or j and
        j + d_rope / 2 ("halves").
      rope_order: the order of the rotated channels. V2 leaves pairs interleaved; V3 writes all
        first members, then all second ones. Scores do not depend on it, the cached rope keys do.
      yarn: context extension, or None.
      moe: the mixture-of-experts layers, or None for a dense model.
      weight_block: rows and columns that share one `weight_scale_inv` in an fp8 checkpoint.
    """

    model_type: str
    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    d_latent: int
    d_nope: int
    d_rope: int
    d_v: int
    d_ff: int
    d_q_latent: int | None = None
    norm_eps: float = 1e-6
    max_positions: int = 4096
    rope_theta: float = 10000.0
    rope_pairs: Literal["interleaved", "halves"] = "interleaved"
    rope_order: Literal["interleaved", "halves"] = "interleaved"
    yarn: YarnConfig | None = None
    moe: MoEConfig | None = None
    attention_bias: bool = False
    tie_embeddings: bool = False
    dtype: str = "float32"
    weight_block: tuple[int, int] = (128, 128)
    eos_id: int | None = None

    @classmethod
    def from_pretrained(cls, path: str | Path) -> MLAConfig:
        """Reads `path`: a `config.json`, or a directory that holds one.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: a key is missing or holds what it cannot; the message names key and file.
          NotImplementedError: another architecture, or a part that is not built, such as the
            indexer of DeepSeek-V3.2.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"no config.json at {str(path)!r}: pass the directory of a Hugging Face checkpoint"
            )
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file}: not a JSON file: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{file}: is of type {type(values).__name__}, must be a JSON object")
        return cls.from_dict(values, source=str(file))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "config.json") -> MLAConfig:
        """As `from_pretrained`, from the parsed file; `source` is what error messages call it.

        Raises:
          ValueError, NotImplementedError: as `from_pretrained`.
        """
        keys = _Keys(values, source)
        model_type = keys.get("model_type", str)
        if model_type == "deepseek_v32":
            keys.refuse(
                "model_type",
                "its sparse-attention indexer (`indexer` weights, `index_topk`) is not built",
            )
        if model_type not in _ARCHITECTURES:
            keys.refuse("model_type", f"must be one of {', '.join(_ARCHITECTURES)}")
        version = _ARCHITECTURES[model_type]
        if keys.get("hidden_act", str, "silu") != "silu":
            keys.refuse("hidden_act", "must be 'silu'")
        if keys.get("mlp_bias", bool, False):
            keys.refuse("mlp_bias", "feed-forward biases are not built")

        max_positions = keys.get("max_position_embeddings", int, 4096)
        theta, yarn = _rope(keys, max_positions)
        halves = version == 3 and not keys.get("rope_interleave", bool, True)
        dtype_key = "dtype" if values.get("dtype") is not None else "torch_dtype"
        dtype = keys.get(dtype_key, str, "float32").removeprefix("torch.")
        if dtype not in _DTYPES:
            keys.fail(dtype_key, f"must be one of {', '.join(_DTYPES)}")
        eos_ids = values.get("eos_token_id")
        if not isinstance(eos_ids, list):
            eos_ids = [eos_ids]
        if not all(isinstance(x, int) for x in eos_ids if x is not None):
            keys.fail("eos_token_id", "must be an int or a list of them")

        config = cls(
            model_type=model_type,
            vocab_size=keys.size("vocab_size"),
            d_model=keys.size("hidden_size"),
            num_layers=keys.size("num_hidden_layers"),
            num_heads=keys.size("num_attention_heads"),
            d_latent=keys.size("kv_lora_rank", 512),
            d_nope=keys.size("qk_nope_head_dim", 128),
            d_rope=keys.size("qk_rope_head_dim", 64),
            d_v=keys.size("v_head_dim", 128),
            d_ff=keys.size("intermediate_size"),
            d_q_latent=keys.size("q_lora_rank", None),
            norm_eps=keys.get("rms_norm_eps", float, 1e-6),
            max_positions=max_positions,
            rope_theta=theta,
            rope_pairs="halves" if halves else "interleaved",
            rope_order="halves" if version == 3 else "interleaved",
            yarn=yarn,
            moe=_moe(keys, version),
            attention_bias=keys.get("attention_bias", bool, False),
            tie_embeddings=keys.get("tie_word_embeddings", bool, False),
            dtype=dtype,
            weight_block=_weight_block(keys),
            eos_id=next(iter(eos_ids), None),
        )
        if config.d_rope % 2:
            keys.fail("qk_rope_head_dim", "must be even: RoPE turns pairs of channels")
        if not 0 < config.norm_eps < math.inf:
            keys.fail("rms_norm_eps", "must be above 0 and finite")
        return config

    @property
    def softmax_scale(self) -> float:
        """Factor on the scores: `(d_nope + d_rope) ** -0.5 * temperature(mscale_all_dim) ** 2`.

        Never `(d_latent + d_rope) ** -0.5`: absorbing W_UK does not change the score.
        """
        scale = (self.d_nope + self.d_rope) ** -0.5
        if self.yarn is not None and self.yarn.mscale_all_dim:
            scale *= self.yarn.temperature(self.yarn.mscale_all_dim) ** 2
        return scale

    @property
    def rope_attention_scaling(self) -> float:
        """Factor on cos and sin, so on the rope part of both q and k.

        1 without YaRN, and where its `mscale` equals its `mscale_all_dim`.
        """
        yarn = self.yarn
        if yarn is None:
            return 1.0
        if yarn.attention_factor is not None:
            return yarn.attention_factor
        if yarn.mscale and yarn.mscale_all_dim:
            return yarn.temperature(yarn.mscale) / yarn.temperature(yarn.mscale_all_dim)
        return yarn.temperature(1.0)

    @property
    def inv_freq(self) -> np.ndarray:
        """Radians per position of each rotated pair, float32 `[d_rope / 2]`, YaRN applied."""
        theta = self.rope_theta
        freq = (
            _inv_freq(self.d_rope, theta)
            if self.yarn is None
            else self.yarn.inv_freq(self.d_rope, theta)
        )
        return freq.astype(np.float32)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the feed-forward part of `layer` (from 0) is a mixture of experts."""
        moe = self.moe
        return moe is not None and layer >= moe.first_layer and layer % moe.layer_freq == 0


def _inv_freq(d_rope: int, theta: float) -> np.ndarray:
    return theta ** -(np.arange(0, d_rope, 2, dtype=np.float64) / d_rope)


class _Keys:
    """Typed access to the keys of a parsed config, with errors that name the key and the file."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = ""):
        self.values, self.source, self.prefix = values, source, prefix

    def _describe(self, key: str) -> str:
        return f"{self.source}: `{self.prefix}{key}` is {self.values.get(key)!r}"

    def fail(self, key: str, must: str) -> NoReturn:
        raise ValueError(f"{self._describe(key)}: {must}")

    def refuse(self, key: str, why: str) -> NoReturn:
        raise NotImplementedError(f"{self._describe(key)}: {why}")

    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise ValueError(f"{self.source}: `{self.prefix}{key}` is missing")
            return default
        is_bool = isinstance(value, bool)
        if kind is float and isinstance(value, int) and not is_bool:
            value = float(value)
        if not isinstance(value, kind) or is_bool != (kind is bool):
            self.fail(key, f"must be of type {kind.__name__}")
        return value

    def size(self, key: str, default: Any = _REQUIRED, *, least: int = 1) -> Any:
        """An int of at least `least`; null counts as missing."""
        value = self.get(key, int, default)
        if value is not None and value < least:
            self.fail(key, f"must be at least {least}")
        return value

    def section(self, key: str) -> _Keys:
        return _Keys(self.get(key, dict, {}), self.source, f"{self.prefix}{key}.")


def _rope(keys: _Keys, max_positions: int) -> tuple[float, YarnConfig | None]:
    """RoPE's base and YaRN's parameters, from either style."""
    theta = keys.get("rope_theta", float, 10000.0)
    rope = keys.section("rope_parameters" if keys.values.get("rope_parameters") else "rope_scaling")
    theta = rope.get("rope_theta", float, theta)
    if theta <= 1:
        (keys if rope.values.get("rope_theta") is None else rope).fail(
            "rope_theta", "must be above 1"
        )
    type_key = "rope_type" if "rope_type" in rope.values else "type"
    rope_type = rope.get(type_key, str, "default")
    if rope_type == "default":
        return theta, None
    if rope_type != "yarn":
        rope.refuse(type_key, "must be 'default' or 'yarn'")
    yarn = YarnConfig(
        factor=rope.get("factor", float),
        original_max_positions=rope.size("original_max_position_embeddings", max_positions),
        beta_fast=rope.get("beta_fast", float, 32.0),
        beta_slow=rope.get("beta_slow", float, 1.0),
        mscale=rope.get("mscale", float, 0.0),
        mscale_all_dim=rope.get("mscale_all_dim", float, 0.0),
        attention_factor=rope.get("attention_factor", float, None),
        truncate=rope.get("truncate", bool, True),
    )
    for key in ("factor", "beta_fast", "beta_slow"):
        if getattr(yarn, key) <= 0:
            rope.fail(key, "must be above 0")
    return theta, yarn


def _moe(keys: _Keys, version: int) -> MoEConfig | None:
    """The experts, or None for a model that has none."""
    num_experts = keys.size("n_routed_experts", None)
    if num_experts is None:
        return None
    scoring: Literal["softmax", "sigmoid"] = "softmax" if version == 2 else "sigmoid"
    if keys.get("scoring_func", str, scoring) != scoring:
        keys.refuse("scoring_func", f"must be {scoring!r} for this model_type")
    methods = ("greedy", "group_limited_greedy") if version == 2 else ("noaux_tc",)
    method = keys.get("topk_method", str, methods[0])
    if method not in methods:
        keys.refuse("topk_method", f"must be one of {', '.join(methods)} for this model_type")

    defaults = _ROUTING_DEFAULTS[version]
    grouped = method != "greedy"
    moe = MoEConfig(
        num_experts=num_experts,
        num_experts_per_token=keys.size("num_experts_per_tok"),
        num_shared_experts=keys.size("n_shared_experts", 0, least=0),
        d_expert=keys.size("moe_intermediate_size"),
        scoring=scoring,
        num_groups=keys.size("n_group", defaults["n_group"]) if grouped else 1,
        num_groups_kept=keys.size("topk_group", defaults["topk_group"]) if grouped else 1,
        # V2 never normalises the weights of the chosen experts, whatever `norm_topk_prob` says.
        normalize=version == 3 and keys.get("norm_topk_prob", bool, True),
        routed_scale=keys.get("routed_scaling_factor", float, defaults["routed_scaling_factor"]),
        first_layer=keys.size("first_k_dense_replace", defaults["first_k_dense_replace"], least=0),
        layer_freq=keys.size("moe_layer_freq", 1),
    )
    if moe.num_experts % moe.num_groups:
        keys.fail("n_group", f"must divide n_routed_experts = {moe.num_experts}")
    if moe.num_groups_kept > moe.num_groups:
        keys.fail("topk_group", f"must be at most n_group = {moe.num_groups}")
    if moe.num_experts_per_token > (
        kept := moe.num_experts // moe.num_groups * moe.num_groups_kept
    ):
        keys.fail(
            "num_experts_per_tok", f"must be at most the {kept} experts of the groups that are kept"
        )
    return moe


def _weight_block(keys: _Keys) -> tuple[int, int]:
    quantization = keys.section("quantization_config")
    if quantization.get("quant_method", str, "fp8") != "fp8":
        quantization.refuse("quant_method", "must be 'fp8'")
    block = quantization.get("weight_block_size", list, [128, 128])
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        quantization.fail("weight_block_size", "must be two positive sizes")
    return block[0], block[1]
