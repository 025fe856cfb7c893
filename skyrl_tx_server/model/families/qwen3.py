"""Dense Qwen3: queries and keys are normalized before they are rotated. Layers may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.model.families.layer_spec import Family, Weight, attention_weights, mlp_weights
from skyrl_tx_server.model.model_config import ModelConfig

EXPECTED = {"attention_bias": False, "hidden_act": "silu"}
HEAD_DIM = 128  # the default of transformers' Qwen3Config
FULL, SLIDING = "full_attention", "sliding_attention"  # the values of `layer_types`
MAX_WINDOW_LAYERS = 28  # the default of transformers' Qwen3Config


def normed_attention_weights(config: ModelConfig) -> dict[str, Weight]:
    norms = {
        f"{name}_norm": Weight(names=(f"self_attn.{name}_norm.weight",), widths=(config.head_dim,))
        for name in "qk"
    }
    return attention_weights(config, more=norms)


def weights(config: ModelConfig) -> dict[str, Weight]:
    return normed_attention_weights(config) | mlp_weights(config)


def read(raw: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """If `use_sliding_window` is true, add the sliding windows, as transformers' Qwen3Config does.
    `layer_types` selects the layers with a window. Without `layer_types`, all layers from layer
    `max_window_layers` on have a window."""
    if not raw.get("use_sliding_window"):
        return config
    window, full_layers = int(raw["sliding_window"]), int(raw.get("max_window_layers", MAX_WINDOW_LAYERS))
    types = raw.get("layer_types") or [
        FULL if layer < full_layers else SLIDING for layer in range(config.num_layers)
    ]
    if window < 1 or len(types) != config.num_layers or not {FULL, SLIDING}.issuperset(types):
        raise ConfigError(
            f"sliding_window={window}, layer_types={types}: a window must have at least 1 position, and each "
            f"of the {config.num_layers} layers must be {FULL} or {SLIDING}"
        )
    return replace(config, sliding_windows=tuple(window if kind == SLIDING else None for kind in types))


def write(config: ModelConfig) -> dict[str, Any]:
    windows = {window for window in config.sliding_windows if window is not None}
    if not windows:
        return {"use_sliding_window": False}
    (window,) = windows
    types = [FULL if layer_window is None else SLIDING for layer_window in config.sliding_windows]
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": types.index(SLIDING),
        "layer_types": types,
    }


FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    weights=weights,
    expected=EXPECTED,
    default_head_dim=HEAD_DIM,
    read=read,
    write=write,
)
