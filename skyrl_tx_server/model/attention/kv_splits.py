"""Which rows of a decode batch read which pages together (cascade attention, Juravsky et al., arXiv:2402.05099).

A row's pages are cut into parts. A part that rows have in common, as the members of a group have their prompt's, is read once for several
of them. The cut depends on the row's own length alone, so that what a row gets does not depend on its company. Made on the host, once per
decode block.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields

import jax
import numpy as np

from skyrl_tx_server.model.lora.lora_math import ArrayLike
from skyrl_tx_server.model.shapes import PAGE_SIZE

MIN_PART, MAX_PARTS = 8, 16
"""Pages of a part, doubled until a row has no more parts than the other."""
MIN_QUERIES, MIN_TOGETHER = 16, 4
"""A matrix product on a GPU takes so many queries of a key-value head at least, and a stretch the rows that fill it, at least the other."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class KVSplits:
    """Each of the batch's devices has N: one part of up to R of the rows that lie there, which have its pages in common."""

    rows: ArrayLike  # [devices * N, R] int32, by place on the device; -1 where there are no more
    part: ArrayLike  # [devices * N] int32, the part's number
    first: ArrayLike  # [devices * N] int32, its first page, by place in the rows' tables
    end: ArrayLike  # [devices * N] int32, the position before which it ends
    counts: ArrayLike  # [devices] int32, how many stretches count
    num_parts: ArrayLike  # [B] int32, the parts of each row


def queries_per_sequence(group: int) -> int:
    """Of a key-value head with `group` queries: the power of two that holds them.

    >>> queries_per_row(1), queries_per_row(5)
    (1, 8)
    """
    return 1 << (group - 1).bit_length()


def sequences_per_split(group: int) -> int:
    """How many rows a stretch has room for where a key-value head has `group` queries.

    >>> [rows_together(group) for group in (1, 2, 4, 8)]
    [16, 8, 4, 4]
    """
    return max(MIN_TOGETHER, MIN_QUERIES // queries_per_sequence(group))


def max_parts(pages: int) -> int:
    """How many parts a row of up to so many pages may have.

    >>> max_parts(5), max_parts(33), max_parts(512)
    (1, 5, 16)
    """
    return min(MAX_PARTS, -(-pages // MIN_PART))


def kv_splits_of(
    tables_BW: np.ndarray, lengths_B: np.ndarray, *, group: int, devices: int = 1, page: int = PAGE_SIZE
) -> KVSplits:
    """The stretches of rows with these pages and positions, an equal share of the rows on each device; `group` queries per key-value head.

    >>> found = stretches_of(np.array([[1, 2], [1, 2], [3, 4]]), np.array([128, 128, 70]), group=4)
    >>> found.counts, found.rows[:2].tolist(), found.end[:2]
    (array([2], dtype=int32), [[0, 1, -1, -1], [2, -1, -1, -1]], array([128,  70], dtype=int32))
    """
    shares = zip(np.split(tables_BW, devices), np.split(lengths_B, devices), strict=True)
    each = [_on_one_device(tables, lengths, sequences_per_split(group), page) for tables, lengths in shares]
    return KVSplits(
        **{
            field.name: np.concatenate([getattr(own, field.name) for own in each])
            for field in fields(KVSplits)
        }
    )


def _on_one_device(tables_BW: np.ndarray, lengths_B: np.ndarray, together: int, page: int) -> KVSplits:
    batch, width = tables_BW.shape
    num_parts, readers = np.zeros(batch, np.int32), defaultdict[tuple[int, int, int, bytes], list[int]](list)
    for row, length in enumerate(lengths_B.tolist()):
        pages = -(-length // page)
        size = _pages_of_part(pages)
        num_parts[row] = -(-pages // size)
        for part, first in enumerate(range(0, pages, size)):
            end = min(first + size, pages)
            readers[part, first, min(end * page, length), tables_BW[row, first:end].tobytes()].append(row)
    found = [
        (part, first, end, rows[begin : begin + together])
        for (part, first, end, _), rows in readers.items()
        for begin in range(0, len(rows), together)
    ]
    rows, spans = (
        np.full((batch * max_parts(width), together), -1, np.int32),
        np.zeros((3, batch * max_parts(width)), np.int32),
    )
    for at, (*span, own) in enumerate(found):
        rows[at, : len(own)], spans[:, at] = own, span
    part, first, end = spans
    return KVSplits(
        rows=rows,
        part=part,
        first=first,
        end=end,
        counts=np.array([len(found)], np.int32),
        num_parts=num_parts,
    )


def _pages_of_part(pages: int) -> int:
    size = MIN_PART
    while size * MAX_PARTS < pages:
        size *= 2
    return size
