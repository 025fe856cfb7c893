"""Qwen2 and Qwen2.5: the projections of queries, keys and values have biases."""

from __future__ import annotations

from skyrl_tx_server.model.families.layer_spec import (
    Family,
    ShardAxis,
    Weight,
    attention_weights,
    mlp_weights,
)
from skyrl_tx_server.model.model_config import ModelConfig


def weights(config: ModelConfig) -> dict[str, Weight]:
    names = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
    bias = Weight(names=names, widths=config.qkv_widths, split=ShardAxis.OUTPUTS)
    return attention_weights(config, more={"qkv_bias": bias}) | mlp_weights(config)


FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    weights=weights,
    expected={"use_sliding_window": False, "hidden_act": "silu"},
)
