"""Parts of a layer: RMS norm and rotary embedding."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx_server.model.model_config import Llama3Scaling, RopeSpec, YarnScaling
from skyrl_tx_server.model.reductions import sum_last


class Rope(NamedTuple):
    """The cos and sin of rotary angles by position, each [B, T, rope_dim / 2]."""

    cos: jax.Array
    sin: jax.Array


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Normalize in float32 and scale in the dtype of x, as Hugging Face does."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(sum_last(wide * wide) / x.shape[-1] + eps)
    return normed.astype(x.dtype) * weight


def rope_tables(rope: RopeSpec, positions: jax.Array | np.ndarray, dtype: jnp.dtype = jnp.float32) -> Rope:
    """Return cos and sin for positions [B, T], computed in float32 and cast to `dtype`."""
    scale = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    angles = positions[..., None].astype(jnp.float32) * _inverse_frequencies(rope)
    return Rope((jnp.cos(angles) * scale).astype(dtype), (jnp.sin(angles) * scale).astype(dtype))


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotate x [B, T, heads, head_dim]. As in Hugging Face, a rotary pair consists of element i of the first
    half and element i of the second half of a head."""
    cos, sin = rope.cos[:, :, None], rope.sin[:, :, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _inverse_frequencies(rope: RopeSpec) -> np.ndarray:
    """Return the inverse frequencies [rope_dim / 2] float32, a constant of the program."""
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / rope.dim
    frequencies = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    match rope.scaling:
        case YarnScaling() as yarn:
            return _yarn_frequencies(frequencies, yarn, rope)
        case Llama3Scaling() as llama3:
            return _llama3_frequencies(frequencies, llama3)
        case None:
            return frequencies


def _llama3_frequencies(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Scale each frequency according to its number of rotations within the original context length.
    Frequencies with at least `high_freq_factor` rotations are kept, frequencies with at most
    `low_freq_factor` rotations are divided by `factor`, and frequencies between these limits are
    interpolated."""
    rotations = scaling.original_max_position_embeddings * frequencies / np.float32(2 * math.pi)
    kept = np.clip(
        (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1
    )
    return (frequencies / scaling.factor * (1 - kept) + frequencies * kept).astype(np.float32)


def _yarn_frequencies(frequencies: np.ndarray, yarn: YarnScaling, rope: RopeSpec) -> np.ndarray:
    """Divide low frequencies by `factor`, keep high frequencies, and interpolate between them
    (arXiv:2309.00071, section 3.2)."""

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
        high += 0.001  # avoids a division by zero, as in Hugging Face
    interpolated = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (frequencies / yarn.factor * interpolated + frequencies * (1 - interpolated)).astype(np.float32)
