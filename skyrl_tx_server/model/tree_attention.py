"""Attention over a stream of sequences that share their beginnings (see `packing`), block by block.

A token at index j of the stream is seen by those from j up to `ends[j]`, where its subtree ends. Only pairs of blocks in which anything
is seen are computed, so the cost grows with what is seen and not with the stream's length squared; scores never lie in memory but one
block's, forward and backward (Dao et al., arXiv:2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from skyrl_tx_server.model.config import ModelConfig
from skyrl_tx_server.model.low_rank import Leaf
from skyrl_tx_server.model.mesh import BATCH, on_each

MASKED = -1e30


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class TreeLayout:
    """Who sees whom, as `packing.PackedBatch` has it; every array has a leading axis of streams R."""

    ends: Leaf  # [R, T] int32
    key_blocks: Leaf  # [R, T / block, T / block] int32
    num_key_blocks: Leaf  # [R, T / block] int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class _Heads:
    """One stream cut into N blocks of n tokens: queries [N, K, G, n, hd], scaled, keys and values [N, K, n, hd]; K key-value heads with G
    queries each."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


def tree_attention(config: ModelConfig, layout: TreeLayout, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """q [R, T, H, hd] over k, v [R, T, K, hd] -> [R, T, H, hd]. On a mesh every device attends in its own streams and heads."""
    if config.mesh is None:
        return _attend(layout, q, k, v)
    heads, rows = PartitionSpec(BATCH, None, "tensor"), PartitionSpec(BATCH)
    return on_each(config, _attend, (rows, heads, heads, heads), heads)(layout, q, k, v)


def _attend(layout: TreeLayout, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.stack([_attend_in_stream(jax.tree.map(lambda leaf, r=r: leaf[r], layout), q[r], k[r], v[r]) for r in range(len(q))])


def _attend_in_stream(layout: TreeLayout, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    (length, _, head_dim), kv_heads, blocks = q.shape, k.shape[1], layout.num_key_blocks.shape[0]

    def cut(array: jax.Array) -> jax.Array:
        return array.reshape(blocks, length // blocks, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)

    layout = replace(layout, ends=layout.ends.reshape(blocks, -1))
    out = _blockwise(_Heads(q=cut(q * head_dim**-0.5), k=cut(k)[:, :, 0], v=cut(v)[:, :, 0]), layout)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


@jax.custom_vjp
def _blockwise(heads: _Heads, layout: TreeLayout) -> jax.Array:
    """What the queries attend to, shaped like them."""
    return _forward(heads, layout)[0]


def _forward(heads: _Heads, layout: TreeLayout) -> tuple[jax.Array, jax.Array]:
    """(outputs [N, K, G, n, hd], log of each softmax's denominator [N, K, G, n] float32)."""

    def of_queries(i: jax.Array, done: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        q = heads.q[i]

        def add_keys(at: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            highest, total, attended = state
            j = layout.key_blocks[i, at]
            scores = _scores(layout, q, heads.k[j], i, j)
            higher = jnp.maximum(highest, scores.max(axis=-1))
            weights, shrink = jnp.exp(scores - higher[..., None]), jnp.exp(highest - higher)
            new = _product("kgqs,ksh->kgqh", weights.astype(q.dtype), heads.v[j])
            return higher, shrink * total + weights.sum(axis=-1), shrink[..., None] * attended + new

        start = (jnp.full(q.shape[:-1], MASKED), jnp.zeros(q.shape[:-1]), jnp.zeros(q.shape))
        highest, total, attended = jax.lax.fori_loop(0, layout.num_key_blocks[i], add_keys, start)
        total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)  # a block of padding sees nothing
        return done[0].at[i].set((attended / total[..., None]).astype(q.dtype)), done[1].at[i].set(highest + jnp.log(total))

    empty = (jnp.zeros_like(heads.q), jnp.zeros(heads.q.shape[:-1]))
    return jax.lax.fori_loop(0, len(heads.q), of_queries, empty)


type _Kept = tuple[_Heads, TreeLayout, jax.Array, jax.Array]


def _forward_kept(heads: _Heads, layout: TreeLayout) -> tuple[jax.Array, _Kept]:
    out, log_total = (checkpoint_name(part, "attended") for part in _forward(heads, layout))
    return out, (heads, layout, out, log_total)


def _backward(kept: _Kept, grad_out: jax.Array) -> tuple[_Heads, None]:
    heads, layout, out, log_total = kept
    along = (grad_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)  # what the softmax's gradient takes off, per query

    def of_queries(i: jax.Array, grads: _Heads) -> _Heads:
        q, grad = heads.q[i], grad_out[i]

        def of_keys(at: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            grad_q, grads_k, grads_v = state
            j = layout.key_blocks[i, at]
            k, v = heads.k[j], heads.v[j]
            weights = jnp.exp(_scores(layout, q, k, i, j) - log_total[i][..., None])
            grad_scores = (weights * (_product("kgqh,ksh->kgqs", grad, v) - along[i][..., None])).astype(q.dtype)
            grads_k = grads_k.at[j].add(_product("kgqs,kgqh->ksh", grad_scores, q))
            grads_v = grads_v.at[j].add(_product("kgqs,kgqh->ksh", weights.astype(q.dtype), grad))
            return grad_q + _product("kgqs,ksh->kgqh", grad_scores, k), grads_k, grads_v

        grad_q, grads_k, grads_v = jax.lax.fori_loop(0, layout.num_key_blocks[i], of_keys, (jnp.zeros(q.shape), grads.k, grads.v))
        return _Heads(q=grads.q.at[i].set(grad_q), k=grads_k, v=grads_v)

    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), heads)
    grads = jax.lax.fori_loop(0, len(heads.q), of_queries, nothing)
    return jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), grads, heads), None


_blockwise.defvjp(_forward_kept, _backward)


def _scores(layout: TreeLayout, q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """[K, G, n, n] float32 of query block i and key block j, masked where a query does not see a key."""
    block = k.shape[1]
    queries, keys = i * block + jnp.arange(block)[:, None], j * block + jnp.arange(block)[None]
    return jnp.where((keys <= queries) & (queries < layout.ends[j][None]), _product("kgqh,ksh->kgqs", q, k), MASKED)


def _product(form: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(form, left, right, preferred_element_type=jnp.float32)
