"""The KV cache: keys and values in pages of PAGE_SIZE positions (Kwon et al., arXiv:2309.06180).

The host keeps a block table for each sequence: the list of its page numbers in order. Sequences with a common
prefix may share pages, and a shared page is never written. The axis of heads comes before the axis of
positions, because a decode step reads the positions of one head consecutively.

On a mesh each data-parallel rank has an equal share of the pages, numbered consecutively. The first page of
each share is the null page, which pads block tables and is the target of writes that must have no effect.
Without a mesh, page 0 is the null page.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from skyrl_tx_server.model.lora.lora_math import ArrayLike
from skyrl_tx_server.model.mesh import BATCH, OnEachDevice, constrain
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.shapes import PAGE_SIZE


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """N pages of each of L layers, with K key-value heads."""

    keys: jax.Array  # [L, N, K, hd, PAGE], rotated; normalized if the family has a norm for keys
    values: jax.Array  # [L, N, K, PAGE, hd]


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Keys and values of n consecutive positions of B sequences, for one layer or stacked over layers."""

    keys: jax.Array  # [B, K, hd, n]
    values: jax.Array  # [B, K, n, hd]


UNIQUE: Any = {"unique_indices": True, "mode": "drop"}
"""Arguments of scatters to unique positions. Without these arguments, XLA's programs for GPUs write 16-bit
elements with compare-and-swap loops."""
REPLICATED = PartitionSpec()
PAGES = PartitionSpec(None, BATCH, "tensor")
"""The sharding of both arrays of the cache: pages by data-parallel rank, heads by `tensor`."""
SEQUENCES = PartitionSpec(BATCH)


def segment_of(k: jax.Array, v: jax.Array) -> Segment:
    """Return a segment of the keys and values [B, T, K, hd] of a layer.

    Values are made finite, because masked positions have weight zero, and zero times NaN is NaN.
    """
    return Segment(keys=k.transpose(0, 2, 3, 1), values=jnp.nan_to_num(v.transpose(0, 2, 1, 3)))


def stacked(segments: Sequence[Segment]) -> Segment:
    """Stack the segments of all layers with one update per layer. XLA would recompute a concatenation at
    every use, and would take as long to compile the concatenation as to compile all layers."""
    whole = jax.tree.map(lambda leaf: jnp.zeros((len(segments), *leaf.shape), leaf.dtype), segments[0])
    for index, segment in enumerate(segments):
        whole = jax.tree.map(
            lambda leaf, new, index=index: jax.lax.dynamic_update_index_in_dim(leaf, new, index, 0),
            whole,
            segment,
        )
    return whole


def page_bytes(config: ModelConfig, dtype: np.dtype) -> int:
    """Return the size in bytes of one page, over all layers."""
    return (
        2 * config.num_layers * config.num_kv_heads * PAGE_SIZE * config.head_dim * np.dtype(dtype).itemsize
    )


@partial(jax.jit, static_argnames=("config", "pages", "dtype"))
def empty_cache(*, config: ModelConfig, pages: int, dtype: np.dtype) -> KVCache:
    """Return a cache of zeros. On one CPU device, the call returns before the memory is filled."""
    lead, head_dim = (config.num_layers, pages, config.num_kv_heads), config.head_dim
    cache = keep_cache(
        config,
        KVCache(
            keys=jnp.zeros((*lead, head_dim, PAGE_SIZE), dtype),
            values=jnp.zeros((*lead, PAGE_SIZE, head_dim), dtype),
        ),
    )
    if config.mesh is not None or jax.default_backend() != "cpu":
        return cache
    # The first write to new memory can take seconds per GiB. XLA runs a program without arithmetic in the
    # calling thread. This thread would wait for the write. The body of the loop below never runs, but it
    # contains arithmetic. XLA therefore fills the memory in another thread while the server starts and
    # compiles the first program.
    zero = jax.lax.optimization_barrier(jnp.int32(0))
    return jax.lax.fori_loop(0, zero, lambda _, cache: jax.tree.map(lambda leaf: 2 * leaf, cache), cache)


def keep_cache(config: ModelConfig, cache: KVCache) -> KVCache:
    """Inside a program: constrain the cache to its sharding."""
    return jax.tree.map(lambda leaf: constrain(config.mesh, leaf, PAGES), cache)


@OnEachDevice(in_specs=(PAGES, REPLICATED, SEQUENCES), out_specs=PartitionSpec(BATCH, "tensor"))
def read_positions(
    config: ModelConfig, cache: KVCache, layer: ArrayLike | int, tables_BW: ArrayLike, *, ends: Sequence[int]
) -> list[Segment]:
    """Return the cached positions of each sequence in one layer, in segments that end at `ends` (multiples of
    PAGE_SIZE)."""
    batch, (_, _, heads, head_dim, _) = tables_BW.shape[0], cache.keys.shape
    local, _ = local_pages(config, cache, tables_BW)

    def segment(first: int, end: int) -> Segment:
        pages = local[:, first // PAGE_SIZE : end // PAGE_SIZE]
        keys = cache.keys[layer, pages].transpose(0, 2, 3, 1, 4).reshape(batch, heads, head_dim, -1)
        # This gather takes two thirds of the time of gathering whole pages and transposing them.
        values = cache.values[layer, pages[:, None], jnp.arange(heads)[None, :, None]]
        return Segment(keys=keys, values=values.reshape(batch, heads, -1, head_dim))

    return [segment(first, end) for first, end in pairwise((0, *ends))]


@OnEachDevice(
    in_specs=(PAGES, REPLICATED, PartitionSpec(None, "tensor"), REPLICATED, REPLICATED, REPLICATED),
    out_specs=PAGES,
)
def write_layer(
    config: ModelConfig,
    cache: KVCache,
    layer: ArrayLike,
    new: Segment,
    tables_BW: ArrayLike,
    starts_B: ArrayLike,
    counts_B: ArrayLike,
) -> KVCache:
    """For each sequence, write the first `counts_B` positions of `new`, the segment of one layer, to the
    positions from `starts_B` on. `tables_BW` are the block tables of the sequences.

    The pairs (page, place) of all new positions are unique. Three kinds of positions get page numbers after
    the last page, so that the scatter drops them: positions from `counts_B` on, positions on other devices,
    and positions in the null page."""
    local, _ = local_pages(config, cache, tables_BW)
    columns = jnp.arange(new.keys.shape[-1])
    positions = starts_B[:, None] + columns
    page = jnp.take_along_axis(local, positions // PAGE_SIZE, axis=1)
    after_last = cache.keys.shape[1] + jnp.arange(positions.size).reshape(positions.shape)
    is_written = (page > 0) & (columns < counts_B[:, None])
    pages, places = jnp.where(is_written, page, after_last), positions % PAGE_SIZE
    return KVCache(
        keys=cache.keys.at[layer, pages, :, :, places].set(new.keys.transpose(0, 3, 1, 2), **UNIQUE),
        values=cache.values.at[layer, pages, :, places].set(new.values.transpose(0, 2, 1, 3), **UNIQUE),
    )


@OnEachDevice(
    in_specs=(PAGES, PartitionSpec(None, BATCH, "tensor"), SEQUENCES, SEQUENCES, SEQUENCES), out_specs=PAGES
)
def write_positions(
    config: ModelConfig,
    cache: KVCache,
    new: Segment,
    tables_BW: ArrayLike,
    starts_B: ArrayLike,
    counts_B: ArrayLike,
) -> KVCache:
    """For each sequence, write the first `counts_B` positions of `new`, which is stacked over layers, to the
    positions from `starts_B` on. `tables_BW` are the block tables of the sequences. A loop writes page by
    page."""
    width = min(new.keys.shape[-1], PAGE_SIZE)  # positions of a page that are written at once

    def write_sequence(b: jax.Array, cache: KVCache) -> KVCache:
        start, count = starts_B[b], counts_B[b]
        keys, values = (jax.lax.dynamic_index_in_dim(leaf, b, axis=1) for leaf in (new.keys, new.values))

        def write_page(index: jax.Array, cache: KVCache) -> KVCache:
            page, _ = local_pages(config, cache, tables_BW[b, index])
            first = jnp.clip(start - index * PAGE_SIZE, 0, PAGE_SIZE - width)
            source = index * PAGE_SIZE + first + jnp.arange(width) - start  # index in `new` of each position
            mask = (source >= 0) & (source < count)
            return KVCache(
                keys=_merge(
                    cache.keys, jnp.take(keys, source, axis=4, mode="clip"), mask, (0, page, 0, 0, first)
                ),
                values=_merge(
                    cache.values,
                    jnp.take(values, source, axis=3, mode="clip"),
                    mask[:, None],
                    (0, page, 0, first, 0),
                ),
            )

        return jax.lax.fori_loop(start // PAGE_SIZE, -(-(start + count) // PAGE_SIZE), write_page, cache)

    return jax.lax.fori_loop(0, tables_BW.shape[0], write_sequence, cache)


def _merge(
    whole: jax.Array, window: jax.Array, mask: jax.Array, at: tuple[jax.Array | int, ...]
) -> jax.Array:
    """Return `whole` with those elements of `window` that `mask` selects. The window begins at index `at`."""
    return jax.lax.dynamic_update_slice(
        whole, jnp.where(mask, window, jax.lax.dynamic_slice(whole, at, window.shape)), at
    )


@OnEachDevice(in_specs=(PAGES, REPLICATED), out_specs=PAGES)
def copy_pages(config: ModelConfig, cache: KVCache, copies_C2: ArrayLike) -> KVCache:
    """Copy pages in order. Each pair is (source page, destination page), and a pair of -1 ends the list."""

    def copy(index: jax.Array, cache: KVCache) -> KVCache:
        (source, is_local), (target, _) = (local_pages(config, cache, page) for page in copies_C2[index])

        def copy_page(whole: jax.Array) -> jax.Array:
            page = jax.lax.dynamic_slice_in_dim(whole, source, 1, axis=1)
            if config.mesh is not None:
                page = jax.lax.psum(jnp.where(is_local, page, 0), BATCH)
            return jax.lax.dynamic_update_slice_in_dim(whole, page, target, axis=1)

        return jax.tree.map(copy_page, cache)

    return jax.lax.fori_loop(0, jnp.sum(copies_C2[:, 0] >= 0), copy, cache)


# --- the pages of one device


def local_pages(config: ModelConfig, cache: KVCache, page: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Return the local number of each page and whether the page is on this device. Pages of other devices
    get the local number 0, which is the null page."""
    local = jnp.asarray(page)
    if config.mesh is not None:
        local -= jax.lax.axis_index(BATCH) * cache.keys.shape[1]
    is_local = (local >= 0) & (local < cache.keys.shape[1])
    return jnp.where(is_local, local, 0), is_local


def read_pages(cache: KVCache, layer: ArrayLike, local_BP: jax.Array) -> Segment:
    """Return the positions of one layer in the local pages `local_BP` of each sequence."""
    # keys [B, P, K, hd, PAGE], values [B, P, K, PAGE, hd]
    keys, values = cache.keys[layer, local_BP], cache.values[layer, local_BP]
    batch, _, heads, head_dim, _ = keys.shape
    return Segment(
        keys=keys.transpose(0, 2, 3, 1, 4).reshape(batch, heads, head_dim, -1),
        values=values.transpose(0, 2, 1, 3, 4).reshape(batch, heads, -1, head_dim),
    )
