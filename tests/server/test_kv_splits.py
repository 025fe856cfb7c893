"""Each part of a sequence is in exactly one KV split. The sequences of a split share its pages."""

import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tx_server.model.attention.kv_splits import MAX_PARTS, kv_splits_of, max_parts, sequences_per_split
from skyrl_tx_server.model.shapes import PAGE_SIZE

WIDTH, ROWS = 300, 8


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Draw sequences of any length, many of which share their first pages."""
    tables = np.arange(ROWS * WIDTH, dtype=np.int32).reshape(ROWS, WIDTH)
    for row in range(1, ROWS):
        source, num_shared = (
            draw(st.integers(0, row - 1)),
            draw(st.sampled_from([0, 1, 8, 9, 24, 130, WIDTH])),
        )
        tables[row, :num_shared] = tables[source, :num_shared]
    lengths = draw(
        st.lists(
            st.one_of(st.integers(0, 700), st.integers(0, WIDTH * PAGE_SIZE)), min_size=ROWS, max_size=ROWS
        )
    )
    return tables, np.array(lengths, np.int32)


@given(batches(), st.sampled_from([1, 2, 4]), st.integers(1, 8))
def test_every_part_is_in_one_split_of_sequences_with_its_pages(
    batch: tuple[np.ndarray, np.ndarray], devices: int, group: int
) -> None:
    tables, lengths = batch
    splits = kv_splits_of(tables, lengths, group=group, devices=devices)
    rows_per_device = ROWS // devices
    assert (
        splits.rows.shape == (devices * rows_per_device * max_parts(WIDTH), sequences_per_split(group))
        and splits.num_parts.max() <= MAX_PARTS
    )
    positions: dict[tuple[int, int], tuple[int, int]] = {}  # first and end, by sequence and part
    for device in range(devices):
        for split in device * rows_per_device * max_parts(WIDTH) + np.arange(int(splits.counts[device])):
            members = device * rows_per_device + splits.rows[split][splits.rows[split] >= 0]
            part, first, end = (int(array[split]) for array in (splits.part, splits.first, splits.end))
            pages = tables[members, first : -(-end // PAGE_SIZE)]
            assert len(members) and (pages == pages[0]).all()
            for row in members.tolist():
                assert (row, part) not in positions
                positions[row, part] = (first * PAGE_SIZE, end)
    for row in range(ROWS):
        spans = [positions.pop((row, part)) for part in range(splits.num_parts[row])]
        assert [first for first, _ in spans] == [0, *(end for _, end in spans)][: len(spans)]
        assert (spans[-1][1] if spans else 0) == lengths[row]
    assert not positions


@given(batches())
def test_a_shared_part_is_in_one_split_if_all_sequences_fit(
    batch: tuple[np.ndarray, np.ndarray],
) -> None:
    tables, lengths = batch
    splits = kv_splits_of(tables, lengths, group=2)
    num_splits = {
        (part, first, end, tables[rows[0], first : -(-end // PAGE_SIZE)].tobytes()): 0
        for part, first, end, rows in _split_list(splits)
    }
    for part, first, end, rows in _split_list(splits):
        num_splits[part, first, end, tables[rows[0], first : -(-end // PAGE_SIZE)].tobytes()] += 1
    assert set(num_splits.values()) <= {1}, "with group=2, a split holds all eight sequences"


def test_more_sequences_than_a_split_holds_get_a_second_split() -> None:
    """With group=4 (four query heads share a key-value head), a split holds four sequences."""
    splits = kv_splits_of(np.tile(np.arange(8, dtype=np.int32), (5, 1)), np.full(5, 500, np.int32), group=4)
    assert [rows[rows >= 0].tolist() for *_, rows in _split_list(splits)] == [[0, 1, 2, 3], [4]]


def test_the_number_of_calls_does_not_depend_on_the_batch_size() -> None:
    def count_function_calls(rows: int) -> int:
        """Return the number of function calls for `rows` sequences of 8,192 tokens. Four sequences each share
        their first 96 pages.
        """
        tables = np.arange(rows * 128, dtype=np.int32).reshape(rows, 128)
        tables[:, :96] = tables[np.arange(rows) // 4 * 4, :96]
        count = 0

        def count_call(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(count_call)
        try:
            kv_splits_of(tables, np.full(rows, 8192, np.int32), group=4)
        finally:
            sys.setprofile(None)
        return count

    count_function_calls(8)  # the first call imports modules
    assert count_function_calls(256) == count_function_calls(8)


def test_free_slots_have_no_parts() -> None:
    splits = kv_splits_of(np.zeros((3, 9), np.int32), np.zeros(3, np.int32), group=4)
    assert not splits.counts.any() and not splits.num_parts.any() and (splits.rows == -1).all()


def _split_list(splits) -> list[tuple[int, int, int, np.ndarray]]:
    """Return the part, first page, end position and rows of each split of the first device."""
    return [
        (splits.part[split], splits.first[split], splits.end[split], splits.rows[split])
        for split in range(splits.counts[0])
    ]
