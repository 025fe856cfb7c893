"""A 2-layer Qwen3 with random weights and adapters, small enough that every test compiles in a second or
two."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

import jax
import numpy as np

from skyrl_tx_server.engine.operations import LoraSpec, TrainDatum
from skyrl_tx_server.model.lora.adapter import Adapter, adapted_modules, init_adapter
from skyrl_tx_server.model.model_config import AttentionSpec, ModelConfig, RopeSpec
from skyrl_tx_server.model.transformer import Params, init_params

FIXTURES = Path(__file__).parent.parent / "fixtures" / "qwen3"

CONFIG = ModelConfig(
    vocab_size=53,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    tie_word_embeddings=True,
    max_position_embeddings=512,
    eos_token_ids=(1,),
)
SPEC = LoraSpec(rank=3, seed=7)
MAX_RANK = 4


def attention_spec(head_dim: int) -> AttentionSpec:
    """Return the attention settings for heads of this width."""
    rope = RopeSpec(dim=head_dim, theta=1e4)
    return AttentionSpec(scale=head_dim**-0.5, rope=rope, sliding_window=None)


@lru_cache
def params(dtype: str = "float32") -> Params:
    """Return weights that are larger than those of a fresh model, so that logits differ between tokens."""
    random_params = jax.jit(partial(init_params, CONFIG))(jax.random.key(0))
    return jax.tree.map(
        lambda leaf: (np.asarray(leaf) * (8.0 if leaf.ndim > 2 or leaf.shape[0] == 53 else 1.0)).astype(
            dtype
        ),
        random_params,
    )


def adapter(spec: LoraSpec = SPEC) -> Adapter:
    """Return an adapter like a trained one: B is random in the first `spec.rank` rows for the projections
    that `spec` trains, and zero elsewhere.

    The arrays are new device arrays in each call.
    """
    random = np.random.default_rng(3)
    adapter_arrays = init_adapter(CONFIG, spec, MAX_RANK)

    for _, module in adapted_modules(CONFIG, adapter_arrays):
        trained = np.any(module.a)
        for b in module.b:
            b[..., : spec.rank, :] = random.normal(0, 0.02, b[..., : spec.rank, :].shape) * trained
    return jax.device_put(adapter_arrays)


def data(
    lengths: tuple[int, ...], *, weights: bool = False, advantages: bool = False
) -> tuple[TrainDatum, ...]:
    """Return one datum for each length, with random tokens. `advantages` also adds logprobs of the
    sampler."""
    random = np.random.default_rng(0)
    drawn = []
    for length in lengths:
        tokens = random.integers(0, CONFIG.vocab_size, length + 1).astype(np.int32)
        drawn.append(
            TrainDatum(
                tokens=tokens[:-1],
                target_tokens=tokens[1:],
                weights=random.normal(size=length).astype(np.float32) if weights else None,
                logprobs=-random.uniform(2, 6, length).astype(np.float32) if advantages else None,
                advantages=random.normal(size=length).astype(np.float32) if advantages else None,
            )
        )
    return tuple(drawn)
