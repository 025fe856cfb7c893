"""The key-value cache of the decode slots: head-major, one pair of arrays per layer.

Head-major [slots, K, S, hd] lets attention read the cache as it lies; token-major would be transposed at every step. A list of layers
rather than one stacked array lets each decode step touch a layer without copying the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from skyrl_tx_server.model.config import ModelConfig
from skyrl_tx_server.model.lora import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    """One layer's keys (normed and rotated) and values; the leading axis is the slot."""

    keys: jax.Array  # [slots, K, S, hd]
    values: jax.Array  # [slots, K, S, hd]


type KVCache = tuple[LayerCache, ...]


def cache_bytes_per_slot(config: ModelConfig, length: int, dtype: np.dtype) -> int:
    return 2 * config.num_layers * config.num_kv_heads * length * config.head_dim * np.dtype(dtype).itemsize


@partial(jax.jit, static_argnames=("config", "slots", "length", "dtype"))
def empty_cache(*, config: ModelConfig, slots: int, length: int, dtype: np.dtype) -> KVCache:
    shape = (slots, config.num_kv_heads, length, config.head_dim)
    return tuple(LayerCache(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype)) for _ in range(config.num_layers))


def window_of(cache: KVCache, length: int) -> KVCache:
    """The first `length` positions of every slot."""
    return jax.tree.map(lambda array: array[:, :, :length], cache)


def write_prompt(cache: KVCache, prompt: KVCache, slots_R: Leaf, num_slots: Leaf) -> KVCache:
    """Copy one prompt's cache (leaves [1, K, P, hd]) into the first `num_slots` of `slots_R`, from position 0."""

    slots_R = jnp.asarray(slots_R)

    def copy(index: jax.Array, cache: KVCache) -> KVCache:
        at = (slots_R[index], jnp.int32(0), jnp.int32(0), jnp.int32(0))
        return jax.tree.map(lambda whole, part: jax.lax.dynamic_update_slice(whole, part, at), cache, prompt)

    return jax.lax.fori_loop(0, num_slots, copy, cache)


def write_block(cache: KVCache, block: KVCache, starts_B: Leaf) -> KVCache:
    """Append a decode block's cache (leaves [slots, K, steps, hd]) to every slot at its own position.

    Close to the end of the cache the position is moved back until the block fits, which spoils the slot: that can only happen to a slot
    whose row has reached its length limit and is done.
    """

    starts_B = jnp.asarray(starts_B)

    def append(slot: jax.Array, cache: KVCache) -> KVCache:
        at = (slot, jnp.int32(0), starts_B[slot], jnp.int32(0))

        def one(whole: jax.Array, part: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(whole, jax.lax.dynamic_slice_in_dim(part, slot, 1), at)

        return jax.tree.map(one, cache, block)

    return jax.lax.fori_loop(0, starts_B.shape[0], append, cache)
