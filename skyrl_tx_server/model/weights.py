"""Weights between disk and the device: Hugging Face directories for models, PEFT names for adapters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import EllipsisType

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from skyrl_tx_server.errors import ConfigError, UserError
from skyrl_tx_server.model.config import ModelConfig
from skyrl_tx_server.model.lora import (
    Adapter,
    Leaf,
    LowRank,
    Projection,
    head_projection,
    is_trained,
    layer_projections,
    zero_adapter,
)
from skyrl_tx_server.model.qwen3 import LayerParams, Params, layer_shapes
from skyrl_tx_server.ops import LoraSpec

LAYER_PARTS: dict[str, tuple[str, ...]] = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "o": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Hugging Face modules that make up each field of `LayerParams`, in order."""

PEFT_PREFIX = "base_model.model."


def resolve_model(base_model: str) -> Path:
    """A local directory for `base_model`: itself, or a download from the hub. Raises ConfigError in one line when there is neither."""
    path = Path(base_model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or base_model.startswith((".", "~")) or base_model.count("/") > 1:
        raise ConfigError(f"base_model={base_model}: no such directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(base_model, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except Exception as error:  # the hub client raises a dozen unrelated types; all mean the same to the user
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"base_model={base_model}: not a local directory, and the hub download failed: {reason}") from None


def load_params(model_dir: Path, config: ModelConfig, dtype: jnp.dtype | str) -> Params:
    """Read a model's safetensors onto the device in `dtype`. Raises ConfigError when a tensor is missing or misshapen."""
    target = np.dtype(dtype)
    with ExitStack() as files:
        read = _reader(model_dir, files)
        vocabulary = (config.vocab_size, config.hidden_size)

        def matrix(name: str, shape: tuple[int, ...]) -> jax.Array:
            return jax.device_put(_checked(read(f"{name}.weight"), shape, name, model_dir).astype(target))

        def stack(field: str, shape: tuple[int, ...]) -> jax.Array:
            out = np.empty((config.num_layers, *shape), target)
            for index in range(config.num_layers):
                parts = [read(f"model.layers.{index}.{name}.weight").T for name in LAYER_PARTS[field]]
                fused = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
                out[index] = _checked(fused, shape, f"layer {index} {field}", model_dir)
            return jax.device_put(out)

        shapes = layer_shapes(config)
        return Params(
            embed=matrix("model.embed_tokens", vocabulary),
            layers=LayerParams(**{field: stack(field, shapes[field]) for field in LAYER_PARTS}),
            final_norm=matrix("model.norm", vocabulary[1:]),
            head=None if config.tie_word_embeddings else matrix("lm_head", vocabulary),
        )


def save_model(params: Params, config: ModelConfig, model_dir: Path) -> None:
    """Write config.json and model.safetensors as Hugging Face reads them (one file; tokenizer files are the caller's)."""
    model_dir.mkdir(parents=True, exist_ok=True)
    host = jax.device_get(params)
    tensors = {"model.embed_tokens.weight": host.embed, "model.norm.weight": host.final_norm}
    if host.head is not None:
        tensors["lm_head.weight"] = host.head
    projections = layer_projections(config)
    for field, names in LAYER_PARTS.items():
        stacked = getattr(host.layers, field)
        widths = projections[field].outputs if field in projections else stacked.shape[-1:]
        for name, part in zip(names, np.split(stacked, np.cumsum(widths)[:-1], axis=-1), strict=True):
            for index in range(config.num_layers):
                tensors[f"model.layers.{index}.{name}.weight"] = np.ascontiguousarray(part[index].T)
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    (model_dir / "config.json").write_text(json.dumps(_config_json(config, str(host.embed.dtype)), indent=2) + "\n", encoding="utf-8")


def adapter_to_arrays(adapter: Adapter, config: ModelConfig, spec: LoraSpec) -> dict[str, np.ndarray]:
    """PEFT's tensors of an adapter: only trained parts, without the rank padding. `adapter` may also be a gradient or a moment."""
    host = jax.device_get(adapter)
    arrays: dict[str, np.ndarray] = {}
    for name, module, layer, part, _ in _parts(host, config, spec):
        at = () if layer is None else (layer,)
        padded = module.b[part].shape[-2]
        arrays[f"{name}.lora_A.weight"] = np.ascontiguousarray(module.a[at][:, part * padded : part * padded + spec.rank].T)
        arrays[f"{name}.lora_B.weight"] = np.ascontiguousarray(module.b[part][at][: spec.rank].T)
    return arrays


def adapter_from_arrays(arrays: Mapping[str, np.ndarray], config: ModelConfig, spec: LoraSpec, max_rank: int) -> Adapter:
    """The inverse of `adapter_to_arrays`, padded to `max_rank`, in host memory. Raises UserError when a tensor is missing or misshapen."""
    if spec.rank > max_rank:
        raise UserError(
            f"the checkpoint's LoRA rank {spec.rank} is above this server's max_lora_rank={max_rank}: start it with a larger one"
        )
    adapter = zero_adapter(config, max_rank)
    for name, module, layer, part, projection in _parts(adapter, config, spec):
        at = () if layer is None else (layer,)
        columns = slice(part * max_rank, part * max_rank + spec.rank)
        _fill(module.a, (*at, slice(None), columns), _tensor(arrays, f"{name}.lora_A.weight", (spec.rank, projection.inputs)).T)
        _fill(module.b[part], (*at, slice(spec.rank)), _tensor(arrays, f"{name}.lora_B.weight", (projection.outputs[part], spec.rank)).T)
    for module in (adapter.layers.qkv, adapter.layers.o, adapter.layers.gate_up, adapter.layers.down, adapter.head):
        _fill(module.scale, ..., np.float32(spec.alpha / spec.rank))
    return adapter


def _fill(leaf: Leaf, at: tuple[int | slice, ...] | EllipsisType, value: np.ndarray | np.float32) -> None:
    assert isinstance(leaf, np.ndarray), "only an adapter in host memory is filled in place"
    leaf[at] = value


def _parts(adapter: Adapter, config: ModelConfig, spec: LoraSpec) -> list[tuple[str, LowRank, int | None, int, Projection]]:
    """(PEFT name, module, layer or None, part, projection) of every trained part."""
    found: list[tuple[str, LowRank, int | None, int, Projection]] = []
    for field, projection in layer_projections(config).items():
        if is_trained(spec, field):
            for layer in range(config.num_layers):
                for part, name in enumerate(projection.parts):
                    found.append((f"{PEFT_PREFIX}model.layers.{layer}.{name}", getattr(adapter.layers, field), layer, part, projection))
    if is_trained(spec, "head"):
        found.append((f"{PEFT_PREFIX}lm_head", adapter.head, None, 0, head_projection(config)))
    return found


def _tensor(arrays: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name not in arrays:
        raise UserError(f"the checkpoint has no tensor {name}: it belongs to another model or LoRA configuration")
    if arrays[name].shape != shape:
        raise UserError(f"the checkpoint's {name} has shape {arrays[name].shape}, expected {shape}: it belongs to another model or rank")
    return arrays[name]


def _reader(model_dir: Path, files: ExitStack) -> Callable[[str], np.ndarray]:
    """A function from tensor name to array, over one file or the shards of an index."""
    index = model_dir / "model.safetensors.index.json"
    single = model_dir / "model.safetensors"
    if index.exists():
        where: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        paths = sorted(set(where.values()))
    elif single.exists():
        where, paths = {}, [single.name]
    else:
        raise ConfigError(f"{model_dir}: neither model.safetensors nor model.safetensors.index.json found")
    try:
        opened = {path: files.enter_context(safe_open(model_dir / path, framework="np")) for path in paths}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{model_dir}: cannot read the weights: {error}") from None

    def read(name: str) -> np.ndarray:
        try:
            return opened[where.get(name, paths[0])].get_tensor(name)
        except SafetensorError:
            raise ConfigError(f"{model_dir}: the weights hold no tensor {name}") from None

    return read


def _checked(array: np.ndarray, shape: tuple[int, ...], name: str, model_dir: Path) -> np.ndarray:
    if array.shape != shape:
        raise ConfigError(f"{model_dir}: {name} has shape {array.shape}, config.json implies {shape}")
    return array


def _config_json(config: ModelConfig, dtype: str) -> dict:
    rope: dict = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (yarn := config.rope_scaling) is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_position_embeddings,
            "attention_factor": yarn.attention_factor,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "truncate": yarn.truncate,
        }
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "eos_token_id": list(config.eos_token_ids) if len(config.eos_token_ids) != 1 else config.eos_token_ids[0],
        "dtype": dtype,
    }
