"""Loading: shards, fp8 blocks, layers to skip, dtypes, and errors that name every culprit."""

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from mla_jax import models
from tests.models.checkpoints import (
    V2,
    V3,
    golden,
    random_tensors,
    tiny_config,
    to_block_fp8,
    write,
)

SMALL = tiny_config(V3, q_lora_rank=16, n_routed_experts=2, n_group=1, topk_group=1)


def params_of(model):
    return {path: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}


def assert_same_params(model, other):
    jax.tree.map(np.testing.assert_array_equal, params_of(model), params_of(other))


@pytest.fixture
def tensors():
    return random_tensors(SMALL)


def test_shards_give_what_one_file_gives(tmp_path, tensors):
    one = models.load(write(tmp_path / "one", SMALL, tensors))
    assert_same_params(one, models.load(write(tmp_path / "three", SMALL, tensors, shards=3)))


@pytest.mark.parametrize("name", ["v2lite-tiny", "v3-tiny"])
def test_block_fp8(tmp_path, name):
    """576 rows are four and a half blocks of 128, and 96 columns not even one."""
    config, tensors = golden(name)
    stored, meant = to_block_fp8(tensors)
    kv_a = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert stored[f"{kv_a}_scale_inv"].shape == (5, 1)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    quantised = write(
        tmp_path / "fp8", config | {"quantization_config": quantization}, stored, shards=2
    )
    expected = models.load(write(tmp_path / "f32", config, meant))
    assert_same_params(models.load(quantised), expected)


def test_layers_past_the_last_are_skipped(tmp_path, tensors):
    extra = random_tensors(SMALL | {"num_hidden_layers": 3}, seed=1)
    mtp = {name: value for name, value in extra.items() if name.startswith("model.layers.2.")}
    mtp["model.layers.2.eh_proj.weight"] = np.zeros((2, 2), np.float32)
    mtp["model.layers.2.eh_proj.codes"] = np.zeros(2, np.int32)
    mtp["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    plain = models.load(write(tmp_path / "plain", SMALL, tensors))
    assert_same_params(plain, models.load(write(tmp_path / "mtp", SMALL, tensors | mtp)))


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_dtypes(tmp_path, tensors, stored, dtype):
    tensors = {name: value.astype(stored) for name, value in tensors.items()}
    path = write(tmp_path / "model", SMALL | {"torch_dtype": "bfloat16"}, tensors)
    model = models.load(path, dtype=dtype)
    embedding = model.embed.embedding[...]
    assert embedding.dtype == (dtype or "bfloat16")
    expected = tensors["model.embed_tokens.weight"].astype(embedding.dtype)
    np.testing.assert_array_equal(embedding, expected)
    params = params_of(model)
    router = [params["layers", 1, "mlp", "router", leaf].dtype for leaf in ("kernel", "bias")]
    assert router == [embedding.dtype, jnp.float32]


def test_tied_embeddings(tmp_path, tensors):
    tied = SMALL | {"tie_word_embeddings": True}
    with_head = models.load(write(tmp_path / "with", tied, tensors))
    del tensors["lm_head.weight"]
    assert_same_params(with_head, models.load(write(tmp_path / "without", tied, tensors)))
    with pytest.raises(ValueError, match=r"\n  missing: lm_head\.weight$"):
        models.load(write(tmp_path / "untied", SMALL, tensors))


def test_parameters_are_not_views_of_the_file(tmp_path, tensors):
    path = write(tmp_path / "model", SMALL, tensors)
    model = models.load(path)
    before = jax.tree.map(np.array, params_of(model))
    write(path, SMALL, random_tensors(SMALL, seed=1))
    jax.tree.map(np.testing.assert_array_equal, params_of(model), before)


def test_progress_ends_at_the_total(tmp_path, tensors):
    calls = []
    models.load(write(tmp_path / "m", SMALL, tensors), progress=lambda *call: calls.append(call))
    done, total = zip(*calls, strict=True)
    assert list(done) == sorted(done) and set(total) == {done[-1]}


def test_every_culprit_is_named(tmp_path, tensors):
    attn = "model.layers.1.self_attn"
    del tensors["model.norm.weight"], tensors[f"{attn}.q_a_proj.weight"]
    tensors[f"{attn}.o_proj.weight"] = np.zeros((48, 8), np.float32)
    tensors[f"{attn}.indexer.weight"] = np.zeros(3, np.float32)
    tensors[f"{attn}.kv_a_layernorm.weight"] = np.zeros(64, np.int32)
    tensors[f"{attn}.kv_b_proj.weight"] = np.zeros((120, 64), ml_dtypes.float8_e4m3fn)
    path = write(tmp_path / "model", SMALL, tensors)
    message = "\n".join(
        [
            f"{path}: the weights do not fit config.json",
            f"  missing: model.layers.1.self_attn.kv_b_proj.weight_scale_inv; {attn}.q_a_proj"
            ".weight; model.norm.weight",
            f"  unknown: {attn}.indexer.weight",
            f"  wrong shape: {attn}.o_proj.weight is [48, 8], must be [48, 72]",
            f"  wrong dtype: {attn}.kv_a_layernorm.weight is I32, must be F32 or F16 or BF16",
        ]
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        models.load(path)


def test_wrong_scale_shape(tmp_path):
    config, tensors = golden("v3-tiny")
    stored, _ = to_block_fp8(tensors)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    stored[name] = stored[name][:4].copy()
    with pytest.raises(ValueError, match=r"wrong shape: .* is \[4, 1\], must be \[5, 1\]$"):
        models.load(write(tmp_path / "model", config, stored))


def test_missing_files(tmp_path, tensors):
    with pytest.raises(
        FileNotFoundError, match=r"^`checkpoint_dir` is '.*gone': no such directory"
    ):
        models.load(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"^no config\.json at "):
        models.load(tmp_path)
    path = write(tmp_path / "model", SMALL, tensors, shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r": no model-00002-of-00003\.safetensors$"):
        models.load(path)
    (path / "model.safetensors.index.json").unlink()
    message = r": no model\.safetensors and no model\.safetensors\.index\.json$"
    with pytest.raises(FileNotFoundError, match=message):
        models.load(path)


def test_damaged_files(tmp_path, tensors):
    path = write(tmp_path / "model", SMALL, tensors)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"\.weight reaches past the end of the file; download"):
        models.load(path)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    for content in (pointer, b"", (5).to_bytes(8, "little") + b"\xff" * 50):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"not a safetensors file; if it is a Git LFS poin"):
            models.load(path)
    file.write_bytes(whole)
    (path / "config.json").write_text(json.dumps(SMALL | {"model_type": "deepseek_v32"}))
    with pytest.raises(NotImplementedError, match="its sparse-attention indexer"):
        models.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_offsets": [0, 4]}, r"model\.norm\.weight has 4 bytes for F32 \[48\]; download"),
        ({"data_offsets": "all"}, "the header is damaged; download the file again"),
        ({"shape": None}, "the header is damaged; download the file again"),
    ],
)
def test_damaged_header(tmp_path, tensors, change, message):
    path = write(tmp_path / "model", SMALL, tensors)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:start])
    header["model.norm.weight"] |= change
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + whole[start:])
    with pytest.raises(ValueError, match=message):
        models.load(path)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": 5}}']
)
def test_damaged_index(tmp_path, tensors, content):
    path = write(tmp_path / "model", SMALL, tensors)
    (path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json: must be a JSON object with a `weight_map`"):
        models.load(path)


def test_v2_without_query_lora_names_what_it_lacks(tmp_path):
    config = tiny_config(V2, q_lora_rank=16, n_routed_experts=2)
    path = write(tmp_path / "model", config, random_tensors(config))
    del config["q_lora_rank"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"missing: model\.layers\.0\.self_attn\.q_proj\.weight;"):
        models.load(path)


def test_a_tensor_that_the_index_leaves_out(tmp_path, tensors):
    """What counts is what the files hold."""
    path = write(tmp_path / "model", SMALL, tensors, shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    models.load(path)
    save_file({}, path / "model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match="missing: "):
        models.load(path)
