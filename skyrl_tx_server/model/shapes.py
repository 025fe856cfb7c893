"""The lengths and widths of the batches of training, scoring, prefill and decoding. Each combination needs a
compiled program, so this module defines few lengths and widths. It uses numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PAGE_SIZE = 64
"""The number of positions of a KV page."""
MIN_SEGMENT = 256
"""The number of positions of the first segment (see `segment_ends`), unless the context is shorter."""
MIN_DECODE_WIDTH = 4
"""The smallest width of a decode program, in sequences, unless a rank has fewer slots. A width of 1
would change results, because a matrix product of one row differs in the last bits from products of several
rows."""
ATTENTION_TILE = 128
"""The number of tokens of a tile in training and scoring. The lengths of training streams and padded texts
are multiples of this number."""
SMALLER_SHAPES = 2  # the maximum number of training lengths below the budget (see `train_shapes`)
PREFILL_TILE = 64
"""The number of tokens of a tile in prefill. The part of a prompt after its cached prefix is divided into
tiles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillShapes:
    """The two sizes of tile batches, in tiles. Each size has its own compiled programs."""

    short: int
    long: int
    long_from: int  # for at least this number of tiles, a long batch is faster than several short batches
    max_tiles: int  # the maximum number of tiles of a prefill batch

    def batch_sizes(self, tiles: int) -> list[int]:
        """Return the sizes of the tile batches for this number of tiles. The last one may have padding.

        >>> [CPU_PREFILL.batch_sizes(tiles) for tiles in (1, 6, 8)], GPU_PREFILL.batch_sizes(6)
        ([[1], [4, 1, 1], [4, 4]], [4, 4])
        """
        if not tiles:
            return []
        size = self.long if tiles >= self.long_from else self.short
        return [size, *self.batch_sizes(max(0, tiles - size))]


CPU_PREFILL = PrefillShapes(short=1, long=4, long_from=3, max_tiles=8)
"""On a CPU, the time of a tile batch is nearly proportional to the number of tokens. A long tile batch is
slightly faster per token."""
GPU_PREFILL = PrefillShapes(short=4, long=16, long_from=13, max_tiles=16)
"""Every tile batch reads all weights. On an H200 this takes as long as the computation of 200 tokens
(calculated for 989 TFLOP/s, 4.8 TB/s and bfloat16, not measured). A short tile batch therefore has 4 tiles,
which are 256 tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketShape:
    """The shape of a micro-batch: streams (packed training sequences) of `length` tokens, each with
    `loss_positions` loss positions (entries of the targets and loss inputs). There are more loss positions
    than tokens, because sequences that share a token may have different targets."""

    streams: int
    length: int

    @property
    def loss_positions(self) -> int:
        return self.length + self.length // 4

    @property
    def tokens(self) -> int:
        return self.streams * self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketShapes:
    """All training shapes, shortest streams first. Shapes larger than `budget` are used only for batches with
    a sequence that is longer than the streams of `budget`."""

    shapes: tuple[BucketShape, ...]
    budget: BucketShape

    def largest(self, longest_sequence: int) -> BucketShape:
        """Return the largest shape that a batch with this longest sequence may use."""
        length = max(longest_sequence, self.budget.length)
        return next(shape for shape in self.shapes if shape.length >= length)


def train_shapes(*, max_context_length: int, tokens_per_batch: int, dp_ranks: int = 1) -> BucketShapes:
    """Return shapes with one stream per data-parallel rank. The budget of a stream is `tokens_per_batch` /
    `dp_ranks`. One length is the budget. The lengths below it are a quarter and a sixteenth of the budget,
    but at least one tile. The lengths above it are obtained by repeated doubling, and the last one is the
    maximum context. All lengths are rounded up to whole tiles.

    >>> [shape.length for shape in train_shapes(max_context_length=20_000, tokens_per_batch=8192).shapes]
    [512, 2048, 8192, 16384, 20096]
    """
    longest, budget = _whole_tiles(max_context_length), _whole_tiles(tokens_per_batch // dp_ranks)
    lengths = [budget]
    while len(lengths) <= SMALLER_SHAPES and lengths[0] > ATTENTION_TILE:
        lengths.insert(0, _whole_tiles(lengths[0] // 4))
    while lengths[-1] < longest:
        lengths.append(min(2 * lengths[-1], longest))
    shapes = tuple(BucketShape(streams=dp_ranks, length=length) for length in lengths)
    return BucketShapes(shapes=shapes, budget=BucketShape(streams=dp_ranks, length=budget))


def _whole_tiles(tokens: int) -> int:
    return max(1, -(-tokens // ATTENTION_TILE)) * ATTENTION_TILE


def num_tiles(length: int) -> int:
    """Return the number of prefill tiles of `length` tokens."""
    return -(-length // PREFILL_TILE)


def score_lengths(max_context_length: int) -> tuple[int, ...]:
    """Return the padded lengths of the scoring programs: ATTENTION_TILE, doubled up to the maximum context.

    >>> score_lengths(2000), score_lengths(100)
    ((128, 256, 512, 1024, 2048), (128,))
    """
    return _doubling(ATTENTION_TILE, -(-max_context_length // ATTENTION_TILE) * ATTENTION_TILE)


def segment_ends(max_context_length: int) -> tuple[int, ...]:
    """Return the positions at which the segments of `decode_steps` end: MIN_SEGMENT, doubled up to the
    maximum context in whole pages. A segment holds the cached keys and values of consecutive positions. The
    program is compiled for each number of segments.

    >>> segment_ends(2000), segment_ends(2048), segment_ends(100)
    ((256, 512, 1024, 2048), (256, 512, 1024, 2048), (128,))
    """
    return _doubling(MIN_SEGMENT, -(-max_context_length // PAGE_SIZE) * PAGE_SIZE)


def decode_widths(num_slots: int) -> tuple[int, ...]:
    """Return every width for which the decode program may be compiled. `num_slots` and the widths are numbers
    of sequences of one data-parallel rank.

    >>> decode_widths(48), decode_widths(32), decode_widths(3)
    ((4, 8, 16, 32, 48), (4, 8, 16, 32), (3,))
    """
    return _doubling(MIN_DECODE_WIDTH, num_slots)


def _doubling(first: int, last: int) -> tuple[int, ...]:
    sizes = [min(first, last)]
    while sizes[-1] < last:
        sizes.append(min(2 * sizes[-1], last))
    return tuple(sizes)


def pad_tokens(tokens: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Return [T] int32, the tokens right-padded with zeros. T is the smallest of `lengths` that is
    sufficient."""
    padded = np.zeros(bucket(len(tokens), lengths), np.int32)
    padded[: len(tokens)] = tokens
    return padded


def bucket(length: int, lengths: Sequence[int]) -> int:
    """Return the smallest of `lengths` that is at least `length`."""
    return next(candidate for candidate in lengths if candidate >= length)


def common_length(left: np.ndarray, right: np.ndarray) -> int:
    """Return the length of the common prefix of two token arrays."""
    shorter = min(len(left), len(right))
    different = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(different[0]) if len(different) else shorter
