"""Decode attention over pages of keys and values for a GPU: a Pallas kernel, compiled by Triton.

One program attends for the queries of one row and key-value head over a share of the row's pages, so that long rows keep more of the
device busy than they have heads (FlashDecoding). What a row gets depends on its own length and pages alone, to the bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from skyrl_tx_server.model.softmax import LOG2E, MASKED, whole_maximum
from skyrl_tx_server.model.tree_kernel import MIN_DIM, padded_heads, product


class Attended(NamedTuple):
    """Attention over some of a softmax's keys, to be merged with the others'."""

    out: jax.Array  # [..., H, hd] float32, the values summed with weights 2^(score - highest)
    highest: jax.Array  # [..., H] float32, the highest score to the base of two, rounded up; -1e30 where there is no key
    total: jax.Array  # [..., H] float32, the sum of those weights


def paged_attention(
    q: jax.Array, keys: jax.Array, values: jax.Array, tables: jax.Array, lengths: jax.Array, *, splits: int = 4, interpret: bool = False
) -> Attended:
    """q [B, H, hd] over the first `lengths` [B] positions of the pages `tables` [B, max_pages] of keys [N, K, hd, P] and values
    [N, K, P, hd]; P is a power of two, 64 or more for speed. What lies beyond a row's length may be anything, NaN too.

    Rows that share their first pages can attend to them together: make their queries one row's, [groups, K * rows * H / K, hd] with the
    key-value head first, and merge with what each attends to alone. `splits` are the programs that share a row's pages.
    """
    (batch, heads, head_dim), (_, kv_heads, _, page) = q.shape, keys.shape
    assert page >= MIN_DIM and page & (page - 1) == 0, f"pages of {page} positions: a power of two from {MIN_DIM} on"
    group = heads // kv_heads
    queries = max(MIN_DIM, pl.next_power_of_2(group))
    grouped = jnp.pad(q.reshape(batch, kv_heads, group, head_dim), ((0, 0), (0, 0), (0, queries - group), (0, 0)))
    grouped, values = padded_heads(grouped), padded_heads(values)
    width = grouped.shape[-1]
    keys = jnp.pad(keys, ((0, 0), (0, 0), (0, width - head_dim), (0, 0)))
    row = pl.BlockSpec((None, None, queries, width), lambda split, head, row: (row, head, 0, 0))
    shares = (splits, batch, kv_heads, group)
    numbers = pl.BlockSpec((None, None, None, queries), lambda split, head, row: (split, row, head, 0))
    attended = pl.pallas_call(
        partial(_kernel, group=group, splits=splits, scale=head_dim**-0.5),
        grid=(splits, kv_heads, batch),
        in_specs=(
            pl.BlockSpec((None, tables.shape[1]), lambda split, head, row: (row, 0)),
            pl.BlockSpec((1,), lambda split, head, row: (row,)),
            row,
            pl.BlockSpec((keys.shape[0], None, width, page), lambda split, head, row: (0, head, 0, 0)),
            pl.BlockSpec((values.shape[0], None, page, width), lambda split, head, row: (0, head, 0, 0)),
        ),
        out_specs=(pl.BlockSpec((None, None, None, queries, width), lambda split, head, row: (split, row, head, 0, 0)), numbers, numbers),
        out_shape=tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*shares, width), shares, shares)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="paged_attention",
    )(tables, lengths, grouped, keys, values)
    out, highest, total = merge(Attended(*attended))
    return Attended(out[..., :head_dim].reshape(q.shape), highest.reshape(batch, heads), total.reshape(batch, heads))


def merge(parts: Attended) -> Attended:
    """Parts stacked along a leading axis as one."""
    highest = parts.highest.max(axis=0)
    weights = jnp.exp2(parts.highest - highest)
    return Attended((parts.out * weights[..., None]).sum(axis=0), highest, (parts.total * weights).sum(axis=0))


def _kernel(
    tables: Any,
    lengths: Any,
    q: Any,
    keys: Any,
    values: Any,
    out: Any,
    highest: Any,
    total: Any,
    *,
    group: int,
    splits: int,
    scale: float,
) -> None:
    queries, length, page = q[...], lengths[0], values.shape[1]
    pages = pl.cdiv(length, page)
    share = pl.cdiv(pages, splits)
    first = pl.program_id(0) * share

    def add_page(at: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest, total, attended = state
        number = tables[at]
        seen = at * page + jnp.arange(page) < length
        scores = jnp.where(seen[None], product(queries, keys[number]) * (scale * LOG2E), MASKED)
        higher = jnp.maximum(highest, whole_maximum(scores))
        weights, shrink = jnp.exp2(scores - higher[:, None]), jnp.exp2(highest - higher)
        own = triton.load(values.at[number], mask=jnp.broadcast_to(seen[:, None], values.shape[1:]), other=0.0)
        attended = shrink[:, None] * attended + product(weights.astype(own.dtype), own)
        return higher, shrink * total + weights.sum(axis=1), attended

    count = queries.shape[0]
    start = (jnp.full(count, MASKED), jnp.zeros(count), jnp.zeros(queries.shape, jnp.float32))
    end = jax.lax.fori_loop(first, jnp.minimum(first + share, pages), add_page, start)
    real = jnp.arange(count) < group  # the rest fills the product up
    triton.store(highest, end[0], mask=real)
    triton.store(total, end[1], mask=real)
    triton.store(out, end[2], mask=jnp.broadcast_to(real[:, None], out.shape))
