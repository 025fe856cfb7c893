"""The table of families, by the `model_type` of config.json. A new one is a file like `llama.py` and a line here."""

from __future__ import annotations

from skyrl_tx_server.model import llama, qwen2, qwen3, qwen3_moe
from skyrl_tx_server.model.config import ModelConfig
from skyrl_tx_server.model.family import Family

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
}


def family_of(config: ModelConfig) -> Family:
    return FAMILIES[config.model_type]
