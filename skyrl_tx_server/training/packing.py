"""Packs training data into micro-batches of token streams. Sequences with a common prefix can share the
tokens of this prefix. All arrays are in host memory.

A stream is a forest of prefix trees in depth-first order: the shared prefix of two sequences occurs once, and
only the remaining tokens of the second sequence follow. A token attends to itself and to the earlier tokens
whose subtree contains it. The subtree of token j ends before index `subtree_end[j]`. For example, if
`prefix_trees.MIN_SHARED` were 2, the prefix `a b` would be shared:

    data    a b c d        stream       a b c d e f | x y z | . .
            a b e f        positions    0 1 2 3 2 3 | 0 1 2 | . .
            x y z          subtree_end  6 6 4 4 6 6 | 9 9 9 | . .

A loss position is one entry of the targets and loss inputs of a stream. `token_index` is the stream index of
the token whose hidden state the loss position reads. A sequence shares a loss position with the sequence
before it if they share this token and their targets and loss inputs for the token are equal. For example, the
sequences of a group can share the loss positions of their prompt. `counts` is the number of sequences that
share a loss position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import struct

from skyrl_tx_server.engine.operations import TrainDatum
from skyrl_tx_server.model.attention.prefix_tree_layout import TreeLayout
from skyrl_tx_server.model.lora.lora_math import ArrayLike
from skyrl_tx_server.model.shapes import ATTENTION_TILE, BucketShape, BucketShapes
from skyrl_tx_server.training.losses import LossInputs
from skyrl_tx_server.training.prefix_trees import PrefixTree, TreeSequence, plan_streams


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """The batch argument of the training programs: R streams of T tokens with E loss positions each. The
    arrays are in host memory or on the device. Padding is zero, except in `layout`.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class DatumSpan:
    """The location of one datum in a micro-batch."""

    datum: int  # index of the datum
    stream: int  # index of the stream
    loss_positions: np.ndarray  # [N] int32, the loss position of each position of the datum
    num_targets: int | None  # targets per position; None: the arrays of the datum have no target axis


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Streams of one `BucketShape` in host memory, and the locations of their data."""

    arrays: TrainBatch
    spans: tuple[DatumSpan, ...]


def dummy_batch(shape: BucketShape) -> TrainBatch:
    """Return the arrays of a micro-batch of this shape, for compilation."""
    tokens = np.zeros(shape.length, np.int32)
    datum = TrainDatum(tokens=tokens, target_tokens=tokens)
    (packed,) = pack([datum], [np.ones(shape.length, bool)], BucketShapes(shapes=(shape,), budget=shape))
    return packed.arrays


def pack(data: Sequence[TrainDatum], trained: Sequence[np.ndarray], shapes: BucketShapes) -> list[MicroBatch]:
    """Pack validated data into micro-batches with little padding. `trained` has one array [N] bool per datum,
    True at positions with a gradient."""
    num_targets = _num_targets(data)
    streams_by_shape = plan_streams(data, trained, shapes, num_targets=num_targets or 1)
    return [
        _pack_streams(streams[first : first + shape.streams], shape, num_targets)
        for shape, streams in streams_by_shape.items()
        for first in range(0, len(streams), shape.streams)
    ]


def unpack(batches: Sequence[MicroBatch], values: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Convert one array per micro-batch, in the shape of its targets, to one array per datum, in the shape of
    the datum's targets. The datums have the order in which `pack` received them."""
    by_datum = {
        span.datum: _cut_targets(array[span.stream, span.loss_positions], span.num_targets)
        for batch, array in zip(batches, values, strict=True)
        for span in batch.spans
    }
    return tuple(by_datum[index] for index in range(len(by_datum)))


def _num_targets(data: Sequence[TrainDatum]) -> int | None:
    """Return the number of targets per position in the arrays: the maximum over the data, rounded up to a
    power of two, because each number needs a compiled program. None: no datum has a target axis."""
    widths = [datum.target_tokens.shape[1] for datum in data if datum.target_tokens.ndim > 1]
    return 1 << (max(widths) - 1).bit_length() if widths else None


def _cut_targets(values: np.ndarray, num_targets: int | None) -> np.ndarray:
    """Convert the values of one datum, [N] or [N, K], to the shape of the datum's targets."""
    if values.ndim == 1:
        return values
    return values[:, 0] if num_targets is None else values[:, :num_targets]


def _pack_streams(streams: Sequence[PrefixTree], shape: BucketShape, num_targets: int | None) -> MicroBatch:
    empty = PrefixTree.from_sequences(())
    padded = [*streams, *[empty] * (shape.streams - len(streams))]
    packed = [_pack_stream(stream, shape, num_targets) for stream in padded]
    return MicroBatch(
        arrays=jax.tree.map(lambda *leaves: np.stack(leaves), *[arrays for arrays, _ in packed]),
        spans=tuple(
            DatumSpan(
                datum=sequence.datum, stream=index, loss_positions=positions, num_targets=sequence.num_targets
            )
            for index, (stream, (_, by_sequence)) in enumerate(zip(streams, packed, strict=False))
            for sequence, positions in zip(stream.sequences, by_sequence, strict=True)
        ),
    )


def _pack_stream(
    stream: PrefixTree, shape: BucketShape, num_targets: int | None
) -> tuple[TrainBatch, list[np.ndarray]]:
    """Return the arrays of one stream, without the leading axis, and the loss positions of each sequence."""
    sequences = stream.sequences
    tokens, positions, subtree_end, token_indices = _pack_tokens(sequences, shape.length)
    masks = [_is_new_loss_position(sequence) for sequence in sequences]
    new_trained = [sequence.trained[mask] for sequence, mask in zip(sequences, masks, strict=True)]
    trained = np.concatenate([np.zeros(0, bool), *new_trained])
    order = np.argsort(~trained, kind="stable")  # loss positions with a gradient come first

    def ordered(parts: Sequence[np.ndarray], empty: np.ndarray) -> np.ndarray:
        """Concatenate the new loss positions of all sequences, sort them by `order` and pad them."""
        new_parts = [part[mask] for part, mask in zip(parts, masks, strict=True)]
        flat = np.concatenate([empty, *new_parts])[order]
        padding = np.zeros((shape.loss_positions - len(flat), *flat.shape[1:]), flat.dtype)
        return np.concatenate([flat, padding])

    width = num_targets or 1
    targets = ordered([sequence.targets for sequence in sequences], np.zeros((0, width), np.int32))
    inputs = ordered([sequence.inputs for sequence in sequences], np.zeros((0, width + 2), np.float32))
    if num_targets is None:
        targets, weights, logprobs, advantages = targets[:, 0], *inputs.T
    else:
        weights, logprobs, advantages = np.split(inputs, [width, width + 1], axis=1)
    by_sequence = _loss_positions(sequences, np.argsort(order))
    uses = np.concatenate([np.zeros(0, np.int32), *by_sequence])
    arrays = TrainBatch(
        tokens=tokens,
        positions=positions,
        layout=_tree_layout(subtree_end, stream.tokens),
        token_index=ordered(token_indices, np.zeros(0, np.int32)),
        targets=targets,
        loss_inputs=LossInputs(
            weights=weights,
            sampler_logprobs=logprobs,
            advantages=advantages,
            counts=np.bincount(uses, minlength=shape.loss_positions).astype(np.float32),
        ),
        num_trained=np.array(trained.sum(), np.int32),
    )
    return arrays, by_sequence


def _pack_tokens(
    sequences: Sequence[TreeSequence], length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return (tokens, positions, subtree_end) of a stream [T], and for each sequence the stream indices of
    its tokens [N] int32."""
    tokens, positions = np.zeros(length, np.int32), np.zeros(length, np.int32)
    subtree_end = np.arange(1, length + 1, dtype=np.int32)
    token_indices: list[np.ndarray] = []
    path, cursor = np.zeros(0, np.int32), 0
    for sequence in sequences:
        subtree_end[path[sequence.num_shared :]] = cursor
        new = np.arange(cursor, cursor + sequence.new_tokens, dtype=np.int32)
        path = np.concatenate([path[: sequence.num_shared], new])
        tokens[new] = sequence.tokens[sequence.num_shared :]
        positions[new] = np.arange(sequence.num_shared, len(sequence.tokens))
        cursor += len(new)
        token_indices.append(path)
    subtree_end[path] = cursor
    return tokens, positions, subtree_end, token_indices


def _is_new_loss_position(sequence: TreeSequence) -> np.ndarray:
    """Return [N] bool, False where the sequence shares the loss position of the previous sequence."""
    is_new = np.ones(len(sequence.tokens), bool)
    is_new[: sequence.num_shared] = ~sequence.shares_loss
    return is_new


def _loss_positions(sequences: Sequence[TreeSequence], final_index: np.ndarray) -> list[np.ndarray]:
    """Return the loss positions [N] int32 of each sequence. `final_index[i]` is the index, after sorting, of
    the i-th new loss position of the stream."""
    by_sequence: list[np.ndarray] = []
    created = 0
    for sequence in sequences:
        is_new = _is_new_loss_position(sequence)
        positions = np.zeros(len(is_new), np.int32)
        positions[is_new] = final_index[created : created + is_new.sum()]
        if sequence.num_shared:
            shared = np.flatnonzero(sequence.shares_loss)
            positions[shared] = by_sequence[-1][shared]
        created += int(is_new.sum())
        by_sequence.append(positions)
    return by_sequence


def _tree_layout(subtree_end: np.ndarray, num_tokens: int) -> TreeLayout:
    """Return the layout of a stream in blocks of ATTENTION_TILE tokens. Query blocks that contain only
    padding attend to no key block."""
    count = len(subtree_end) // ATTENTION_TILE
    tile = np.arange(count)
    tile_end = subtree_end.reshape(count, ATTENTION_TILE).max(axis=1)
    visible = (tile[None] <= tile[:, None]) & (tile_end[None] > tile[:, None] * ATTENTION_TILE)
    visible &= (tile * ATTENTION_TILE < num_tokens)[:, None]
    return TreeLayout(
        subtree_end=subtree_end,
        key_blocks=np.argsort(~visible, axis=1, kind="stable").astype(np.int32),
        num_key_blocks=visible.sum(axis=1).astype(np.int32),
    )
