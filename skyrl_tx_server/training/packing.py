"""Training data laid out for the device: micro-batches of token streams in which sequences that begin alike share their beginning.

Host numpy only, no jax. A stream is a forest in depth-first order: where one sequence leaves another, only what is its own follows.
A token sees the earlier tokens in whose subtree it lies, which `ends` says with one number per token. Example, `a b` shared by two:

    data    a b c d        stream     a b c d e f | x y z | . .
            a b e f        positions  0 1 2 3 2 3 | 0 1 2 | . .
            x y z          ends       6 6 4 4 6 6 | 9 9 9 | . .

What a loss reads belongs to a (sequence, position), not to a token: it lies in `entries`, each pointing to the token whose hidden state
it needs. Sequences share an entry too where token, target and every loss input agree, as on the prompt of a group; it counts for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from skyrl_tx_server.engine.operations import TrainDatum
from skyrl_tx_server.model.shapes import ATTENTION_TILE, common_length

SMALLER_SHAPES = 2
MIN_FILL = 0.75  # of a shape that is not the smallest to hold the longest sequence
MIN_SHARED = 16  # tokens; less is not worth tying two sequences to one stream


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketShape:
    """One training micro-batch: `rows` streams of `length` tokens, each with `entries` entries."""

    rows: int
    length: int

    @property
    def entries(self) -> int:
        return self.length + self.length // 4

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketShapes:
    """Every training shape, shortest streams first; `budget` is the one to fill where no sequence is longer."""

    shapes: tuple[BucketShape, ...]
    budget: BucketShape

    def full(self, longest: int) -> BucketShape:
        return next(shape for shape in self.shapes if shape.length >= max(longest, self.budget.length))


def train_shapes(*, max_context_length: int, tokens_per_batch: int, row_groups: int = 1) -> BucketShapes:
    """The budget, a quarter and a sixteenth of it, and its doubles up to the context; `row_groups` streams, one for each of the devices
    they are divided over.

    >>> [shape.length for shape in train_shapes(max_context_length=20_000, tokens_per_batch=8192).shapes]
    [512, 2048, 8192, 16384, 20096]
    """
    longest, budget = _whole_blocks(max_context_length), _whole_blocks(tokens_per_batch // row_groups)
    lengths = [budget]
    while len(lengths) <= SMALLER_SHAPES and lengths[0] > ATTENTION_TILE:
        lengths.insert(0, _whole_blocks(lengths[0] // 4))
    while lengths[-1] < longest:
        lengths.append(min(2 * lengths[-1], longest))
    shapes = tuple(BucketShape(rows=row_groups, length=length) for length in lengths)
    return BucketShapes(shapes=shapes, budget=BucketShape(rows=row_groups, length=budget))


def _whole_blocks(tokens: int) -> int:
    return max(1, -(-tokens // ATTENTION_TILE)) * ATTENTION_TILE


@dataclass(frozen=True, kw_only=True, slots=True)
class DatumSpan:
    """Where one datum lies in a packed batch."""

    datum: int
    row: int
    entries: np.ndarray  # [N] int32, one per position
    num_targets: int | None  # per position; None: one, and the datum's arrays have no axis for them


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """Streams of one `BucketShape`: tokens [rows, length], entries [rows, entries]. What is not filled is zero, but for `ends`.

    With several targets per position targets and weights are [rows, entries, K], the other two loss inputs [rows, entries, 1].
    Entries that train come before the others.
    """

    tokens: np.ndarray  # int32
    positions: np.ndarray  # int32, from 0 in every sequence
    ends: np.ndarray  # int32, where in the stream a token's subtree ends; its own index + 1 for padding
    key_blocks: (
        np.ndarray
    )  # [rows, length / BLOCK, length / BLOCK] int32, the blocks that each block of the stream looks at
    num_key_blocks: (
        np.ndarray
    )  # [rows, length / BLOCK] int32, how many of them count; 0 for a block of padding
    sources: np.ndarray  # int32, the token of each entry
    targets: np.ndarray  # int32
    weights: np.ndarray  # float32
    sampler_logprobs: np.ndarray  # float32
    advantages: np.ndarray  # float32
    counts: np.ndarray  # float32, how many sequences share each entry; 0 for padding
    num_trained: np.ndarray  # [rows] int32, entries with a gradient
    placements: tuple[DatumSpan, ...]


def example(shape: BucketShape) -> PackedBatch:
    """A batch of that shape, full of nothing in particular."""
    tokens = np.zeros(shape.length, np.int32)
    datum, fitting = (
        TrainDatum(tokens=tokens, target_tokens=tokens),
        BucketShapes(shapes=(shape,), budget=shape),
    )
    (packed,) = pack([datum], [np.ones(shape.length, np.bool_)], fitting)
    return packed


def pack(
    data: Sequence[TrainDatum], trained: Sequence[np.ndarray], shapes: BucketShapes
) -> list[PackedBatch]:
    """Lay checked data out in micro-batches, so that few tokens are computed: in long streams, where sequences share most, or in shorter
    ones, where less is padding. `trained`, [N] bool for each datum, says which positions have a gradient."""
    width = _target_width(data)
    longest = max(len(datum.tokens) for datum in data)
    sequences = _in_order(data, trained, width or 1)
    limits = [shape for shape in shapes.shapes if longest <= shape.length <= shapes.full(longest).length]
    plans = [
        _by_shape(_streams(list(_clusters(sequences, limit)), shapes.shapes, limit))
        for limit in reversed(limits)
    ]
    streams = min(plans, key=_computed_tokens)
    return [
        _lay_out(of_shape[first : first + shape.rows], shape, width)
        for shape, of_shape in streams.items()
        for first in range(0, len(of_shape), shape.rows)
    ]


def unpack(batches: Sequence[PackedBatch], values: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """One array per datum, shaped like its targets and in the order given to `pack`, from one array per batch, shaped like its entries."""
    found = {
        place.datum: _own_targets(array[place.row, place.entries], place.num_targets)
        for batch, array in zip(batches, values, strict=True)
        for place in batch.placements
    }
    return tuple(found[index] for index in range(len(found)))


# --- sequences in the order of a stream ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sequence:
    """A datum with its loss inputs in full, and what it shares with the one before it."""

    datum: int
    tokens: np.ndarray  # [N]
    targets: np.ndarray  # [N, K] int32
    inputs: np.ndarray  # [N, K + 2] float32: weights, the sampler's logprob, the advantage
    trained: np.ndarray  # [N] bool
    num_targets: int | None
    shared: int  # tokens in common with the sequence before
    same_entries: np.ndarray  # [shared] bool, where the loss inputs are the same too

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - self.shared

    @property
    def new_entries(self) -> int:
        return len(self.tokens) - int(self.same_entries.sum())


def _in_order(data: Sequence[TrainDatum], trained: Sequence[np.ndarray], width: int) -> list[_Sequence]:
    """Sorted by their tokens, so that those that begin alike are neighbours."""
    found: list[_Sequence] = []
    for index in sorted(range(len(data)), key=lambda i: data[i].tokens.astype(">i4").tobytes()):
        sequence = _sequence(index, data[index], trained[index], width)
        if found and (shared := common_length(found[-1].tokens, sequence.tokens)) >= MIN_SHARED:
            last, begin = found[-1], slice(shared)
            same = (last.targets[begin] == sequence.targets[begin]).all(axis=1) & (
                last.inputs[begin] == sequence.inputs[begin]
            ).all(axis=1)
            same &= (last.trained[begin] == sequence.trained[begin]) & (
                last.num_targets == sequence.num_targets
            )
            sequence = replace(sequence, shared=shared, same_entries=same)
        found.append(sequence)
    return found


def _sequence(index: int, datum: TrainDatum, trained: np.ndarray, width: int) -> _Sequence:
    length = len(datum.tokens)
    own = datum.target_tokens.reshape(length, -1)
    targets, inputs = np.zeros((length, width), np.int32), np.zeros((length, width + 2), np.float32)
    targets[:, : own.shape[1]] = own
    inputs[:, : own.shape[1]] = 1.0 if datum.weights is None else datum.weights.reshape(length, -1)
    if datum.logprobs is not None:
        inputs[:, -2] = datum.logprobs
    if datum.advantages is not None:
        inputs[:, -1] = datum.advantages
    return _Sequence(
        datum=index,
        tokens=datum.tokens,
        targets=targets,
        inputs=inputs,
        trained=trained,
        num_targets=datum.target_tokens.shape[1] if datum.target_tokens.ndim > 1 else None,
        shared=0,
        same_entries=np.zeros(0, bool),
    )


def _target_width(data: Sequence[TrainDatum]) -> int | None:
    """Targets per position that hold every datum's: a power of two, as each is a program. None: no datum has an axis for them."""
    widths = [datum.target_tokens.shape[1] for datum in data if datum.target_tokens.ndim > 1]
    return 1 << (max(widths) - 1).bit_length() if widths else None


def _own_targets(values: np.ndarray, num_targets: int | None) -> np.ndarray:
    """[N] or [N, K] of a datum's own K, from [N] or [N, K of the batch]."""
    if values.ndim == 1:
        return values
    return values[:, 0] if num_targets is None else values[:, :num_targets]


# --- which sequences share a stream ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cluster:
    """Neighbours that share beginnings; they stay together."""

    sequences: tuple[_Sequence, ...]
    tokens: int
    entries: int

    def fits(self, shape: BucketShape) -> bool:
        return self.tokens <= shape.length and self.entries <= shape.entries


def _clusters(sequences: Sequence[_Sequence], full: BucketShape) -> Iterator[_Cluster]:
    """Runs of sequences that share beginnings, cut where a stream is full."""
    run: list[_Sequence] = []
    tokens = entries = 0
    for sequence in sequences:
        tokens, entries = tokens + sequence.new_tokens, entries + sequence.new_entries
        if not sequence.shared or tokens > full.length or entries > full.entries:
            if run:
                yield _cluster(run)
            run, sequence = [], replace(sequence, shared=0, same_entries=np.zeros(0, bool))
            tokens, entries = sequence.new_tokens, sequence.new_entries
        run.append(sequence)
    yield _cluster(run)


def _cluster(sequences: Sequence[_Sequence]) -> _Cluster:
    return _Cluster(
        sequences=tuple(sequences),
        tokens=sum(sequence.new_tokens for sequence in sequences),
        entries=sum(sequence.new_entries for sequence in sequences),
    )


def _streams(
    clusters: Sequence[_Cluster], shapes: Sequence[BucketShape], full: BucketShape
) -> Iterator[tuple[BucketShape, _Cluster]]:
    """Clusters side by side in streams of the longest shape they fill. Those left over, too few for one more, take a shorter shape."""
    while clusters:
        total = sum(cluster.tokens for cluster in clusters)
        fitting = [shape for shape in shapes if all(cluster.fits(shape) for cluster in clusters)]
        filled = [
            shape for shape in fitting if shape.length <= full.length and MIN_FILL * shape.tokens <= total
        ]
        shape = filled[-1] if filled else fitting[0]
        good, poor = [], []
        for stream in _first_fit(clusters, shape):
            fills = not filled or sum(cluster.tokens for cluster in stream) >= MIN_FILL * shape.length
            (good if fills else poor).append(stream)
        yield from (
            (shape, _cluster([sequence for cluster in stream for sequence in cluster.sequences]))
            for stream in good or poor
        )
        clusters = [cluster for stream in poor for cluster in stream] if good else []


def _by_shape(streams: Iterable[tuple[BucketShape, _Cluster]]) -> dict[BucketShape, list[_Cluster]]:
    found: dict[BucketShape, list[_Cluster]] = {}
    for shape, stream in streams:
        found.setdefault(shape, []).append(stream)
    return found


def _computed_tokens(streams: Mapping[BucketShape, Sequence[_Cluster]]) -> int:
    """Padding among them."""
    return sum(-(-len(of_shape) // shape.rows) * shape.tokens for shape, of_shape in streams.items())


def _first_fit(clusters: Sequence[_Cluster], shape: BucketShape) -> list[list[_Cluster]]:
    """The largest first, since that packs tightest."""
    streams: list[list[_Cluster]] = []
    free: list[tuple[int, int]] = []  # tokens and entries, by stream
    for cluster in sorted(clusters, key=lambda cluster: -cluster.tokens):
        at = next(
            (
                at
                for at, (tokens, entries) in enumerate(free)
                if cluster.tokens <= tokens and cluster.entries <= entries
            ),
            len(free),
        )
        if at == len(free):
            streams.append([])
            free.append((shape.length, shape.entries))
        streams[at].append(cluster)
        free[at] = (free[at][0] - cluster.tokens, free[at][1] - cluster.entries)
    return streams


# --- in arrays -------------------------------------------------------------------------------------------------------


def _lay_out(streams: Sequence[_Cluster], shape: BucketShape, width: int | None) -> PackedBatch:
    empty = _Cluster(sequences=(), tokens=0, entries=0)
    rows = [_row(stream, shape, width) for stream in [*streams, *[empty] * (shape.rows - len(streams))]]
    placements = [
        DatumSpan(datum=sequence.datum, row=at, entries=entries, num_targets=sequence.num_targets)
        for at, (stream, row) in enumerate(zip(streams, rows, strict=False))
        for sequence, entries in zip(stream.sequences, row.entries, strict=True)
    ]
    return PackedBatch(
        **{name: np.stack([row.arrays[name] for row in rows]) for name in rows[0].arrays},
        placements=tuple(placements),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One stream as the arrays of a `PackedBatch`, and where each of its sequences' entries are."""

    arrays: dict[str, np.ndarray]
    entries: list[np.ndarray]


def _row(stream: _Cluster, shape: BucketShape, width: int | None) -> _Row:
    tokens, positions, ends, paths = _walk(stream.sequences, shape.length)
    made = [
        (path, sequence, _new_entries(sequence))
        for path, sequence in zip(paths, stream.sequences, strict=True)
    ]
    trained = np.concatenate([np.zeros(0, bool), *(sequence.trained[new] for _, sequence, new in made)])
    order = np.argsort(~trained, kind="stable")  # what trains comes first

    def ordered(parts: list[np.ndarray], empty: np.ndarray) -> np.ndarray:
        flat = np.concatenate([empty, *parts])[order]
        return np.concatenate([flat, np.zeros((shape.entries - len(flat), *flat.shape[1:]), flat.dtype)])

    columns = width or 1
    targets = ordered([sequence.targets[new] for _, sequence, new in made], np.zeros((0, columns), np.int32))
    inputs = ordered(
        [sequence.inputs[new] for _, sequence, new in made], np.zeros((0, columns + 2), np.float32)
    )
    if width is None:
        targets, weights, logprobs, advantages = targets[:, 0], *inputs.T
    else:
        weights, logprobs, advantages = np.split(inputs, [columns, columns + 1], axis=1)
    key_blocks, num_key_blocks = _blocks_to_look_at(ends, stream.tokens)
    entries = _entries_of(stream.sequences, np.argsort(order))
    arrays = {
        "tokens": tokens,
        "positions": positions,
        "ends": ends,
        "key_blocks": key_blocks,
        "num_key_blocks": num_key_blocks,
        "sources": ordered([path[new] for path, _, new in made], np.zeros(0, np.int32)),
        "targets": targets,
        "weights": weights,
        "sampler_logprobs": logprobs,
        "advantages": advantages,
        "counts": np.bincount(
            np.concatenate([np.zeros(0, np.int32), *entries]), minlength=shape.entries
        ).astype(np.float32),
        "num_trained": np.array(trained.sum(), np.int32),
    }
    return _Row(arrays=arrays, entries=entries)


def _walk(
    sequences: Sequence[_Sequence], length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """(tokens, positions, ends) of the stream, and for each sequence where in it its tokens are."""
    tokens, positions = np.zeros(length, np.int32), np.zeros(length, np.int32)
    ends = np.arange(1, length + 1, dtype=np.int32)
    paths: list[np.ndarray] = []
    path, cursor = np.zeros(0, np.int32), 0
    for sequence in sequences:
        ends[path[sequence.shared :]] = cursor
        own = np.arange(cursor, cursor + sequence.new_tokens, dtype=np.int32)
        path = np.concatenate([path[: sequence.shared], own])
        tokens[own] = sequence.tokens[sequence.shared :]
        positions[own] = np.arange(sequence.shared, len(sequence.tokens))
        cursor += len(own)
        paths.append(path)
    ends[path] = cursor
    return tokens, positions, ends, paths


def _new_entries(sequence: _Sequence) -> np.ndarray:
    """[N] bool, where it cannot use the entry of the sequence before."""
    new = np.ones(len(sequence.tokens), bool)
    new[: sequence.shared] = ~sequence.same_entries
    return new


def _entries_of(sequences: Sequence[_Sequence], places: np.ndarray) -> list[np.ndarray]:
    """[N] int32 for each sequence; `places` says where the entries lie in the order in which they were made."""
    found: list[np.ndarray] = []
    made = 0
    for sequence in sequences:
        new = _new_entries(sequence)
        own = np.zeros(len(new), np.int32)
        own[new] = places[made : made + new.sum()]
        if sequence.shared:
            own[: sequence.shared][sequence.same_entries] = found[-1][: sequence.shared][
                sequence.same_entries
            ]
        made += int(new.sum())
        found.append(own)
    return found


def _blocks_to_look_at(ends: np.ndarray, used: int) -> tuple[np.ndarray, np.ndarray]:
    """For each block of queries the blocks of keys that any of it sees, and how many they are."""
    count = len(ends) // ATTENTION_TILE
    block = np.arange(count)
    seen = (block[None] <= block[:, None]) & (
        ends.reshape(count, ATTENTION_TILE).max(axis=1)[None] > block[:, None] * ATTENTION_TILE
    )
    seen &= (block * ATTENTION_TILE < used)[:, None]
    return np.argsort(~seen, axis=1, kind="stable").astype(np.int32), seen.sum(axis=1).astype(np.int32)
