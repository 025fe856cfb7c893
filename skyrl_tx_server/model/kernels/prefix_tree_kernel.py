"""`tree_attention` for a GPU: Pallas kernels, compiled by Triton, that keep a tile's scores in registers
(Dao, arXiv:2307.08691).

One program attends for a tile of one head's queries, or gathers the gradient of a tile of one head's keys,
and goes through what they see or are seen by in the order of the stream: results are the same to the bit from
run to run. Products add up in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from skyrl_tx_server.model.attention.prefix_tree_layout import TreeLayout
from skyrl_tx_server.model.attention.softmax import LOG2E, MASKED, ceil_max

MIN_DIM, MAX_HEAD_DIM = 16, 256
"""The least a matrix product takes of any axis, and the widest head of which a tile fits on chip."""
WIDE_HEAD = 256  # bytes
QUERY_TILE, TILE = 128, 64
"""Tokens: the forward pass holds so many queries while keys pass by in tiles of the other; the backward pass
takes the other of both."""


def forward(
    layout: TreeLayout, q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """q [R, T, H, hd] over k, v [R, T, K, hd] -> (outputs like q, log2 of each softmax's denominator [R, H,
    T] float32)."""
    rows, length, heads, head_dim = q.shape
    q, k, v = (padded_heads(array) for array in (q, k, v))
    tile = min(QUERY_TILE, length // layout.num_key_blocks.shape[1])
    looks, own, keys, numbers = _query_specs(layout, q, k, tile)
    out, log_total = pl.pallas_call(
        partial(_forward_kernel, tile=tile, scale=scale),
        grid=(length // tile, heads, rows),
        in_specs=(*looks, own, keys, keys),
        out_specs=(own, numbers),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((rows, heads, length), jnp.float32),
        ),
        compiler_params=compiler_params(q),
        interpret=interpret,
        name="tree_attention_forward",
    )(layout.subtree_end, layout.key_blocks, layout.num_key_blocks, q, k, v)
    return out[..., :head_dim], log_total


def backward(
    layout: TreeLayout,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    log_total: jax.Array,
    grad_out: jax.Array,
    *,
    scale: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients on q, k and v, from what the forward pass took and made and the gradient on its
    outputs."""
    rows, length, heads, head_dim = q.shape
    along = (
        (grad_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1).transpose(0, 2, 1)
    )  # [R, H, T], the softmax's own part
    q, k, v, grad_out = (padded_heads(array) for array in (q, k, v, grad_out))
    kv_heads, tile = k.shape[2], min(TILE, length // layout.num_key_blocks.shape[1])
    options = {"compiler_params": compiler_params(q), "interpret": interpret}
    looks, own, keys, numbers = _query_specs(layout, q, k, tile)
    grad_q = pl.pallas_call(
        partial(_query_gradient_kernel, tile=tile, scale=scale),
        grid=(length // tile, heads, rows),
        in_specs=(*looks, own, keys, keys, own, numbers, numbers),
        out_specs=own,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="tree_attention_query_gradient",
        **options,
    )(layout.subtree_end, layout.key_blocks, layout.num_key_blocks, q, k, v, grad_out, log_total, along)
    group = heads // kv_heads
    queries = pl.BlockSpec((None, length, group, q.shape[-1]), lambda i, h, r: (r, 0, h, 0))
    numbers = pl.BlockSpec((None, group, length), lambda i, h, r: (r, h, 0))
    own_ends = pl.BlockSpec((None, tile), lambda i, h, r: (r, i))
    grad_k, grad_v = pl.pallas_call(
        partial(_key_gradient_kernel, tile=tile, scale=scale),
        grid=(length // tile, kv_heads, rows),
        in_specs=(own_ends, queries, own, own, queries, numbers, numbers),
        out_specs=(own, own),
        out_shape=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        name="tree_attention_key_gradient",
        **options,
    )(layout.subtree_end, q, k, v, grad_out, log_total, along)
    return grad_q[..., :head_dim], grad_k[..., :head_dim], grad_v[..., :head_dim]


def padded_heads(array: jax.Array) -> jax.Array:
    """The last axis filled up with zeros to a power of two that a matrix product takes."""
    width = array.shape[-1]
    return jnp.pad(
        array, ((0, 0),) * (array.ndim - 1) + ((0, max(MIN_DIM, pl.next_power_of_2(width)) - width),)
    )


def product(left: jax.Array, right: jax.Array, *, over: tuple[int, int] = (1, 0)) -> jax.Array:
    """Inside a kernel: two matrices multiplied over one axis of each, in float32."""
    return jax.lax.dot_general(
        left, right, (((over[0],), (over[1],)), ((), ())), preferred_element_type=jnp.float32
    )


def compiler_params(q: jax.Array) -> triton.CompilerParams:
    """Of a kernel over queries [..., hd]. Of wide heads only one tile of keys at a time fits into many a
    GPU's shared memory."""
    wide = q.shape[-1] * q.dtype.itemsize > WIDE_HEAD
    return triton.CompilerParams(num_warps=4 if q.shape[-1] <= 64 else 8, num_stages=1 if wide else 2)


def _query_specs(
    layout: TreeLayout, q: jax.Array, k: jax.Array, tile: int
) -> tuple[tuple[pl.BlockSpec, ...], pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """For a program per tile of queries, head and stream: its part of the layout, of arrays like q, of k and
    v, of numbers [R, H, T]."""
    (_, length, heads, head_dim), kv_heads, blocks = q.shape, k.shape[2], layout.num_key_blocks.shape[1]
    group, tiles_per_block = heads // kv_heads, length // blocks // tile
    looks = (
        pl.BlockSpec((None, length), lambda i, h, r: (r, 0)),
        pl.BlockSpec((None, None, blocks), lambda i, h, r: (r, i // tiles_per_block, 0)),
        pl.BlockSpec((None, 1), lambda i, h, r: (r, i // tiles_per_block)),
    )
    own = pl.BlockSpec((None, tile, None, head_dim), lambda i, h, r: (r, i, h, 0))
    keys = pl.BlockSpec((None, length, None, head_dim), lambda i, h, r: (r, 0, h // group, 0))
    return looks, own, keys, pl.BlockSpec((None, None, tile), lambda i, h, r: (r, h, i))


def _forward_kernel(
    ends: Any,
    key_blocks: Any,
    num_key_blocks: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    log_total: Any,
    *,
    tile: int,
    scale: float,
) -> None:
    queries = q[...]

    def add_keys(
        here: Any, seen: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest, total, attended = state
        scores = jnp.where(seen, product(queries, k[here], over=(1, 1)) * (scale * LOG2E), MASKED)
        higher = jnp.maximum(highest, ceil_max(scores))
        weights, shrink = jnp.exp2(scores - higher[:, None]), jnp.exp2(highest - higher)
        values = v[here]
        attended = shrink[:, None] * attended + product(weights.astype(values.dtype), values)
        return higher, shrink * total + weights.sum(axis=1), attended

    start = (jnp.full(tile, MASKED), jnp.zeros(tile), jnp.zeros(queries.shape, jnp.float32))
    highest, total, attended = _over_keys(ends, key_blocks, num_key_blocks, tile, add_keys, start)
    any_seen = total > 0  # not by a block of padding, whose weights are then zero in the backward pass
    total = jnp.where(any_seen, total, 1.0)
    out[...] = (attended / total[:, None]).astype(out.dtype)
    log_total[...] = jnp.where(any_seen, highest + jnp.log2(total), -MASKED)


def _query_gradient_kernel(
    ends: Any,
    key_blocks: Any,
    num_key_blocks: Any,
    q: Any,
    k: Any,
    v: Any,
    grad_out: Any,
    log_total: Any,
    along: Any,
    grad_q: Any,
    *,
    tile: int,
    scale: float,
) -> None:
    queries, gradient, denominator, taken_off = q[...], grad_out[...], log_total[...], along[...]

    def add_keys(here: Any, seen: jax.Array, grad: jax.Array) -> jax.Array:
        keys = k[here]
        scores = jnp.where(seen, product(queries, keys, over=(1, 1)) * (scale * LOG2E), MASKED)
        weights = jnp.exp2(scores - denominator[:, None])
        grad_scores = weights * (product(gradient, v[here], over=(1, 1)) - taken_off[:, None])
        return grad + product(grad_scores.astype(keys.dtype), keys)

    grad = _over_keys(ends, key_blocks, num_key_blocks, tile, add_keys, jnp.zeros(queries.shape, jnp.float32))
    grad_q[...] = (grad * scale).astype(grad_q.dtype)


def _key_gradient_kernel(
    ends: Any,
    q: Any,
    k: Any,
    v: Any,
    grad_out: Any,
    log_total: Any,
    along: Any,
    grad_k: Any,
    grad_v: Any,
    *,
    tile: int,
    scale: float,
) -> None:
    """Those who see a key lie between it and its end, so that no list of them is needed."""
    group, keys, values, last_seen = log_total.shape[0], k[...], v[...], ends[...]
    first = pl.program_id(0)
    tiles = pl.cdiv(last_seen.max(), tile) - first
    own = first * tile + jnp.arange(tile)

    def add_queries(at: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        head, begin = jax.lax.rem(at, group), (first + jax.lax.div(at, group)) * tile
        here, positions = pl.ds(begin, tile), begin + jnp.arange(tile)
        seen = (own[:, None] <= positions[None]) & (positions[None] < last_seen[:, None])
        queries, gradient = q[here, head], grad_out[here, head]
        scores = jnp.where(seen, product(keys, queries, over=(1, 1)) * (scale * LOG2E), MASKED)
        weights = jnp.exp2(scores - log_total[head, here][None])  # [keys, queries], as all here
        grad_scores = weights * (product(values, gradient, over=(1, 1)) - along[head, here][None])
        keys_gain = product(grad_scores.astype(queries.dtype), queries)
        return grads[0] + keys_gain, grads[1] + product(weights.astype(gradient.dtype), gradient)

    nothing = jnp.zeros(keys.shape, jnp.float32)
    of_keys, of_values = jax.lax.fori_loop(0, tiles * group, add_queries, (nothing, nothing))
    grad_k[...], grad_v[...] = (of_keys * scale).astype(grad_k.dtype), of_values.astype(grad_v.dtype)


def _over_keys[State](
    ends: Any,
    key_blocks: Any,
    num_key_blocks: Any,
    tile: int,
    add: Callable[[Any, jax.Array, State], State],
    start: State,
) -> State:
    """`add(where a tile of keys lies, seen [queries, keys], state)` over the blocks that a tile of queries
    looks at."""
    queries = pl.program_id(0) * tile + jnp.arange(tile)
    block = ends.shape[0] // key_blocks.shape[0]
    width = min(TILE, block)
    parts = block // width

    def step(at: jax.Array, state: State) -> State:
        first = key_blocks[jax.lax.div(at, parts)] * block + jax.lax.rem(at, parts) * width
        here, keys = pl.ds(first, width), first + jnp.arange(width)
        seen = (keys[None] <= queries[:, None]) & (queries[:, None] < ends[here][None])
        return add(here, seen, state)

    return jax.lax.fori_loop(0, num_key_blocks[0] * parts, step, start)
