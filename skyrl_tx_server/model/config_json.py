"""Convert the config.json of a Hugging Face directory to a `ModelConfig`, and back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.files.fp8 import block_size
from skyrl_tx_server.files.json_file import read_json_object, write_json
from skyrl_tx_server.model.families.layer_spec import Family
from skyrl_tx_server.model.families.qwen3 import FULL, SLIDING
from skyrl_tx_server.model.families.table import FAMILIES, family_of
from skyrl_tx_server.model.model_config import (
    Llama3Scaling,
    ModelConfig,
    YarnScaling,
    attention_factor,
    yarn_context,
)

DEFAULT_ROPE_THETA = 10_000.0  # Hugging Face's default
ORIGINAL_LENGTH = "original_max_position_embeddings"  # an entry of the rope settings or of config.json itself
SIZES = (  # the entries of config.json that must be at least 1
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "moe_intermediate_size", "num_experts", "num_local_experts"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_routed_experts", "n_group", "topk_group", "max_position_embeddings"),
)
NEUTRAL = {
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "embedding_multiplier": 1,
    "final_logit_softcapping": None,
    "is_causal": True,
    "logit_scale": 1,
    "logits_scaling": 1,
    "no_rope_layers": None,
    "query_pre_attn_scalar": None,
    "residual_multiplier": 1,
    "scale_depth": None,
    "scale_emb": 1,
}
"""Settings that change the logits of other model types -> their value without effect. A config.json whose
model_type was replaced by that of a supported family may still have them."""


def load_model_config(model_dir: Path) -> ModelConfig:
    """Read config.json, and the stop tokens of generation_config.json if that file exists. Raises ConfigError
    if config.json is missing, if a file is invalid, or if no family supports the model."""
    path = model_dir / "config.json"
    raw = _read_json(path)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"{path}: model_type={model_type!r} is not supported; use one of {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[model_type]
    for name, expected in (NEUTRAL | {**family.expected}).items():
        if raw.get(name, expected) not in (expected, None):
            raise ConfigError(
                f"{path}: {name}={raw[name]!r} is not supported; the only supported value is {expected!r}"
            )
    block_size(raw, path)
    try:
        for name in SIZES:
            if (size := raw.get(name)) is not None and int(size) < 1:
                raise ConfigError(f"{name}={size} must be at least 1")
        config = family.read(raw, _model_config(raw, model_type, family, model_dir))
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]!r} is missing") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"{path}: num_attention_heads={config.num_heads} must be a multiple of "
            f"num_key_value_heads={config.num_kv_heads}"
        )
    layer_types = {*(raw.get("layer_types") or ())} - {FULL}
    if raw.get("use_sliding_window") is False:
        layer_types -= {SLIDING}  # transformers computes full attention in sliding layers, too
    if not config.sliding_windows and (raw.get("use_sliding_window") or layer_types):
        raise ConfigError(
            f"{path}: use_sliding_window must be false and every entry of layer_types must be {FULL!r}, "
            f"because this server computes full attention in all layers of this model "
            f"(model_type={model_type!r})"
        )
    if config.experts is not None and not 1 <= config.experts.per_token <= config.experts.count:
        raise ConfigError(
            f"{path}: num_experts_per_tok={config.experts.per_token} must be between 1 and the number of "
            f"experts, {config.experts.count}"
        )
    return config


def config_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json that `load_model_config` and Hugging Face read as `config`."""
    family, eos = family_of(config), config.eos_token_ids
    return {
        "architectures": [family.architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        **family.expected,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_parameters": _rope_json(config),
        "eos_token_id": list(eos) if len(eos) != 1 else eos[0],
        "dtype": dtype,
        **family.write(config),
    }


def _model_config(raw: dict[str, Any], model_type: str, family: Family, model_dir: Path) -> ModelConfig:
    num_heads, hidden_size = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    max_position_embeddings = int(raw.get("max_position_embeddings", 32768))
    rope = _rope(raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {})
    if raw.get(ORIGINAL_LENGTH) is not None:  # takes precedence in transformers
        rope[ORIGINAL_LENGTH] = raw[ORIGINAL_LENGTH]
    rotated = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if rotated not in (None, 1):
        raise ConfigError(
            f"partial_rotary_factor={rotated!r} is not supported; the only supported value is 1"
        )
    return ModelConfig(
        model_type=model_type,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or family.default_head_dim or hidden_size // num_heads),
        rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", DEFAULT_ROPE_THETA))),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_position_embeddings=max_position_embeddings,
        rope_scaling=_rope_scaling(rope, max_position_embeddings),
        eos_token_ids=_eos_token_ids(model_dir, raw),
    )


def _rope(scaling: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Merge rope_scaling, the entry of transformers 4, with rope_parameters, the entry of transformers 5.

    Raises ConfigError if they have different values for a name, because transformers 5 would ignore all of
    rope_parameters in this case.
    """
    scaling = ({"rope_type": scaling["type"]} if "type" in scaling else {}) | {**scaling}
    for name in sorted(scaling.keys() & {**parameters}.keys()):
        if scaling[name] != parameters[name]:
            raise ConfigError(
                f"rope_scaling has {name}={scaling[name]!r} and rope_parameters has {parameters[name]!r}; "
                "keep one value, in rope_parameters"
            )
    return scaling | parameters


def extend_context(model_dir: Path, length: int) -> None:
    """Write the YaRN scaling of `yarn_context` into config.json: into `rope_parameters` if this entry exists
    (transformers 5), else into `rope_scaling`. Raise ConfigError as `yarn_context` does."""
    config = load_model_config(model_dir)
    extended = yarn_context(config, length)
    if extended is config or not isinstance(extended.rope_scaling, YarnScaling):
        return
    raw = _read_json(model_dir / "config.json")
    entry = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = (raw.pop("rope_scaling", None) or {}) | (raw.get("rope_parameters") or {})
    rope.pop("type", None)  # the former name of rope_type
    raw.pop(ORIGINAL_LENGTH, None)  # would take precedence over the entry below
    raw[entry] = rope | {
        "rope_type": "yarn",
        "factor": extended.rope_scaling.factor,
        ORIGINAL_LENGTH: extended.rope_scaling.original_max_position_embeddings,
    }
    write_json(model_dir / "config.json", raw)


def _rope_scaling(rope: dict[str, Any], max_position_embeddings: int) -> YarnScaling | Llama3Scaling | None:
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError("rope_parameters per layer type are not supported; use one rope for all layers")
    if rope.get("factor") is not None and not float(rope["factor"]) >= 1:
        raise ConfigError(f"rope_scaling has factor={rope['factor']!r}; it must be a number of at least 1")
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return None
        case "llama3":
            low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
            if not low < high:
                raise ConfigError(
                    f"rope_scaling has low_freq_factor={low} and high_freq_factor={high}; high_freq_factor "
                    "must be larger"
                )
            return Llama3Scaling(
                factor=float(rope["factor"]),
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position_embeddings=int(rope[ORIGINAL_LENGTH]),
            )
        case "yarn":
            original = int(rope.get(ORIGINAL_LENGTH) or max_position_embeddings)
            factor = float(rope.get("factor") or max_position_embeddings / original)
            return YarnScaling(
                factor=factor,
                original_max_position_embeddings=original,
                attention_factor=attention_factor(rope, factor),
                beta_fast=float(rope.get("beta_fast") or 32.0),
                beta_slow=float(rope.get("beta_slow") or 1.0),
                truncate=bool(rope.get("truncate", True)),
                mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
            )
        case kind:
            raise ConfigError(f"rope_type {kind!r} is not supported; use 'default', 'yarn' or 'llama3'")


def _rope_json(config: ModelConfig) -> dict[str, Any]:
    kinds = {YarnScaling: "yarn", Llama3Scaling: "llama3"}
    kind = "default" if config.rope_scaling is None else kinds[type(config.rope_scaling)]
    scaling = {} if config.rope_scaling is None else asdict(config.rope_scaling)
    return {"rope_type": kind, "rope_theta": config.rope_theta, **scaling}


def _eos_token_ids(model_dir: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a turn. generation_config.json takes precedence, because config.json often
    has only one of these tokens."""
    generation = model_dir / "generation_config.json"
    ids = _read_json(generation).get("eos_token_id") if generation.exists() else None
    if ids is None:
        ids = raw.get("eos_token_id")
    if ids is None:
        return ()
    eos_token_ids = tuple(ids) if isinstance(ids, list) else (ids,)
    if not all(type(token) is int and token >= 0 for token in eos_token_ids):
        raise ConfigError(f"eos_token_id={ids!r} of config.json or generation_config.json: not token ids")
    return eos_token_ids


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: base_model must be a Hugging Face directory") from None
    except ValueError as error:
        raise ConfigError(f"{path} is invalid: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
