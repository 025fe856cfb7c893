"""Qwen3, dense: queries and keys are normalised before they are rotated. Some layers may have a sliding
window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from skyrl_tx_server.errors import ConfigError
from skyrl_tx_server.model.families.layer_spec import (
    Attend,
    Family,
    LayerParams,
    Weight,
    add_attention,
    add_mlp,
    attention_weights,
    mlp_weights,
    qkv_proj,
)
from skyrl_tx_server.model.layers import Rope, rms_norm, rotate
from skyrl_tx_server.model.lora.lora_math import LoraWeights
from skyrl_tx_server.model.model_config import ModelConfig

EXPECTED = {"attention_bias": False, "hidden_act": "silu"}
HEAD_DIM = 128
FULL, SLIDING = "full_attention", "sliding_attention"  # the values of `layer_types`
MAX_WINDOW_LAYERS = 28  # of transformers' Qwen3Config, if config.json names none


def normed_attention_weights(config: ModelConfig) -> dict[str, Weight]:
    norms = {
        f"{name}_norm": Weight(names=(f"self_attn.{name}_norm.weight",), widths=(config.head_dim,))
        for name in "qk"
    }
    return attention_weights(config, heads=norms)


def add_normed_attention[Aux](
    config: ModelConfig,
    x: jax.Array,
    params: LayerParams,
    adapter: Mapping[str, LoraWeights] | None,
    rope: Rope,
    attend: Attend[Aux],
) -> tuple[jax.Array, Aux]:
    q, k, v = qkv_proj(config, x, params, adapter)
    q = rotate(rms_norm(q, params["q_norm"], config.rms_norm_eps), rope)
    k = rotate(rms_norm(k, params["k_norm"], config.rms_norm_eps), rope)
    return add_attention(config, x, params, adapter, (q, k, v), attend)


def weights(config: ModelConfig) -> dict[str, Weight]:
    return normed_attention_weights(config) | mlp_weights(config)


def layer[Aux](
    config: ModelConfig,
    x: jax.Array,
    params: LayerParams,
    adapter: Mapping[str, LoraWeights] | None,
    rope: Rope,
    attend: Attend[Aux],
) -> tuple[jax.Array, Aux]:
    x, aux = add_normed_attention(config, x, params, adapter, rope, attend)
    return add_mlp(config, x, params, adapter), aux


def read(raw: Mapping[str, Any], usual: ModelConfig) -> ModelConfig:
    """Read the sliding windows as transformers' Qwen3Config does: `layer_types`, or else all layers from
    `max_window_layers` on."""
    if not raw.get("use_sliding_window"):
        return usual
    window, full_layers = int(raw["sliding_window"]), int(raw.get("max_window_layers", MAX_WINDOW_LAYERS))
    types = raw.get("layer_types") or [
        FULL if layer < full_layers else SLIDING for layer in range(usual.num_layers)
    ]
    if window < 1 or len(types) != usual.num_layers or not {FULL, SLIDING}.issuperset(types):
        raise ConfigError(
            f"sliding_window={window}, layer_types={types}: a window has at least 1 position, and each of the "
            f"{usual.num_layers} layers is {FULL} or {SLIDING}"
        )
    return replace(usual, sliding_windows=tuple(window if kind == SLIDING else None for kind in types))


def write(config: ModelConfig) -> dict[str, Any]:
    windows = {window for window in config.sliding_windows if window is not None}
    if not windows:
        return {"use_sliding_window": False}
    (window,) = windows
    types = [FULL if of_layer is None else SLIDING for of_layer in config.sliding_windows]
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": types.index(SLIDING),
        "layer_types": types,
    }


FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    weights=weights,
    layer=layer,
    expected=EXPECTED,
    default_head_dim=HEAD_DIM,
    read=read,
    write=write,
)
