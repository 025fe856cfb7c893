"""Llama 2 and 3: neither biases nor norms of the heads. Llama 3.1's rotary scaling is
`config.Llama3Scaling`."""

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
from skyrl_tx_server.model.layers import Rope, rotate
from skyrl_tx_server.model.lora.lora_math import LoraWeights
from skyrl_tx_server.model.model_config import ModelConfig


def weights(config: ModelConfig) -> dict[str, Weight]:
    return attention_weights(config) | mlp_weights(config)


def layer[Aux](
    config: ModelConfig,
    x: jax.Array,
    params: LayerParams,
    adapter: Mapping[str, LoraWeights] | None,
    rope: Rope,
    attend: Attend[Aux],
) -> tuple[jax.Array, Aux]:
    q, k, v = qkv_proj(config, x, params, adapter)
    x, aux = add_attention(config, x, params, adapter, (rotate(q, rope), rotate(k, rope), v), attend)
    return add_mlp(config, x, params, adapter), aux


FAMILY = Family(
    architecture="LlamaForCausalLM",
    weights=weights,
    layer=layer,
    expected={"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"},
)
