"""Which sequences of a decode batch read which KV pages together (cascade attention, Juravsky et al.,
arXiv:2402.05099).

The pages of a sequence are divided into parts. A part that several sequences share, as the members of a group
share their prompt, is read once for several of them. The division depends on the length of the sequence
alone, so the result of a sequence does not depend on the other sequences. The host computes the splits once
per dispatch of decode steps.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import jax
import numpy as np

from skyrl_tx_server.model.lora.lora_math import ArrayLike
from skyrl_tx_server.model.shapes import PAGE_SIZE

MIN_PART, MAX_PARTS = 8, 16
"""A part has at least MIN_PART pages. The size doubles until a sequence has at most MAX_PARTS parts."""
MIN_QUERIES, MIN_SEQUENCES = 16, 4
"""A matrix product on a GPU has at least MIN_QUERIES queries, and a split has room for at least MIN_SEQUENCES
sequences."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class KVSplits:
    """N splits for each data-parallel rank. A split is one part of up to R sequences that share its pages."""

    rows: ArrayLike  # [devices * N, R] int32, indices of sequences on the device, padded with -1
    part: ArrayLike  # [devices * N] int32, the part's number
    first: ArrayLike  # [devices * N] int32, its first page, as an index into the block tables
    end: ArrayLike  # [devices * N] int32, the position before which it ends
    counts: ArrayLike  # [devices] int32, the number of splits
    num_parts: ArrayLike  # [B] int32, the parts of each sequence


def queries_per_sequence(group: int) -> int:
    """Return the queries of a key-value head with `group` queries, rounded up to a power of two.

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
    """Return the largest number of parts of a sequence with this number of pages.

    >>> max_parts(5), max_parts(33), max_parts(512)
    (1, 5, 16)
    """
    return min(MAX_PARTS, -(-pages // MIN_PART))


def kv_splits_of(
    tables_BW: np.ndarray, lengths_B: np.ndarray, *, group: int, devices: int = 1, page: int = PAGE_SIZE
) -> KVSplits:
    """Return the splits of sequences with these block tables and lengths, an equal share of them on each
    device; `group` queries per KV head.

    >>> splits = kv_splits_of(np.array([[1, 2], [1, 2], [3, 4]]), np.array([128, 128, 70]), group=4)
    >>> splits.counts, splits.rows[:2].tolist(), splits.end[:2]
    (array([2], dtype=int32), [[0, 1, -1, -1], [2, -1, -1, -1]], array([128,  70], dtype=int32))
    """
    shares = zip(np.split(tables_BW, devices), np.split(lengths_B, devices), strict=True)
    per_device = [
        _on_one_device(tables, lengths, sequences_per_split(group), page) for tables, lengths in shares
    ]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *per_device)


def _on_one_device(tables_BW: np.ndarray, lengths_B: np.ndarray, max_sequences: int, page: int) -> KVSplits:
    batch, width = tables_BW.shape
    num_parts, readers = np.zeros(batch, np.int32), defaultdict[tuple[int, int, int, bytes], list[int]](list)
    for row, length in enumerate(lengths_B.tolist()):
        pages = -(-length // page)
        size = _pages_of_part(pages)
        num_parts[row] = -(-pages // size)
        for part, first in enumerate(range(0, pages, size)):
            end = min(first + size, pages)
            readers[part, first, min(end * page, length), tables_BW[row, first:end].tobytes()].append(row)
    splits = [
        (part, first, end, sequences[begin : begin + max_sequences])
        for (part, first, end, _), sequences in readers.items()
        for begin in range(0, len(sequences), max_sequences)
    ]
    rows = np.full((batch * max_parts(width), max_sequences), -1, np.int32)
    spans = np.zeros((3, batch * max_parts(width)), np.int32)
    for index, (*span, sequences) in enumerate(splits):
        rows[index, : len(sequences)], spans[:, index] = sequences, span
    part, first, end = spans
    return KVSplits(
        rows=rows,
        part=part,
        first=first,
        end=end,
        counts=np.array([len(splits)], np.int32),
        num_parts=num_parts,
    )


def _pages_of_part(pages: int) -> int:
    size = MIN_PART
    while size * MAX_PARTS < pages:
        size *= 2
    return size
