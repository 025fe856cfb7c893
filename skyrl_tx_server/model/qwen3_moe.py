"""Qwen3 with a mixture of experts in every layer (30B-A3B, 235B-A22B): the attention of the dense models, experts for the perceptron."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from skyrl_tx_server.model.config import ModelConfig
from skyrl_tx_server.model.experts import add_experts, expert_weights
from skyrl_tx_server.model.family import Attend, Family, LayerParams, Weight
from skyrl_tx_server.model.layers import Rope
from skyrl_tx_server.model.low_rank import LowRank
from skyrl_tx_server.model.qwen3 import EXPECTED, HEAD_DIM, add_normed_attention, normed_attention_weights


def weights(config: ModelConfig) -> dict[str, Weight]:
    return normed_attention_weights(config) | expert_weights(config)


def layer[Aux](
    config: ModelConfig, x: jax.Array, params: LayerParams, adapter: Mapping[str, LowRank] | None, rope: Rope, attend: Attend[Aux]
) -> tuple[jax.Array, Aux]:
    x, aux = add_normed_attention(config, x, params, adapter, rope, attend)
    return add_experts(config, x, params, adapter), aux


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    weights=weights,
    layer=layer,
    expected={**EXPECTED, "decoder_sparse_step": 1, "mlp_only_layers": []},
    default_head_dim=HEAD_DIM,
    has_experts=True,
)
