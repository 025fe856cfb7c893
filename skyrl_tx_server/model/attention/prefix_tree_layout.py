"""The attention layout of a stream of prefix trees (see `training.packing`). The subtree of a token consists
of the token and of all later tokens of the sequences that contain it. These tokens are consecutive in the
stream."""

from __future__ import annotations

from flax import struct

from skyrl_tx_server.model.lora.lora_math import ArrayLike


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class TreeLayout:
    """The layout of R streams of T tokens in N blocks. A key block is visible to a query block if a query may
    attend to one of its keys. In the layout of a single stream, the arrays have no axis R."""

    subtree_end: ArrayLike  # [R, T] int32, the index after the last token of each token's subtree
    key_blocks: ArrayLike  # [R, N, N] int32, for each query block all key blocks, visible blocks first
    num_key_blocks: ArrayLike  # [R, N] int32, for each query block the number of visible key blocks
    # [R, T] int32, the position of each token in its sequence; only sliding windows need positions
    positions: ArrayLike | None = None
