"""The one table of shapes the device ever sees, and operations laid out in those shapes. Host numpy only, no jax.

Every distinct shape is a program to compile, so shapes come from here and nowhere else. Training packs sequences
first-fit into rows of a bucketed length; segment ids keep them apart and 0 marks padding. Example, rows of 8:

    data of lengths 5, 3, 4   ->   tokens       a a a a a b b b | c c c c . . . .
                                   segment_ids  1 1 1 1 1 2 2 2 | 1 1 1 1 0 0 0 0
                                   positions    0 1 2 3 4 0 1 2 | 0 1 2 3 0 0 0 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from skyrl_tx_server.errors import UserError
from skyrl_tx_server.ops import TrainDatum

MIN_TRAIN_LENGTH = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainShape:
    """One training micro-batch: `rows` packed rows of `length` tokens."""

    rows: int
    length: int


def train_shapes(*, max_context_length: int, tokens_per_batch: int, row_groups: int = 1) -> tuple[TrainShape, ...]:
    """Every training shape, shortest rows first: lengths double from 128 and end at the context (rounded up to 128).

    Rows are a multiple of `row_groups`, the devices they are divided over.

    >>> [(s.rows, s.length) for s in train_shapes(max_context_length=1000, tokens_per_batch=512)]
    [(4, 128), (2, 256), (1, 512), (1, 1024)]
    """
    longest = -(-max_context_length // MIN_TRAIN_LENGTH) * MIN_TRAIN_LENGTH
    lengths = [MIN_TRAIN_LENGTH]
    while lengths[-1] < longest:
        lengths.append(min(2 * lengths[-1], longest))
    return tuple(TrainShape(rows=max(1, tokens_per_batch // (length * row_groups)) * row_groups, length=length) for length in lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where one datum lies in a packed batch."""

    datum: int
    row: int
    start: int
    length: int
    num_targets: int | None  # per position; None: one, and the datum's arrays have no axis for them


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """Sequences laid out in one `TrainShape`; every array is [rows, length]. Inputs a loss does not read are zero.

    Data with several targets per position have targets and weights [rows, length, K], the other two loss inputs [rows, length, 1].
    """

    tokens: np.ndarray  # int32
    positions: np.ndarray  # int32, from 0 in every segment
    segment_ids: np.ndarray  # int32, from 1 in every row; 0 is padding
    targets: np.ndarray  # int32
    weights: np.ndarray  # float32
    sampler_logprobs: np.ndarray  # float32
    advantages: np.ndarray  # float32
    placements: tuple[Placement, ...]

    def with_sequence_ratios(self, data: Sequence[TrainDatum], logprobs: np.ndarray) -> PackedBatch:
        """The batch for gspo, from the model's own `logprobs` [rows, length]: s in place of the sampler's (see `steps/losses.py`)."""
        ratios = np.zeros_like(self.sampler_logprobs)
        for place in self.placements:
            datum = data[place.datum]
            assert datum.logprobs is not None and datum.sequence_ratio_mask is not None, "checked before packing"
            span = (place.row, slice(place.start, place.start + place.length))
            counts = datum.sequence_ratio_mask != 0
            if counts.any():
                ratios[span] = np.mean((logprobs[span] - datum.logprobs)[counts], dtype=np.float64)
        return replace(self, sampler_logprobs=ratios)


def check_data(data: Sequence[TrainDatum], *, vocab_size: int, max_context_length: int) -> None:
    """Refuse sequences the model cannot hold. Raises UserError that names the datum."""
    if not data:
        raise UserError("the request holds no data: send at least one datum")
    for index, datum in enumerate(data):
        length = len(datum.tokens)
        if length == 0:
            raise UserError(f"datum {index} is empty: model_input needs at least one token")
        if length > max_context_length:
            raise UserError(f"datum {index} has {length} tokens, more than the context of {max_context_length}: shorten it")
        if len(datum.target_tokens) != length:
            raise UserError(f"datum {index}: target_tokens has length {len(datum.target_tokens)}, model_input {length}: make them equal")
        for name, ids in (("model_input", datum.tokens), ("target_tokens", datum.target_tokens)):
            if ids.min() < 0 or ids.max() >= vocab_size:
                raise UserError(f"datum {index}: {name} holds a token id outside 0..{vocab_size - 1}, the model's vocabulary")


def pack(data: Sequence[TrainDatum], shapes: Sequence[TrainShape]) -> list[PackedBatch]:
    """Lay checked data out in as few micro-batches as first-fit finds, all in the smallest shape that holds the longest datum."""
    longest = max(len(datum.tokens) for datum in data)
    shape = next(shape for shape in shapes if shape.length >= longest)
    rows = _first_fit([len(datum.tokens) for datum in data], capacity=shape.length)
    width = _target_width(data)
    return [_lay_out(data, rows[first : first + shape.rows], shape, width) for first in range(0, len(rows), shape.rows)]


def unpack(batches: Sequence[PackedBatch], values: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """One array per datum, shaped like its targets and in the order given to `pack`, from one array per batch, shaped like the batch's."""
    found = {
        place.datum: _cut_out(array[place.row, place.start : place.start + place.length], place.num_targets)
        for batch, array in zip(batches, values, strict=True)
        for place in batch.placements
    }
    return tuple(found[index] for index in range(len(found)))


def _cut_out(values: np.ndarray, num_targets: int | None) -> np.ndarray:
    """[N] or [N, K] of a datum's own K, from [N] or [N, K of the batch]."""
    if values.ndim == 1:
        return values
    return values[:, 0] if num_targets is None else values[:, :num_targets]


def _target_width(data: Sequence[TrainDatum]) -> int | None:
    """Targets per position that hold every datum's: a power of two, as each is a program. None: no datum has an axis for them."""
    widths = [datum.target_tokens.shape[1] for datum in data if datum.target_tokens.ndim > 1]
    return 1 << (max(widths) - 1).bit_length() if widths else None


def _first_fit(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Rows of indices whose lengths sum to at most `capacity`; longest first, since that packs tightest."""
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, room in enumerate(free) if room >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(capacity)
        rows[row].append(index)
        free[row] -= lengths[index]
    return rows


def _lay_out(data: Sequence[TrainDatum], rows: Sequence[Sequence[int]], shape: TrainShape, width: int | None) -> PackedBatch:
    size = (shape.rows, shape.length)
    tokens, positions, segment_ids = (np.zeros(size, np.int32) for _ in range(3))
    sampler_logprobs, advantages = (np.zeros(size if width is None else (*size, 1), np.float32) for _ in range(2))
    targets = np.zeros(size if width is None else (*size, width), np.int32)
    weights = np.zeros(targets.shape, np.float32)
    placements = []
    for row, members in enumerate(rows):
        start = 0
        for segment, index in enumerate(members, start=1):
            datum, length = data[index], len(data[index].tokens)
            span = (row, slice(start, start + length))
            tokens[span] = datum.tokens
            positions[span] = np.arange(length)
            segment_ids[span] = segment
            num_targets = datum.target_tokens.shape[1] if datum.target_tokens.ndim > 1 else None
            own = span if width is None else (*span, 0 if num_targets is None else slice(num_targets))
            targets[own] = datum.target_tokens
            weights[own] = 1.0 if datum.weights is None else datum.weights
            if datum.logprobs is not None:
                sampler_logprobs[span] = datum.logprobs
            if datum.advantages is not None:
                advantages[span] = datum.advantages
            placements.append(Placement(datum=index, row=row, start=start, length=length, num_targets=num_targets))
            start += length
    return PackedBatch(
        tokens=tokens,
        positions=positions,
        segment_ids=segment_ids,
        targets=targets,
        weights=weights,
        sampler_logprobs=sampler_logprobs,
        advantages=advantages,
        placements=tuple(placements),
    )


# --- sampling -----------------------------------------------------------------------------------------------------

MIN_PREFILL_LENGTH = 128
MIN_SEGMENT = 256
MIN_PREFIX = 2048


def prefill_lengths(max_context_length: int) -> tuple[int, ...]:
    """Every length a prefill is compiled for: doubling, up to the context.

    >>> prefill_lengths(2000)
    (128, 256, 512, 1024, 2000)
    """
    lengths = [min(MIN_PREFILL_LENGTH, max_context_length)]
    while lengths[-1] < max_context_length:
        lengths.append(min(2 * lengths[-1], max_context_length))
    return tuple(lengths)


def segment_ends(max_context_length: int) -> tuple[int, ...]:
    """Where the segments of the key-value cache end, which are the lengths of cache a decode block reads: doubling, up to the context.

    >>> segment_ends(2000)
    (256, 512, 1024, 2000)
    >>> segment_ends(1100)  # a last segment shorter than the first joins the one before
    (256, 512, 1100)
    """
    ends = [MIN_SEGMENT]
    while max_context_length - 2 * ends[-1] >= MIN_SEGMENT:
        ends.append(2 * ends[-1])
    if max_context_length - ends[-1] >= MIN_SEGMENT:
        ends.append(max_context_length)
    ends[-1] = max_context_length
    return tuple(ends)


def prefix_ends(max_context_length: int) -> tuple[int, ...]:
    """The lengths of cached prefix a prefill is compiled for: few, since each comes on top of every prefill length.

    >>> prefix_ends(2000), prefix_ends(16384)
    ((2000,), (4096, 16384))
    """
    ends = segment_ends(max_context_length)
    return tuple(end for end in reversed(ends[::-2]) if end >= MIN_PREFIX or end == ends[-1])


def pad_tokens(tokens: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """[T] int32, the tokens right-padded with zeros to the smallest length that holds them."""
    padded = np.zeros(bucket(len(tokens), lengths), np.int32)
    padded[: len(tokens)] = tokens
    return padded


def bucket(length: int, lengths: Sequence[int]) -> int:
    """The smallest of `lengths` that is at least `length`."""
    return next(candidate for candidate in lengths if candidate >= length)
