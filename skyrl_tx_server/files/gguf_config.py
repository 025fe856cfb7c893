"""Derives config.json from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

import numpy as np

from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.files.gguf_file import GgufFile

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
"""`general.architecture` -> `model_type` and the class in `architectures` of config.json."""
DEFAULT_ROPE_THETA = 10_000.0
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The parameters of RoPE scaling that all Llama 3.1 to 3.3 models have in common; `factor` differs between
models. A GGUF file contains only the divisors of the rotary frequencies (`llama3_divisors`), whose maximum is
`factor`."""
MAX_LAYERS = 1024
_UNSUPPORTED = ("attention.scale", "attention.sliding_window", "logit_scale", "embedding_scale")


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the contents of config.json. Raises ConfigError for a model that is not supported."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: general.architecture is {architecture!r}; supported are {', '.join(ARCHITECTURES)}"
        )
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise ConfigError(
            f"{file.path}: the file is one part of several; join the parts with llama-gguf-split --merge"
        )
    fields = _Fields(file, str(architecture))
    model_type, model_class = ARCHITECTURES[str(architecture)]
    for name in _UNSUPPORTED:
        if fields.has(name):
            raise ConfigError(f"{file.path}: {architecture}.{name} is not supported")
    heads = fields.count("attention.head_count")
    hidden = fields.count("embedding_length")
    head_dim = fields.count("attention.key_length", fields.count("rope.dimension_count", hidden // heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.count(name, head_dim) != head_dim:
            raise ConfigError(
                f"{file.path}: {architecture}.{name}={fields.count(name)} differs from the width "
                f"{head_dim} of a head; only equal values are supported"
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.path}: tensor token_embd.weight is missing or is not a matrix")
    context = fields.count("context_length")
    rope = {"rope_theta": fields.number("rope.freq_base", DEFAULT_ROPE_THETA), **_rope(fields, head_dim)}
    layers = fields.count("block_count")
    if layers > MAX_LAYERS:
        raise ConfigError(f"{file.path}: {architecture}.block_count={layers} is above {MAX_LAYERS}")
    return {
        "architectures": [model_class],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.count("feed_forward_length", 1 if "moe" in model_type else None),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        # rounded, because the float32 value 1e-5 of the file is 9.999999747378752e-06 in Python
        "rms_norm_eps": float(f"{fields.number('attention.layer_norm_rms_epsilon'):.7g}"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "max_position_embeddings": context,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "eos_token_id": _stop_tokens(file),
        **_experts(fields, model_type),
    }


class _Fields:
    """The metadata of one architecture. `count` and `number` raise ConfigError for a field that is missing or
    has an invalid value."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self._prefix = f"{architecture}."

    def has(self, name: str) -> bool:
        return self._prefix + name in self.file.metadata

    def count(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{self.file.path}: {self._prefix}{name} must be a positive integer, not {str(value)[:80]}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ConfigError(
                f"{self.file.path}: {self._prefix}{name} must be a positive number, not {str(value)[:80]}"
            )
        return float(value)

    def text(self, name: str, default: str) -> str:
        return str(self.file.metadata.get(self._prefix + name, default))

    def _value(self, name: str, default: float | None) -> object:
        value = self.file.metadata.get(self._prefix + name, default)
        if value is None:
            raise ConfigError(f"{self.file.path}: the metadata have no {self._prefix}{name}")
        return value


def _experts(fields: _Fields, model_type: str) -> dict[str, Any]:
    if model_type != "qwen3_moe":
        if fields.has("expert_count") and fields.file.metadata[f"{model_type}.expert_count"]:
            raise ConfigError(f"{fields.file.path}: {model_type} models with experts are not supported")
        return {}
    return {
        "num_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "norm_topk_prob": True,  # every model of this architecture has this value
    }


def _rope(fields: _Fields, head_dim: int) -> dict[str, Any]:
    """Return `rope_type` and its parameters."""
    file = fields.file
    if (frequencies := file.tensors.get("rope_freqs.weight")) is not None:
        stored = file.rows(frequencies).view("<f4").reshape(-1) if frequencies.kind.name == "F32" else None
        if stored is not None and stored.shape == (head_dim // 2,):
            scaling = {"factor": round(float(stored.max()), 4), **LLAMA3_SCALING}
            theta = fields.number("rope.freq_base", DEFAULT_ROPE_THETA)
            if np.allclose(stored, llama3_divisors(theta, head_dim, **scaling), rtol=1e-4):
                return {"rope_type": "llama3", **scaling}
        raise ConfigError(
            f"{file.path}: rope_freqs.weight is not the scaling of Llama 3.1 to 3.3, and other "
            "scalings are not supported"
        )
    match fields.text("rope.scaling.type", "none"):
        case "none":
            return {"rope_type": "default"}
        case "yarn":
            return {
                "rope_type": "yarn",
                "factor": fields.number("rope.scaling.factor"),
                "original_max_position_embeddings": fields.count("rope.scaling.original_context_length"),
            }
        case kind:
            raise ConfigError(
                f"{file.path}: rope.scaling.type {kind[:80]!r} is not supported, only none and yarn"
            )


def llama3_divisors(
    theta: float,
    head_dim: int,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> np.ndarray:
    """Return the divisor of each rotary frequency in Llama 3.1's scaling: [head_dim / 2].

    Source: `_compute_llama3_parameters` of transformers and `rope_freqs` of llama.cpp's converter.
    """
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    rotations = original_max_position_embeddings / wavelengths
    smooth = np.clip((rotations - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _stop_tokens(file: GgufFile) -> list[int]:
    ids = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(number for number in ids if isinstance(number, int)))
