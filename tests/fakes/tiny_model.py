"""Writes a two-layer random Qwen3 with a byte-level tokenizer as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from skyrl_tx_server.config.engine_options import EngineOptions
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.transformer import init_params
from skyrl_tx_server.model.weights import save_model

QUICK_TO_COMPILE = "--xla_backend_optimization_level=0"  # XLA flag for server processes
CONFIG = ModelConfig(
    vocab_size=260,  # 256 bytes and four ids that `byte_tokenizer` does not have
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
    max_position_embeddings=600,
    eos_token_ids=(257, 258),
)


def make_model(directory: Path, config: ModelConfig = CONFIG) -> Path:
    """Save a random model. Its matrices are scaled by 6, so that its distributions are far from uniform."""
    params = jax.jit(init_params, static_argnums=(0,))(config, jax.random.key(0))
    save_model(
        jax.tree.map(lambda leaf: np.asarray(leaf) * (6 if leaf.ndim > 1 else 1), params), config, directory
    )
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose token i is the i-th character of the sorted byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_settings(model_dir: Path, checkpoints_dir: Path, **changes: object) -> EngineOptions:
    settings: dict[str, object] = {
        "base_model": str(model_dir),
        "model_alias": "local/tiny",
        "checkpoints_dir": str(checkpoints_dir),
        "compilation_cache_dir": None,
        "dtype": "float32",
        "max_lora_rank": 8,
        "max_context_length": None,
        "max_num_seqs": 6,
        "decode_steps_per_dispatch": 8,
        "train_tokens_per_batch": 512,
        "max_models": 3,
        "max_loras": 2,
    }
    return EngineOptions(**(settings | changes))  # type: ignore[arg-type]
