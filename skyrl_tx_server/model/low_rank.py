"""The arithmetic of LoRA: a projection's factors, and what they add to it.

The same code applies one adapter to a whole batch and one adapter per row. Give every leaf a leading row axis for the latter:

    rows = rows_of(bank, index_B)     # every leaf [S, ...] -> [B, ...]
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

type Leaf = jax.Array | np.ndarray
"""An adapter lives on the device, or in host memory while it is made, loaded and saved."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """One projection's A, B and scale: the parts' outputs gain `scale * (x @ a_part) @ b_part`. Experts give A and B a leading axis."""

    a: Leaf  # [in, parts * max_rank]
    b: tuple[Leaf, ...]  # one [max_rank, out_part] each
    scale: Leaf  # [] float32, alpha / rank; never trained
    rows: Leaf | None = None  # [B] int32: the other leaves are a bank [S, ...] and this says which entry each row uses


def rows_of[Tree](bank: Tree, index_B: jax.Array) -> Tree:
    """Each row's own adapter: every leaf [S, ...] -> [B, ...]."""
    return jax.tree.map(lambda leaf: leaf[index_B], bank)


def project(
    x: jax.Array, weight: jax.Array, widths: tuple[int, ...], module: LowRank | None, *, bias: jax.Array | None = None, shards: int = 1
) -> tuple[jax.Array, ...]:
    """x [B, T, in] @ weight [in, sum(widths)] plus the adapter's delta, split into the parts of a fused projection.

    `module` is one adapter for the whole batch, one per row (every leaf with a leading B axis), or None for the base model. `shards` is
    into how many blocks the weight's columns are arranged (see `family.Weight`).
    """
    outputs = split_parts(x @ weight if bias is None else x @ weight + bias, widths, shards)
    if module is None:
        return outputs
    return tuple(output + delta for output, delta in zip(outputs, low_rank_deltas(x, module), strict=True))


def split_parts(fused: jax.Array, widths: tuple[int, ...], shards: int) -> tuple[jax.Array, ...]:
    """The parts of a fused projection's output [..., sum(widths)], each of whose `shards` blocks holds a piece of every part."""
    if shards == 1:
        return tuple(jnp.split(fused, np.cumsum(widths)[:-1], axis=-1))
    blocks = fused.reshape(*fused.shape[:-1], shards, -1)
    parts = jnp.split(blocks, np.cumsum(widths)[:-1] // shards, axis=-1)
    return tuple(part.reshape(*fused.shape[:-1], -1) for part in parts)


def low_rank_deltas(x: jax.Array, module: LowRank) -> tuple[jax.Array, ...]:
    """The adapter's part of a projection of x [B, T, in], one [B, T, out_part] per part, in x's dtype."""
    per_row = module.a.ndim == 3
    scale = jax.lax.stop_gradient(module.scale).astype(x.dtype)
    down, up = ("bti,bir->btr", "btr,bro->bto") if per_row else ("bti,ir->btr", "btr,ro->bto")
    inner = jnp.einsum(down, x, module.a.astype(x.dtype)) * (scale[:, None, None] if per_row else scale)
    return tuple(
        jnp.einsum(up, part, b.astype(x.dtype)) for part, b in zip(jnp.split(inner, len(module.b), axis=-1), module.b, strict=True)
    )
