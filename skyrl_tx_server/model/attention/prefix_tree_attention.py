"""Attention over a stream of prefix trees, computed in pairs of blocks. A stream consists of packed training
sequences that share the tokens of common prefixes (see `training.packing`).

The token at index j of the stream is visible to the tokens from j up to, but not including, `subtree_end[j]`.
The stream is divided into blocks of ATTENTION_TILE tokens. A pair of a query block and a key block is
computed only if a query sees a key, so the cost depends on the lengths of the sequences and not on the square
of the stream's length. In the forward and the backward pass, only the scores of one pair of blocks are in
memory at a time (Dao et al., arXiv:2205.14135).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from skyrl_tx_server.model.attention.prefix_tree_layout import TreeLayout
from skyrl_tx_server.model.attention.softmax import LOG2E, MASKED, ceil_max
from skyrl_tx_server.model.kernels import prefix_tree_kernel
from skyrl_tx_server.model.mesh import batch_axes, shard_map_over
from skyrl_tx_server.model.model_config import AttentionSpec, ModelConfig


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class _Heads:
    """One stream in N blocks of n tokens. Each of the K key-value heads has G query heads. q is
    [N, K, G, n, hd], and k and v are [N, K, n, hd]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


def tree_attention(
    config: ModelConfig,
    layout: TreeLayout,
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> jax.Array:
    """Return attention [R, T, H, hd] of q [R, T, H, hd] over k, v [R, T, K, hd], for R streams of T tokens
    with H query heads and K key-value heads. On a mesh each device computes a share of the streams and
    heads."""
    if spec.sliding_window is None:
        layout = replace(layout, positions=None)  # only a sliding window needs positions
    batch_axis = batch_axes(config, q.shape[0])
    heads = PartitionSpec(batch_axis, None, "tensor")
    return shard_map_over(
        config, partial(_attend, spec), (PartitionSpec(batch_axis), heads, heads, heads), heads
    )(layout, q, k, v)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec: AttentionSpec, layout: TreeLayout, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _forward(spec, layout, q, k, v)[0]


def _forward(
    spec: AttentionSpec, layout: TreeLayout, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return (outputs like q, log2 of the softmax denominators [R, H, T] float32)."""
    return _by_platform(spec, prefix_tree_kernel.forward, _stream_forward, layout, q, k, v)


type _Kept = tuple[TreeLayout, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def _forward_kept(
    spec: AttentionSpec, layout: TreeLayout, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, _Kept]:
    out, log_total = (checkpoint_name(part, "attended") for part in _forward(spec, layout, q, k, v))
    return out, (layout, q, k, v, out, log_total)


def _backward(
    spec: AttentionSpec, kept: _Kept, grad_out: jax.Array
) -> tuple[None, jax.Array, jax.Array, jax.Array]:
    grad_q, grad_k, grad_v = _by_platform(
        spec, prefix_tree_kernel.backward, _stream_backward, *kept, grad_out
    )
    return None, grad_q, grad_k, grad_v


_attend.defvjp(_forward_kept, _backward)


def _by_platform[Output](
    spec: AttentionSpec,
    kernel: Callable[..., Output],
    loop: Callable[..., Output],
    layout: TreeLayout,
    *arrays: jax.Array,
) -> Output:
    """Run the kernel on NVIDIA GPUs. On other devices, for sliding windows, and for head dimensions that are
    too large for the kernel, run the loop for each stream."""

    def each_stream(*stacked: object) -> Output:
        streams = [
            loop(spec, *jax.tree.map(lambda leaf, r=r: leaf[r], stacked))
            for r in range(layout.subtree_end.shape[0])
        ]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *streams)

    if spec.sliding_window is not None or arrays[0].shape[-1] > prefix_tree_kernel.MAX_HEAD_DIM:
        return each_stream(layout, *arrays)
    return jax.lax.platform_dependent(
        layout, *arrays, cuda=partial(kernel, scale=spec.scale), default=each_stream
    )


# --- the loop over pairs of blocks


def _stream_forward(
    spec: AttentionSpec, layout: TreeLayout, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return (outputs [T, H, hd], log2 of the softmax denominators [H, T] float32)."""
    heads = _heads(layout, q, k, v)

    def attend_block(i: jax.Array, done: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        q = heads.q[i]

        def add_key_block(
            number: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            highest, total, attended = state
            j = layout.key_blocks[i, number]
            scores = _scores(spec, layout, q, heads.k[j], i, j)
            higher = jnp.maximum(highest, ceil_max(scores))
            weights, shrink = jnp.exp2(scores - higher[..., None]), jnp.exp2(highest - higher)
            new = _product("kgqs,ksh->kgqh", weights.astype(q.dtype), heads.v[j])
            return higher, shrink * total + weights.sum(axis=-1), shrink[..., None] * attended + new

        start = (jnp.full(q.shape[:-1], MASKED), jnp.zeros(q.shape[:-1]), jnp.zeros(q.shape))
        highest, total, attended = jax.lax.fori_loop(0, layout.num_key_blocks[i], add_key_block, start)
        total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)  # avoids 0 / 0 in blocks of padding
        return done[0].at[i].set((attended / total[..., None]).astype(q.dtype)), done[1].at[i].set(
            highest + jnp.log2(total)
        )

    empty = (jnp.zeros_like(heads.q), jnp.zeros(heads.q.shape[:-1]))
    out, log_total = jax.lax.fori_loop(0, len(heads.q), attend_block, empty)
    return _join_blocks(out), _join_blocks(log_total[..., None])[..., 0].T


def _stream_backward(
    spec: AttentionSpec,
    layout: TreeLayout,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    log_total: jax.Array,
    grad_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    heads = _heads(layout, q, k, v)
    arrays = out, log_total.T[..., None], grad_out
    out, log_total, grad_out = (_split_blocks(layout, k, array) for array in arrays)
    log_total = log_total[..., 0]
    # [N, K, G, n]: for each query, the sum over the keys of softmax weight * gradient of this weight. It
    # equals the dot product of the output and the gradient of the output over the head dimension. The
    # gradient of a score is softmax weight * (gradient of this weight - this sum).
    grad_sum = (grad_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)

    def add_query_block(i: jax.Array, grads: _Heads) -> _Heads:
        q, grad = heads.q[i], grad_out[i]

        def add_key_block(
            number: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            grad_q, grads_k, grads_v = state
            j = layout.key_blocks[i, number]
            k, v = heads.k[j], heads.v[j]
            weights = jnp.exp2(_scores(spec, layout, q, k, i, j) - log_total[i][..., None])
            grad_scores = (weights * (_product("kgqh,ksh->kgqs", grad, v) - grad_sum[i][..., None])).astype(
                q.dtype
            )
            grads_k = grads_k.at[j].add(_product("kgqs,kgqh->ksh", grad_scores, q))
            grads_v = grads_v.at[j].add(_product("kgqs,kgqh->ksh", weights.astype(q.dtype), grad))
            return grad_q + _product("kgqs,ksh->kgqh", grad_scores, k), grads_k, grads_v

        grad_q, grads_k, grads_v = jax.lax.fori_loop(
            0, layout.num_key_blocks[i], add_key_block, (jnp.zeros(q.shape), grads.k, grads.v)
        )
        return _Heads(q=grads.q.at[i].set(grad_q), k=grads_k, v=grads_v)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), heads)
    grads = jax.lax.fori_loop(0, len(heads.q), add_query_block, zeros)
    grad_q = _join_blocks((grads.q * spec.scale).astype(q.dtype))
    grad_k = _join_blocks((grads.k[:, :, None] * spec.scale).astype(k.dtype))
    return grad_q, grad_k, _join_blocks(grads.v[:, :, None].astype(v.dtype))


def _heads(layout: TreeLayout, q: jax.Array, k: jax.Array, v: jax.Array) -> _Heads:
    queries, keys = _split_blocks(layout, k, q), _split_blocks(layout, k, k)[:, :, 0]
    return _Heads(q=queries, k=keys, v=_split_blocks(layout, k, v)[:, :, 0])


def _split_blocks(layout: TreeLayout, k: jax.Array, array: jax.Array) -> jax.Array:
    """Return `array` [T, heads, hd] as blocks [N, K, heads / K, n, hd]. `k` [T, K, hd] determines K."""
    blocks = layout.num_key_blocks.shape[0]
    by_block = array.reshape(blocks, len(array) // blocks, k.shape[1], -1, array.shape[-1])
    return by_block.transpose(0, 2, 3, 1, 4)


def _join_blocks(array: jax.Array) -> jax.Array:
    """Undo `_split_blocks`."""
    blocks, kv_heads, group, block, head_dim = array.shape
    return array.transpose(0, 3, 1, 2, 4).reshape(blocks * block, kv_heads * group, head_dim)


def _scores(
    spec: AttentionSpec, layout: TreeLayout, q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array
) -> jax.Array:
    """Return masked base-2 scores [K, G, n, n] float32 of query block i and key block j."""
    block = k.shape[1]
    queries, keys = i * block + jnp.arange(block)[:, None], j * block + jnp.arange(block)[None]
    ends = layout.subtree_end.reshape(-1, block)[j]
    scores = _product("kgqh,ksh->kgqs", q, k) * (spec.scale * LOG2E)
    seen = (keys <= queries) & (queries < ends[None])
    if spec.sliding_window is not None:
        assert layout.positions is not None, "a sliding window needs positions"
        positions = layout.positions.reshape(-1, block)
        seen &= positions[i][:, None] - positions[j][None] < spec.sliding_window
    return jnp.where(seen, scores, MASKED)


def _product(form: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(form, left, right, preferred_element_type=jnp.float32)
