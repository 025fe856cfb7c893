"""Decode attention over pages of keys and values for a GPU: a Pallas kernel, compiled by Triton.

A program takes one stretch of pages after the other (`page_stretches`) and attends for the queries of one key-value head of all rows that
have it in common. Long rows keep more of the device busy than they have heads, since each of their parts is a stretch (FlashDecoding), and
a prompt that a group shares is read once for several of its members, whose queries fill up a matrix product that one row's would not. What
a row gets depends on its own length and pages alone, to the bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from skyrl_tx_server.model.page_stretches import Stretches, max_parts, queries_per_row
from skyrl_tx_server.model.softmax import LOG2E, MASKED, whole_maximum
from skyrl_tx_server.model.tree_kernel import MIN_DIM, padded_heads, product


class Attended(NamedTuple):
    """Attention over some of a softmax's keys, to be merged with the others'."""

    out: jax.Array  # [..., H, hd] float32, the values summed with weights 2^(score - highest)
    highest: jax.Array  # [..., H] float32, the highest score to the base of two, rounded up; -1e30 where there is no key
    total: jax.Array  # [..., H] float32, the sum of those weights


PROGRAMS = 128
"""For each key-value head, where there are so many stretches: several for each of a GPU's processors."""


def paged_attention(
    q: jax.Array, keys: jax.Array, values: jax.Array, tables: jax.Array, stretches: Stretches, *, interpret: bool = False
) -> Attended:
    """q [B, H, hd] over the `stretches` of the pages `tables` [B, max_pages] of keys [N, K, hd, P] and values [N, K, P, hd]; P is a power
    of two, 64 or more for speed. What lies beyond a row's length may be anything, NaN too."""
    (batch, heads, head_dim), (_, kv_heads, _, page) = q.shape, keys.shape
    assert page >= MIN_DIM and page & (page - 1) == 0, f"pages of {page} positions: a power of two from {MIN_DIM} on"
    q, values = padded_heads(q), padded_heads(values)
    width, parts = q.shape[-1], max_parts(tables.shape[1])
    keys = jnp.pad(keys, ((0, 0), (0, 0), (0, width - head_dim), (0, 0)))
    whole = pl.BlockSpec()
    programs = min(PROGRAMS, len(stretches.part))
    attended = pl.pallas_call(
        partial(_kernel, group=heads // kv_heads, programs=programs, scale=head_dim**-0.5),
        grid=(kv_heads, programs),
        in_specs=(
            *[whole] * 7,
            pl.BlockSpec((keys.shape[0], None, width, page), lambda head, program: (0, head, 0, 0)),
            pl.BlockSpec((values.shape[0], None, page, width), lambda head, program: (0, head, 0, 0)),
        ),
        out_specs=(whole, whole, whole),
        out_shape=tuple(jax.ShapeDtypeStruct((parts, batch, heads, *last), jnp.float32) for last in ((width,), (), ())),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="paged_attention",
    )(stretches.counts, stretches.rows, stretches.part, stretches.first, stretches.end, tables, q, keys, values)
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
    return Attended((parts.out * weights[..., None]).sum(axis=0), highest, (parts.total * weights).sum(axis=0))


def _kernel(
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
    (batch, _, width), page, each = q.shape, values.shape[1], queries_per_row(group)
    query = jnp.arange(rows.shape[1] * each)
    place, column = query // each, jnp.arange(width)[None]

    def attend(turn: jax.Array, done: jax.Array) -> jax.Array:
        at = program + turn * programs
        row, own, leader, last = rows[at, place], query % each, rows[at, 0], end[at]
        real = (row >= 0) & (own < group)  # the rest fills the product up
        row, own = jnp.where(real, row, batch), head * group + own
        wide = jnp.broadcast_to(real[:, None], (len(query), width))
        queries = triton.load(q.at[row[:, None], own[:, None], column], mask=wide, other=0.0)

        def add_page(index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            highest, total, attended = state
            number = tables[leader, index]
            seen = index * page + jnp.arange(page) < last
            scores = jnp.where(seen[None], product(queries, keys[number]) * (scale * LOG2E), MASKED)
            higher = jnp.maximum(highest, whole_maximum(scores))
            weights, shrink = jnp.exp2(scores - higher[:, None]), jnp.exp2(highest - higher)
            found = triton.load(values.at[number], mask=jnp.broadcast_to(seen[:, None], values.shape[1:]), other=0.0)
            attended = shrink[:, None] * attended + product(weights.astype(found.dtype), found)
            return higher, shrink * total + weights.sum(axis=1), attended

        start = (jnp.full(len(query), MASKED), jnp.zeros(len(query)), jnp.zeros(queries.shape, jnp.float32))
        state = jax.lax.fori_loop(first[at], pl.cdiv(last, page), add_page, start)
        number = part[at]
        triton.store(highest.at[number, row, own], state[0], mask=real)
        triton.store(total.at[number, row, own], state[1], mask=real)
        triton.store(out.at[number, row[:, None], own[:, None], column], state[2], mask=wide)
        return done

    turns = pl.cdiv(counts[0] - program, programs)
    jax.lax.fori_loop(0, turns, attend, jnp.int32(0))
