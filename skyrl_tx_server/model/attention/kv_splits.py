"""KV splits: if several sequences of a decode batch share KV pages, an attention kernel reads these pages
once for all of them (as in Hydragen, Juravsky et al., arXiv:2402.05099).

The pages of a sequence are divided into parts. Sequences share a part if it has the same positions and the
same pages in each of them, for example if they have the same prompt. A split is a part together with the
sequences that share it, up to a maximum number R. An attention kernel reads the part once for all of them.
The division into parts depends only on the length of the sequence, so the result of a sequence does not
depend on the other sequences. The host computes the splits once per decode dispatch.
"""

from __future__ import annotations

import itertools

import jax
import numpy as np
from flax import struct

from skyrl_tx_server.model.lora.lora_math import ArrayLike
from skyrl_tx_server.model.shapes import PAGE_SIZE

MIN_PART, MAX_PARTS = 8, 16
"""All parts of a sequence except the last have the same number of pages: MIN_PART, doubled until the
sequence has at most MAX_PARTS parts."""
MIN_QUERIES, MIN_SEQUENCES = 16, 4
"""A split has space for at least MIN_SEQUENCES sequences, and for at least MIN_QUERIES queries per key-value
head. MIN_QUERIES is the minimum number of rows of a matrix product in a GPU kernel."""
_MULTIPLIER = 0x9E3779B97F4A7C15


@struct.dataclass(frozen=True, kw_only=True, slots=True)
class KVSplits:
    """N splits for each of `devices` data-parallel ranks. A split is a part together with up to R sequences
    that share it."""

    rows: ArrayLike  # [devices * N, R] int32, indices of sequences within the rank, padded with -1
    part: ArrayLike  # [devices * N] int32, the index of the part among the parts of a sequence
    first: ArrayLike  # [devices * N] int32, the first page of the part, as a column of the block tables
    end: ArrayLike  # [devices * N] int32, the position after the last position of the part
    counts: ArrayLike  # [devices] int32, how many of the N splits of each rank are used
    num_parts: ArrayLike  # [B] int32, the number of parts of each sequence


def queries_per_sequence(group: int) -> int:
    """Return `group`, the number of queries per key-value head, rounded up to a power of two.

    >>> queries_per_sequence(1), queries_per_sequence(5)
    (1, 8)
    """
    return 1 << (group - 1).bit_length()


def sequences_per_split(group: int) -> int:
    """Return the number of sequences in a split if a key-value head has `group` queries.

    >>> [sequences_per_split(group) for group in (1, 2, 4, 8)]
    [16, 8, 4, 4]
    """
    return max(MIN_SEQUENCES, MIN_QUERIES // queries_per_sequence(group))


def max_parts(pages: int) -> int:
    """Return the largest number of parts that a sequence of up to `pages` pages can have.

    >>> max_parts(5), max_parts(33), max_parts(512)
    (1, 5, 16)
    """
    return min(MAX_PARTS, -(-pages // MIN_PART))


def kv_splits_of(
    tables_BW: np.ndarray, lengths_B: np.ndarray, *, group: int, devices: int = 1, page: int = PAGE_SIZE
) -> KVSplits:
    """Return the splits of sequences with these block tables and lengths. Each of `devices` ranks has an
    equal number of consecutive sequences. `group` is the number of queries per key-value head.

    >>> splits = kv_splits_of(np.array([[1, 2], [1, 2], [3, 4]]), np.array([128, 128, 70]), group=4)
    >>> splits.counts, splits.rows[:2].tolist(), splits.end[:2]
    (array([2], dtype=int32), [[0, 1, -1, -1], [2, -1, -1, -1]], array([128,  70], dtype=int32))
    """
    shares = zip(np.split(tables_BW, devices), np.split(lengths_B, devices), strict=True)
    per_device = [
        _on_one_rank(tables, lengths, sequences_per_split(group), page) for tables, lengths in shares
    ]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *per_device)


def _on_one_rank(tables_BW: np.ndarray, lengths_B: np.ndarray, max_sequences: int, page: int) -> KVSplits:
    """Return the splits of one rank. In this function, arrays with the suffix N have one entry per part of a
    sequence, not one per split as in `KVSplits`. The first arrays, from `row_N` to `leader_N`, list the parts
    in the order of the sequences. The arrays after `order_N`, from `begins_N` to `split_N`, list the parts in
    the order `order_N`, in which equal parts are adjacent. The number of numpy calls does not depend on the
    number of sequences or parts."""
    batch, width = tables_BW.shape
    pages_B = -(-lengths_B // page)
    sizes_B = _pages_of_part(pages_B)
    num_parts_B = -(-pages_B // sizes_B)
    row_N = np.repeat(np.arange(batch), num_parts_B)
    part_N = np.arange(len(row_N)) - np.repeat(np.cumsum(num_parts_B) - num_parts_B, num_parts_B)
    first_N = part_N * sizes_B[row_N]
    last_N = np.minimum(first_N + sizes_B[row_N], pages_B[row_N])
    end_N = np.minimum(last_N * page, lengths_B[row_N])
    leader_N = _first_equal(tables_BW, row_N, np.stack([part_N, first_N, last_N, end_N]))
    order_N = np.argsort(leader_N, kind="stable")
    begins_N = np.append(True, leader_N[order_N][1:] != leader_N[order_N][:-1])[: len(order_N)]
    place_N = np.arange(len(order_N)) - np.flatnonzero(begins_N)[np.cumsum(begins_N) - 1]
    column_N = place_N % max_sequences
    split_N = np.cumsum(column_N == 0) - 1
    num_splits = int(split_N[-1]) + 1 if len(split_N) else 0
    rows = np.full((batch * max_parts(width), max_sequences), -1, np.int32)
    rows[split_N, column_N] = row_N[order_N]
    spans = np.zeros((3, batch * max_parts(width)), np.int32)
    spans[:, :num_splits] = np.stack([part_N, first_N, end_N])[:, order_N[column_N == 0]]
    part, first, end = spans
    return KVSplits(
        rows=rows,
        part=part,
        first=first,
        end=end,
        counts=np.array([num_splits], np.int32),
        num_parts=num_parts_B.astype(np.int32),
    )


def _pages_of_part(pages_B: np.ndarray) -> np.ndarray:
    sizes_B = np.full_like(pages_B, MIN_PART)
    while (too_small := sizes_B * MAX_PARTS < pages_B).any():
        sizes_B = np.where(too_small, 2 * sizes_B, sizes_B)
    return sizes_B


def _first_equal(tables_BW: np.ndarray, row_N: np.ndarray, spans_4N: np.ndarray) -> np.ndarray:
    """Return for each part the index of the first part with the same span (part, first page, page after the
    last page, end) and the same pages. Parts are matched by a 64-bit hash, and then the pages of matching
    parts are compared. If some pages differ, all parts are matched again by another hash."""
    _, first_N, last_N, _ = spans_4N
    count = len(row_N)
    for salt in itertools.count(1):
        positions = np.arange(tables_BW.shape[1], dtype=np.uint64)
        mixed = tables_BW.astype(np.uint64) * np.uint64(_MULTIPLIER) + positions
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(_MULTIPLIER * (2 * salt + 1) % 2**64)
        sums = np.zeros((len(tables_BW), tables_BW.shape[1] + 1), np.uint64)
        np.cumsum(mixed ^ (mixed >> np.uint64(32)), axis=1, out=sums[:, 1:])
        hash_N = sums[row_N, last_N] - sums[row_N, first_N]
        order_N = np.lexsort((np.arange(count), *spans_4N, hash_N))
        same = (hash_N[order_N][1:] == hash_N[order_N][:-1]) & (
            spans_4N[:, order_N][:, 1:] == spans_4N[:, order_N][:, :-1]
        ).all(axis=0)
        begins_N = np.append(True, ~same)[:count]
        leader_N = np.empty(count, np.int64)
        leader_N[order_N] = order_N[np.flatnonzero(begins_N)[np.cumsum(begins_N) - 1]]
        others = np.flatnonzero(leader_N != np.arange(count))
        lengths = (last_N - first_N)[others]
        pages = np.arange(lengths.sum()) + np.repeat(first_N[others] - np.cumsum(lengths) + lengths, lengths)
        rows, leader_rows = (np.repeat(row_N[parts], lengths) for parts in (others, leader_N[others]))
        if (tables_BW[rows, pages] == tables_BW[leader_rows, pages]).all():
            return leader_N
    raise AssertionError("the loop has no end")
