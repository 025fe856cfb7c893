"""Groups sequences with common prefixes into prefix trees, and distributes the trees over streams. A stream
is computed as one sequence of tokens. Its length is one of the few lengths (bucket shapes) for which training
programs are compiled. This module uses numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from skyrl_tx_server.engine.operations import TrainDatum
from skyrl_tx_server.model.shapes import BucketShape, BucketShapes, common_length

MIN_FILL = 0.75  # minimum filled fraction of a micro-batch and of each stream (see `_fill_streams`)
MIN_SHARED = 16  # minimum number of tokens of a shared prefix


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeSequence:
    """A datum with its loss inputs, and the prefix that it shares with the previous sequence."""

    datum: int  # index of the datum
    tokens: np.ndarray  # [N] int32
    targets: np.ndarray  # [N, K] int32
    inputs: np.ndarray  # [N, K + 2] float32: K weights, sampler's logprob, advantage
    trained: np.ndarray  # [N] bool, True at positions with a gradient
    num_targets: int | None  # targets per position; None: the datum has no target axis
    num_shared: int  # number of tokens of the prefix shared with the previous sequence
    # [num_shared] bool, True where the targets and loss inputs equal those of the previous sequence
    shares_loss: np.ndarray

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - self.num_shared

    @property
    def new_loss_positions(self) -> int:
        return len(self.tokens) - int(self.shares_loss.sum())

    def without_shared(self) -> TreeSequence:
        """Return the sequence as the first sequence of a tree, which shares no prefix."""
        return replace(self, num_shared=0, shares_loss=np.zeros(0, bool))


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixTree:
    """A prefix tree, or all prefix trees of one stream, as a list of sequences. Each sequence may share a
    prefix with the sequence before it."""

    sequences: tuple[TreeSequence, ...]
    tokens: int  # number of tokens, shared ones counted once
    loss_positions: int

    @classmethod
    def from_sequences(cls, sequences: Sequence[TreeSequence]) -> PrefixTree:
        return cls(
            sequences=tuple(sequences),
            tokens=sum(sequence.new_tokens for sequence in sequences),
            loss_positions=sum(sequence.new_loss_positions for sequence in sequences),
        )

    def fits(self, shape: BucketShape) -> bool:
        return self.tokens <= shape.length and self.loss_positions <= shape.loss_positions


def plan_streams(
    data: Sequence[TrainDatum], trained: Sequence[np.ndarray], shapes: BucketShapes, *, num_targets: int
) -> dict[BucketShape, list[PrefixTree]]:
    """Return the streams of each shape. Long streams share more prefixes, and short streams have less
    padding. This function plans for several stream lengths and returns the plan with the fewest tokens,
    including padding."""
    longest = max(len(datum.tokens) for datum in data)
    sequences = _sorted_sequences(data, trained, num_targets)
    limits = [shape for shape in shapes.shapes if longest <= shape.length <= shapes.largest(longest).length]
    plans = [
        _by_shape(_fill_streams(list(_trees(sequences, limit)), shapes.shapes, limit))
        for limit in reversed(limits)
    ]
    return min(plans, key=_computed_tokens)


def _sorted_sequences(
    data: Sequence[TrainDatum], trained: Sequence[np.ndarray], num_targets: int
) -> list[TreeSequence]:
    """Sort the data by tokens, so that sequences with a common prefix are adjacent."""
    sequences: list[TreeSequence] = []
    for index in sorted(range(len(data)), key=lambda i: data[i].tokens.astype(">i4").tobytes()):
        sequence = _sequence(index, data[index], trained[index], num_targets)
        if sequences:
            last = sequences[-1]
            num_shared = common_length(last.tokens, sequence.tokens)
            if num_shared >= MIN_SHARED:
                shares_loss = _shares_loss(last, sequence, slice(num_shared))
                sequence = replace(sequence, num_shared=num_shared, shares_loss=shares_loss)
        sequences.append(sequence)
    return sequences


def _shares_loss(left: TreeSequence, right: TreeSequence, positions: slice) -> np.ndarray:
    """Return [n] bool, True at the `positions` where both sequences have the same targets and loss inputs."""
    equal = (left.targets[positions] == right.targets[positions]).all(axis=1)
    equal &= (left.inputs[positions] == right.inputs[positions]).all(axis=1)
    equal &= left.trained[positions] == right.trained[positions]
    return equal & (left.num_targets == right.num_targets)


def _sequence(index: int, datum: TrainDatum, trained: np.ndarray, num_targets: int) -> TreeSequence:
    length = len(datum.tokens)
    datum_targets = datum.target_tokens.reshape(length, -1)
    width = datum_targets.shape[1]
    targets = np.zeros((length, num_targets), np.int32)
    inputs = np.zeros((length, num_targets + 2), np.float32)
    targets[:, :width] = datum_targets
    inputs[:, :width] = 1.0 if datum.weights is None else datum.weights.reshape(length, -1)
    if datum.logprobs is not None:
        inputs[:, -2] = datum.logprobs
    if datum.advantages is not None:
        inputs[:, -1] = datum.advantages
    return TreeSequence(
        datum=index,
        tokens=datum.tokens,
        targets=targets,
        inputs=inputs,
        trained=trained,
        num_targets=width if datum.target_tokens.ndim > 1 else None,
        num_shared=0,
        shares_loss=np.zeros(0, bool),
    )


def _trees(sequences: Sequence[TreeSequence], limit: BucketShape) -> Iterator[PrefixTree]:
    """Yield one tree for each run of sequences with common prefixes. A run also ends where a stream of shape
    `limit` is full."""
    run: list[TreeSequence] = []
    tokens = loss_positions = 0
    for sequence in sequences:
        tokens, loss_positions = tokens + sequence.new_tokens, loss_positions + sequence.new_loss_positions
        if not sequence.num_shared or tokens > limit.length or loss_positions > limit.loss_positions:
            if run:
                yield PrefixTree.from_sequences(run)
            run, sequence = [], sequence.without_shared()
            tokens, loss_positions = sequence.new_tokens, sequence.new_loss_positions
        run.append(sequence)
    yield PrefixTree.from_sequences(run)


def _fill_streams(
    trees: Sequence[PrefixTree], shapes: Sequence[BucketShape], limit: BucketShape
) -> Iterator[tuple[BucketShape, PrefixTree]]:
    """Distribute trees over streams, and yield (shape, stream).

    A shape is usable if each tree fits into one of its streams. Choose the longest usable shape, up to
    `limit`, for which the trees fill at least MIN_FILL of one micro-batch. Yield the streams that are filled
    to MIN_FILL, and repeat these steps with the trees of the other streams. If no stream is filled to
    MIN_FILL, yield all streams. If the trees have too few tokens for every usable shape up to `limit`,
    distribute them over streams of the shortest usable shape, and yield all streams.
    """
    while trees:
        total = sum(tree.tokens for tree in trees)
        fitting = [shape for shape in shapes if all(tree.fits(shape) for tree in trees)]
        filled = [
            shape for shape in fitting if shape.length <= limit.length and MIN_FILL * shape.tokens <= total
        ]
        shape = filled[-1] if filled else fitting[0]
        filled_streams, partial_streams = [], []
        for stream in _first_fit(trees, shape):
            fills = not filled or sum(tree.tokens for tree in stream) >= MIN_FILL * shape.length
            (filled_streams if fills else partial_streams).append(stream)
        yield from (
            (shape, PrefixTree.from_sequences([sequence for tree in stream for sequence in tree.sequences]))
            for stream in filled_streams or partial_streams
        )
        trees = [tree for stream in partial_streams for tree in stream] if filled_streams else []


def _by_shape(streams: Iterable[tuple[BucketShape, PrefixTree]]) -> dict[BucketShape, list[PrefixTree]]:
    by_shape: dict[BucketShape, list[PrefixTree]] = {}
    for shape, stream in streams:
        by_shape.setdefault(shape, []).append(stream)
    return by_shape


def _computed_tokens(streams: Mapping[BucketShape, Sequence[PrefixTree]]) -> int:
    """Return the number of tokens in the micro-batches, including padding."""
    return sum(-(-len(planned) // shape.streams) * shape.tokens for shape, planned in streams.items())


def _first_fit(trees: Sequence[PrefixTree], shape: BucketShape) -> list[list[PrefixTree]]:
    """Distribute trees over streams of `shape` by first-fit decreasing bin packing."""
    streams: list[list[PrefixTree]] = []
    free: list[tuple[int, int]] = []  # free tokens and loss positions of each stream
    for tree in sorted(trees, key=lambda tree: -tree.tokens):
        index = next(
            (
                index
                for index, (tokens, loss_positions) in enumerate(free)
                if tree.tokens <= tokens and tree.loss_positions <= loss_positions
            ),
            len(free),
        )
        if index == len(free):
            streams.append([])
            free.append((shape.length, shape.loss_positions))
        streams[index].append(tree)
        free[index] = (free[index][0] - tree.tokens, free[index][1] - tree.loss_positions)
    return streams
