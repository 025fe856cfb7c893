"""Attention over packed sequences with all scores in memory, for scripts and as a reference in tests."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx_server.model.model_config import AttentionSpec


def within_segments(
    segment_ids_BT: jax.Array | np.ndarray,
) -> Callable[[AttentionSpec, jax.Array, jax.Array, jax.Array], jax.Array]:
    """Return the argument `attend` of `transformer.hidden_states` for causal attention within each segment. A
    segment consists of the positions with the same value of `segment_ids_BT`."""

    def attend(spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None, :]
        visible = distance >= 0
        if spec.sliding_window is not None:
            visible &= distance < spec.sliding_window
        same = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
        return jax.nn.dot_product_attention(q, k, v, mask=(visible[None] & same)[:, None], scale=spec.scale)

    return attend
