"""Attention over pages of keys and values for a GPU: Pallas kernels, compiled by Triton.

Decoding: a program processes one KV split after the other (`kv_splits`) and attends for the queries
of one key-value head of all rows that have it in common. Long rows keep more of the device busy than they
have heads, since each of their parts is a stretch (FlashDecoding), and a prompt that a group shares is read
once for several of its members, whose queries fill up a matrix product that one row's would not. What a row
gets depends on its own length and pages alone, to the bit.

Prefill: a program attends for one block of a prompt and one or two of its heads, page after page from the
first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from skyrl_tx_server.model.attention.kv_splits import KVSplits, max_parts, queries_per_sequence
from skyrl_tx_server.model.attention.softmax import LOG2E, MASKED, ceil_max
from skyrl_tx_server.model.kernels.prefix_tree_kernel import (
    MAX_HEAD_DIM,
    MIN_DIM,
    compiler_params,
    padded_heads,
    product,
)


class Attended(NamedTuple):
    """Attention over some of a softmax's keys, to be merged with the others'."""

    out: jax.Array  # [..., H, hd] float32, the values summed with weights 2^(score - highest)
    highest: (
        jax.Array
    )  # [..., H] float32, the highest score to the base of two, rounded up; -1e30 where there is no key
    total: jax.Array  # [..., H] float32, the sum of those weights


PROGRAMS = 128
"""For each key-value head, where there are so many stretches: several for each of a GPU's processors."""

MANY_TILES = 512
"""Blocks of a prompt, by heads, that keep a GPU busy when two of them share a program, which reads their
pages once."""


def supports_head_dim(head_dim: int) -> bool:
    """Whether pages of such heads go to the kernels as they are. Others would be filled up to a power of two
    first, in a copy of all pages.

    >>> [supports_head_dim(head_dim) for head_dim in (64, 96, 128, 256, 576)]
    [True, False, True, True, False]
    """
    return MIN_DIM <= head_dim <= MAX_HEAD_DIM and head_dim & (head_dim - 1) == 0


def paged_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tables: jax.Array,
    stretches: KVSplits,
    *,
    scale: float,
    interpret: bool = False,
) -> Attended:
    """q [B, H, hd] over the `stretches` of the pages `tables` [B, max_pages] of keys [N, K, hd, P] and values
    [N, K, P, hd]; P is a power of two, 64 or more for speed. What lies beyond a row's length may be anything,
    NaN too."""
    (batch, heads, head_dim), (_, kv_heads, _, page) = q.shape, keys.shape
    assert page >= MIN_DIM and page & (page - 1) == 0, (
        f"pages of {page} positions: a power of two from {MIN_DIM} on"
    )
    q, values = padded_heads(q), padded_heads(values)
    width, parts = q.shape[-1], max_parts(tables.shape[1])
    keys = jnp.pad(keys, ((0, 0), (0, 0), (0, width - head_dim), (0, 0)))
    whole = pl.BlockSpec()
    programs = min(PROGRAMS, len(stretches.part))
    attended = pl.pallas_call(
        partial(_decode_kernel, group=heads // kv_heads, programs=programs, scale=scale),
        grid=(kv_heads, programs),
        in_specs=(
            *[whole] * 7,
            pl.BlockSpec((keys.shape[0], None, width, page), lambda head, program: (0, head, 0, 0)),
            pl.BlockSpec((values.shape[0], None, page, width), lambda head, program: (0, head, 0, 0)),
        ),
        out_specs=(whole, whole, whole),
        out_shape=tuple(
            jax.ShapeDtypeStruct((parts, batch, heads, *last), jnp.float32) for last in ((width,), (), ())
        ),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="paged_attention",
    )(
        stretches.counts,
        stretches.rows,
        stretches.part,
        stretches.first,
        stretches.end,
        tables,
        q,
        keys,
        values,
    )
    own = jnp.arange(parts)[:, None, None] < jnp.asarray(stretches.num_parts)[:, None]
    out, highest, total = (
        jnp.where(own.reshape(*own.shape, *[1] * (part.ndim - 3)), part, absent)
        for part, absent in zip(attended, (0.0, MASKED, 0.0), strict=True)
    )
    return merge(Attended(out[..., :head_dim], highest, total))


def merge(parts: Attended) -> Attended:
    """Parts stacked along a leading axis as one."""
    highest = parts.highest.max(axis=0)
    weights = jnp.exp2(parts.highest - highest)
    return Attended(
        (parts.out * weights[..., None]).sum(axis=0), highest, (parts.total * weights).sum(axis=0)
    )


def _decode_kernel(
    counts: Any,
    rows: Any,
    part: Any,
    first: Any,
    end: Any,
    tables: Any,
    q: Any,
    keys: Any,
    values: Any,
    out: Any,
    highest: Any,
    total: Any,
    *,
    group: int,
    programs: int,
    scale: float,
) -> None:
    head, program = pl.program_id(0), pl.program_id(1)
    (batch, _, width), each = q.shape, queries_per_sequence(group)
    query = jnp.arange(rows.shape[1] * each)
    place, column = query // each, jnp.arange(width)[None]

    def attend(turn: jax.Array, done: jax.Array) -> jax.Array:
        at = program + turn * programs
        row, own, leader, last = rows[at, place], query % each, rows[at, 0], end[at]
        real = (row >= 0) & (own < group)  # the rest fills the product up
        row, own = jnp.where(real, row, batch), head * group + own
        wide = jnp.broadcast_to(real[:, None], (len(query), width))
        queries = triton.load(q.at[row[:, None], own[:, None], column], mask=wide, other=0.0)

        limit = jnp.full(len(query), last)
        state = _over_pages(
            queries, limit, (first[at], last), lambda index: tables[leader, index], keys, values, scale
        )
        number = part[at]
        triton.store(highest.at[number, row, own], state[0], mask=real)
        triton.store(total.at[number, row, own], state[1], mask=real)
        triton.store(out.at[number, row[:, None], own[:, None], column], state[2], mask=wide)
        return done

    turns = pl.cdiv(counts[0] - program, programs)
    jax.lax.fori_loop(0, turns, attend, jnp.int32(0))


def prefill_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of N blocks q [N, T, H, hd], whose first tokens have the positions `starts` [N] and of
    which `lengths` [N] tokens count, over their pages `tables` [N, max_pages] of keys [P, K, hd, page] and
    values [P, K, page, hd], which hold the blocks' own too."""
    (blocks, length, heads, head_dim), (_, kv_heads, _, page) = q.shape, keys.shape
    each = 2 if heads // kv_heads % 2 == 0 and blocks * heads >= MANY_TILES else 1
    q, values = padded_heads(q), padded_heads(values)
    width = q.shape[-1]
    keys = jnp.pad(keys, ((0, 0), (0, 0), (0, width - head_dim), (0, 0)))
    tiles = (
        q.reshape(blocks, length, heads // each, each, width)
        .transpose(0, 2, 3, 1, 4)
        .reshape(blocks, heads // each, -1, width)
    )
    own = pl.BlockSpec((None, None, each * length, width), lambda head, block: (block, head, 0, 0))
    number = pl.BlockSpec((1,), lambda head, block: (block,))
    of_head = heads // each // kv_heads
    out = pl.pallas_call(
        partial(_prefill_kernel, length=length, scale=scale),
        grid=(heads // each, blocks),
        in_specs=(
            number,
            number,
            pl.BlockSpec((None, tables.shape[1]), lambda head, block: (block, 0)),
            own,
            pl.BlockSpec((keys.shape[0], None, width, page), lambda head, block: (0, head // of_head, 0, 0)),
            pl.BlockSpec(
                (values.shape[0], None, page, width), lambda head, block: (0, head // of_head, 0, 0)
            ),
        ),
        out_specs=own,
        out_shape=jax.ShapeDtypeStruct(tiles.shape, q.dtype),
        compiler_params=compiler_params(q),
        interpret=interpret,
        name="prefill_attention",
    )(starts, lengths, tables, tiles, keys, values)
    out = out.reshape(blocks, heads // each, each, length, width).transpose(0, 3, 1, 2, 4)
    return out.reshape(blocks, length, heads, width)[..., :head_dim]


def _prefill_kernel(
    starts: Any,
    lengths: Any,
    tables: Any,
    q: Any,
    keys: Any,
    values: Any,
    out: Any,
    *,
    length: int,
    scale: float,
) -> None:
    queries, end = q[...], starts[0] + lengths[0]
    position = starts[0] + jnp.arange(len(queries)) % length
    limit = jnp.minimum(position + 1, end)  # padding sees what is there
    _, total, attended = _over_pages(
        queries, limit, (0, end), lambda index: tables[index], keys, values, scale
    )
    out[...] = (attended / jnp.where(total > 0, total, 1.0)[:, None]).astype(out.dtype)


type _State = tuple[jax.Array, jax.Array, jax.Array]


def _over_pages(
    queries: jax.Array,
    limit: jax.Array,
    span: tuple[Any, jax.Array],
    page_of: Callable[[jax.Array], jax.Array],
    keys: Any,
    values: Any,
    scale: float,
) -> _State:
    """(highest, total, sum of values) of queries [M, hd] over what lies in the pages from the first of `span`
    up to its last position, of which each query sees those before its `limit` [M]."""
    first, end = span
    count, page = len(queries), values.shape[1]

    def add_page(index: jax.Array, state: _State) -> _State:
        highest, total, attended = state
        number, positions = page_of(index), index * page + jnp.arange(page)
        scores = product(queries, keys[number]) * (scale * LOG2E)
        scores = jnp.where(positions[None] < limit[:, None], scores, MASKED)
        higher = jnp.maximum(highest, ceil_max(scores))
        weights, shrink = jnp.exp2(scores - higher[:, None]), jnp.exp2(highest - higher)
        there = jnp.broadcast_to((positions < end)[:, None], values.shape[1:])
        found = triton.load(values.at[number], mask=there, other=0.0)
        attended = shrink[:, None] * attended + product(weights.astype(found.dtype), found)
        return higher, shrink * total + weights.sum(axis=1), attended

    start = (jnp.full(count, MASKED), jnp.zeros(count), jnp.zeros(queries.shape, jnp.float32))
    return jax.lax.fori_loop(first, pl.cdiv(end, page), add_page, start)
