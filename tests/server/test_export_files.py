"""File modes and the model name of exports, and adapters that do not cover all projections of attention."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_tx_server.engine.operations import AdamSettings, LoraSpec
from skyrl_tx_server.export import main
from skyrl_tx_server.files.base_model import fingerprint, open_base_model
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.files.peft_files import read_adapter
from skyrl_tx_server.model.lora.adapter import init_adapter, trainable_mask
from skyrl_tx_server.model.weights import adapter_from_arrays, adapter_to_arrays
from skyrl_tx_server.training.train_step import adam_scalars, adam_step, init_adam
from tests.server import tiny_qwen3
from tests.server.test_export import SAVED, logits, save
from tests.server.test_train_step import gradient
from tests.server.tiny_qwen3 import CONFIG, FIXTURES, MAX_RANK

BASE = FIXTURES / "tied"
RANK, ALPHA = 4, 6.0


@pytest.mark.parametrize("umask", [0o022, 0o027], ids=oct)
@pytest.mark.parametrize("command", ["adapter", "merge"])
def test_exported_files_have_the_mode_of_the_umask(tmp_path: Path, command: str, umask: int) -> None:
    save(tmp_path, BASE, LoraSpec(rank=2))
    options = [f"checkpoint={SAVED}", f"checkpoints_dir={tmp_path}", f"output={tmp_path / 'out'}"]
    before = os.umask(umask)
    try:
        assert main([command, *options, *([f"base_model={BASE}"] if command == "merge" else [])]) == 0
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert len(modes) >= 2 and set(modes.values()) == {0o666 & ~umask}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask


@pytest.mark.parametrize(
    ("server_name", "options", "written"),
    [
        ("Qwen/Qwen3-4B", [], "Qwen/Qwen3-4B"),
        ("local/smollm2-135m", [], "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("local/tied", [], "local/tied"),
        ("local/tied", ["base_model_name=org/tied"], "org/tied"),
    ],
)
def test_an_exported_adapter_names_its_hub_model(
    tmp_path: Path, server_name: str, options: list[str], written: str
) -> None:
    save(tmp_path, BASE, LoraSpec(rank=2), name=server_name)
    files = [f"checkpoint={SAVED}", f"checkpoints_dir={tmp_path}", f"output={tmp_path / 'out'}"]
    assert main(["adapter", *files, *options]) == 0
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == written


def query_and_value_adapter(directory: Path) -> dict[str, np.ndarray]:
    """Write a PEFT adapter of q_proj and v_proj. Return the delta alpha / rank * B @ A of each of these
    weights, by its name in the base model."""
    directory.mkdir()
    random = np.random.default_rng(1)
    weights, tensors, deltas = load_file(BASE / "model.safetensors"), {}, {}
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            a = random.normal(0, 0.2, (RANK, weight.shape[1])).astype(np.float32)
            b = random.normal(0, 0.2, (weight.shape[0], RANK)).astype(np.float32)
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            deltas[name] = np.float32(ALPHA / RANK) * b @ a
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "v_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return deltas


def test_an_imported_adapter_of_q_and_v_adds_its_deltas(tmp_path: Path) -> None:
    deltas = query_and_value_adapter(tmp_path / "peft")
    path = "tinker://imported/weights/one"
    files = [f"adapter={tmp_path / 'peft'}", f"base_model={BASE}", f"checkpoints_dir={tmp_path}"]
    assert main(["import", *files, f"checkpoint={path}"]) == 0
    info, arrays = CheckpointStore(tmp_path, "local/tied", fingerprint(BASE)).read(path)
    assert info.lora == LoraSpec(rank=RANK, alpha=ALPHA, train_mlp=False, train_unembed=False)
    merged = shutil.copytree(BASE, tmp_path / "merged")
    weights = load_file(BASE / "model.safetensors")
    weights |= {name: weights[name].astype(np.float32) + delta for name, delta in deltas.items()}
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    adapted, expected = logits(BASE, arrays, info.lora), logits(merged, None, info.lora)
    assert np.abs(adapted - expected).max() < 1e-4 < np.abs(expected - logits(BASE, None, info.lora)).max()


def test_an_adapter_of_q_and_v_has_zeros_for_k_and_o(tmp_path: Path) -> None:
    query_and_value_adapter(tmp_path / "peft")
    _, arrays = read_adapter(tmp_path / "peft", open_base_model(BASE))
    missing = {name for name in arrays if ".k_proj." in name or ".o_proj." in name}
    assert len(missing) == len(arrays) / 2 and not any(np.any(arrays[name]) for name in missing)


def test_training_leaves_missing_projections_at_zero() -> None:
    """Both factors are zero, and the gradient of each factor is a multiple of the other factor."""
    spec = LoraSpec(rank=RANK, train_mlp=False, train_unembed=False)
    arrays = adapter_to_arrays(init_adapter(CONFIG, spec, MAX_RANK), CONFIG, spec)
    missing = {name for name in arrays if ".k_proj." in name or ".o_proj." in name}
    arrays |= {name: np.zeros_like(arrays[name]) for name in missing}
    adapter = jax.device_put(adapter_from_arrays(arrays, CONFIG, spec, MAX_RANK))
    state = jax.device_put(init_adam(CONFIG, MAX_RANK))
    settings = adam_scalars(AdamSettings(learning_rate=0.1, weight_decay=0.1))
    for _ in range(2):
        grad_sum, _, _ = gradient(tiny_qwen3.data((60,), weights=True), adapter=adapter)
        mask = trainable_mask(CONFIG, spec, MAX_RANK)
        adapter, state, _ = adam_step(adapter, grad_sum, state, mask, settings)
    trained = adapter_to_arrays(jax.device_get(adapter), CONFIG, spec)
    assert trained.keys() == arrays.keys()
    assert {name for name in trained if not np.any(trained[name])} == missing
    assert all(np.any(trained[name] != arrays[name]) for name in trained.keys() - missing)
