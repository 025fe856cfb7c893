"""The batch argument of the training programs, in host memory or on the device."""

from __future__ import annotations

from flax import struct

from skyrl_tx_server.model.attention.prefix_tree_layout import TreeLayout
from skyrl_tx_server.model.lora.lora_math import ArrayLike
from skyrl_tx_server.training.losses import LossInputs


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """R streams of T tokens with E loss positions each. A stream consists of packed training sequences, and a
    loss position is one entry of its targets and loss inputs (see `packing`). Padding is zero, except in
    `layout`.

    With K targets per position, `targets` and `loss_inputs.weights` are [R, E, K],
    `loss_inputs.sampler_logprobs` and `loss_inputs.advantages` are [R, E, 1], and `loss_inputs.counts` is
    [R, E]. Each K needs its own compiled program. In each stream, the loss positions with a gradient come
    first.
    """

    tokens: ArrayLike  # [R, T] int32
    positions: ArrayLike  # [R, T] int32, positions of the tokens in their sequences, from 0
    layout: TreeLayout
    token_index: ArrayLike  # [R, E] int32, the token whose hidden state a loss position reads
    targets: ArrayLike  # [R, E] int32
    loss_inputs: LossInputs  # [R, E] float32
    num_trained: ArrayLike  # [R] int32, number of loss positions with a gradient
