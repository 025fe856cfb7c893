"""Two Pallas kernels for GPUs, compiled by Triton, that compute LoRA deltas for one token per sequence: in
decode steps, and in the output head when prefill samples the first token of each sequence. Each sequence uses
one LoRA slot, which is the index of an adapter in the stacked adapters.

In a decode step, the products with the factors A and B read little memory. If one program multiplied over the
whole input dimension, its latency would determine the time. The first kernel therefore divides the input
dimension into splits, and different programs compute the products of different splits in parallel. The second
kernel adds the results of the splits and multiplies the sum by B.

A program processes ROWS sequences. It reads the factors of the slots of these sequences in place, one slot
after the other, and keeps for each sequence the result of its slot. If the sequences are ordered by slot, a
program reads few slots. The order of summation is fixed, so the result of a sequence does not depend on the
other sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import accumulate, pairwise
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from skyrl_tx_server.model.kernels.products import product

ROWS, RANKS, INPUTS = 16, 32, 128
"""The sizes of the blocks that a program multiplies: ROWS sequences, RANKS columns of A, and INPUTS elements
of the input dimension, which are rows of A."""
BLOCKS_PER_SPLIT = 5
"""The maximum number of blocks of INPUTS inputs in a split. One program of the first kernel multiplies one
split."""
MANY_OUTPUTS = 4096
"""A projection with at most this number of outputs has NARROW outputs per program of the second kernel. With
WIDE outputs per program, it would have too few programs for all multiprocessors. Other projections have WIDE
outputs per program."""
NARROW, WIDE = 64, 128
NO_SLOT = 2**31 - 1


def lora_delta(
    x: jax.Array,
    a: jax.Array,
    b: Sequence[jax.Array],
    scale: jax.Array,
    *,
    slots: jax.Array,
    layer: jax.Array,
    order: jax.Array | None = None,
    one_slot: bool = False,
) -> jax.Array:
    """Return the delta [B, sum(out_part)] of a fused projection with P parts, for x [B, in].

    For S LoRA slots and L layers, the factors are `a` [S, L, in, P * rank], `b` with one matrix
    [S, L, rank, out_part] for each part, and the float32 `scale` [S, L]. Sequence i uses slot `slots[i]`
    of layer `layer`. `order` [B] is a permutation of the sequences in which those of a slot are adjacent.
    None: the sequences are processed in the order of x. With `one_slot`, all elements of `slots` are equal.
    Products are summed in float32. x @ a and the scaled B are rounded to the dtype of B.
    """
    (batch, inputs), rank, widths = x.shape, b[0].shape[-2], [part.shape[-1] for part in b]
    row_blocks, num_blocks, rank_blocks = pl.cdiv(batch, ROWS), pl.cdiv(inputs, INPUTS), pl.cdiv(rank, RANKS)
    splits = pl.next_power_of_2(pl.cdiv(num_blocks, BLOCKS_PER_SPLIT))
    whole, columns = pl.BlockSpec(), len(b) * rank_blocks * RANKS
    orders = () if order is None else (order,)
    sequences = (jnp.reshape(layer, 1), slots, *orders)
    sums = pl.pallas_call(
        partial(
            _split_kernel,
            rank=rank,
            num_blocks=num_blocks,
            blocks_per_split=pl.cdiv(num_blocks, splits),
            one_slot=one_slot,
        ),
        grid=(columns // RANKS, splits, row_blocks),
        in_specs=[whole] * (len(sequences) + 2),
        out_specs=pl.BlockSpec((None, ROWS, RANKS), lambda column, split, row: (split, row, column)),
        out_shape=jax.ShapeDtypeStruct((splits, row_blocks * ROWS, columns), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=BLOCKS_PER_SPLIT),
        name="lora_splits",
    )(*sequences, x, a)
    width = NARROW if sum(widths) <= MANY_OUTPUTS else WIDE
    return pl.pallas_call(
        partial(_delta_kernel, num_parts=len(b), width=width, one_slot=one_slot),
        grid=(sum(pl.cdiv(outputs, width) for outputs in widths), row_blocks),
        in_specs=[whole] * (len(sequences) + 2 + len(b)),
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((batch, sum(widths)), x.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        name="lora_delta",
    )(*sequences, sums, scale, *b)


def _split_kernel(
    layer: Any,
    slots: Any,
    *refs: Any,
    rank: int,
    num_blocks: int,
    blocks_per_split: int,
    one_slot: bool,
) -> None:
    """Multiply the inputs of ROWS sequences in one split by RANKS columns of A of one part."""
    *order, x, a, sums = refs
    rows = _rows(slots, order, pl.program_id(2))
    rank_blocks = pl.cdiv(rank, RANKS)
    part, block = jax.lax.div(pl.program_id(0), rank_blocks), jax.lax.rem(pl.program_id(0), rank_blocks)
    ranks, first = block * RANKS + jnp.arange(RANKS)[None], pl.program_id(1) * blocks_per_split
    last, layer_index = jnp.minimum(first + blocks_per_split, num_blocks), layer[0]
    size = x.shape[1]
    masked = size % INPUTS != 0

    def multiply(slot: jax.Array) -> jax.Array:
        def add(block: jax.Array, total: jax.Array) -> jax.Array:
            inputs = block * INPUTS + jnp.arange(INPUTS)
            row_mask, column_mask = (inputs[:, None] < size, inputs[None] < size) if masked else (None, None)
            left = _load(x.at[rows[:, None], inputs[None]], (ROWS, INPUTS), column_mask)
            factor = a.at[slot, layer_index, inputs[:, None], part * rank + ranks]
            right = _load(factor, (INPUTS, RANKS), row_mask, None if rank % RANKS == 0 else ranks < rank)
            return total + product(left, right)

        return jax.lax.fori_loop(first, last, add, jnp.zeros((ROWS, RANKS), jnp.float32))

    if one_slot:
        sums[...] = multiply(slots[0])
        return
    slot_of_row = slots[rows]
    slot = slot_of_row.min()
    sums[...] = _with_other_slots(slot_of_row, slot, multiply(slot), multiply)


def _delta_kernel(layer: Any, slots: Any, *refs: Any, num_parts: int, width: int, one_slot: bool) -> None:
    """For ROWS sequences, add the results of the splits and multiply the sum by `width` columns of B of one
    part."""
    *order, sums, scale = refs[: -num_parts - 1]
    *b, out = refs[-num_parts - 1 :]
    rank, widths, layer_index = b[0].shape[2], [part.shape[3] for part in b], layer[0]
    blocks = [pl.cdiv(outputs, width) for outputs in widths]
    starts, column_block = [0, *accumulate(blocks[:-1])], pl.program_id(0)
    # for each part except the first: 1 if it begins at or before `column_block`, otherwise 0
    begun = [jnp.minimum(jax.lax.div(column_block, start), 1) for start in starts[1:]]
    part, column_index = sum(begun), jnp.arange(width)[None]
    columns = [(column_block - start) * width + column_index for start in starts]
    is_column = [(column >= 0) & (column < outputs) for column, outputs in zip(columns, widths, strict=True)]
    rank_blocks = range(pl.cdiv(rank, RANKS))

    def load_b(slot: jax.Array) -> list[jax.Array]:
        """Return the blocks [RANKS, width] of the scaled B. The masks of all parts except one are False, so
        only this part is read."""
        factor, loaded = scale[slot, layer_index], []
        for block in rank_blocks:
            ranks = block * RANKS + jnp.arange(RANKS)[:, None]
            is_rank = None if rank % RANKS == 0 else ranks < rank
            whole = jnp.zeros((RANKS, width), b[0].dtype)
            for matrix, column, is_part in zip(b, columns, is_column, strict=True):
                whole += _load(matrix.at[slot, layer_index, ranks, column], (RANKS, width), is_part, is_rank)
            loaded.append((whole.astype(jnp.float32) * factor).astype(b[0].dtype))
        return loaded

    rows = _rows(slots, order, pl.program_id(1))
    slot_of_row = None if one_slot else slots[rows]
    slot = slots[0] if slot_of_row is None else slot_of_row.min()
    first_b = load_b(slot)  # before the loads of `sums`, so that both are loaded at the same time
    inner, block_rows = [], pl.ds(pl.program_id(1) * ROWS, ROWS)
    for block in rank_blocks:
        ranks = pl.ds((part * len(rank_blocks) + block) * RANKS, RANKS)
        inner.append(sums[:, block_rows, ranks].sum(axis=0).astype(b[0].dtype))

    def multiply(loaded: list[jax.Array]) -> jax.Array:
        delta = jnp.zeros((ROWS, width), jnp.float32)
        for left, right in zip(inner, loaded, strict=True):
            delta += product(left, right)
        return delta

    delta = multiply(first_b)
    if slot_of_row is not None:
        delta = _with_other_slots(slot_of_row, slot, delta, lambda slot: multiply(load_b(slot)))
    # for each part: the number to add to `column_block * width` to get the first column of the block in `out`
    offsets = [sum(widths[:index]) - start * width for index, start in enumerate(starts)]
    offset = sum(
        flag * (after - before) for flag, (before, after) in zip(begun, pairwise(offsets), strict=True)
    )
    column = offset + column_block * width + column_index
    is_row = pl.program_id(1) * ROWS + jnp.arange(ROWS) < out.shape[0]
    # The mask excludes rows after the end of the batch. In `rows`, they have the index of the last sequence.
    # The interpreter writes the old value to the index of each excluded element, which could overwrite the
    # delta of the last sequence. These rows therefore get an index after the end of `out`.
    target = out.at[jnp.where(is_row, rows, out.shape[0])[:, None], column]
    mask = jnp.broadcast_to(is_row[:, None], delta.shape) & reduce(or_, is_column)
    triton.store(target, delta.astype(out.dtype), mask=mask)


def _rows(slots: Any, order: Sequence[Any], block: jax.Array) -> jax.Array:
    """Return the indices [ROWS] of the sequences of a block. Positions after the end of the batch
    repeat the last sequence."""
    position = jnp.minimum(block * ROWS + jnp.arange(ROWS), slots.shape[0] - 1)
    return order[0][position] if order else position


def _with_other_slots(
    slot_of_row: jax.Array,
    slot: jax.Array,
    result: jax.Array,
    compute: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Replace each row of `result` whose slot is greater than `slot` by this row of `compute(its slot)`."""

    def after(slot: jax.Array) -> jax.Array:
        return jnp.where(slot_of_row > slot, slot_of_row, NO_SLOT).min()

    def replace_rows(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        slot, result = state
        return after(slot), jnp.where((slot_of_row == slot)[:, None], compute(slot), result)

    return jax.lax.while_loop(lambda state: state[0] < NO_SLOT, replace_rows, (after(slot), result))[1]


def _load(ref: Any, shape: tuple[int, int], *masks: jax.Array | None) -> jax.Array:
    """Load a block. Elements outside one of the masks are loaded as zeros. None: no mask."""
    mask: jax.Array | None = None
    for part in masks:
        if part is not None:
            part = jnp.broadcast_to(part, shape)
            mask = part if mask is None else mask & part
    return triton.load(ref) if mask is None else triton.load(ref, mask=mask, other=0.0)
