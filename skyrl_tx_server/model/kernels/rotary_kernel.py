"""A Pallas kernel for GPUs that normalizes and rotates the queries and keys of a decode step.

It replaces three to five kernels per layer that XLA would generate. In a decode step, the launches of these
kernels would take longer than their computations.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


def normalize_and_rotate(
    fused: jax.Array,
    widths: tuple[int, int],
    norms: tuple[jax.Array, jax.Array] | None,
    cos: jax.Array,
    sin: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split the output [B, H + 2K, hd] of a fused projection into queries [B, H, hd], keys and values
    [B, K, hd], and apply RMS norm and rotation to queries and keys.

    `widths` is (H, K). `norms` are the weights [hd] of the norms of queries and keys; None: queries and keys
    are not normalized. `cos` and `sin` [B, hd / 2] are results of `rope_tables`. hd is a power of two.
    Where `rms_norm` and `rotate` round an intermediate result to the dtype of `fused`, the kernel rounds it
    too.
    """
    (batch, num_heads, head_dim), (num_queries, num_keys) = fused.shape, widths
    whole, per_program = pl.BlockSpec(), heads_per_program(num_queries, num_keys)
    inputs = (fused, cos, sin, *(norms or ()))
    return pl.pallas_call(
        partial(_kernel, count=per_program, eps=eps),
        grid=(batch, num_heads // per_program),
        in_specs=(whole,) * len(inputs),
        out_specs=(whole,) * 3,
        out_shape=tuple(
            jax.ShapeDtypeStruct((batch, heads, head_dim), fused.dtype)
            for heads in (num_queries, num_keys, num_keys)
        ),
        compiler_params=triton.CompilerParams(num_warps=4 if per_program >= 4 else 1),
        name="normalize_and_rotate",
    )(*inputs)


def heads_per_program(*num_heads: int, limit: int = 16) -> int:
    """Return the largest power of two that divides all `num_heads` and is at most `limit`. `limit` must be a
    power of two.

    If a program processed only one head, its start would take longer than its computations.

    >>> heads_per_program(32, 8), heads_per_program(28, 4), heads_per_program(9, 3)
    (8, 4, 1)
    """
    return math.gcd(*num_heads, limit)


def _kernel(fused: Any, cos: Any, sin: Any, *norms_and_outputs: Any, count: int, eps: float) -> None:
    """Process `count` heads of one sequence. The heads are either all queries, all keys or all values. Each
    head is loaded as two halves, because the rotation combines element i of the first half with element i of
    the second half."""
    *norms, queries, keys, values = norms_and_outputs
    row, begin, indices = pl.program_id(0), pl.program_id(1) * count, jnp.arange(count)[:, None]
    (_, num_queries, head_dim), num_keys = queries.shape, keys.shape[1]
    first_half = jnp.arange(head_dim // 2)
    halves = first_half[None], (first_half + head_dim // 2)[None]
    is_query = begin < num_queries

    def rounded(x: jax.Array) -> jax.Array:
        return x.astype(fused.dtype).astype(jnp.float32)

    loaded = [fused[row, begin + indices, half] for half in halves]
    parts = [part.astype(jnp.float32) for part in loaded]
    if norms:
        mean_square = sum((part * part).sum(axis=1, keepdims=True) for part in parts) / head_dim
        weights = [jnp.where(is_query, norms[0][half], norms[1][half]).astype(jnp.float32) for half in halves]
        parts = [
            rounded(rounded(part * jax.lax.rsqrt(mean_square + eps)) * weight)
            for part, weight in zip(parts, weights, strict=True)
        ]
    (first, second), (cosine, sine) = (
        parts,
        (table[row, first_half].astype(jnp.float32)[None] for table in (cos, sin)),
    )
    rotated = (
        rounded(first * cosine) - rounded(second * sine),
        rounded(second * cosine) + rounded(first * sine),
    )
    first_key, first_value = num_queries, num_queries + num_keys
    for output, first, results in (
        (queries, 0, rotated),
        (keys, first_key, rotated),
        (values, first_value, loaded),
    ):
        in_output = (begin >= first) & (begin < first + output.shape[1])
        for half, result in zip(halves, results, strict=True):
            triton.store(
                output.at[row, jnp.where(in_output, begin - first, 0) + indices, half],
                result.astype(fused.dtype),
                mask=jnp.broadcast_to(in_output, result.shape),
            )
