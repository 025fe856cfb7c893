"""A Pallas kernel for GPUs that normalizes and rotates the queries and keys of a decode step.

XLA compiles the same operations to three programs per layer, whose launches take longer than their work.
"""

from __future__ import annotations

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
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the queries [B, H, hd] and the keys [B, K, hd] of a fused projection [B, H + 2K, hd], after RMS
    norm and rotation.

    `widths` is (H, K). `norms` are the weights [hd] of the norms of queries and keys; None: they are not
    normalized. `cos` and `sin` [B, hd / 2] are those of `rope_tables`. hd is a power of two. Values are
    rounded to the dtype of `fused` after the same operations as in `rms_norm` and `rotate`.
    """
    (batch, _, head_dim), (queries, keys) = fused.shape, widths
    whole = pl.BlockSpec()
    inputs = (fused, cos, sin, *(norms or ()))
    return pl.pallas_call(
        partial(_kernel, eps=eps),
        grid=(batch, queries + keys),
        in_specs=(whole,) * len(inputs),
        out_specs=(whole, whole),
        out_shape=tuple(jax.ShapeDtypeStruct((batch, heads, head_dim), fused.dtype) for heads in widths),
        compiler_params=triton.CompilerParams(num_warps=1),
        interpret=interpret,
        name="normalize_and_rotate",
    )(*inputs)


def _kernel(fused: Any, cos: Any, sin: Any, *norms_and_outputs: Any, eps: float) -> None:
    """Process one head of one sequence. A head is loaded as two halves, the pairs of the rotation."""
    *norms, queries, keys = norms_and_outputs
    row, head = pl.program_id(0), pl.program_id(1)
    num_queries, head_dim = queries.shape[1:]
    first_half = jnp.arange(head_dim // 2)
    halves = first_half, first_half + head_dim // 2
    is_query = head < num_queries

    def rounded(x: jax.Array) -> jax.Array:
        return x.astype(fused.dtype).astype(jnp.float32)

    parts = [fused[row, head, half].astype(jnp.float32) for half in halves]
    if norms:
        mean = sum((part * part).sum() for part in parts) / head_dim
        weights = [jnp.where(is_query, norms[0][half], norms[1][half]).astype(jnp.float32) for half in halves]
        parts = [
            rounded(rounded(part * jax.lax.rsqrt(mean + eps)) * weight)
            for part, weight in zip(parts, weights, strict=True)
        ]
    (first, second), (cosine, sine) = (
        parts,
        (table[row, first_half].astype(jnp.float32) for table in (cos, sin)),
    )
    rotated = (
        rounded(first * cosine) - rounded(second * sine),
        rounded(second * cosine) + rounded(first * sine),
    )
    for half, values in zip(halves, rotated, strict=True):
        mask = jnp.broadcast_to(is_query, half.shape)
        values = values.astype(fused.dtype)
        triton.store(queries.at[row, jnp.where(is_query, head, 0), half], values, mask=mask)
        triton.store(keys.at[row, jnp.where(is_query, 0, head - num_queries), half], values, mask=~mask)
