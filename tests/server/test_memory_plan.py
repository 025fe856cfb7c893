"""The memory plan for training. test_command_line.py checks the other items of the plan."""

from __future__ import annotations

from pathlib import Path

from skyrl_tx_server.executor.memory_plan import plan_memory
from skyrl_tx_server.model.config_json import load_model_config
from tests.fakes.tiny_model import make_settings
from tests.server.tiny_qwen3 import FIXTURES


def test_the_plan_covers_a_context_longer_than_the_batch() -> None:
    plan = plan_memory(make_settings(FIXTURES / "tied", Path("unused"), train_tokens_per_batch=128))
    config = load_model_config(FIXTURES / "tied")
    training_item = plan.items[-1]
    assert (training_item.name, training_item.option) == (
        "a training batch with streams of 256 tokens",
        "max_context_length",
    )
    matrix_products = sum(config.qkv_widths) + config.qkv_widths[0] + 2 * config.intermediate_size
    assert training_item.num_bytes > 4 * 256 * config.num_layers * (config.hidden_size + matrix_products)
