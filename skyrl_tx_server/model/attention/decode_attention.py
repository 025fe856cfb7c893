"""Attention of decoding. The query of each sequence attends to the KV pages of the sequence and to the
positions that the current dispatch has added."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from skyrl_tx_server.model.attention.attention_spec import AttentionSpec
from skyrl_tx_server.model.attention.kv_splits import KVSplits
from skyrl_tx_server.model.attention.softmax import LOG2E, MASKED, ceil_max
from skyrl_tx_server.model.kernels.paged_kernel import Attended, merge, paged_attention
from skyrl_tx_server.model.kv_cache import BATCH_HEADS, PAGES, KVCache, Segment, local_pages
from skyrl_tx_server.model.lora.lora_math import ArrayLike
from skyrl_tx_server.model.mesh import BATCH, shard_map_over
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.reductions import sum_last

HEADS = PartitionSpec(BATCH, None, "tensor")
"""The sharding of the queries [B, 1, H, hd], equal to that of the keys and values of their sequences."""


def attend_over_segments(
    spec: AttentionSpec, q: jax.Array, segments: Sequence[Segment], masks: Sequence[jax.Array]
) -> jax.Array:
    """Return attention of q [B, 1, H, hd] over consecutive segments. The masks broadcast to [B, K, G, n].
    Softmax is computed in float32."""
    batch, _, heads, head_dim = q.shape
    kv_heads = segments[0].keys.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    scores = [_scores(spec, grouped, segment, mask) for segment, mask in zip(segments, masks, strict=True)]
    highest = jnp.stack([ceil_max(score) for score in scores]).max(axis=0)[..., None]
    weights = [jnp.exp2(score - highest) for score in scores]
    total = sum((sum_last(weight) for weight in weights), start=jnp.zeros((), jnp.float32))
    attended = sum(
        (
            jnp.einsum(
                "bkgs,bksh->bkgh", weight.astype(q.dtype), segment.values, preferred_element_type=jnp.float32
            )
            for weight, segment in zip(weights, segments, strict=True)
        ),
        start=jnp.zeros((), jnp.float32),
    )
    return (attended / total).astype(q.dtype).reshape(batch, 1, heads, head_dim)


def attend_over_pages(
    config: ModelConfig,
    spec: AttentionSpec,
    cache: KVCache,
    layer: ArrayLike | int,
    q: jax.Array,
    tables_BW: jax.Array,
    splits: KVSplits,
    recent: Segment,
    visible: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Return attention of q [B, 1, H, hd] over the KV splits of the cached positions and over the `visible`
    [1, 1, 1, n] positions of `recent`. A GPU kernel reads the pages of `layer` in place."""
    assert spec.sliding_window is None, "the kernel does not support sliding windows"
    attend = partial(_attend_over_local_pages, config, spec, layer, interpret)
    if config.mesh is not None:
        batch = PartitionSpec(BATCH)
        attend = shard_map_over(
            config, attend, (PAGES, HEADS, batch, batch, BATCH_HEADS, PartitionSpec()), HEADS
        )
    return attend(cache, q, tables_BW, splits, recent, visible)


def _attend_over_local_pages(
    config: ModelConfig,
    spec: AttentionSpec,
    layer: ArrayLike | int,
    interpret: bool,
    cache: KVCache,
    q: jax.Array,
    tables_BW: jax.Array,
    splits: KVSplits,
    recent: Segment,
    visible: jax.Array,
) -> jax.Array:
    pages, _ = local_pages(config, cache, tables_BW)
    # pass the pages of all layers, because a slice would be a copy
    keys, values = (leaf.reshape(-1, *leaf.shape[2:]) for leaf in (cache.keys, cache.values))
    past = paged_attention(
        q[:, 0],
        keys,
        values,
        pages + layer * cache.keys.shape[1],
        splits,
        scale=spec.scale,
        interpret=interpret,
    )
    new = _attend_recent(spec, q, recent, visible)
    whole = merge(jax.tree.map(lambda *parts: jnp.stack(parts), past, new))
    return (whole.out / whole.total[..., None]).astype(q.dtype)[:, None]


def _attend_recent(spec: AttentionSpec, q: jax.Array, recent: Segment, visible: jax.Array) -> Attended:
    (batch, _, heads, head_dim), kv_heads = q.shape, recent.keys.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    scores = _scores(spec, grouped, recent, visible)
    highest = ceil_max(scores)
    weights = jnp.exp2(scores - highest[..., None])
    out = jnp.einsum(
        "bkgs,bksh->bkgh", weights.astype(q.dtype), recent.values, preferred_element_type=jnp.float32
    )
    by_head = (batch, heads)
    return Attended(
        out.reshape(*by_head, head_dim), highest.reshape(by_head), weights.sum(axis=-1).reshape(by_head)
    )


def _scores(spec: AttentionSpec, grouped: jax.Array, segment: Segment, mask: jax.Array) -> jax.Array:
    """Return base-2 scores [B, K, G, n] float32 of queries [B, K, G, hd]."""
    scores = jnp.einsum("bkgh,bkhs->bkgs", grouped, segment.keys, preferred_element_type=jnp.float32)
    return jnp.where(mask, scores * (spec.scale * LOG2E), MASKED)
