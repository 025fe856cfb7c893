"""Describes which tokens attend to which in a stream of prefix trees (see `training.packing`)."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from skyrl_tx_server.model.lora.lora_math import ArrayLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class TreeLayout:
    """The attention of R streams of T tokens in N blocks. Without the leading axis: one stream."""

    subtree_end: ArrayLike  # [R, T] int32, the end of the subtree of each token
    key_blocks: ArrayLike  # [R, N, N] int32, the key blocks that each query block attends to come first
    num_key_blocks: ArrayLike  # [R, N] int32, the number of these key blocks
    positions: ArrayLike | None = None  # [R, T] int32, of tokens in their sequences, for sliding windows
