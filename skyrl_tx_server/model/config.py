"""What a Qwen3 model is made of, read from a Hugging Face config.json."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from skyrl_tx_server.errors import ConfigError

DEFAULT_ROPE_THETA = 10_000.0  # Hugging Face's, when config.json names none
YARN_ORIGINAL_LENGTH = 32_768  # the length Qwen3 was trained on, which its model cards stretch from


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """YaRN context extension (arXiv:2309.00071) with Hugging Face's parameter names."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float  # multiplies cos and sin
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A dense Qwen3. Hashable, so that it can be a static argument of a jitted function."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    rope_scaling: YarnScaling | None = None  # None: plain rotary embedding
    eos_token_ids: tuple[int, ...] = ()

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Output widths of the fused query, key and value projection."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim

    @property
    def context_length(self) -> int:
        """Longest sequence the positions are meant for, scaling included."""
        if self.rope_scaling is None:
            return self.max_position_embeddings
        stretched = int(self.rope_scaling.factor * self.rope_scaling.original_max_position_embeddings)
        return max(self.max_position_embeddings, stretched)


def load_model_config(model_dir: Path) -> ModelConfig:
    """Read config.json (and the stop tokens of generation_config.json). Raises ConfigError for anything but a dense Qwen3."""
    path = model_dir / "config.json"
    raw = _read_json(path)
    if raw.get("model_type") != "qwen3":
        raise ConfigError(f"{path}: model_type is {raw.get('model_type')!r}; this server runs dense Qwen3 models (model_type 'qwen3')")
    for name, expected in (("attention_bias", False), ("use_sliding_window", False), ("hidden_act", "silu")):
        if raw.get(name, expected) != expected:
            raise ConfigError(f"{path}: {name}={raw[name]!r} is not supported, only {expected!r}")
    try:
        num_heads = int(raw["num_attention_heads"])
        max_position_embeddings = int(raw.get("max_position_embeddings", 32768))
        rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
        config = ModelConfig(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
            head_dim=int(raw.get("head_dim") or 128),
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", DEFAULT_ROPE_THETA))),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            max_position_embeddings=max_position_embeddings,
            rope_scaling=_yarn(rope, max_position_embeddings, path),
            eos_token_ids=_eos_token_ids(model_dir, raw),
        )
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]!r} is missing") from None
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(f"{path}: {config.num_heads} attention heads do not divide over {config.num_kv_heads} key-value heads")
    return config


def stretch_context(config: ModelConfig, length: int) -> ModelConfig:
    """The same model with YaRN by the smallest whole factor that reaches `length` tokens; unchanged where its own limit does.

    Qwen3's model cards reach 131,072 tokens so, with factor 4 over 32,768. Raises ConfigError for a model that is stretched already.
    """
    if length <= config.context_length:
        return config
    if config.rope_scaling is not None:
        raise ConfigError(f"the model's own config.json stretches it to {config.context_length} tokens; {length} are out of its reach")
    original = min(YARN_ORIGINAL_LENGTH, config.max_position_embeddings)
    factor = float(math.ceil(length / original))
    scaling = YarnScaling(factor=factor, original_max_position_embeddings=original, attention_factor=_attention_factor({}, factor))
    return replace(config, rope_scaling=scaling)


def _yarn(rope: dict, max_position_embeddings: int, path: Path) -> YarnScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(f"{path}: rope_type {kind!r} is not supported; use 'default' or 'yarn'")
    original = int(rope.get("original_max_position_embeddings") or max_position_embeddings)
    factor = float(rope.get("factor") or max_position_embeddings / original)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=_attention_factor(rope, factor),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        truncate=bool(rope.get("truncate", True)),
    )


def _attention_factor(rope: dict, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(float(rope["mscale"])) / mscale(float(rope["mscale_all_dim"]))
    return mscale(1.0)


def _eos_token_ids(model_dir: Path, raw: dict) -> tuple[int, ...]:
    """generation_config.json wins: it lists every token that ends a turn, config.json often only one."""
    generation = model_dir / "generation_config.json"
    ids = (_read_json(generation) if generation.exists() else {}).get("eos_token_id", raw.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: base_model must be a Hugging Face model directory") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
