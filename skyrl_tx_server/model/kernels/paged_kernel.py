"""Pallas kernels for attention over KV pages on GPUs, compiled by Triton.

Decoding: a KV split (`kv_splits`) is one part of the pages of one or more sequences. A program processes
several splits in order, for one key-value head. For each split, it computes the attention of the queries of
all sequences of the split. The parts of a long sequence are in different splits, which can run in parallel
(FlashDecoding). The KV pages of a shared prompt are read once for several sequences, whose queries are the
rows of one matrix product. Each bit of the result of a sequence depends only on the length, the pages and the
queries of this sequence.

Prefill: a program computes the attention of one tile of a prompt for one or two heads. It reads the pages of
the prompt one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from skyrl_tx_server.model.attention.kv_splits import KVSplits, max_parts, queries_per_sequence
from skyrl_tx_server.model.attention.softmax import LOG2E, MASKED, ceil_max
from skyrl_tx_server.model.kernels.prefix_tree_kernel import MAX_HEAD_DIM, MIN_DIM, compiler_params
from skyrl_tx_server.model.kernels.products import product
from skyrl_tx_server.model.kernels.rotary_kernel import heads_per_program

PROGRAMS = 128
"""The maximum number of programs per key-value head. With this number, each multiprocessor of a GPU runs
several programs."""

PARTS_AT_ONCE = 8
"""The number of parts of a sequence that `_merge_kernel` loads together."""

MANY_TILES = 512
"""The minimum number of (tile, head) pairs in a tile batch for which one program processes two heads that
share a key-value head. The program reads the pages once for both heads. With fewer pairs, there would be too
few programs for all multiprocessors of a GPU."""


def supports_head_dim(head_dim: int) -> bool:
    """Return whether the kernels can read pages with this head dimension in place. Other head dimensions up
    to MAX_HEAD_DIM would need a padded copy of all pages. With larger head dimensions, the tiles of the
    kernels would not fit into shared memory.

    >>> [supports_head_dim(head_dim) for head_dim in (64, 96, 128, 256, 576)]
    [True, False, True, True, False]
    """
    return MIN_DIM <= head_dim <= MAX_HEAD_DIM and head_dim & (head_dim - 1) == 0


def paged_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tables: jax.Array,
    splits: KVSplits,
    lengths: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Return the attention [B, H, hd] of q [B, H, hd] over N KV pages with keys [N, K, hd, P] and values
    [N, K, P, hd]. `tables` [B, W] are the block tables of the sequences. `lengths` [B] are the lengths of the
    sequences, and `splits` are KV splits that cover at least these lengths. The page size P is a power of
    two. Keys and values after the end of a sequence may be NaN. The result of a sequence that is in no split
    is zero."""
    (batch, heads, head_dim), (_, kv_heads, _, page) = q.shape, keys.shape
    assert page >= MIN_DIM and page & (page - 1) == 0, f"page size {page} must be a power of two >= {MIN_DIM}"
    assert supports_head_dim(head_dim), f"head dimension {head_dim}"
    whole, parts = pl.BlockSpec(), max_parts(tables.shape[1])
    programs = min(PROGRAMS, len(splits.part))
    attended = pl.pallas_call(
        partial(_decode_kernel, group=heads // kv_heads, programs=programs, scale=scale),
        grid=(kv_heads, programs),
        in_specs=(
            *[whole] * 8,
            pl.BlockSpec((keys.shape[0], None, head_dim, page), lambda head, program: (0, head, 0, 0)),
            pl.BlockSpec((values.shape[0], None, page, head_dim), lambda head, program: (0, head, 0, 0)),
        ),
        out_specs=(whole, whole, whole),
        out_shape=tuple(
            jax.ShapeDtypeStruct((parts, batch, heads, *last), jnp.float32) for last in ((head_dim,), (), ())
        ),
        # The software pipeline loads page numbers two stages before the pages. With fewer than five stages,
        # no load would overlap a product.
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=5),
        name="paged_attention",
    )(
        splits.counts,
        splits.rows,
        splits.part,
        splits.first,
        splits.end,
        lengths,
        tables,
        q,
        keys,
        values,
    )
    per_program = heads_per_program(heads, limit=4)
    return pl.pallas_call(
        _merge_kernel,
        grid=(batch, heads // per_program),
        in_specs=(pl.BlockSpec((1,), lambda row, block: (row,)), *[whole] * 3),
        out_specs=pl.BlockSpec((None, per_program, head_dim), lambda row, block: (row, block, 0)),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=triton.CompilerParams(num_warps=4 if per_program >= 4 else 1),
        name="merge_parts",
    )(splits.num_parts, *attended)


def _decode_kernel(
    counts: Any,
    rows: Any,
    part: Any,
    first: Any,
    end: Any,
    lengths: Any,
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
    """Write the result of `_over_pages` for each part of each sequence. Sequences that share a part have the
    same number of positions in it. The length of the first of them (`leader`) therefore limits the positions
    for all of them."""
    head, program = pl.program_id(0), pl.program_id(1)
    (batch, _, width), num_queries = q.shape, queries_per_sequence(group)
    query = jnp.arange(rows.shape[1] * num_queries)
    member, column = query // num_queries, jnp.arange(width)[None]

    def attend(turn: jax.Array, done: jax.Array) -> jax.Array:
        split = program + turn * programs
        row, query_head, leader = rows[split, member], query % num_queries, rows[split, 0]
        last = jnp.minimum(end[split], lengths[leader])
        valid = (row >= 0) & (query_head < group)  # all other queries are padding
        row, query_head = jnp.where(valid, row, batch), head * group + query_head
        mask = jnp.broadcast_to(valid[:, None], (len(query), width))
        queries = triton.load(q.at[row[:, None], query_head[:, None], column], mask=mask, other=0.0)

        limit = jnp.full(len(query), last)
        state = _over_pages(
            queries, limit, (first[split], last), lambda index: tables[leader, index], keys, values, scale
        )
        number = part[split]
        triton.store(highest.at[number, row, query_head], state[0], mask=valid)
        triton.store(total.at[number, row, query_head], state[1], mask=valid)
        triton.store(out.at[number, row[:, None], query_head[:, None], column], state[2], mask=mask)
        return done

    turns = pl.cdiv(counts[0] - program, programs)
    jax.lax.fori_loop(0, turns, attend, jnp.int32(0))


def _merge_kernel(num_parts: Any, out: Any, highest: Any, total: Any, merged: Any) -> None:
    """Merge the results of the parts of a sequence, for some heads. Several parts are loaded together,
    because a load takes longer than the merge of a part."""
    count, (num_heads, width) = num_parts[0], merged.shape
    row, heads = pl.program_id(0), pl.program_id(1) * num_heads + jnp.arange(num_heads)[None]
    column = jnp.arange(width)[None, None]

    def add(
        index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        best, weights, attended = state
        part = index * PARTS_AT_ONCE + jnp.arange(PARTS_AT_ONCE)[:, None]
        valid = jnp.broadcast_to(part < count, (PARTS_AT_ONCE, num_heads))
        part = jnp.where(part < count, part, 0)
        scores = triton.load(highest.at[part, row, heads], mask=valid, other=MASKED)
        totals = triton.load(total.at[part, row, heads], mask=valid, other=0.0)
        mask = jnp.broadcast_to(valid[..., None], (PARTS_AT_ONCE, num_heads, width))
        outputs = triton.load(out.at[part[..., None], row, heads[..., None], column], mask=mask, other=0.0)
        higher = jnp.maximum(best, scores.max(axis=0))
        weight, shrink = jnp.exp2(scores - higher[None]), jnp.exp2(best - higher)
        return (
            higher,
            shrink * weights + (weight * totals).sum(axis=0),
            shrink[:, None] * attended + (weight[..., None] * outputs).sum(axis=0),
        )

    start = jnp.full(num_heads, MASKED), jnp.zeros(num_heads), jnp.zeros((num_heads, width), jnp.float32)
    _, weights, attended = jax.lax.fori_loop(0, pl.cdiv(count, PARTS_AT_ONCE), add, start)
    merged[...] = (attended / jnp.where(weights > 0, weights, 1.0)[:, None]).astype(merged.dtype)


def prefill_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Return the causal attention [M, T, H, hd] of M tiles q [M, T, H, hd] over N KV pages with keys
    [N, K, hd, P] and values [N, K, P, hd]. The pages must include the keys and values of the tiles. `tables`
    [M, W] are the block tables of the tiles' prompts. `starts` [M] are the positions of the tiles' first
    tokens. `lengths` [M] are the tiles' numbers of tokens without padding."""
    (num_tiles, length, heads, head_dim), (_, kv_heads, _, page) = q.shape, keys.shape
    paired_heads = 2 if heads // kv_heads % 2 == 0 and num_tiles * heads >= MANY_TILES else 1
    last = num_tiles - 1  # the last tiles attend to the most positions, so their programs run first
    tiles = (
        q.reshape(num_tiles, length, heads // paired_heads, paired_heads, head_dim)
        .transpose(0, 2, 3, 1, 4)
        .reshape(num_tiles, heads // paired_heads, -1, head_dim)
    )
    query_spec = pl.BlockSpec(
        (None, None, paired_heads * length, head_dim), lambda head, tile: (last - tile, head, 0, 0)
    )
    scalar = pl.BlockSpec((1,), lambda head, tile: (last - tile,))
    per_kv_head = heads // paired_heads // kv_heads
    out = pl.pallas_call(
        partial(_prefill_kernel, length=length, scale=scale),
        grid=(heads // paired_heads, num_tiles),
        in_specs=(
            scalar,
            scalar,
            pl.BlockSpec((None, tables.shape[1]), lambda head, tile: (last - tile, 0)),
            query_spec,
            pl.BlockSpec(
                (len(keys), None, head_dim, page), lambda head, tile: (0, head // per_kv_head, 0, 0)
            ),
            pl.BlockSpec(
                (len(values), None, page, head_dim), lambda head, tile: (0, head // per_kv_head, 0, 0)
            ),
        ),
        out_specs=query_spec,
        out_shape=jax.ShapeDtypeStruct(tiles.shape, q.dtype),
        compiler_params=compiler_params(q, stages=5),
        name="prefill_attention",
    )(starts, lengths, tables, tiles, keys, values)
    out = out.reshape(num_tiles, heads // paired_heads, paired_heads, length, head_dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


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
    limit = jnp.minimum(position + 1, end)  # padding attends to all positions before `end`
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
    """Compute the attention of queries [M, hd] over the positions in `span`, which is (index of the first
    page in the block table, end position). Each query attends to the positions before its `limit` [M].
    `page_of` returns the number of the page with a given index.

    Return three float32 arrays: the highest base-2 scores [M], rounded up, or MASKED if there are no
    positions; the sums [M] of the weights 2^(score - highest); the sums [M, hd] of the values with these
    weights.
    """
    first, end = span
    count, page = len(queries), values.shape[1]

    def add_page(index: jax.Array, state: _State) -> _State:
        highest, total, attended = state
        number, positions = page_of(index), index * page + jnp.arange(page)
        scores = product(queries, keys[number]) * (scale * LOG2E)
        scores = jnp.where(positions[None] < limit[:, None], scores, MASKED)
        higher = jnp.maximum(highest, ceil_max(scores))
        weights, shrink = jnp.exp2(scores - higher[:, None]), jnp.exp2(highest - higher)
        mask = jnp.broadcast_to((positions < end)[:, None], values.shape[1:])
        page_values = triton.load(values.at[number], mask=mask, other=0.0)
        attended = shrink[:, None] * attended + product(weights.astype(page_values.dtype), page_values)
        return higher, shrink * total + weights.sum(axis=1), attended

    start = (jnp.full(count, MASKED), jnp.zeros(count), jnp.zeros(queries.shape, jnp.float32))
    return jax.lax.fori_loop(first, pl.cdiv(end, page), add_page, start)
