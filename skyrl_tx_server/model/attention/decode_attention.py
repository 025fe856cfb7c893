"""Attention in decode steps. In `attend_over_pages`, a GPU kernel reads the KV pages in place.
`attend_over_segments` reads segments: copies of the pages, and the keys and values that the current decode
dispatch (one program call of several decode steps) has computed."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from skyrl_tx_server.model.attention.kv_splits import KVSplits
from skyrl_tx_server.model.attention.softmax import LOG2E, MASKED, ceil_max
from skyrl_tx_server.model.kernels.paged_kernel import paged_attention
from skyrl_tx_server.model.kernels.write_kernel import write_tokens
from skyrl_tx_server.model.kv_cache import PAGES, KVCache, Segment, local_pages
from skyrl_tx_server.model.lora.lora_math import ArrayLike
from skyrl_tx_server.model.mesh import BATCH, OnEachDevice
from skyrl_tx_server.model.model_config import AttentionSpec, ModelConfig
from skyrl_tx_server.model.reductions import sum_last
from skyrl_tx_server.model.shapes import PAGE_SIZE

HEADS = PartitionSpec(BATCH, None, "tensor")
"""The sharding of the queries [B, 1, H, hd] and of the new keys and values [B, 1, K, hd]: sequences by
data-parallel rank, heads by `tensor`."""


def attend_over_segments(
    spec: AttentionSpec, q: jax.Array, segments: Sequence[Segment], masks: Sequence[jax.Array]
) -> jax.Array:
    """Return attention of q [B, 1, H, hd] over the positions of all segments. There is one mask per segment.
    The masks are True at visible positions and broadcast to [B, K, G, n]. K is the number of key-value heads,
    and G = H / K is the number of query heads of each. Softmax is computed in float32."""
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


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class TokenRows:
    """The tokens of a decode step, one for each of B sequences."""

    positions: jax.Array  # [B] int32
    # [B] bool, False for free slots and for sequences that ended before the current decode dispatch
    is_written: jax.Array
    tables: jax.Array  # [B, W] int32, the block tables of the sequences


@OnEachDevice(
    in_specs=(PAGES, HEADS, PartitionSpec(BATCH), PartitionSpec(BATCH)),
    out_specs=(HEADS, PAGES),
)
def attend_over_pages(
    config: ModelConfig,
    cache: KVCache,
    heads: tuple[jax.Array, jax.Array, jax.Array],
    tokens: TokenRows,
    splits: KVSplits,
    *,
    spec: AttentionSpec,
    layer: ArrayLike | int,
) -> tuple[jax.Array, KVCache]:
    """Write the keys and values of the tokens to the pages of `layer`. Return attention [B, 1, H, hd] over
    the positions up to and including these tokens, and the new cache. `heads` are q [B, 1, H, hd], k and v
    [B, 1, K, hd]. `splits` are KV splits (parts of the pages of one or more sequences) that cover at least
    these positions. A GPU kernel reads the pages in place."""
    assert spec.sliding_window is None, "the kernel does not support sliding windows"
    q, k, v = heads
    pages, _ = local_pages(config, cache, tokens.tables)
    page = jnp.take_along_axis(pages, tokens.positions[:, None] // PAGE_SIZE, axis=1)[:, 0]
    keys, values = write_tokens(
        cache.keys,
        cache.values,
        k[:, 0],
        v[:, 0],
        jnp.asarray(layer, jnp.int32).reshape(1),
        jnp.where(tokens.is_written & (page > 0), page, -1),
        tokens.positions % PAGE_SIZE,
    )
    cache = KVCache(keys=keys, values=values)
    # Pass the pages of all layers, because XLA would copy a slice of one layer.
    keys, values = (leaf.reshape(-1, *leaf.shape[2:]) for leaf in (cache.keys, cache.values))
    attended = paged_attention(
        q[:, 0],
        keys,
        values,
        pages + layer * cache.keys.shape[1],
        splits,
        tokens.positions + 1,
        scale=spec.scale,
    )
    return attended[:, None], cache


def _scores(spec: AttentionSpec, grouped: jax.Array, segment: Segment, mask: jax.Array) -> jax.Array:
    """Return base-2 scores [B, K, G, n] float32 of queries [B, K, G, hd]."""
    scores = jnp.einsum("bkgh,bkhs->bkgs", grouped, segment.keys, preferred_element_type=jnp.float32)
    return jnp.where(mask, scores * (spec.scale * LOG2E), MASKED)
