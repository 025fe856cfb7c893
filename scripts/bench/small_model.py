"""The model of the engine's benchmarks: a random Qwen3 with 27M parameters and a tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer, models, pre_tokenizers

from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.transformer import init_params
from skyrl_tx_server.model.weights import save_model

CONFIG = ModelConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1536,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
RANK = 32


def make_model(
    directory: Path, config: ModelConfig = CONFIG, *, layers: int | None = None, dtype: str = "float32"
) -> Path:
    """Write a random model of `config` and a tokenizer as a Hugging Face directory, which all compared
    programs (`scripts/bench/sides`) can read. `layers` replaces the number of layers of `config` unless it is
    None."""
    config = replace(config, num_layers=layers or config.num_layers)
    save_model(
        jax.jit(partial(init_params, config, dtype=jnp.dtype(dtype)))(jax.random.key(0)), config, directory
    )
    tokenizer = Tokenizer(
        models.WordLevel({f"w{token}": token for token in range(config.vocab_size)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8"
    )
    return directory
