"""Reads and writes adapters in PEFT format: adapter_config.json and adapter_model.safetensors.

Tensors are written in one dtype and with names such as `base_model.model.<module>.lora_A.weight`, without
`.base_layer.` or an adapter's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 # pyright: ignore[reportUnusedImport]  registers bfloat16 with numpy
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from skyrl_tx_server.engine.operations import LoraSpec, expert_rank
from skyrl_tx_server.errors import UserError
from skyrl_tx_server.files.base_model import BaseTensors
from skyrl_tx_server.files.json_file import read_json_object, write_json

PREFIX, HEAD = "base_model.model.", "lm_head"
HEAD_WEIGHT = f"{PREFIX}{HEAD}.base_layer.weight"
"""The weight of the base model that peft saves with an adapter of the output head."""
TIED_HEAD = "model.embed_tokens.weight"  # the weight of the output head of a model with tied embeddings
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_ATTENTION = re.compile(r"(?P<module>model\.layers\.(?P<layer>\d+)\.self_attn\.\w+_proj(_with_mqa)?)\.weight")
_MLP = re.compile(
    r"(?P<module>model\.layers\.(?P<layer>\d+)\.mlp\.(experts\.\d+\.|shared_experts\.)?(gate|up|down)_proj)\.weight"
)
_EXPERT = re.compile(r".*\.mlp\.experts\.\d+\..*")
_FACTOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_UNSUPPORTED = (
    "use_dora",
    "fan_in_fan_out",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
)
_INITIALIZATIONS = (None, True, False, "gaussian", "orthogonal", "eva")
"""The values of `init_lora_weights` with which peft does not change the weights of the base model."""


def adapter_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the adapter's tensors of a checkpoint, which may also contain an optimizer state."""
    return {name: array for name, array in arrays.items() if _FACTOR.fullmatch(name)}


def deltas(arrays: Mapping[str, np.ndarray], lora: LoraSpec) -> dict[str, np.ndarray]:
    """Return alpha / rank * B @ A of each module, [out, in] float32, by the Hugging Face name of its weight.
    `rank` is the rank of A and B, which for experts may be less than the rank of the adapter."""
    by_name = {}
    for name, a in adapter_tensors(arrays).items():
        if name.endswith(".lora_A.weight"):
            b = arrays[name.replace(".lora_A.", ".lora_B.")]
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            product = b.astype(np.float32) @ a.astype(np.float32)
            by_name[f"{module}.weight"] = np.float32(lora.alpha / a.shape[0]) * product
    return by_name


def write_adapter(
    directory: Path, arrays: Mapping[str, np.ndarray], lora: LoraSpec, base_model: str, dtype: str
) -> None:
    """Write both files of an adapter into `directory`, which is created if necessary."""
    directory.mkdir(parents=True, exist_ok=True)
    widened = {name: _widened(name, array, lora) for name, array in adapter_tensors(arrays).items()}
    tensors = {name: np.ascontiguousarray(array.astype(np.dtype(dtype))) for name, array in widened.items()}
    modules = {name.removeprefix(PREFIX).rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    write_json(directory / CONFIG, config)


def read_adapter(directory: Path, base: BaseTensors) -> tuple[LoraSpec, dict[str, np.ndarray]]:
    """Read an adapter of `base` in float32, with the tensor names of a checkpoint. Raise UserError if
    `directory` contains no valid PEFT adapter of `base`, or if this server cannot represent the adapter.

    If the adapter has only some projections of a part, such as q and v of attention, the other projections of
    this part get zero factors.
    """
    try:
        config: dict[str, Any] = read_json_object(directory / CONFIG)
        tensors = load_file(directory / WEIGHTS)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        dropout = float(config.get("lora_dropout") or 0.0)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, SafetensorError) as error:
        raise UserError(f"{directory}: not a PEFT adapter: {error}") from None
    if rank < 1 or not 0 < alpha < math.inf or not 0 <= dropout <= 1:
        raise UserError(
            f"{directory}: rank {rank}, alpha {alpha:g} and dropout {dropout:g} are not valid; expected rank "
            ">= 1, alpha > 0 and dropout in 0..1"
        )
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        raise UserError(
            f"{directory}: only LoRA without biases can be imported, not peft_type={config.get('peft_type')} "
            f"with bias={config.get('bias')}"
        )
    for name in _UNSUPPORTED:
        if config.get(name):
            raise UserError(
                f"{directory}: {name} is not supported by this server; merge the adapter with peft instead"
            )
    if (initialization := config.get("init_lora_weights")) not in _INITIALIZATIONS:
        raise UserError(
            f"{directory}: init_lora_weights={str(initialization)[:40]!r} changes the weights of the base "
            "model; save the adapter with path_initial_model_for_weight_conversion, or merge it with peft"
        )
    if config.get("use_rslora"):
        alpha *= math.sqrt(rank)  # rsLoRA scales by alpha / sqrt(rank), this server by alpha / rank
    base_config: dict[str, Any] = read_json_object(base.directory / "config.json")
    rank_per_expert = expert_rank(rank, int(base_config.get("num_experts_per_tok") or 1))
    arrays = {}
    for name, tensor in tensors.items():
        if name == HEAD_WEIGHT:
            _check_head(directory, tensor, base)
            continue
        factor = _FACTOR.fullmatch(name.replace(".base_layer.", "."))
        if factor is None:
            raise UserError(f"{directory}: {name} is not a LoRA factor that this server supports")
        array = tensor.astype(np.float32)
        if _EXPERT.fullmatch(name):
            array = _narrowed(directory, name, array, rank, rank_per_expert)
        arrays[f"{PREFIX}{factor['module']}.lora_{factor['side']}.weight"] = array
    modules = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in arrays}
    parts = _parts(base, int(base_config["num_hidden_layers"]))
    spec = _spec(directory, modules, parts, rank, alpha)
    return spec, arrays | _missing_factors(directory, arrays, modules, parts, base, rank, rank_per_expert)


def initial_optimizer_state(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the optimizer state before the first step, with the names of a training checkpoint."""
    moments = {
        f"optimizer.{moment}.{name}": np.zeros_like(array)
        for moment in ("first", "second")
        for name, array in arrays.items()
    }
    return {"optimizer.step": np.array(0, np.int32), **moments}


def _widened(name: str, array: np.ndarray, lora: LoraSpec) -> np.ndarray:
    """Pad a factor of an expert to the rank of the adapter, because PEFT has one rank for all modules. B is
    scaled so that alpha / rank * B @ A is unchanged."""
    rank_axis = 0 if ".lora_A." in name else 1
    rank = array.shape[rank_axis]
    if rank == lora.rank:
        return array
    padding = [(0, lora.rank - rank) if axis == rank_axis else (0, 0) for axis in range(2)]
    return np.pad(array if rank_axis == 0 else array * np.float32(lora.rank / rank), padding)


def _check_head(directory: Path, weight: np.ndarray, base: BaseTensors) -> None:
    """Raise UserError if `weight` is not the weight of the output head of the base model."""
    base_name = f"{HEAD}.weight" if f"{HEAD}.weight" in base.files else TIED_HEAD
    with safe_open(base.files[base_name], framework="np") as opened:
        base_weight = opened.get_tensor(base_name)
    if not np.array_equal(weight.astype(np.float32), base_weight.astype(np.float32)):
        raise UserError(
            f"{directory}: {HEAD_WEIGHT} differs from the weight of the base model; merge the adapter with "
            "peft instead"
        )


def _narrowed(directory: Path, name: str, array: np.ndarray, rank: int, rank_per_expert: int) -> np.ndarray:
    """Undo `_widened`. Raise UserError if this would remove values that are not zero."""
    rank_axis = 0 if ".lora_A." in name else 1
    if array.shape[rank_axis] != rank:
        return array
    kept, padding = np.split(array, [rank_per_expert], axis=rank_axis)
    if np.any(padding):
        raise UserError(
            f"{directory}: {name} has rank {rank}, but experts of this server have rank {rank_per_expert} "
            "(rank // num_experts_per_tok, but at least 1); merge the adapter with peft instead"
        )
    return kept if rank_axis == 0 else kept / np.float32(rank / rank_per_expert)


def _spec(
    directory: Path, modules: set[str], parts: Mapping[str, set[str]], rank: int, alpha: float
) -> LoraSpec:
    """Return the LoraSpec of an adapter with these modules. Raise UserError if there is no module, or for a
    module that belongs to no part."""
    unknown = sorted(modules - set().union(*parts.values()))
    if unknown or not modules:
        raise UserError(
            f"{directory}: this server adapts only attention projections, MLP projections and the head, but "
            "the adapter has " + (unknown[0] if unknown else "no modules")
        )
    trained = {name: not part.isdisjoint(modules) for name, part in parts.items()}
    return LoraSpec(rank=rank, alpha=alpha, **trained)


def _parts(base: BaseTensors, num_layers: int) -> dict[str, set[str]]:
    """Return the modules of each part. One switch of a LoraSpec, such as `train_attn`, selects one part."""

    def modules_like(pattern: re.Pattern[str]) -> set[str]:
        matches = (pattern.fullmatch(name) for name in base.files)
        # DeepSeek's checkpoints have further layers for multi-token prediction, which are not adapted.
        return {match["module"] for match in matches if match and int(match["layer"]) < num_layers}

    return {
        "train_attn": modules_like(_ATTENTION),
        "train_mlp": modules_like(_MLP),
        "train_unembed": {HEAD},
    }


def _missing_factors(
    directory: Path,
    arrays: Mapping[str, np.ndarray],
    modules: set[str],
    parts: Mapping[str, set[str]],
    base: BaseTensors,
    rank: int,
    rank_per_expert: int,
) -> dict[str, np.ndarray]:
    """Return zero factors for the modules that the adapter lacks. Parts of which the adapter has no
    module are skipped. Raise UserError if a factor of `modules` is missing or has a wrong shape.

    The gradient of each factor is a matrix product with the other factor, so training leaves both at zero.
    """
    zeros = {}
    for module in set[str]().union(*(part for part in parts.values() if part & modules)):
        weight = f"{module}.weight"
        if weight not in base.files:
            weight = TIED_HEAD
        outputs, inputs = base.shape(weight)
        module_rank = rank_per_expert if _EXPERT.fullmatch(module) else rank
        for side, shape in (("A", (module_rank, inputs)), ("B", (outputs, module_rank))):
            name = f"{PREFIX}{module}.lora_{side}.weight"
            if module not in modules:
                zeros[name] = np.zeros(shape, np.float32)
            elif name not in arrays or arrays[name].shape != shape:
                actual = f"has shape {arrays[name].shape}" if name in arrays else "is missing"
                raise UserError(f"{directory}: {name} {actual}; the base model and the rank require {shape}")
    return zeros
