"""The family of Llama 2 and Llama 3. `model_config.Llama3Scaling` is the context extension of Llama 3.1."""

from __future__ import annotations

from skyrl_tx_server.model.families.layer_spec import Family, Weight, attention_weights, mlp_weights
from skyrl_tx_server.model.model_config import ModelConfig


def weights(config: ModelConfig) -> dict[str, Weight]:
    return attention_weights(config) | mlp_weights(config)


FAMILY = Family(
    architecture="LlamaForCausalLM",
    weights=weights,
    expected={"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"},
)
