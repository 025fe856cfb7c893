"""The learning rate of supervised fine-tuning, by the rule of tinker-cookbook."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub

LORA_RATE = 5e-4  # ten times the rate of full fine-tuning, for a hidden size of REFERENCE_SIZE
REFERENCE_SIZE = 2000
EXPONENTS = {"llama": 0.781}  # by model_type
OTHER_EXPONENT = 0.0775


def recommended_rate(hidden_size: int | None, model_type: str = "") -> float:
    """Return the learning rate for a LoRA adapter. If the hidden size is unknown (None), the rate is
    LORA_RATE.

    Source of the formula: tinker-cookbook, `hyperparam_utils.py`.

    >>> [round(recommended_rate(size, kind), 6) for size, kind in [(576, "llama"), (2560, "qwen3")]]
    [0.001322, 0.000491]
    """
    if hidden_size is None:
        return LORA_RATE
    return LORA_RATE * (REFERENCE_SIZE / hidden_size) ** EXPONENTS.get(model_type, OTHER_EXPONENT)


def size_of(*models: str | None) -> tuple[int | None, str]:
    """Return hidden size and model type of the first of `models` whose config.json states a hidden size.

    A model is a directory, or a repository in the hub's cache. Returns (None, "") if no model has such a
    file.
    """
    for model in models:
        try:
            path = _config_file(model) if model else None
            if path is not None:
                config = json.loads(path.read_text(encoding="utf-8"))
                return int(config["hidden_size"]), str(config.get("model_type", ""))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None, ""


def _config_file(model: str) -> Path | None:
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory / "config.json"
    cached = huggingface_hub.try_to_load_from_cache(model, "config.json")
    return Path(cached) if isinstance(cached, str) else None
