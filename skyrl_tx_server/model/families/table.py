"""The table of model families. Its keys are the values of `model_type` in config.json."""

from __future__ import annotations

from itertools import groupby

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
    """Return the layers of a model as stacks, in order. Consecutive layers with the same kinds of weights and
    attention form one stack."""
    family = family_of(config)
    num_dense = 0 if config.experts is None else config.experts.dense_layers
    stacks = []
    for (is_dense, attention), group in groupby(
        range(config.num_layers), lambda layer: (layer < num_dense, family.attention(config, layer))
    ):
        layers = list(group)
        weights = family.first_weights if is_dense else family.weights
        assert weights is not None, f"{config.model_type} needs first_weights for its dense first layers"
        stacks.append(
            Stack(layers=range(layers[0], layers[-1] + 1), weights=weights(config), attention=attention)
        )
    return tuple(stacks)
