"""A Pallas kernel for GPUs that writes the keys and values of a decode step to the KV pages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


def write_tokens(
    keys: jax.Array,
    values: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array,
    pages: jax.Array,
    places: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Write the key and the value of one token of each sequence to the KV pages of one layer, in place.

    `keys` [L, N, K, hd, P] and `values` [L, N, K, P, hd] are the N pages of all L layers, with K heads and P
    positions per page. `layer` [1] int32 is the index of the layer to write. k and v [B, K, hd] are the new
    keys and values. `pages` [B] int32 are the numbers of the pages that receive them. For a sequence with the
    page number -1, nothing is written. `places` [B] int32 are the positions of the tokens within these pages.
    NaNs in v are replaced by zeros, and infinities by the largest finite numbers.
    """
    batch, kv_heads, head_dim = k.shape
    whole = pl.BlockSpec()
    row = pl.BlockSpec((1,), lambda row, head: (row,))
    head = pl.BlockSpec((None, None, head_dim), lambda row, head: (row, head, 0))
    return pl.pallas_call(
        _write_kernel,
        grid=(batch, kv_heads),
        in_specs=(whole, whole, head, head, whole, row, row),
        out_specs=(whole, whole),
        out_shape=(
            jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
        ),
        input_output_aliases={0: 0, 1: 1},
        compiler_params=triton.CompilerParams(num_warps=1),
        name="write_tokens",
    )(keys, values, k, v, layer, pages, places)


def _write_kernel(
    _: Any, __: Any, k: Any, v: Any, layer: Any, pages: Any, places: Any, keys: Any, values: Any
) -> None:
    """Write the key and the value of one head of one sequence."""
    head, page, place, column = pl.program_id(1), pages[0], places[0], jnp.arange(k.shape[0])
    mask = jnp.broadcast_to(page >= 0, column.shape)
    at = layer[0], jnp.maximum(page, 0), head
    triton.store(keys.at[*at, column, place], k[...].astype(keys.dtype), mask=mask)
    triton.store(values.at[*at, place, column], jnp.nan_to_num(v[...]).astype(values.dtype), mask=mask)
