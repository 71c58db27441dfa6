"""Hugging Face checkpoints: config.json and safetensors files into a `DeepseekModel`.

This module is the only one that knows how a checkpoint names its tensors.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mla_jax.config import MLAConfig
from mla_jax.models.deepseek import DeepseekModel

_INDEX = "model.safetensors.index.json"
_FP8 = "F8_E4M3"
_DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    _FP8: ml_dtypes.float8_e4m3fn,
}


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor in a safetensors file; nothing is read before `array`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def array(self) -> np.ndarray:
        """A read-only view of the file."""
        return np.memmap(self.file, _DTYPES[self.dtype], "r", self.offset, self.shape)


@dataclasses.dataclass(frozen=True)
class _Source:
    """A checkpoint tensor, and the part of a parameter that it fills.

    `view` makes that part of the tensor; `start` is the corner where the part goes, None for one
    that is the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    view: Callable[[jax.Array], jax.Array] = lambda x: x
    start: tuple[int, ...] | None = None


_Sources = Iterator[tuple[tuple[Any, ...], list[_Source]]]


def load(
    checkpoint_dir: str | Path,
    *,
    dtype: DTypeLike | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DeepseekModel:
    """Loads a DeepSeek-V2 or -V3 checkpoint of the Hugging Face layout.

    Weights in bfloat16, float16, float32 or block-scaled fp8 (`weight_scale_inv`) are read one
    tensor at a time, then dequantised and laid out on the device. Layers past `num_hidden_layers`
    (multi-token prediction) are skipped.

    Args:
      checkpoint_dir: directory with `config.json`, and `model.safetensors` or the files that
        `model.safetensors.index.json` names.
      dtype: of parameters and activations; None follows the config. The router's selection bias
        stays float32.
      progress: called as `progress(bytes_done, bytes_total)` after each tensor.

    Raises:
      FileNotFoundError: no such directory, or a file is missing.
      TypeError: `dtype` is not a dtype of models.
      ValueError: the config is incomplete, a file is damaged, or tensors are missing, unknown or of
        the wrong shape; one message names them all.
      NotImplementedError: another architecture or quantisation.
    """
    checkpoint_dir = Path(checkpoint_dir)
    if not checkpoint_dir.is_dir():
        raise FileNotFoundError(f"`checkpoint_dir` is {str(checkpoint_dir)!r}: no such directory")
    config = MLAConfig.from_pretrained(checkpoint_dir)
    tensors = _read_headers(checkpoint_dir)
    sources = dict(_model_sources(config))
    all_sources = [source for group in sources.values() for source in group]
    _check(tensors, all_sources, config, checkpoint_dir)

    model = nnx.eval_shape(lambda: DeepseekModel(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, abstract_state = nnx.split(model)
    total = sum(tensors[source.name].num_bytes for source in all_sources)
    done, state = 0, []
    for path, variable in nnx.to_flat_state(abstract_state):
        value = None
        for source in sources[path]:
            part = source.view(_read(tensors, source.name, config.weight_block, variable.dtype))
            if source.start is None:
                value = part
            else:
                value = jnp.zeros(variable.shape, variable.dtype) if value is None else value
                value = _place(value, part, source.start)
            done += tensors[source.name].num_bytes
            if progress is not None:
                progress(done, total)
        state.append((path, variable.replace(value)))
    return nnx.merge(graphdef, nnx.from_flat_state(state))


def _model_sources(config: MLAConfig) -> _Sources:
    """Path of each parameter of the model, and the tensors that it is made of."""
    yield ("embed", "embedding"), [_plain("model.embed_tokens", config.vocab_size, config.d_model)]
    yield ("norm", "scale"), [_plain("model.norm", config.d_model)]
    if not config.tie_embeddings:
        yield ("lm_head", "kernel"), [_linear("lm_head", config.d_model, config.vocab_size)]
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        feed_forward = (
            _moe_sources(f"{layer}.mlp", config)
            if config.is_moe_layer(i)
            else _mlp_sources(f"{layer}.mlp", config.d_model, config.d_ff)
        )
        for norm, name in (
            ("input_norm", "input_layernorm"),
            ("post_attention_norm", "post_attention_layernorm"),
        ):
            yield ("layers", i, norm, "scale"), [_plain(f"{layer}.{name}", config.d_model)]
        for path, sources in _attention_sources(f"{layer}.self_attn", config):
            yield ("layers", i, "attention", *path), sources
        for path, sources in feed_forward:
            yield ("layers", i, "mlp", *path), sources


def _attention_sources(name: str, config: MLAConfig) -> _Sources:
    d_model, d_latent, heads = config.d_model, config.d_latent, config.num_heads
    d_q, d_out = heads * (config.d_nope + config.d_rope), heads * config.d_v
    linears = [
        ("kv_a_proj", "kv_a_proj_with_mqa", d_model, d_latent + config.d_rope, True),
        ("o_proj", "o_proj", d_out, d_model, True),
    ]
    norms = [("kv_a_norm", "kv_a_layernorm", d_latent)]
    if config.d_q_latent is None:
        linears.append(("q_proj", "q_proj", d_model, d_q, False))
    else:
        linears.append(("q_a_proj", "q_a_proj", d_model, config.d_q_latent, True))
        linears.append(("q_b_proj", "q_b_proj", config.d_q_latent, d_q, False))
        norms.append(("q_a_norm", "q_a_layernorm", config.d_q_latent))

    for ours, theirs, d_in, d_out, may_have_bias in linears:
        yield (ours, "kernel"), [_linear(f"{name}.{theirs}", d_in, d_out)]
        if may_have_bias and config.attention_bias:
            yield (ours, "bias"), [_Source(f"{name}.{theirs}.bias", (d_out,))]
    for ours, theirs, size in norms:
        yield (ours, "scale"), [_plain(f"{name}.{theirs}", size)]

    # Rows are per head [k_nope | v].
    per_head = (heads, config.d_nope + config.d_v, d_latent)
    kv_b = _plain(f"{name}.kv_b_proj", per_head[0] * per_head[1], d_latent)
    for ours, rows in (("w_uk", slice(config.d_nope)), ("w_uv", slice(config.d_nope, None))):
        view = lambda w, rows=rows: w.reshape(per_head)[:, rows]
        yield (ours,), [dataclasses.replace(kv_b, view=view)]


def _mlp_sources(name: str, d_model: int, d_ff: int) -> _Sources:
    for proj, d_in, d_out in (
        ("gate_proj", d_model, d_ff),
        ("up_proj", d_model, d_ff),
        ("down_proj", d_ff, d_model),
    ):
        yield (proj, "kernel"), [_linear(f"{name}.{proj}", d_in, d_out)]


def _moe_sources(name: str, config: MLAConfig) -> _Sources:
    assert config.moe is not None
    moe, d_model, d_expert = config.moe, config.d_model, config.moe.d_expert
    yield ("router", "kernel"), [_linear(f"{name}.gate", d_model, moe.num_experts)]
    if moe.scoring == "sigmoid":
        bias = _Source(f"{name}.gate.e_score_correction_bias", (moe.num_experts,))
        yield ("router", "bias"), [bias]
    if moe.num_shared_experts:
        d_shared = moe.num_shared_experts * d_expert
        for path, sources in _mlp_sources(f"{name}.shared_experts", d_model, d_shared):
            yield ("shared", *path), sources

    def expert(i: int, proj: str, d_in: int, d_out: int, column: int = 0) -> _Source:
        whole = _linear(f"{name}.experts.{i}.{proj}", d_in, d_out)
        return dataclasses.replace(whole, view=lambda w: w.T[None], start=(i, 0, column))

    experts = range(moe.num_experts)
    yield (
        ("gate_up",),
        [expert(i, "gate_proj", d_model, d_expert) for i in experts]
        + [expert(i, "up_proj", d_model, d_expert, d_expert) for i in experts],
    )
    yield ("down",), [expert(i, "down_proj", d_expert, d_model) for i in experts]


def _plain(name: str, *shape: int) -> _Source:
    """A weight that is stored as it is used."""
    return _Source(f"{name}.weight", shape)


def _linear(name: str, d_in: int, d_out: int) -> _Source:
    """A matrix, stored `[out, in]` and used `[in, out]`."""
    return _Source(f"{name}.weight", (d_out, d_in), jnp.transpose)


def _read(
    tensors: Mapping[str, _Tensor], name: str, block: tuple[int, int], dtype: DTypeLike
) -> jax.Array:
    """The tensor on the device in `dtype`, dequantised if it is fp8."""
    tensor = tensors[name]
    # A copy: jnp.asarray would leave the parameter a view of the file where the device is the CPU.
    weight = jnp.array(tensor.array())
    if tensor.dtype != _FP8:
        return weight.astype(dtype)
    return _dequantise(weight, jnp.array(tensors[_scale_of(name)].array()), block, dtype)


@functools.partial(jax.jit, static_argnames=("block", "dtype"))
def _dequantise(
    weight: Float[Array, "n k"],
    scale: Float[Array, "n_blocks k_blocks"],
    block: tuple[int, int],
    dtype: DTypeLike,
) -> Float[Array, "n k"]:
    """Multiplies each block of `weight` by its scale; the last row and column may be partial."""
    n, k = weight.shape
    scale = jnp.repeat(scale.astype(jnp.float32), block[0], axis=0)[:n]
    scale = jnp.repeat(scale, block[1], axis=1)[:, :k]
    return (weight.astype(jnp.float32) * scale).astype(dtype)


@functools.partial(jax.jit, donate_argnames="value")
def _place(value: jax.Array, part: jax.Array, start: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(value, part, start)


def _scale_of(name: str) -> str:
    return f"{name}_scale_inv"


def _check(
    tensors: Mapping[str, _Tensor], sources: list[_Source], config: MLAConfig, where: Path
) -> None:
    """Raises one error that names every tensor which keeps the checkpoint from being loaded."""
    shapes = {source.name: source.shape for source in sources}
    dtypes = dict.fromkeys(shapes, tuple(_DTYPES))
    for name, shape in list(shapes.items()):
        if len(shape) != 2:
            dtypes[name] = tuple(dtype for dtype in _DTYPES if dtype != _FP8)
        elif name in tensors and tensors[name].dtype == _FP8:
            blocks = zip(shape, config.weight_block, strict=True)
            shapes[_scale_of(name)] = tuple(-(-size // block) for size, block in blocks)
            dtypes[_scale_of(name)] = ("F32", "BF16")

    found = {name: tensors[name] for name in shapes if name in tensors}
    problems = {
        "missing": [name for name in shapes if name not in tensors],
        "unknown": [n for n in tensors if n not in shapes and not _is_skipped(n, config)],
        "wrong shape": [
            f"{name} is {list(tensor.shape)}, must be {list(shapes[name])}"
            for name, tensor in found.items()
            if tensor.shape != shapes[name]
        ],
        "wrong dtype": [
            f"{name} is {tensor.dtype}, must be {' or '.join(dtypes[name])}"
            for name, tensor in found.items()
            if tensor.dtype not in dtypes[name]
        ],
    }
    if any(problems.values()):
        lines = [f"  {kind}: {'; '.join(sorted(what))}" for kind, what in problems.items() if what]
        raise ValueError("\n".join([f"{where}: the weights do not fit config.json", *lines]))


def _is_skipped(name: str, config: MLAConfig) -> bool:
    """Whether a tensor may be in a checkpoint and is not needed."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return (
        (layer is not None and int(layer[1]) >= config.num_layers)
        or name.endswith("rotary_emb.inv_freq")
        or (config.tie_embeddings and name == "lm_head.weight")
    )


def _read_headers(checkpoint_dir: Path) -> dict[str, _Tensor]:
    """All tensors of the checkpoint, by name."""
    index = checkpoint_dir / _INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            missing = sorted(name for name in names if not (checkpoint_dir / name).is_file())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: must be a JSON object with a `weight_map`") from error
    else:
        names = {"model.safetensors"}
        missing = sorted(name for name in names if not (checkpoint_dir / name).is_file())
    if missing:
        hint = "" if index.is_file() else f" and no {_INDEX}"
        raise FileNotFoundError(f"{checkpoint_dir}: no {', '.join(missing)}{hint}")
    tensors: dict[str, _Tensor] = {}
    for name in sorted(names):
        tensors.update(_read_header(checkpoint_dir / name))
    return tensors


def _read_header(file: Path) -> dict[str, _Tensor]:
    """The tensors of one safetensors file: a length, a JSON header, then the data.

    Read here because the safetensors package has no numpy arrays of fp8.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        data_start = 8 + int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(data_start - 8) if data_start <= size else b"")
        except ValueError as error:
            raise ValueError(
                f"{file}: not a safetensors file; if it is a Git LFS pointer, pull it"
            ) from error
    tensors = {}
    try:
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = map(int, entry["data_offsets"])
            shape = tuple(map(int, entry["shape"]))
            tensors[name] = _Tensor(file, entry["dtype"], shape, data_start + start, end - start)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: the header is damaged; download the file again") from error
    for name, tensor in tensors.items():
        if tensor.offset + tensor.num_bytes > size:
            raise ValueError(f"{file}: {name} reaches past the end of the file; download it again")
        dtype = _DTYPES.get(tensor.dtype)  # `_check` names the others
        if dtype and tensor.num_bytes != math.prod(tensor.shape) * np.dtype(dtype).itemsize:
            raise ValueError(
                f"{file}: {name} has {tensor.num_bytes} bytes for {tensor.dtype} "
                f"{list(tensor.shape)}; download it again"
            )
    return tensors
