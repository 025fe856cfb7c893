"""Attention in prefill. Each tile of a prompt attends to the KV pages of the prompt. These pages already hold
the keys and values of the tile.

Keys are always read in the same groups of pages and in the same order. The attention of a token is therefore
bit-identical in every batch, and for every division of its prompt into prefill chunks. Keys and values that
decode steps compute differ in the last bits from those that prefill computes.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from skyrl_tx_server.model.attention.softmax import LOG2E, MASKED, ceil_max
from skyrl_tx_server.model.kernels.paged_kernel import prefill_attention, supports_head_dim
from skyrl_tx_server.model.kv_cache import PAGES, KVCache, Segment, local_pages, read_pages
from skyrl_tx_server.model.lora.lora_math import ArrayLike
from skyrl_tx_server.model.mesh import BATCH, OnEachDevice
from skyrl_tx_server.model.model_config import AttentionSpec, ModelConfig
from skyrl_tx_server.model.shapes import PAGE_SIZE

PAGES_AT_ONCE = 4
HEADS = PartitionSpec(None, None, "tensor")
"""The sharding of the queries [N, T, H, hd]: heads by `tensor`."""


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class PrefillTiles:
    """N tiles of T tokens of one or several prompts."""

    starts: ArrayLike  # [N] int32, the position of a tile's first token
    lengths: ArrayLike  # [N] int32, the number of tokens without padding
    tables: ArrayLike  # [N, W] int32, the block table of the prompt


@OnEachDevice(in_specs=(PAGES, PartitionSpec(), PartitionSpec(), HEADS), out_specs=HEADS)
def attend_to_pages(
    config: ModelConfig,
    cache: KVCache,
    layer: ArrayLike,
    tiles: PrefillTiles,
    q: jax.Array,
    *,
    spec: AttentionSpec,
) -> jax.Array:
    """Return causal attention of q [N, T, H, hd] over the keys and values of one layer in the tiles'
    pages. On a mesh, all pages of a tile belong to one data-parallel rank. The devices of the other ranks add
    zeros."""
    if config.mesh is None:
        return _attend_to_local_pages(spec, cache, layer, tiles, q)
    tables, is_local = local_pages(config, cache, tiles.tables)
    is_local = is_local[:, 0] & (tiles.lengths > 0)
    starts, lengths = jnp.where(is_local, tiles.starts, 0), jnp.where(is_local, tiles.lengths, 0)
    local = PrefillTiles(starts=starts, lengths=lengths, tables=tables)
    attended = _attend_to_local_pages(spec, cache, layer, local, q)
    return jax.lax.psum(jnp.where(is_local[:, None, None, None], attended, 0), BATCH)


def _attend_to_local_pages(
    spec: AttentionSpec, cache: KVCache, layer: ArrayLike, tiles: PrefillTiles, q: jax.Array
) -> jax.Array:
    """Run the kernel on NVIDIA GPUs. On other devices, for sliding windows, and for head dimensions that the
    kernel does not support, run the loop."""
    if spec.sliding_window is not None or not supports_head_dim(q.shape[-1]):
        return attend_by_loop(spec, cache, layer, tiles, q)
    kernel, loop = partial(attend_by_kernel, spec), partial(attend_by_loop, spec)
    return jax.lax.platform_dependent(cache, layer, tiles, q, cuda=kernel, default=loop)


def attend_by_kernel(
    spec: AttentionSpec,
    cache: KVCache,
    layer: ArrayLike,
    tiles: PrefillTiles,
    q: jax.Array,
) -> jax.Array:
    # Pass the pages of all layers, because XLA would copy a slice of one layer.
    keys, values = (leaf.reshape(-1, *leaf.shape[2:]) for leaf in (cache.keys, cache.values))
    tables = jnp.asarray(tiles.tables) + layer * cache.keys.shape[1]
    return prefill_attention(
        q,
        keys,
        values,
        tables,
        jnp.asarray(tiles.starts),
        jnp.asarray(tiles.lengths),
        scale=spec.scale,
    )


def attend_by_loop(
    spec: AttentionSpec, cache: KVCache, layer: ArrayLike, tiles: PrefillTiles, q: jax.Array
) -> jax.Array:
    count, length = q.shape[:2]
    tables, ends = jnp.asarray(tiles.tables), jnp.asarray(tiles.starts) + tiles.lengths
    # padding positions attend to all positions before the end of the tile's tokens
    last_seen = jnp.minimum(tiles.starts[:, None] + jnp.arange(length), ends[:, None] - 1)

    def attend(prompts: int) -> jax.Array:
        """Compute attention for each tile (prompts = N), or for all tiles of one prompt together (prompts =
        1)."""
        queries, prompt_tables = q.reshape(prompts, -1, *q.shape[2:]), tables[:prompts]
        seen = last_seen.reshape(prompts, -1)
        return _attend(spec, cache, layer, queries, prompt_tables, seen, ends.max()).reshape(q.shape)

    if count == 1:
        return attend(1)
    return jax.lax.cond((tables == tables[0]).all(), lambda: attend(1), lambda: attend(count))


def _attend(
    spec: AttentionSpec,
    cache: KVCache,
    layer: ArrayLike,
    q: jax.Array,
    tables: jax.Array,
    last_seen: jax.Array,
    end: jax.Array,
) -> jax.Array:
    """Return attention of q [M, T, H, hd] over the pages of M prompts. Each query attends to positions up to
    its `last_seen` [M, T]. All values of `last_seen` are less than `end`."""
    (prompts, length), kv_heads = q.shape[:2], cache.keys.shape[2]
    grouped = q.reshape(prompts, length, kv_heads, -1, q.shape[-1]).transpose(0, 2, 1, 3, 4)
    at_once = PAGES_AT_ONCE * PAGE_SIZE
    tables = jnp.pad(tables, ((0, 0), (0, PAGES_AT_ONCE)), mode="edge")

    def add(index: jax.Array, state: _Attended) -> _Attended:
        pages = jax.lax.dynamic_slice_in_dim(tables, index * PAGES_AT_ONCE, PAGES_AT_ONCE, axis=1)
        positions = index * at_once + jnp.arange(at_once)
        visible = positions <= last_seen[..., None]
        if spec.sliding_window is not None:
            visible &= positions > last_seen[..., None] - spec.sliding_window
        return state.with_segment(spec, grouped, read_pages(cache, layer, pages), visible[:, None, :, None])

    per_query = jnp.zeros(grouped.shape[:-1], jnp.float32)
    start = _Attended(
        highest=jnp.full_like(per_query, MASKED),
        total=per_query,
        values=jnp.zeros(grouped.shape, jnp.float32),
    )
    whole = jax.lax.fori_loop(0, -(-end // at_once), add, start)
    attended = whole.values / whole.total[..., None]
    return attended.astype(q.dtype).transpose(0, 2, 1, 3, 4).reshape(q.shape)


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class _Attended:
    """The state of a base-2 softmax over a part of the keys, for M prompts, K key-value heads, T queries and
    G heads per key-value head; float32."""

    highest: jax.Array  # [M, K, T, G], the highest score, rounded up
    total: jax.Array  # [M, K, T, G], the sum of the weights exp2(score - highest)
    values: jax.Array  # [M, K, T, G, hd], the sum of the weighted values

    def with_segment(
        self, spec: AttentionSpec, q: jax.Array, segment: Segment, visible: jax.Array
    ) -> _Attended:
        """Return the state after the n positions of `segment`. q is [M, K, T, G, hd], and `visible`
        broadcasts to [M, K, T, G, n]."""
        scores = jnp.einsum("mktgh,mkhs->mktgs", q, segment.keys, preferred_element_type=jnp.float32)
        scores = jnp.where(visible, scores * (spec.scale * LOG2E), MASKED)
        highest = jnp.maximum(self.highest, ceil_max(scores))
        weights, shrink = jnp.exp2(scores - highest[..., None]), jnp.exp2(self.highest - highest)
        new = jnp.einsum(
            "mktgs,mksh->mktgh", weights.astype(q.dtype), segment.values, preferred_element_type=jnp.float32
        )
        return _Attended(
            highest=highest,
            total=shrink * self.total + weights.sum(axis=-1),
            values=shrink[..., None] * self.values + new,
        )
