"""The trained weights do not change when an adapter is exported (for PEFT or Hugging Face) or imported.
Errors are printed as one line.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import transformers
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from scripts.packed_attention import within_segments
from skyrl_tx_server import export
from skyrl_tx_server.engine.operations import LoraSpec
from skyrl_tx_server.errors import ConfigError, ServerError, UserError
from skyrl_tx_server.export import main
from skyrl_tx_server.files import disk
from skyrl_tx_server.files.base_model import fingerprint, open_base_model
from skyrl_tx_server.files.checkpoints import CheckpointStore
from skyrl_tx_server.files.peft_files import read_adapter
from skyrl_tx_server.model.config_json import load_model_config
from skyrl_tx_server.model.lora.adapter import init_adapter
from skyrl_tx_server.model.model_config import yarn_context
from skyrl_tx_server.model.transformer import head_logits, hidden_states
from skyrl_tx_server.model.weights import adapter_from_arrays, adapter_to_arrays, load_params
from skyrl_tx_server.training.train_step import adam_from_arrays
from tests.server.tiny_qwen3 import FIXTURES

MAX_RANK = 4
SAVED = "tinker://run/weights/last"


def random_adapter_arrays(base: Path, spec: LoraSpec) -> dict[str, np.ndarray]:
    """Return the arrays of an adapter as in a checkpoint, with random values."""
    config = load_model_config(base)
    random = np.random.default_rng(4)
    arrays = adapter_to_arrays(init_adapter(config, spec, MAX_RANK), config, spec)
    return {name: random.normal(0, 0.05, array.shape).astype(np.float32) for name, array in arrays.items()}


def save(root: Path, base: Path, spec: LoraSpec, name: str = "fixture/base") -> dict[str, np.ndarray]:
    """Save a random adapter as the checkpoint SAVED of the base model `name`. Return the adapter."""
    arrays = random_adapter_arrays(base, spec)
    store = CheckpointStore(root, name, fingerprint(base))
    store.write(
        "tinker://run/weights/last",
        arrays | {"optimizer.step": np.array(3, np.int32)},
        lora=spec,
        step=3,
        user_metadata={},
    )
    return arrays


def logits(model_dir: Path, arrays: dict[str, np.ndarray] | None, spec: LoraSpec) -> np.ndarray:
    config = load_model_config(model_dir)
    params = load_params(model_dir, config, "float32")
    adapter = None if arrays is None else adapter_from_arrays(arrays, config, spec, MAX_RANK)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24)).astype(np.int32)
    positions = np.tile(np.arange(24, dtype=np.int32), (2, 1))
    hidden = hidden_states(config, params, adapter, tokens, positions, within_segments(np.ones_like(tokens)))
    return np.asarray(head_logits(config, params, adapter, hidden))


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        ("tied", LoraSpec(rank=3)),
        ("untied", LoraSpec(rank=2, alpha=5.0, train_attn=False)),
        ("../families/qwen2", LoraSpec(rank=3)),
        ("../families/llama3", LoraSpec(rank=3)),
        ("../families/qwen3_moe", LoraSpec(rank=4)),
    ],
)
def test_a_merged_model_equals_the_base_model_with_its_adapter(
    tmp_path: Path, model: str, spec: LoraSpec
) -> None:
    arrays = save(tmp_path, FIXTURES / model, spec)
    options = [
        f"checkpoint={SAVED}",
        f"checkpoints_dir={tmp_path}",
        f"base_model={FIXTURES / model}",
        f"output={tmp_path / 'merged'}",
    ]
    assert main(["merge", *options]) == 0
    merged, adapted = logits(tmp_path / "merged", None, spec), logits(FIXTURES / model, arrays, spec)
    assert (
        np.abs(merged - adapted).max() < 1e-4 < np.abs(adapted - logits(FIXTURES / model, None, spec)).max()
    )
    assert load_model_config(tmp_path / "merged").tie_word_embeddings is False


@pytest.mark.parametrize(
    ("model", "entries"),
    [("tied", {}), ("untied", {}), ("tied", {"original_max_position_embeddings": 48})],
)
def test_a_merged_model_has_the_context_of_the_server(
    tmp_path: Path, model: str, entries: dict[str, int]
) -> None:
    """One model has `rope_parameters` (transformers 5), the other has not."""
    base = tmp_path / "base"
    shutil.copytree(FIXTURES / model, base)
    raw = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(raw | entries))
    save(tmp_path, base, LoraSpec(rank=2))
    options = [f"checkpoint={SAVED}", f"checkpoints_dir={tmp_path}", f"base_model={base}"]
    config = load_model_config(base)
    for length in (config.context_length, 1000):
        merged = tmp_path / str(length)
        assert main(["merge", *options, f"max_context_length={length}", f"output={merged}"]) == 0
        expected = yarn_context(config, length)
        assert load_model_config(merged).rope_scaling == expected.rope_scaling
        rope = transformers.AutoConfig.from_pretrained(merged).rope_parameters
        assert rope["rope_type"] == ("yarn" if length == 1000 else "default")
        assert (rope.get("factor"), rope["rope_theta"]) == (
            4.0 if length == 1000 else None,
            config.rope_theta,
        )


def test_a_stored_copy_of_a_tied_head_is_not_merged(tmp_path: Path) -> None:
    """The base model ties its head to the embedding in config.json, but its files contain another head."""
    spec = LoraSpec(rank=3)
    base = tmp_path / "base"
    shutil.copytree(FIXTURES / "tied", base)
    tensors = load_file(base / "model.safetensors")
    head = np.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors | {"lm_head.weight": head}, base / "model.safetensors", metadata={"format": "pt"})
    arrays = save(tmp_path, base, spec)
    options = [f"checkpoint={SAVED}", f"checkpoints_dir={tmp_path}", f"output={tmp_path / 'merged'}"]
    assert main(["merge", *options, f"base_model={base}"]) == 0
    merged, adapted = logits(tmp_path / "merged", None, spec), logits(FIXTURES / "tied", arrays, spec)
    assert np.abs(merged - adapted).max() < 1e-4
    assert load_model_config(tmp_path / "merged").tie_word_embeddings is False


def test_the_config_of_a_merged_model_states_its_dtype(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(FIXTURES / "untied", base)
    config = json.loads((base / "config.json").read_text())
    del config["dtype"]
    (base / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    save(tmp_path, base, LoraSpec(rank=2))
    options = [f"checkpoint={SAVED}", f"checkpoints_dir={tmp_path}", f"base_model={base}"]
    assert main(["merge", *options, "dtype=float32", f"output={tmp_path / 'merged'}"]) == 0
    merged = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (merged["dtype"], merged["torch_dtype"]) == ("float32", "float32")


@pytest.mark.seed_behaviour(88)
def test_an_adapter_is_unchanged_after_export_and_import(tmp_path: Path) -> None:
    spec = LoraSpec(rank=3, alpha=7.5)
    arrays = save(tmp_path, FIXTURES / "tied", spec)
    output, imported_path = tmp_path / "peft", "tinker://imported/weights/one"
    assert main(["adapter", f"checkpoint={SAVED}", f"checkpoints_dir={tmp_path}", f"output={output}"]) == 0
    written = load_file(output / "adapter_model.safetensors")
    assert written.keys() == arrays.keys() and {str(array.dtype) for array in written.values()} == {"float32"}
    assert (
        "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight" in written
        and "base_model.model.lm_head.lora_A.weight" in written
    )
    config = json.loads((output / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"]) == (3, 7.5, "none")
    modules = ["down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == modules
    base = [f"base_model={FIXTURES / 'tied'}", f"checkpoints_dir={tmp_path}"]
    assert main(["import", f"adapter={output}", *base, f"checkpoint={imported_path}"]) == 0
    info, imported = CheckpointStore(tmp_path, "local/tied", fingerprint(FIXTURES / "tied")).read(
        imported_path
    )
    assert info.lora == spec and info.step == 0
    for name, array in arrays.items():
        np.testing.assert_array_equal(imported[name], array)
    adam = adam_from_arrays(imported, load_model_config(FIXTURES / "tied"), spec, MAX_RANK)
    assert int(adam.step) == 0 and not np.any(adam.second.layers[0]["qkv"].a)


def test_experts_are_unchanged_after_export_and_import(tmp_path: Path) -> None:
    spec, base = LoraSpec(rank=4, train_unembed=False), FIXTURES.parent / "families" / "qwen3_moe"
    arrays = save(tmp_path, base, spec)
    expert = "base_model.model.model.layers.1.mlp.experts.5.up_proj"
    a, b = (arrays[f"{expert}.lora_{side}.weight"] for side in "AB")
    assert a.shape == (4 // 2, 40)  # each token uses two experts, which share the rank
    assert (
        main(["adapter", f"checkpoint={SAVED}", f"checkpoints_dir={tmp_path}", f"output={tmp_path / 'peft'}"])
        == 0
    )
    written = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    exported_a, exported_b = (written[f"{expert}.lora_{side}.weight"] for side in "AB")
    assert exported_a.shape == (4, 40)
    np.testing.assert_allclose(spec.alpha / 4 * exported_b @ exported_a, spec.alpha / 2 * b @ a, rtol=1e-5)
    target = [f"base_model={base}", f"checkpoints_dir={tmp_path}", "checkpoint=tinker://imported/weights/one"]
    assert main(["import", f"adapter={tmp_path / 'peft'}", *target]) == 0
    info, imported = CheckpointStore(tmp_path, "local/qwen3_moe", fingerprint(base)).read(
        "tinker://imported/weights/one"
    )
    assert info.lora == spec
    for name, array in arrays.items():
        np.testing.assert_array_equal(imported[name], array)
    written[f"{expert}.lora_A.weight"] = np.ones_like(exported_a)
    save_file(written, tmp_path / "peft" / "adapter_model.safetensors")
    with pytest.raises(
        UserError,
        match=r"experts\.5\.up_proj\.lora_A\.weight has rank 4, but experts of this server have rank 2",
    ):
        read_adapter(tmp_path / "peft", open_base_model(base))


def test_deepseek_is_unchanged_after_export_and_import(tmp_path: Path) -> None:
    spec, base = (
        LoraSpec(rank=3),
        shutil.copytree(FIXTURES.parent / "families" / "deepseek_v3", tmp_path / "deepseek_v3"),
    )
    # a tensor of a multi-token-prediction layer, which the server ignores
    prediction_layer = {"model.layers.2.self_attn.o_proj.weight": np.zeros((40, 40), np.float32)}
    save_file(
        load_file(base / "model.safetensors") | prediction_layer,
        base / "model.safetensors",
        metadata={"format": "pt"},
    )
    arrays = save(tmp_path, base, spec)
    assert (
        main(["adapter", f"checkpoint={SAVED}", f"checkpoints_dir={tmp_path}", f"output={tmp_path / 'peft'}"])
        == 0
    )
    modules = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["target_modules"]
    attention = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]
    assert modules == sorted(["down_proj", "gate_proj", "lm_head", "up_proj", *attention])
    written = load_file(tmp_path / "peft" / "adapter_model.safetensors").keys()
    for module in ("0.mlp.up_proj", "1.mlp.experts.7.down_proj", "1.mlp.shared_experts.gate_proj"):
        assert f"base_model.model.model.layers.{module}.lora_A.weight" in written
    target = [f"base_model={base}", f"checkpoints_dir={tmp_path}", "checkpoint=tinker://imported/weights/one"]
    assert main(["import", f"adapter={tmp_path / 'peft'}", *target]) == 0
    info, imported = CheckpointStore(tmp_path, "local/deepseek_v3", fingerprint(base)).read(
        "tinker://imported/weights/one"
    )
    assert info.lora == spec and imported.keys() >= arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_allclose(imported[name], array, rtol=1e-6)
    options = [
        f"checkpoint={SAVED}",
        f"checkpoints_dir={tmp_path}",
        f"base_model={base}",
        f"output={tmp_path / 'merged'}",
        "dtype=bfloat16",
    ]
    assert main(["merge", *options]) == 0
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    a, b = (
        arrays[f"base_model.model.model.layers.0.self_attn.kv_b_proj.lora_{side}.weight"] for side in "AB"
    )
    expected = (
        load_file(base / "model.safetensors")["model.layers.0.self_attn.kv_b_proj.weight"]
        + spec.alpha / 3 * b @ a
    )
    np.testing.assert_allclose(
        merged["model.layers.0.self_attn.kv_b_proj.weight"].astype(np.float32), expected, atol=1e-2
    )
    float32_names = {name for name, array in merged.items() if array.dtype == np.float32}
    assert float32_names == {"model.layers.1.mlp.gate.e_score_correction_bias"}


@pytest.mark.seed_behaviour(89)
def test_every_exported_tensor_has_the_requested_dtype(tmp_path: Path) -> None:
    save(tmp_path, FIXTURES / "untied", LoraSpec(rank=2))
    options = [f"checkpoint={SAVED}", f"checkpoints_dir={tmp_path}", "dtype=bfloat16"]
    assert main(["adapter", *options, f"output={tmp_path / 'peft'}"]) == 0
    assert (
        main(["merge", *options, f"base_model={FIXTURES / 'untied'}", f"output={tmp_path / 'merged'}"]) == 0
    )
    files = [*(tmp_path / "peft").glob("*.safetensors"), *(tmp_path / "merged").glob("*.safetensors")]
    assert len(files) == 1 + 2  # the base model has two shards
    assert {str(array.dtype) for file in files for array in load_file(file).values()} == {"bfloat16"}
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    num_bytes = sum(array.nbytes for file in files[1:] for array in load_file(file).values())
    assert index["metadata"]["total_size"] == num_bytes


@pytest.mark.seed_behaviour(88)
def test_default_adapter_names_and_rslora_are_imported(tmp_path: Path) -> None:
    arrays = save(tmp_path, FIXTURES / "tied", LoraSpec(rank=4, train_mlp=False, train_unembed=False))
    main(["adapter", f"checkpoint={SAVED}", f"checkpoints_dir={tmp_path}", f"output={tmp_path / 'peft'}"])
    renamed = {
        name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default."): array
        for name, array in arrays.items()
    }
    save_file(renamed, tmp_path / "peft" / "adapter_model.safetensors")
    change_config(tmp_path / "peft", use_rslora=True, lora_alpha=10)
    imported_path = "tinker://imported/sampler_weights/one"
    assert (
        main(
            [
                "import",
                f"adapter={tmp_path / 'peft'}",
                f"base_model={FIXTURES / 'tied'}",
                f"checkpoints_dir={tmp_path}",
                f"checkpoint={imported_path}",
            ]
        )
        == 0
    )
    info, imported = CheckpointStore(tmp_path, "local/tied").read(imported_path)
    assert info.lora == LoraSpec(rank=4, alpha=20.0, train_mlp=False, train_unembed=False)
    assert imported.keys() == arrays.keys()


def test_the_head_that_peft_saves_with_an_adapter_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default, peft saves the base weight of the head with each adapter of the head."""
    arrays = save(tmp_path, FIXTURES / "tied", LoraSpec(rank=4, train_mlp=False))
    main(["adapter", f"checkpoint={SAVED}", f"checkpoints_dir={tmp_path}", f"output={tmp_path / 'peft'}"])
    options = [f"adapter={tmp_path / 'peft'}", f"base_model={FIXTURES / 'tied'}"]
    head = load_file(FIXTURES / "tied" / "model.safetensors")["model.embed_tokens.weight"]
    for scale, path, status in ((1.0, "tinker://a/sampler_weights/one", 0), (1.5, SAVED, 2)):
        weight = {"base_model.model.lm_head.base_layer.weight": head * np.float32(scale)}
        save_file(arrays | weight, tmp_path / "peft" / "adapter_model.safetensors")
        assert main(["import", *options, f"checkpoints_dir={tmp_path}", f"checkpoint={path}"]) == status
    assert "lm_head.base_layer.weight differs from the weight of the base" in capsys.readouterr().err
    _, imported = CheckpointStore(tmp_path, "local/tied").read("tinker://a/sampler_weights/one")
    assert imported.keys() == arrays.keys()


def test_external_weights_cannot_be_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"adapter={tmp_path}", f"base_model={FIXTURES / 'tied'}", f"checkpoints_dir={tmp_path}"]
    assert main(["import", *options, "checkpoint=tinker://new/external_weights/one"]) == 2
    assert "external_weights are for download only" in capsys.readouterr().err


def change_config(adapter: Path, **changes: object) -> None:
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


def rename_modules(adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {name.replace("v_proj", "g_proj"): array for name, array in tensors.items()},
        adapter / "adapter_model.safetensors",
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rename_modules, "the adapter has model.layers.0.self_attn.g_proj"),
        (lambda adapter: change_config(adapter, use_dora=True), "use_dora is not supported"),
        (
            lambda adapter: change_config(adapter, alora_invocation_tokens=[1, 2]),
            "alora_invocation_tokens is not supported",
        ),
        (
            lambda adapter: change_config(adapter, init_lora_weights="pissa_niter_16"),
            "init_lora_weights='pissa_niter_16' changes the weights of the base model",
        ),
        (lambda adapter: change_config(adapter, r=2), "require (2,"),
        (lambda adapter: change_config(adapter, r=0), "are not valid"),
        (
            lambda adapter: change_config(adapter, lora_alpha=0),
            "rank 3, alpha 0 and dropout 0 are not valid",
        ),
        (
            lambda adapter: change_config(adapter, lora_alpha=math.nan),
            "alpha nan and dropout 0 are not valid",
        ),
        (lambda adapter: change_config(adapter, lora_dropout=1.0001), "dropout 1.0001 are not valid"),
        (lambda adapter: (adapter / "adapter_config.json").unlink(), "not a PEFT adapter"),
    ],
)
@pytest.mark.seed_behaviour(86)
def test_an_unsupported_or_invalid_adapter_is_refused(
    tmp_path: Path, damage, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, FIXTURES / "tied", LoraSpec(rank=3))
    main(["adapter", f"checkpoint={SAVED}", f"checkpoints_dir={tmp_path}", f"output={tmp_path / 'peft'}"])
    damage(tmp_path / "peft")
    options = [
        f"adapter={tmp_path / 'peft'}",
        f"base_model={FIXTURES / 'tied'}",
        f"checkpoints_dir={tmp_path}",
    ]
    assert main(["import", *options, "checkpoint=tinker://new/weights/one"]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and message in printed
    assert not CheckpointStore(tmp_path, "local/tied").exists("tinker://new/weights/one")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["marge"], "unknown command 'marge'; use one of adapter, merge, import"),
        (["adapter", "chekpoint=x"], "did you mean checkpoint=...?"),
        (["adapter", "checkpoint=tinker://run/weights/last"], "missing option output"),
        (
            ["adapter", "checkpoint=tinker://run/weights/none", "output={out}"],
            "no checkpoint tinker://run/weights/none",
        ),
        (["adapter", f"checkpoint={SAVED}", "output={full}"], "not an empty directory"),
        (
            ["merge", f"checkpoint={SAVED}", "output={out}", "base_model={full}"],
            "not a readable safetensors model",
        ),
        (
            ["merge", f"checkpoint={SAVED}", "output={out}", f"base_model={FIXTURES / 'untied'}"],
            "was made from other weights",
        ),
    ],
)
def test_the_error_for_an_invalid_command_line_is_one_line(
    tmp_path: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, FIXTURES / "tied", LoraSpec(rank=3))
    arguments = [argument.format(out=tmp_path / "out", full=tmp_path) for argument in argv]
    assert main([*arguments, *([f"checkpoints_dir={tmp_path}"] if len(argv) > 1 else [])]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and message in printed.err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_other_weights_is_refused(tmp_path: Path) -> None:
    save(tmp_path, FIXTURES / "tied", LoraSpec(rank=3), name="org/model")
    with pytest.raises(UserError, match="made from other weights"):
        CheckpointStore(tmp_path, "org/model", fingerprint(FIXTURES / "untied")).read(SAVED)


def test_quantized_weights_are_named_in_the_error(tmp_path: Path) -> None:
    copy = shutil.copytree(FIXTURES / "tied", tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ConfigError, match=r"^\S*config.json: quantized weights \(quantization_config, awq\)"):
        open_base_model(copy)


def test_the_fingerprint_depends_only_on_the_weights(tmp_path: Path) -> None:
    copy = shutil.copytree(FIXTURES / "tied", tmp_path / "copy")
    assert fingerprint(copy) == fingerprint(FIXTURES / "tied")
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(copy) != fingerprint(FIXTURES / "tied")


def test_a_full_disk_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = save(tmp_path, FIXTURES / "tied", LoraSpec(rank=3))
    store = CheckpointStore(tmp_path, "fixture/base")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda directory: usage(free=1000))
    for name, overwrite in (("last", True), ("next", False)):
        with pytest.raises(ServerError, match="not enough disk space"):
            store.write(
                f"tinker://run/weights/{name}",
                arrays,
                lora=LoraSpec(rank=3),
                step=4,
                user_metadata={},
                overwrite=overwrite,
            )
    assert (
        main(["adapter", f"checkpoint={SAVED}", f"checkpoints_dir={tmp_path}", f"output={tmp_path / 'out'}"])
        == 2
    )
    assert not (tmp_path / "out").exists() and [info.name for info in store.list()] == ["last"]
    assert store.read(SAVED)[0].step == 3


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
        (SafetensorError("Error while serializing: I/O error: Disk quota exceeded"), "Disk quota exceeded"),
    ],
)
def test_a_failed_write_gives_one_line_and_leaves_no_output(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    message: str,
) -> None:
    def fail(*_: object) -> None:
        raise error

    save(tmp_path, FIXTURES / "tied", LoraSpec(rank=3))
    monkeypatch.setattr(export, "write_adapter", fail)
    output = tmp_path / "exports" / "peft"
    assert main(["adapter", f"checkpoint={SAVED}", f"checkpoints_dir={tmp_path}", f"output={output}"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"export: output={output}: ") and message in printed
    assert printed.count("\n") == 1 and "[Errno" not in printed
    assert not list(output.parent.iterdir())
