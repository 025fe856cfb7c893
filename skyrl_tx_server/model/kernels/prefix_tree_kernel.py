"""Pallas kernels of `tree_attention` for GPUs, compiled by Triton. The scores of a tile are kept in registers
(Dao, arXiv:2307.08691).

In the kernels of the forward pass and of the query gradient, a program computes the results of one tile of
queries of one head and reads the tiles of keys and values. In the kernel of the key gradient, a program
computes the gradients of one tile of keys and values of one key-value head and reads the tiles of queries. A
program reads tiles one after the other in a fixed order, so results are bit-identical in every run. Products
are summed in float32.

A GPU starts the programs of a grid in order. The index of the first axis of the grid changes fastest. In a
long sequence, the last queries attend to more keys than other queries, and more queries attend to the first
keys than to other keys. The grids therefore begin with the last tile of queries of all heads, or with the
first tile of keys of all heads. The longest programs then run first, and all multiprocessors finish at about
the same time.
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
from skyrl_tx_server.model.kernels.products import product

MIN_DIM, MAX_HEAD_DIM = 16, 256
"""The minimum size of an axis of a matrix product, and the maximum head dimension with which tiles fit into
shared memory."""
WIDE_HEAD = 256
"""The maximum size in bytes of the vector of one head for which shared memory can hold several pipeline
stages. Larger heads use one stage."""
TILE = 64
"""The maximum number of tokens of a tile of queries or keys."""


def forward(
    layout: TreeLayout, q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Return the attention of q [R, T, H, hd] over k and v [R, T, K, hd] for R streams of packed training
    sequences, as (outputs with the shape of q, base-2 logarithms of the softmax denominators [R, H, T]
    float32)."""
    batch, length, heads, head_dim = q.shape
    q, k, v = (padded_heads(array) for array in (q, k, v))
    tile = min(TILE, length // layout.num_key_blocks.shape[1])
    layout_specs, query_spec, key_spec, row_spec = _query_specs(layout, q, k, tile)
    out, log_total = pl.pallas_call(
        partial(_forward_kernel, tile=tile, scale=scale),
        grid=(heads, length // tile, batch),
        in_specs=(*layout_specs, query_spec, key_spec, key_spec),
        out_specs=(query_spec, row_spec),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        ),
        compiler_params=compiler_params(q, stages=3, warps=4),
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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, k and v. The arguments are the inputs and results of `forward`, and the
    gradient `grad_out` of the outputs."""
    batch, length, heads, head_dim = q.shape
    # [R, H, T], the sum over the keys of softmax weight * gradient of this weight. The gradient of the scores
    # needs this sum.
    grad_sum = (grad_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1).transpose(0, 2, 1)
    q, k, v, grad_out = (padded_heads(array) for array in (q, k, v, grad_out))
    kv_heads, tile = k.shape[2], min(TILE, length // layout.num_key_blocks.shape[1])
    parameters = compiler_params(q, stages=2, warps=4)
    layout_specs, query_tile_spec, key_spec, row_spec = _query_specs(layout, q, k, tile)
    grad_q = pl.pallas_call(
        partial(_query_gradient_kernel, tile=tile, scale=scale),
        grid=(heads, length // tile, batch),
        in_specs=(*layout_specs, query_tile_spec, key_spec, key_spec, query_tile_spec, row_spec, row_spec),
        out_specs=query_tile_spec,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="tree_attention_query_gradient",
        compiler_params=parameters,
    )(layout.subtree_end, layout.key_blocks, layout.num_key_blocks, q, k, v, grad_out, log_total, grad_sum)
    kv_group = heads // kv_heads
    query_spec = pl.BlockSpec((None, length, kv_group, q.shape[-1]), lambda h, i, r: (r, 0, h, 0))
    row_spec = pl.BlockSpec((None, kv_group, length), lambda h, i, r: (r, h, 0))
    ends_spec = pl.BlockSpec((None, tile), lambda h, i, r: (r, i))
    key_tile_spec = pl.BlockSpec((None, tile, None, q.shape[-1]), lambda h, i, r: (r, i, h, 0))
    grad_k, grad_v = pl.pallas_call(
        partial(_key_gradient_kernel, tile=tile, scale=scale),
        grid=(kv_heads, length // tile, batch),
        in_specs=(ends_spec, query_spec, key_tile_spec, key_tile_spec, query_spec, row_spec, row_spec),
        out_specs=(key_tile_spec, key_tile_spec),
        out_shape=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        name="tree_attention_key_gradient",
        compiler_params=parameters,
    )(layout.subtree_end, q, k, v, grad_out, log_total, grad_sum)
    return grad_q[..., :head_dim], grad_k[..., :head_dim], grad_v[..., :head_dim]


def padded_heads(array: jax.Array) -> jax.Array:
    """Pad the last axis with zeros to a power of two of at least MIN_DIM."""
    width = array.shape[-1]
    padding = max(MIN_DIM, pl.next_power_of_2(width)) - width
    return jnp.pad(array, ((0, 0),) * (array.ndim - 1) + ((0, padding),))


def compiler_params(q: jax.Array, *, stages: int, warps: int = 8) -> triton.CompilerParams:
    """Return the parameters of a kernel over queries [..., hd].

    `stages` is the number of stages of the software pipeline on GPUs with at least 160 KiB of shared memory
    per program. On GPUs with 99 KiB, kernels use at most two stages, and loads then do not overlap products.
    Heads of more than WIDE_HEAD bytes use one stage and 8 warps on every GPU. Heads of at most 64 dimensions
    use 4 warps. All other heads use `warps` warps. The kernels of this module set `warps` to 4, for two
    reasons: with tiles of TILE tokens, each of 8 warps would compute narrower products, and programs with 4
    warps can share a multiprocessor.
    """
    if q.shape[-1] * q.dtype.itemsize > WIDE_HEAD:
        return triton.CompilerParams(num_warps=8, num_stages=1)
    return triton.CompilerParams(
        num_warps=4 if q.shape[-1] <= 64 else warps, num_stages=min(stages, 2) if _has_99_kib() else stages
    )


def _has_99_kib() -> bool:
    """Return whether a program on this GPU has at most 99 KiB of shared memory (CUDA C++ Programming Guide,
    Technical Specifications per Compute Capability). Return False on a machine without a GPU, where
    `scripts/check_gpu.py` compiles the programs for an H200."""
    return getattr(jax.local_devices()[0], "compute_capability", None) in ("8.6", "8.9", "12.0", "12.1")


def _query_specs(
    layout: TreeLayout, q: jax.Array, k: jax.Array, tile: int
) -> tuple[tuple[pl.BlockSpec, ...], pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Return the block specs for a grid of (heads, tiles of queries from last to first, streams), as (specs
    of the arrays of `layout`, spec of arrays with the shape of q, spec of k and v, spec of arrays
    [R, H, T])."""
    (_, length, heads, head_dim), kv_heads, blocks = q.shape, k.shape[2], layout.num_key_blocks.shape[1]
    kv_group, tiles_per_block, last = heads // kv_heads, length // blocks // tile, length // tile - 1
    layout_specs = (
        pl.BlockSpec((None, length), lambda h, i, r: (r, 0)),
        pl.BlockSpec((None, None, blocks), lambda h, i, r: (r, (last - i) // tiles_per_block, 0)),
        pl.BlockSpec((None, 1), lambda h, i, r: (r, (last - i) // tiles_per_block)),
    )
    query_spec = pl.BlockSpec((None, tile, None, head_dim), lambda h, i, r: (r, last - i, h, 0))
    key_spec = pl.BlockSpec((None, length, None, head_dim), lambda h, i, r: (r, 0, h // kv_group, 0))
    row_spec = pl.BlockSpec((None, None, tile), lambda h, i, r: (r, h, last - i))
    return layout_specs, query_spec, key_spec, row_spec


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
        key_slice: Any, visible: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest, total, attended = state
        scores = jnp.where(visible, product(queries, k[key_slice], over=(1, 1)) * (scale * LOG2E), MASKED)
        higher = jnp.maximum(highest, ceil_max(scores))
        weights, shrink = jnp.exp2(scores - higher[:, None]), jnp.exp2(highest - higher)
        values = v[key_slice]
        attended = shrink[:, None] * attended + product(weights.astype(values.dtype), values)
        return higher, shrink * total + weights.sum(axis=1), attended

    start = (jnp.full(tile, MASKED), jnp.zeros(tile), jnp.zeros(queries.shape, jnp.float32))
    highest, total, attended = _over_keys(ends, key_blocks, num_key_blocks, tile, add_keys, start)
    # A padding query may attend to no key. Its `log_total` is then -MASKED, a large number, so that its
    # weights are zero in the backward pass.
    any_visible = total > 0
    total = jnp.where(any_visible, total, 1.0)
    out[...] = (attended / total[:, None]).astype(out.dtype)
    log_total[...] = jnp.where(any_visible, highest + jnp.log2(total), -MASKED)


def _query_gradient_kernel(
    ends: Any,
    key_blocks: Any,
    num_key_blocks: Any,
    q: Any,
    k: Any,
    v: Any,
    grad_out: Any,
    log_total: Any,
    grad_sum: Any,
    grad_q: Any,
    *,
    tile: int,
    scale: float,
) -> None:
    queries, gradient, log_denominator, subtracted = q[...], grad_out[...], log_total[...], grad_sum[...]

    def add_keys(key_slice: Any, visible: jax.Array, grad: jax.Array) -> jax.Array:
        keys = k[key_slice]
        scores = jnp.where(visible, product(queries, keys, over=(1, 1)) * (scale * LOG2E), MASKED)
        weights = jnp.exp2(scores - log_denominator[:, None])
        grad_scores = weights * (product(gradient, v[key_slice], over=(1, 1)) - subtracted[:, None])
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
    grad_sum: Any,
    grad_k: Any,
    grad_v: Any,
    *,
    tile: int,
    scale: float,
) -> None:
    """Compute the gradients of a tile of keys and values. Only the queries from the stream index of a key to
    the end of its subtree attend to the key."""
    kv_group, keys, values, subtree_end = log_total.shape[0], k[...], v[...], ends[...]
    first = pl.program_id(1)
    tiles = pl.cdiv(subtree_end.max(), tile) - first
    key_positions = first * tile + jnp.arange(tile)

    def add_queries(at: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        head, begin = jax.lax.rem(at, kv_group), (first + jax.lax.div(at, kv_group)) * tile
        part, positions = pl.ds(begin, tile), begin + jnp.arange(tile)
        visible = (key_positions[:, None] <= positions[None]) & (positions[None] < subtree_end[:, None])
        queries, gradient = q[part, head], grad_out[part, head]
        # The scores, the weights and the gradients of the scores have the axes [keys, queries].
        scores = jnp.where(visible, product(keys, queries, over=(1, 1)) * (scale * LOG2E), MASKED)
        weights = jnp.exp2(scores - log_total[head, part][None])
        grad_scores = weights * (product(values, gradient, over=(1, 1)) - grad_sum[head, part][None])
        new_k = product(grad_scores.astype(queries.dtype), queries)
        return grads[0] + new_k, grads[1] + product(weights.astype(gradient.dtype), gradient)

    zeros = jnp.zeros(keys.shape, jnp.float32)
    sum_k, sum_v = jax.lax.fori_loop(0, tiles * kv_group, add_queries, (zeros, zeros))
    grad_k[...], grad_v[...] = (sum_k * scale).astype(grad_k.dtype), sum_v.astype(grad_v.dtype)


def _over_keys[State](
    ends: Any,
    key_blocks: Any,
    num_key_blocks: Any,
    tile: int,
    add: Callable[[Any, jax.Array, State], State],
    start: State,
) -> State:
    """Call `add(slice of the tile, visible [queries, keys], state)` for each tile of keys in the key blocks
    of the program's tile of queries. Each call returns the state for the next call. Return the last state."""
    queries = (pl.num_programs(1) - 1 - pl.program_id(1)) * tile + jnp.arange(tile)
    block = ends.shape[0] // key_blocks.shape[0]
    width = min(TILE, block)
    parts = block // width

    def step(at: jax.Array, state: State) -> State:
        first = key_blocks[jax.lax.div(at, parts)] * block + jax.lax.rem(at, parts) * width
        key_slice, keys = pl.ds(first, width), first + jnp.arange(width)
        visible = (keys[None] <= queries[:, None]) & (queries[:, None] < ends[key_slice][None])
        return add(key_slice, visible, state)

    return jax.lax.fori_loop(0, num_key_blocks[0] * parts, step, start)
