"""The pieces of a layer: RMS norm, rotary embedding, causal attention over packed rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx_server.model.attention.attention_spec import AttentionSpec
from skyrl_tx_server.model.model_config import Llama3Scaling, RopeSpec, YarnScaling

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


def rope_tables(rope: RopeSpec, positions: jax.Array | np.ndarray, dtype: jnp.dtype = jnp.float32) -> Rope:
    """Return cos and sin for positions [B, T], computed in float32 and cast to the activations' dtype."""
    scale = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    angles = positions[..., None].astype(jnp.float32) * _inverse_frequencies(rope)
    return Rope((jnp.cos(angles) * scale).astype(dtype), (jnp.sin(angles) * scale).astype(dtype))


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotate x [B, T, heads, head_dim], halves paired as in Hugging Face."""
    cos, sin = rope.cos[:, :, None], rope.sin[:, :, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def packed_attention(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids_BT: jax.Array | np.ndarray
) -> jax.Array:
    """Causal attention of q [B, T, H, hd] over k, v [B, T, K, hd], each token within its own segment.

    A long sequence is computed in blocks of queries: a block reads only the keys before its end, and the
    backward pass recomputes its probabilities, so the scores [T, T] are never in memory as a whole.
    """
    length = q.shape[1]
    block = min(max(MIN_QUERY_BLOCK, -(-length // QUERY_BLOCKS)), MAX_QUERY_BLOCK)
    if length <= block:
        return _attend_block(spec, q, k, v, segment_ids_BT, segment_ids_BT, first=0)
    attend = jax.checkpoint(_attend_block, static_argnums=(0, 6))
    blocks = []
    for first in range(0, length, block):
        end = min(first + block, length)
        blocks.append(
            attend(
                spec,
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
) -> Callable[[AttentionSpec, jax.Array, jax.Array, jax.Array], jax.Array]:
    """Return `packed_attention` over these segments, as `hidden_states` takes it."""
    return lambda spec, q, k, v: packed_attention(spec, q, k, v, segment_ids_BT)


def _attend_block(
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_segments: jax.Array | np.ndarray,
    key_segments: jax.Array | np.ndarray,
    first: int,
) -> jax.Array:
    distance = (first + jnp.arange(q.shape[1]))[:, None] - jnp.arange(k.shape[1])[None, :]
    seen = (
        distance >= 0 if spec.sliding_window is None else (distance >= 0) & (distance < spec.sliding_window)
    )
    same = query_segments[:, :, None] == key_segments[:, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=(seen[None] & same)[:, None], scale=spec.scale)


def _inverse_frequencies(rope: RopeSpec) -> np.ndarray:
    """[rope_dim / 2] float32, known when the program is traced."""
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / rope.dim
    plain = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    match rope.scaling:
        case YarnScaling() as yarn:
            return _yarn_frequencies(plain, yarn, rope)
        case Llama3Scaling() as llama3:
            return _llama3_frequencies(plain, llama3)
    return plain


def _llama3_frequencies(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Keep what turns `high_freq_factor` times or more within the original length, slow what turns
    `low_freq_factor` times or less."""
    turns = scaling.original_max_position_embeddings * plain / np.float32(2 * math.pi)
    kept = np.clip(
        (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1
    )
    return (plain / scaling.factor * (1 - kept) + plain * kept).astype(np.float32)


def _yarn_frequencies(plain: np.ndarray, yarn: YarnScaling, rope: RopeSpec) -> np.ndarray:
    """Interpolate slow dimensions, leave fast ones, ramp between (YaRN, arXiv:2309.00071, section 3.2)."""

    def dimension(rotations: float) -> float:
        return (
            rope.dim
            * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # Hugging Face's guard against a division by zero
    interpolated = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (plain / yarn.factor * interpolated + plain * (1 - interpolated)).astype(np.float32)
