"""The attention layout of a stream of prefix trees (see `training.packing`)."""

from __future__ import annotations

from flax import struct

from skyrl_tx_server.model.lora.lora_math import ArrayLike


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class TreeLayout:
    """The layout of R streams of T tokens in N blocks. In the layout of a single stream, the arrays have no
    axis R."""

    subtree_end: ArrayLike  # [R, T] int32, the index after the subtree of each token
    key_blocks: ArrayLike  # [R, N, N] int32, the key blocks for each query block, visible blocks first
    num_key_blocks: ArrayLike  # [R, N] int32, the number of visible key blocks
    # [R, T] int32, the position of each token in its sequence; only sliding windows need positions
    positions: ArrayLike | None = None
