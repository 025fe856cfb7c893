"""Configurations with the shapes of Qwen3 models, and a tiny configuration for tests. Benchmarks and
compilation checks use them without trained weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from scripts.bench.small_model import CONFIG
from skyrl_tx_server.model.families.layer_spec import Weight
from skyrl_tx_server.model.families.table import stacks_of
from skyrl_tx_server.model.model_config import Experts, ModelConfig

QWEN3 = replace(
    CONFIG, vocab_size=151_936, num_heads=32, num_kv_heads=8, head_dim=128, max_position_embeddings=40_960
)
MODELS = {
    "4b": replace(QWEN3, hidden_size=2560, intermediate_size=9728, num_layers=36),
    "8b": replace(
        QWEN3, hidden_size=4096, intermediate_size=12_288, num_layers=36, tie_word_embeddings=False
    ),
    "32b": replace(
        QWEN3,
        hidden_size=5120,
        intermediate_size=25600,
        num_layers=64,
        num_heads=64,
        tie_word_embeddings=False,
    ),
    "30b-a3b": replace(
        QWEN3,
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=768,
        num_layers=48,
        num_kv_heads=4,
        experts=Experts(count=128, per_token=8, normalized=True),
        tie_word_embeddings=False,
    ),
    "tiny": replace(CONFIG, hidden_size=64, intermediate_size=128, num_layers=2, head_dim=16),
}


def matrix_size(model: ModelConfig) -> int:
    """Return the number of weights in the matrices of the layers and the head, all experts included."""
    return _size_of(model, lambda weight: prod(weight.shape))


def active_size(model: ModelConfig) -> int:
    """Return the number of weights by which each token is multiplied. It is `matrix_size` with only the
    `per_token` experts of a token instead of all experts."""
    per_token = 0 if model.experts is None else model.experts.per_token
    return _size_of(
        model,
        lambda weight: (
            prod(weight.shape) * per_token // weight.experts if weight.experts else prod(weight.shape)
        ),
    )


def _size_of(model: ModelConfig, size_of: Callable[[Weight], int]) -> int:
    layers = sum(
        len(stack.layers) * size_of(weight)
        for stack in stacks_of(model)
        for weight in stack.weights.values()
        if weight.inputs
    )
    return layers + model.vocab_size * model.hidden_size


def heads_size(model: ModelConfig) -> int:
    return model.num_layers * model.num_heads * model.head_dim


def projection_sizes(model: ModelConfig) -> list[tuple[int, tuple[int, ...]]]:
    """Return (number of inputs, number of outputs of each part) of each projection with an adapter in a layer
    of the last stack. Projections of experts are left out."""
    weights = stacks_of(model)[-1].weights.values()
    return [(weight.inputs, tuple(weight.widths)) for weight in weights if weight.is_projection]
