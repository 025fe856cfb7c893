"""The table of families, by the `model_type` of config.json. A new one is a file like `llama.py` and a line here."""

from __future__ import annotations

from skyrl_tx_server.model.families import deepseek_v3, llama, qwen2, qwen3, qwen3_moe
from skyrl_tx_server.model.families.layer_spec import Family, Stack
from skyrl_tx_server.model.model_config import ModelConfig

FAMILIES: dict[str, Family] = {
    "deepseek_v3": deepseek_v3.FAMILY,
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
}


def family_of(config: ModelConfig) -> Family:
    return FAMILIES[config.model_type]


def stacks_of(config: ModelConfig) -> tuple[Stack, ...]:
    """All layers of a model from the first to the last."""
    family = family_of(config)
    dense = 0 if config.experts is None else config.experts.dense_layers
    rest = Stack(layers=range(dense, config.num_layers), weights=family.weights(config))
    if not dense:
        return (rest,)
    assert family.first_weights is not None, f"{config.model_type} has no dense layers before its mixtures"
    return Stack(layers=range(dense), weights=family.first_weights(config)), rest
