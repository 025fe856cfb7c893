"""Attention of prefill: tiles of prompts over the KV pages of their prompts, which already hold the keys and
values of the tiles.

The keys are read in the same groups of pages whichever tokens are computed together, so neither the other
prompts of a batch nor the boundaries of prefill chunks change a bit of the result. (Keys and values that a
decode step wrote differ from those of prefill in the last bits.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from skyrl_tx_server.model.attention.attention_spec import AttentionSpec
from skyrl_tx_server.model.attention.softmax import LOG2E, MASKED, ceil_max
from skyrl_tx_server.model.kernels.paged_kernel import prefill_attention, supports_head_dim
from skyrl_tx_server.model.kv_cache import PAGES, KVCache, Segment, own_pages, read_pages
from skyrl_tx_server.model.lora.lora_math import ArrayLike
from skyrl_tx_server.model.mesh import BATCH, shard_map_over
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.shapes import PAGE_SIZE

PAGES_AT_ONCE = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillTiles:
    """N tiles of T tokens of one or several prompts."""

    starts: ArrayLike  # [N] int32, the position of a tile's first token
    lengths: ArrayLike  # [N] int32, the number of its tokens; the rest is padding
    tables: ArrayLike  # [N, W] int32, the block table of its prompt


def attend_to_pages(
    config: ModelConfig,
    spec: AttentionSpec,
    cache: KVCache,
    layer: ArrayLike,
    blocks: PrefillTiles,
    q: jax.Array,
) -> jax.Array:
    """Causal attention of q [N, T, H, hd] over one layer's keys and values in the pages of the tiles."""
    if config.mesh is None:
        return _attend_here(spec, cache, jnp.asarray(layer), blocks, q)
    heads = PartitionSpec(None, None, "tensor")
    attend = shard_map_over(
        config,
        partial(_attend_where_pages_lie, config, spec),
        (PAGES, PartitionSpec(), PartitionSpec(), heads),
        heads,
    )
    return attend(cache, jnp.asarray(layer), blocks, q)


def _attend_where_pages_lie(
    config: ModelConfig,
    spec: AttentionSpec,
    cache: KVCache,
    layer: jax.Array,
    blocks: PrefillTiles,
    q: jax.Array,
) -> jax.Array:
    """Each device computes the tiles whose pages it holds, and the sum over devices gives all tiles. One
    device holds all pages of a tile."""
    tables, here = own_pages(config, cache, jnp.asarray(blocks.tables))
    mine = here[:, 0] & (jnp.asarray(blocks.lengths) > 0)
    own = PrefillTiles(
        starts=jnp.where(mine, blocks.starts, 0), lengths=jnp.where(mine, blocks.lengths, 0), tables=tables
    )
    return jax.lax.psum(
        jnp.where(mine[:, None, None, None], _attend_here(spec, cache, layer, own, q), 0), BATCH
    )


def _attend_here(
    spec: AttentionSpec, cache: KVCache, layer: jax.Array, blocks: PrefillTiles, q: jax.Array
) -> jax.Array:
    """Run the kernel on NVIDIA's devices; elsewhere, and for heads and windows that it does not support, run
    the loop."""
    if spec.sliding_window is not None or not supports_head_dim(q.shape[-1]):
        return attend_by_loop(spec, cache, layer, blocks, q)
    kernel, loop = partial(attend_by_kernel, spec), partial(attend_by_loop, spec)
    return jax.lax.platform_dependent(cache, layer, blocks, q, cuda=kernel, default=loop)


def attend_by_kernel(
    spec: AttentionSpec,
    cache: KVCache,
    layer: jax.Array,
    blocks: PrefillTiles,
    q: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    keys, values = (
        leaf.reshape(-1, *leaf.shape[2:]) for leaf in (cache.keys, cache.values)
    )  # of every layer: a slice would be copied
    tables = jnp.asarray(blocks.tables) + layer * cache.keys.shape[1]
    return prefill_attention(
        q,
        keys,
        values,
        tables,
        jnp.asarray(blocks.starts),
        jnp.asarray(blocks.lengths),
        scale=spec.scale,
        interpret=interpret,
    )


def attend_by_loop(
    spec: AttentionSpec, cache: KVCache, layer: jax.Array, blocks: PrefillTiles, q: jax.Array
) -> jax.Array:
    count, length = q.shape[:2]
    tables, ends = jnp.asarray(blocks.tables), jnp.asarray(blocks.starts) + blocks.lengths
    last_seen = jnp.minimum(
        blocks.starts[:, None] + jnp.arange(length), ends[:, None] - 1
    )  # padding sees what is there

    def of(rows: int) -> jax.Array:
        """Attend with the queries of each tile, or, if all tiles belong to one prompt, with all queries
        together."""
        own = q.reshape(rows, -1, *q.shape[2:])
        return _attend(
            spec, cache, layer, own, tables[:rows], last_seen.reshape(rows, -1), ends.max()
        ).reshape(q.shape)

    return (
        of(1) if count == 1 else jax.lax.cond((tables == tables[0]).all(), lambda: of(1), lambda: of(count))
    )


def _attend(
    spec: AttentionSpec,
    cache: KVCache,
    layer: jax.Array,
    q: jax.Array,
    tables: jax.Array,
    last_seen: jax.Array,
    end: jax.Array,
) -> jax.Array:
    """q [M, T, H, hd] over the pages of M prompts, whose positions up to `last_seen` [M, T] each query sees;
    none lies behind `end`."""
    (rows, length), kv_heads = q.shape[:2], cache.keys.shape[2]
    grouped = q.reshape(rows, length, kv_heads, -1, q.shape[-1]).transpose(0, 2, 1, 3, 4)
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
    nothing = _Attended(
        highest=jnp.full_like(per_query, MASKED),
        total=per_query,
        values=jnp.zeros(grouped.shape, jnp.float32),
    )
    whole = jax.lax.fori_loop(0, -(-end // at_once), add, nothing)
    attended = whole.values / whole.total[..., None]
    return attended.astype(q.dtype).transpose(0, 2, 1, 3, 4).reshape(q.shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class _Attended:
    """The state of a softmax to the base of two over some of the keys, for T queries of G heads per key-value
    head K of M prompts; float32."""

    highest: jax.Array  # [M, K, T, G]
    total: jax.Array  # [M, K, T, G]
    values: jax.Array  # [M, K, T, G, hd]

    def with_segment(
        self, spec: AttentionSpec, q: jax.Array, segment: Segment, visible: jax.Array
    ) -> _Attended:
        """More positions; q [M, K, T, G, hd], `visible` broadcasts to [M, K, T, G, n]."""
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
