"""The pieces of a layer: RMS norm, rotary embedding, causal attention over packed rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx_server.model.model_config import Llama3Scaling, ModelConfig, YarnScaling

QUERY_BLOCKS = (
    4  # each is one more attention to compile; four save 3/8 of a full causal mask's work, eight only 7/16
)
MIN_QUERY_BLOCK, MAX_QUERY_BLOCK = 256, 1024


class Rope(NamedTuple):
    """Rotary tables for given positions, each [B, T, rope_dim / 2]."""

    cos: jax.Array
    sin: jax.Array


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Normalise in float32, scale in x's dtype (Hugging Face's order)."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)).astype(
        x.dtype
    ) * weight


def rope_tables(
    config: ModelConfig, positions: jax.Array | np.ndarray, dtype: jnp.dtype = jnp.float32
) -> Rope:
    """cos and sin for positions [B, T], computed in float32 and cast to the activations' dtype."""
    scale = config.rope_scaling.attention_factor if isinstance(config.rope_scaling, YarnScaling) else 1.0
    angles = positions[..., None].astype(jnp.float32) * _inverse_frequencies(config)
    return Rope((jnp.cos(angles) * scale).astype(dtype), (jnp.sin(angles) * scale).astype(dtype))


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotate x [B, T, heads, head_dim], halves paired as in Hugging Face."""
    cos, sin = rope.cos[:, :, None], rope.sin[:, :, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def packed_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids_BT: jax.Array | np.ndarray
) -> jax.Array:
    """Causal attention of q [B, T, H, hd] over k, v [B, T, K, hd], each token within its own segment.

    Long rows go block by block over the queries: a block sees only the keys before its end, and its probabilities are
    recomputed in the backward pass, so [T, T] never lies in memory whole.
    """
    length = q.shape[1]
    block = min(max(MIN_QUERY_BLOCK, -(-length // QUERY_BLOCKS)), MAX_QUERY_BLOCK)
    if length <= block:
        return _attend_block(q, k, v, segment_ids_BT, segment_ids_BT, first=0)
    attend = jax.checkpoint(_attend_block, static_argnums=(5,))
    blocks = []
    for first in range(0, length, block):
        end = min(first + block, length)
        blocks.append(
            attend(
                q[:, first:end],
                k[:, :end],
                v[:, :end],
                segment_ids_BT[:, first:end],
                segment_ids_BT[:, :end],
                first,
            )
        )
    return jnp.concatenate(blocks, axis=1)


def within_segments(
    segment_ids_BT: jax.Array | np.ndarray,
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """`packed_attention` of rows laid out so, as `hidden_states` takes it."""
    return lambda q, k, v: packed_attention(q, k, v, segment_ids_BT)


def _attend_block(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_segments: jax.Array | np.ndarray,
    key_segments: jax.Array | np.ndarray,
    first: int,
) -> jax.Array:
    causal = (first + jnp.arange(q.shape[1]))[:, None] >= jnp.arange(k.shape[1])[None, :]
    same = query_segments[:, :, None] == key_segments[:, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=(causal[None] & same)[:, None])


def _inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """[rope_dim / 2] float32, known when the program is traced."""
    exponents = np.arange(0, config.rope_dim, 2, dtype=np.float32) / config.rope_dim
    plain = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    match config.rope_scaling:
        case YarnScaling() as yarn:
            return _yarn_frequencies(plain, yarn, config)
        case Llama3Scaling() as llama3:
            return _llama3_frequencies(plain, llama3)
    return plain


def _llama3_frequencies(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Keep what turns `high_freq_factor` times or more within the original length, slow what turns `low_freq_factor` times or less."""
    turns = scaling.original_max_position_embeddings * plain / np.float32(2 * math.pi)
    kept = np.clip(
        (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1
    )
    return (plain / scaling.factor * (1 - kept) + plain * kept).astype(np.float32)


def _yarn_frequencies(plain: np.ndarray, yarn: YarnScaling, config: ModelConfig) -> np.ndarray:
    """Interpolate slow dimensions, leave fast ones, ramp between (YaRN, arXiv:2309.00071, section 3.2)."""

    def dimension(rotations: float) -> float:
        return (
            config.rope_dim
            * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(config.rope_theta))
        )

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rope_dim - 1)
    if low == high:
        high += 0.001  # Hugging Face's guard against a division by zero
    interpolated = np.clip((np.arange(config.rope_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (plain / yarn.factor * interpolated + plain * (1 - interpolated)).astype(np.float32)
