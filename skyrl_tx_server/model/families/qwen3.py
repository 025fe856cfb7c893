"""Qwen3, dense: queries and keys are normed before they are rotated."""

from __future__ import annotations

from collections.abc import Mapping

import jax

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

EXPECTED = {"attention_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
HEAD_DIM = 128


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


FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    weights=weights,
    layer=layer,
    expected=EXPECTED,
    default_head_dim=HEAD_DIM,
)
