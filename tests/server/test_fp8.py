"""FP8 checkpoints are dequantised while they are loaded, and exported as bfloat16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.files.base_model import open_base_model
from skyrl_tx_server.files.fp8 import SCALE_SUFFIX, Fp8File, block_size, dequantize
from skyrl_tx_server.files.merge import write_merged
from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.model.weights import load_params
from tests.server.tiny_qwen3 import FIXTURES

FAMILIES = FIXTURES.parent / "families"
BLOCK = (16, 24)
LARGEST = 448.0  # the largest value of float8_e4m3fn
QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(BLOCK),
}
UNQUANTISED = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight")


def over_blocks(scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return the scale of each element of a matrix."""
    return np.kron(scales, np.ones(BLOCK, np.float32))[: shape[0], : shape[1]]


def quantise(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the FP8 values and the scales of a matrix."""
    counts = [-(-size // length) for size, length in zip(matrix.shape, BLOCK, strict=True)]
    padded = np.zeros([count * length for count, length in zip(counts, BLOCK, strict=True)], np.float32)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    blocks = padded.reshape(counts[0], BLOCK[0], counts[1], BLOCK[1])
    scales = np.abs(blocks).max((1, 3)) / np.float32(LARGEST)
    values = (matrix / over_blocks(scales, matrix.shape)).astype(ml_dtypes.float8_e4m3fn)
    return values, scales


def write_fp8_model(family: str, directory: Path, *, without: str = "") -> dict[str, np.ndarray]:
    """Write a model with FP8 weights in two files, without the tensor `without`. Some scales are not in the
    file of their weight. Return the dequantised tensors."""
    directory.mkdir()
    config = json.loads((FAMILIES / family / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    expected: dict[str, np.ndarray] = {}
    files: tuple[dict[str, np.ndarray], dict[str, np.ndarray]] = ({}, {})
    for number, (name, tensor) in enumerate(load_file(FAMILIES / family / "model.safetensors").items()):
        if tensor.ndim != 2 or any(part in name for part in UNQUANTISED):
            files[number % 2][name] = expected[name] = tensor
            continue
        values, scales = quantise(tensor.astype(np.float32))
        files[number % 2][name], files[number // 2 % 2][name + SCALE_SUFFIX] = values, scales
        expected[name] = values.astype(np.float32) * over_blocks(scales, tensor.shape)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files):
        tensors.pop(without, None)
        file_name = f"model-{number + 1}.safetensors"
        save_file(tensors, directory / file_name)
        weight_map |= dict.fromkeys(tensors, file_name)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return expected


def write_model(family: str, directory: Path, tensors: dict[str, np.ndarray]) -> None:
    directory.mkdir()
    shutil.copyfile(FAMILIES / family / "config.json", directory / "config.json")
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.seed_behaviour(122)
def test_fp8_weights_load_as_their_dequantised_values(tmp_path: Path, family: str, dtype: str) -> None:
    write_model(family, tmp_path / "plain", write_fp8_model(family, tmp_path / "fp8"))
    config = load_model_config(tmp_path / "fp8")
    assert config == load_model_config(tmp_path / "plain")
    quantised, plain = (load_params(tmp_path / name, config, dtype) for name in ("fp8", "plain"))
    for left, right in zip(jax.tree.leaves(quantised), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    original = load_params(FAMILIES / family, config, dtype)
    differences = [
        float(np.abs(np.asarray(left, np.float32) - np.asarray(right, np.float32)).max())
        for left, right in zip(jax.tree.leaves(quantised), jax.tree.leaves(original), strict=True)
    ]
    assert 0 < max(differences) < 0.1  # the error of rounding to FP8


def test_a_part_of_a_matrix_gets_the_scales_of_its_blocks() -> None:
    random = np.random.default_rng(0)
    values, scales = quantise(random.normal(size=(50, 70)).astype(np.float32))
    whole = dequantize(values, scales, BLOCK)
    np.testing.assert_array_equal(whole, values.astype(np.float32) * over_blocks(scales, (50, 70)))
    for _ in range(50):
        (top, bottom), (left, right) = (sorted(random.integers(0, size + 1, 2)) for size in (50, 70))
        part = dequantize(values[top:bottom, left:right], scales, BLOCK, first=(top, left))
        np.testing.assert_array_equal(part, whole[top:bottom, left:right])


def test_all_256_values_are_read_from_a_file(tmp_path: Path) -> None:
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(16, 16)
    save_file({"before": np.zeros(3, np.float32), "w": values}, tmp_path / "model.safetensors")
    stored = Fp8File(tmp_path / "model.safetensors").read("w")
    np.testing.assert_array_equal(stored.view(np.uint8), values.view(np.uint8))
    scales = np.full((1, 1), 0.5, np.float32)
    np.testing.assert_array_equal(
        dequantize(stored, scales, (16, 16)), values.astype(np.float32) / np.float32(2)
    )


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_merged_fp8_model_has_no_quantisation(tmp_path: Path, dtype: str | None) -> None:
    expected = write_fp8_model("qwen3_moe", tmp_path / "fp8")
    name = "model.layers.0.self_attn.q_proj.weight"
    delta = np.full(expected[name].shape, 0.25, np.float32)
    (tmp_path / "merged").mkdir()
    write_merged(open_base_model(tmp_path / "fp8"), {name: delta}, tmp_path / "merged", dtype)
    expected |= {
        key: value.astype(ml_dtypes.bfloat16).astype(np.float32)
        for key, value in expected.items()
        if value.ndim == 2 and not any(part in key for part in UNQUANTISED)
    }
    expected[name] = expected[name] + delta
    write_model("qwen3_moe", tmp_path / "plain", expected)
    config = load_model_config(tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    precision = "bfloat16" if dtype is None else dtype
    merged, plain = (
        load_params(tmp_path / directory, config, precision) for directory in ("merged", "plain")
    )
    for left, right in zip(jax.tree.leaves(merged), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def test_fp8_weights_without_their_scales_are_refused(tmp_path: Path) -> None:
    missing = "model.layers.0.self_attn.o_proj.weight" + SCALE_SUFFIX
    write_fp8_model("llama", tmp_path / "fp8", without=missing)
    with pytest.raises(ConfigError, match=f"the weights have no tensor {missing}"):
        load_params(tmp_path / "fp8", load_model_config(tmp_path / "fp8"), "bfloat16")


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "awq", "weight_block_size": [128, 128]},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": None},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]},
        "fp8",
    ],
)
def test_other_quantised_formats_are_refused(quantization: object) -> None:
    with pytest.raises(ConfigError, match=r"except FP8 \(e4m3\) with weight_block_size; convert them"):
        block_size({"quantization_config": quantization}, Path("config.json"))
