"""Two Pallas kernels for GPUs, compiled by Triton, that compute the deltas of adapters in a decode step.

In a decode step, the products with the factors A and B read little memory. If one program multiplied all
inputs by A, its latency would determine the time. The first kernel therefore divides the inputs into splits,
and different programs multiply them by A in parallel. The second kernel adds the results of the splits and
multiplies the sum by B. It adds them in a fixed order, so the result of a sequence does not depend on the
other sequences.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from skyrl_tx_server.model.kernels.products import product

ROWS, RANKS, INPUTS = 32, 32, 128
"""The sizes of the blocks that a program multiplies: the number of sequences, of columns of A and of rows of
A."""
BLOCKS_PER_SPLIT = 5
"""The maximum number of blocks of INPUTS inputs in a split. One program of the first kernel multiplies one
split."""
MIN_OUTPUTS, MAX_OUTPUTS = 64, 256
"""The minimum and maximum number of outputs that a program of the second kernel computes."""


def supports(a: jax.Array, b: jax.Array) -> bool:
    """Return whether the kernels support factors of these shapes.

    >>> supports(jnp.zeros((2560, 64)), jnp.zeros((64, 19456)))
    True
    >>> supports(jnp.zeros((2560, 8)), jnp.zeros((8, 19456)))
    False
    """
    (inputs, ranks), outputs = a.shape, b.shape[1]
    return inputs % INPUTS == 0 and ranks % RANKS == 0 and outputs % MIN_OUTPUTS == 0


def low_rank_delta(
    x: jax.Array, a: jax.Array, b: jax.Array, uses: jax.Array | None, *, interpret: bool = False
) -> jax.Array:
    """Return ((x @ a) * uses) @ b [B, out] for x [B, in], a [in, R] and b [R, out].

    In each row of `uses` [B, R], the columns of the sequence's LoRA slot are 1 and all other columns are 0.
    None: all sequences use all columns. Products are summed in float32. x @ a is rounded to the dtype of b.
    """
    assert supports(a, b)
    (batch, inputs), (ranks, outputs) = x.shape, b.shape
    row_blocks, num_blocks = pl.cdiv(batch, ROWS), inputs // INPUTS
    splits = pl.next_power_of_2(pl.cdiv(num_blocks, BLOCKS_PER_SPLIT))
    whole = pl.BlockSpec()
    sums = pl.pallas_call(
        partial(_split_kernel, num_blocks=num_blocks, blocks_per_split=pl.cdiv(num_blocks, splits)),
        grid=(ranks // RANKS, splits, row_blocks),
        in_specs=(whole, whole),
        out_specs=pl.BlockSpec((None, ROWS, RANKS), lambda rank, split, row: (split, row, rank)),
        out_shape=jax.ShapeDtypeStruct((splits, row_blocks * ROWS, ranks), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=BLOCKS_PER_SPLIT),
        interpret=interpret,
        name="low_rank_splits",
    )(x, a)
    width = math.gcd(outputs, MAX_OUTPUTS)
    masks = () if uses is None else (uses,)
    return pl.pallas_call(
        _delta_kernel,
        grid=(outputs // width, row_blocks),
        in_specs=(
            pl.BlockSpec((splits, ROWS, ranks), lambda column, row: (0, row, 0)),
            pl.BlockSpec((ranks, width), lambda column, row: (0, column)),
            *[whole] * len(masks),
        ),
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((batch, outputs), x.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="low_rank_delta",
    )(sums, b, *masks)


def _split_kernel(x: Any, a: Any, sums: Any, *, num_blocks: int, blocks_per_split: int) -> None:
    """Multiply the inputs of ROWS sequences in one split by RANKS columns of A."""
    columns, first = pl.ds(pl.program_id(0) * RANKS, RANKS), pl.program_id(1) * blocks_per_split
    rows = pl.program_id(2) * ROWS + jnp.arange(ROWS)[:, None]

    def add(block: jax.Array, total: jax.Array) -> jax.Array:
        inputs = block * INPUTS + jnp.arange(INPUTS)[None]
        left = _load_rows(x, rows, inputs)
        return total + product(left, a[pl.ds(block * INPUTS, INPUTS), columns])

    last = jnp.minimum(first + blocks_per_split, num_blocks)
    sums[...] = jax.lax.fori_loop(first, last, add, jnp.zeros((ROWS, RANKS), jnp.float32))


def _delta_kernel(sums: Any, b: Any, *uses_and_out: Any) -> None:
    """For ROWS sequences, add the results of the splits and multiply the sum by a block of columns of B."""
    *uses, out = uses_and_out
    width, rows = b.shape[1], pl.program_id(1) * ROWS + jnp.arange(ROWS)[:, None]

    def add(block: jax.Array, total: jax.Array) -> jax.Array:
        ranks = pl.ds(block * RANKS, RANKS)
        inner = sums[0, :, ranks]
        for split in range(1, sums.shape[0]):
            inner += sums[split, :, ranks]
        inner = inner.astype(b.dtype)
        if uses:
            inner *= _load_rows(uses[0], rows, block * RANKS + jnp.arange(RANKS)[None])
        return total + product(inner, b[ranks, :])

    total = jax.lax.fori_loop(0, b.shape[0] // RANKS, add, jnp.zeros((ROWS, width), jnp.float32))
    columns = pl.program_id(0) * width + jnp.arange(width)[None]
    mask = _in_batch(rows, out.shape[0], width)
    triton.store(out.at[rows, columns], total.astype(out.dtype), mask=mask)


def _load_rows(array: Any, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Load a block of `array`. Rows after the end of the batch are loaded as zeros."""
    mask = _in_batch(rows, array.shape[0], columns.shape[1])
    block = array.at[rows, columns]
    return triton.load(block) if mask is None else triton.load(block, mask=mask, other=0.0)


def _in_batch(rows: jax.Array, batch: int, width: int) -> jax.Array | None:
    """Return the mask [ROWS, `width`] of a block. It is True in those of the `rows` [ROWS, 1] that belong to
    the batch. None: all rows belong to the batch."""
    return None if batch % ROWS == 0 else jnp.broadcast_to(rows < batch, (ROWS, width))
