import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from safetensors.numpy import load_file, save_file

from skyrl_tx_server.engine.operations import LoraSpec
from skyrl_tx_server.errors import ConfigError, UserError
from skyrl_tx_server.model import mesh, weights
from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.weights import (
    adapter_from_arrays,
    adapter_to_arrays,
    check_weights,
    load_params,
    resolve_model,
    save_model,
)
from tests.server import tiny_qwen3
from tests.server.tiny_qwen3 import CONFIG, FIXTURES, MAX_RANK, SPEC


def assert_same(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@pytest.mark.parametrize("name", ["tied", "untied", "yarn"])
def test_saved_tensors_equal_those_of_hugging_face(tmp_path, name: str) -> None:
    config = load_model_config(FIXTURES / name)
    save_model(load_params(FIXTURES / name, config, "float32"), config, tmp_path)
    assert load_model_config(tmp_path) == config
    written = load_file(tmp_path / "model.safetensors")
    expected = {
        key: value
        for shard in (FIXTURES / name).glob("model*.safetensors")
        for key, value in load_file(shard).items()
    }
    assert written.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(written[key], value)


def test_shards_load_like_one_file(tmp_path) -> None:
    config = load_model_config(FIXTURES / "untied")
    sharded = load_params(FIXTURES / "untied", config, "float32")
    save_model(sharded, config, tmp_path)
    assert not (tmp_path / "model.safetensors.index.json").exists()
    assert_same(load_params(tmp_path, config, "float32"), sharded)


@pytest.mark.parametrize("has_mesh", [False, True])
def test_a_gpu_reads_large_weights_in_blocks(has_mesh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_model_config(FIXTURES / "untied")
    if has_mesh:
        axes = ("data", "fsdp", "tensor", "expert")
        config = replace(config, mesh=Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1), axes))
    whole = load_params(FIXTURES / "untied", config, "float32")
    block_bytes = max(leaf.nbytes // len(leaf) for leaf in jax.tree.leaves(whole.layers))
    read_bytes = []

    def recorded_place(
        config: ModelConfig,
        shape: tuple[int, ...],
        spec: PartitionSpec,
        read: Callable[[tuple[slice, ...]], np.ndarray],
    ) -> jax.Array:
        def recorded(index: tuple[slice, ...]) -> np.ndarray:
            part = read(index)
            read_bytes.append(part.nbytes)
            return part

        return mesh.place(config, shape, spec, recorded)

    monkeypatch.setattr(mesh, "on_gpu", lambda: True)
    monkeypatch.setattr(mesh, "MAX_HOST_BYTES", block_bytes)
    monkeypatch.setattr(weights, "place", recorded_place)
    assert_same(load_params(FIXTURES / "untied", config, "float32"), whole)
    assert max(read_bytes) <= block_bytes < max(leaf.nbytes for leaf in jax.tree.leaves(whole))


def test_bfloat16_weights_are_unchanged_after_save_and_load(tmp_path) -> None:
    config = load_model_config(FIXTURES / "tied")
    params = load_params(FIXTURES / "tied", config, "bfloat16")
    save_model(params, config, tmp_path)
    assert_same(load_params(tmp_path, config, "bfloat16"), params)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_head_of_a_tied_model_must_equal_its_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_tx_server.model.weights.ROWS_PER_COMPARISON", 7)
    shutil.copytree(FIXTURES / "tied", tmp_path / "model")
    tensors = load_file(FIXTURES / "tied" / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].copy()
    config = load_model_config(tmp_path / "model")
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model" / "model.safetensors")
    assert_same(
        load_params(tmp_path / "model", config, "float32"), load_params(FIXTURES / "tied", config, "float32")
    )
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"tie_word_embeddings is true, but lm_head\.weight differs from"):
        load_params(tmp_path / "model", config, "float32")


def test_a_missing_or_misshapen_tensor_is_refused(tmp_path) -> None:
    config = load_model_config(FIXTURES / "tied")
    tensors = load_file(FIXTURES / "tied" / "model.safetensors")
    incomplete = {key: value for key, value in tensors.items() if key != "model.layers.1.mlp.up_proj.weight"}
    save_file(incomplete, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_params(tmp_path, config, "float32")
    save_file(tensors | {"model.norm.weight": np.ones(7, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"model\.norm\.weight has shape \(7,\), but config\.json implies \(40,\)"
    ):
        load_params(tmp_path, config, "float32")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not a model", "Error while deserializing header"),
        (b"version https://git-lfs.github.com/spec/v1\n", "the file is a pointer of Git LFS"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content: bytes, reason: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=f"cannot read the weights: model.safetensors: {reason}"):
        load_params(tmp_path, load_model_config(FIXTURES / "tied"), "float32")


@pytest.mark.parametrize("num_prediction_layers", [0, 1])
def test_weights_with_further_layers_are_refused(tmp_path, num_prediction_layers: int) -> None:
    config = load_model_config(FIXTURES / "tied")
    save_model(load_params(FIXTURES / "tied", config, "float32"), config, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    layers = {
        "num_hidden_layers": config.num_layers - 1,
        "num_nextn_predict_layers": num_prediction_layers,
        "layer_types": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(content | layers))
    smaller = replace(config, num_layers=config.num_layers - 1)
    if num_prediction_layers:
        load_params(tmp_path, smaller, "float32")
        return
    with pytest.raises(ConfigError, match=f"but the weights have {config.num_layers} layers; use the config"):
        load_params(tmp_path, smaller, "float32")


def test_a_tensor_that_the_family_does_not_use_is_refused(tmp_path: Path) -> None:
    config = load_model_config(FIXTURES / "tied")
    tensors = load_file(FIXTURES / "tied" / "model.safetensors")
    save_file(
        tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)},
        tmp_path / "model.safetensors",
    )
    check_weights(tmp_path, config)
    name = "model.layers.0.self_attn.q_proj.bias"
    save_file(tensors | {name: np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"model_type='qwen3' have no tensor {name}; use the config.json"):
        check_weights(tmp_path, config)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, dtype: type, value: float) -> None:
    tensors = {
        key: tensor.astype(dtype) for key, tensor in load_file(FIXTURES / "tied/model.safetensors").items()
    }
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name][-1, -1] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name} contains NaN or infinity; download"):
        load_params(tmp_path, load_model_config(FIXTURES / "tied"), "float32")


@pytest.mark.parametrize(("dtype", "name"), [(np.int8, "I8"), (ml_dtypes.float8_e4m3fn, "F8_E4M3")])
def test_eight_bit_weights_of_an_unquantized_config_are_refused(tmp_path, dtype, name: str) -> None:
    config = load_model_config(FIXTURES / "tied")
    tensors = {
        key: value.astype(dtype) for key, value in load_file(FIXTURES / "tied" / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=rf"has dtype {name}, supported are F64, F32, F16, BF16; convert quantized"
    ):
        load_params(tmp_path, config, "float32")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        load_params(tmp_path, config, "float32")


def test_an_empty_weight_map_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ConfigError, match="has no valid weight_map"):
        load_params(tmp_path, load_model_config(FIXTURES / "tied"), "float32")


def test_a_model_path_must_be_an_existing_directory(tmp_path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="no such directory"):
        resolve_model(str(tmp_path / "absent"))


def test_the_error_for_a_failed_hub_download_is_one_line(monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise OSError("offline\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ConfigError, match=r"not a local directory, and the hub download failed: offline$"):
        resolve_model("Qwen/Qwen3-4B")


@pytest.mark.parametrize(
    "spec", [SPEC, LoraSpec(rank=2, train_mlp=False), LoraSpec(rank=4, train_attn=False, train_unembed=False)]
)
def test_adapters_are_unchanged_by_conversion_to_pefts_names(spec: LoraSpec) -> None:
    adapter = tiny_qwen3.adapter(spec)
    arrays = adapter_to_arrays(adapter, CONFIG, spec)
    assert ("base_model.model.model.layers.1.mlp.gate_proj.lora_A.weight" in arrays) == spec.train_mlp
    assert ("base_model.model.lm_head.lora_B.weight" in arrays) == spec.train_unembed
    assert all(min(array.shape) == spec.rank for array in arrays.values())
    assert_same(adapter_from_arrays(arrays, CONFIG, spec, MAX_RANK), adapter)


def test_a_server_with_a_larger_maximum_rank_loads_an_adapter() -> None:
    arrays = adapter_to_arrays(tiny_qwen3.adapter(), CONFIG, SPEC)
    wider = adapter_from_arrays(arrays, CONFIG, SPEC, 9)
    assert wider.head.a.shape == (CONFIG.hidden_size, 9)
    for name, array in adapter_to_arrays(wider, CONFIG, SPEC).items():
        np.testing.assert_array_equal(array, arrays[name])


def test_an_adapter_that_does_not_fit_the_model_is_refused() -> None:
    arrays = adapter_to_arrays(tiny_qwen3.adapter(), CONFIG, SPEC)
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"
    with pytest.raises(UserError, match=f"no tensor {name}"):
        adapter_from_arrays(
            {key: value for key, value in arrays.items() if key != name}, CONFIG, SPEC, MAX_RANK
        )
    with pytest.raises(UserError, match=r"has shape \(5, 3\), expected \(16, 3\)"):
        adapter_from_arrays(arrays | {name: np.zeros((5, 3), np.float32)}, CONFIG, SPEC, MAX_RANK)
    with pytest.raises(UserError, match="max_lora_rank=2"):
        adapter_from_arrays(arrays, CONFIG, SPEC, 2)
