"""Qwen2 and Qwen2.5: queries, keys and values have biases and no norms."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from skyrl_tx_server.model.families.layer_spec import (
    Attend,
    Family,
    LayerParams,
    ShardAxis,
    Weight,
    add_attention,
    add_mlp,
    attention_weights,
    mlp_weights,
    qkv_proj,
)
from skyrl_tx_server.model.layers import Rope, rotate
from skyrl_tx_server.model.lora.lora_math import LoraWeights
from skyrl_tx_server.model.model_config import ModelConfig


def weights(config: ModelConfig) -> dict[str, Weight]:
    names = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
    bias = Weight(names=names, widths=config.qkv_widths, split=ShardAxis.OUTPUTS)
    return attention_weights(config, heads={"qkv_bias": bias}) | mlp_weights(config)


def layer[Aux](
    config: ModelConfig,
    x: jax.Array,
    params: LayerParams,
    adapter: Mapping[str, LoraWeights] | None,
    rope: Rope,
    attend: Attend[Aux],
) -> tuple[jax.Array, Aux]:
    q, k, v = qkv_proj(config, x, params, adapter, bias=params["qkv_bias"])
    x, aux = add_attention(config, x, params, adapter, (rotate(q, rope), rotate(k, rope), v), attend)
    return add_mlp(config, x, params, adapter), aux


FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    weights=weights,
    layer=layer,
    expected={"use_sliding_window": False, "hidden_act": "silu"},
)
