"""Products of blocks of rows with one expert's weight each, for a GPU: a Pallas kernel, compiled by Triton (a
grouped matmul)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from skyrl_tx_server.model.kernels.prefix_tree_kernel import MIN_DIM, product

OUTPUTS, INPUTS = 128, 64
"""Of a weight, at most so many in a tile."""


def fits(blocks: jax.Array, weight: jax.Array) -> bool:
    """Whether the weight's matrices can be cut into tiles, and a tile of a block's rows is not too high."""
    return min(_tile(size, OUTPUTS) for size in weight.shape[1:]) >= MIN_DIM and blocks.shape[1] <= OUTPUTS


def grouped_products(
    blocks: jax.Array,
    weight: jax.Array,
    experts: jax.Array,
    used: jax.Array,
    *,
    transposed: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """blocks [n, block, in] through weight[experts] [n, out, in], or `transposed` [n, block, out] back
    through it, for the first `used` blocks; zeros beyond. Adds up in float32."""
    count, rows, _ = blocks.shape
    outputs, inputs = weight.shape[1:] if not transposed else weight.shape[:0:-1]
    height, width, depth = (
        max(MIN_DIM, pl.next_power_of_2(rows)),
        _tile(outputs, OUTPUTS),
        _tile(inputs, INPUTS),
    )
    blocks = jnp.pad(blocks, ((0, 0), (0, height - rows), (0, 0)))
    of_weight = pl.BlockSpec((weight.shape[0], width, inputs), lambda block, tile: (0, tile, 0))
    if transposed:
        of_weight = pl.BlockSpec((weight.shape[0], inputs, width), lambda block, tile: (0, 0, tile))
    # programs of one tile of the outputs come one after the other, those of the same expert side by side: its
    # weight is read once
    out = pl.pallas_call(
        partial(_kernel, depth=depth, transposed=transposed),
        grid=(count, outputs // width),
        in_specs=(
            pl.BlockSpec((1,), lambda block, tile: (block,)),
            pl.BlockSpec((1,), lambda block, tile: (0,)),
            pl.BlockSpec((None, height, inputs), lambda block, tile: (block, 0, 0)),
            of_weight,
        ),
        out_specs=pl.BlockSpec((None, height, width), lambda block, tile: (block, 0, tile)),
        out_shape=jax.ShapeDtypeStruct((count, height, outputs), blocks.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="grouped_products",
    )(experts, used.reshape(1), blocks, weight)
    return out[:, :rows]


def _kernel(
    experts: Any, used: Any, blocks: Any, weight: Any, out: Any, *, depth: int, transposed: bool
) -> None:
    expert = experts[0]

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        here = pl.ds(index * depth, depth)
        own = weight[expert, here, :] if transposed else weight[expert, :, here]
        return total + product(blocks[:, here], own, over=(1, 0) if transposed else (1, 1))

    steps = (pl.program_id(0) < used[0]).astype(jnp.int32) * (blocks.shape[1] // depth)
    out[...] = jax.lax.fori_loop(0, steps, add, jnp.zeros(out.shape, jnp.float32)).astype(out.dtype)


def _tile(size: int, most: int) -> int:
    """The largest power of two, up to `most`, that divides `size`."""
    return min(size & -size, most)
