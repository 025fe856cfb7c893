"""A Pallas kernel for GPUs that multiplies each tile of tokens by the weight of its expert (grouped
matmul)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from skyrl_tx_server.model.kernels.prefix_tree_kernel import MIN_DIM
from skyrl_tx_server.model.kernels.products import product

OUTPUTS, INPUTS = 128, 64
"""A kernel program multiplies by a weight in blocks. These are the maximum numbers of outputs and inputs of a
block. OUTPUTS is also the maximum number of tokens of a tile."""


def fits(tiles: jax.Array, weight: jax.Array) -> bool:
    """Return whether the kernel supports these shapes of `tiles` and `weight` (see `grouped_products`)."""
    return min(_block(size, OUTPUTS) for size in weight.shape[1:]) >= MIN_DIM and tiles.shape[1] <= OUTPUTS


def grouped_products(
    tiles: jax.Array,
    weight: jax.Array,
    experts: jax.Array,
    used: jax.Array,
    *,
    transposed: bool = False,
) -> jax.Array:
    """Multiply each tile of tokens by the weight of its expert. `experts` has the expert of each tile, and
    `weight` is [E, out, in]. A tile [tokens, in] is multiplied by `weight[expert].T`. With `transposed` (in
    the backward pass), a tile [tokens, out] is multiplied by `weight[expert]`. Only the first `used` tiles
    are multiplied. The results of the other tiles are zero. Products are summed in float32."""
    count, rows, _ = tiles.shape
    outputs, inputs = weight.shape[1:] if not transposed else weight.shape[:0:-1]
    height = max(MIN_DIM, pl.next_power_of_2(rows))
    width, depth = _block(outputs, OUTPUTS), _block(inputs, INPUTS)
    tiles = jnp.pad(tiles, ((0, 0), (0, height - rows), (0, 0)))
    weight_spec = pl.BlockSpec((weight.shape[0], width, inputs), lambda tile, column: (0, column, 0))
    if transposed:
        weight_spec = pl.BlockSpec((weight.shape[0], inputs, width), lambda tile, column: (0, 0, column))
    # On a GPU, consecutive programs compute the same output columns of consecutive tiles, because grid axis 0
    # changes fastest. Tiles are sorted by expert, so the programs that read the same weights run together.
    out = pl.pallas_call(
        partial(_kernel, depth=depth, transposed=transposed),
        grid=(count, outputs // width),
        in_specs=(
            pl.BlockSpec((1,), lambda tile, column: (tile,)),
            pl.BlockSpec((1,), lambda tile, column: (0,)),
            pl.BlockSpec((None, height, inputs), lambda tile, column: (tile, 0, 0)),
            weight_spec,
        ),
        out_specs=pl.BlockSpec((None, height, width), lambda tile, column: (tile, 0, column)),
        out_shape=jax.ShapeDtypeStruct((count, height, outputs), tiles.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        name="grouped_products",
    )(experts, used.reshape(1), tiles, weight)
    return out[:, :rows]


def _kernel(
    experts: Any, used: Any, tiles: Any, weight: Any, out: Any, *, depth: int, transposed: bool
) -> None:
    expert = experts[0]

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        inputs = pl.ds(index * depth, depth)
        part = weight[expert, inputs, :] if transposed else weight[expert, :, inputs]
        return total + product(tiles[:, inputs], part, over=(1, 0) if transposed else (1, 1))

    steps = (pl.program_id(0) < used[0]).astype(jnp.int32) * (tiles.shape[1] // depth)
    out[...] = jax.lax.fori_loop(0, steps, add, jnp.zeros(out.shape, jnp.float32)).astype(out.dtype)


def _block(size: int, maximum: int) -> int:
    """Return the largest power of two, up to `maximum`, that divides `size`."""
    return min(size & -size, maximum)
