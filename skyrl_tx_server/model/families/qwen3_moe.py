"""Qwen3 with a mixture of experts in every layer (30B-A3B, 235B-A22B) and the attention of dense Qwen3
without sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from skyrl_tx_server.model.experts import add_experts, expert_weights
from skyrl_tx_server.model.families.layer_spec import Family, Weight
from skyrl_tx_server.model.families.qwen3 import EXPECTED, normed_attention_weights
from skyrl_tx_server.model.model_config import Experts, ModelConfig


def weights(config: ModelConfig) -> dict[str, Weight]:
    return normed_attention_weights(config) | expert_weights(config)


def read(raw: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    # transformers 5 writes num_local_experts, earlier versions num_experts
    experts = Experts(
        count=int(raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"]),
        per_token=int(raw["num_experts_per_tok"]),
        normalized=bool(raw.get("norm_topk_prob", False)),
    )
    return replace(config, intermediate_size=int(raw["moe_intermediate_size"]), experts=experts)


def write(config: ModelConfig) -> dict[str, Any]:
    assert config.experts is not None
    return {
        # in config.json, `intermediate_size` is the width of dense layers
        "moe_intermediate_size": config.intermediate_size,
        "num_experts": config.experts.count,
        "num_experts_per_tok": config.experts.per_token,
        "norm_topk_prob": config.experts.normalized,
    }


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    weights=weights,
    mlp_block=add_experts,
    expected={**EXPECTED, "use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    read=read,
    write=write,
)
