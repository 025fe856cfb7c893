"""Which tokens attend to which in a stream of sequences that share prefixes (see `training.packing`)."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from skyrl_tx_server.model.lora.lora_math import ArrayLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class TreeLayout:
    """The layout arrays of in `TrainBatch`: every array has a leading axis of streams R; each stream has
    N tiles."""

    subtree_end: ArrayLike  # [R, T] int32, the end of the subtree of each token
    key_blocks: ArrayLike  # [R, N, N] int32
    num_key_blocks: ArrayLike  # [R, N] int32
    positions: ArrayLike | None = (
        None  # [R, T] int32, of each token in its sequence; sliding windows need them
    )
