import numpy as np
import pytest

from skyrl_tx_server.errors import CapacityError
from skyrl_tx_server.model.shapes import PAGE_SIZE
from skyrl_tx_server.sampling.block_tables import allocate_block_tables
from skyrl_tx_server.sampling.prefix_cache import Prefix, PrefixCache

NO_PREFIX = Prefix()


def cache_text(cache: PrefixCache, text: np.ndarray) -> None:
    """Cache the tokens `text` in free pages, as the server does when a sequence ends."""
    pages = cache.allocate(-(-len(text) // PAGE_SIZE))
    assert pages is not None
    cache.insert("w", text, pages)
    cache.free(pages)


def test_sequences_of_one_rank_share_full_pages() -> None:
    rank_0 = PrefixCache(first=0, count=10)
    tables = allocate_block_tables(
        [rank_0] * 3,
        2 * PAGE_SIZE + 1,
        prefix=NO_PREFIX,
        prefix_cache=rank_0,
        spare_pages={},
        text_length=2 * PAGE_SIZE + 1,
    )
    assert tables.tables == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert (tables.copies_before, tables.copies_after) == ([], [(3, 4), (3, 5)])
    assert rank_0.references == {1: 3, 2: 3, 3: 1, 4: 1, 5: 1}


def test_full_prefix_pages_are_shared_and_the_last_is_copied() -> None:
    rank_0, text = PrefixCache(first=0, count=10), np.arange(2 * PAGE_SIZE, dtype=np.int32)
    cache_text(rank_0, text[: PAGE_SIZE + 9])
    cached_prefix = rank_0.find("w", text)
    tables = allocate_block_tables(
        [rank_0] * 2,
        2 * PAGE_SIZE,
        prefix=cached_prefix,
        prefix_cache=rank_0,
        spare_pages={},
        text_length=2 * PAGE_SIZE,
    )
    assert tables.tables == [[1, 3], [1, 3]] and (tables.copies_before, tables.copies_after) == ([(2, 3)], [])
    assert rank_0.references == {1: 3, 2: 1, 3: 2}


def test_a_sequence_in_another_rank_gets_copies_of_all_pages() -> None:
    rank_0, rank_1 = PrefixCache(first=0, count=10), PrefixCache(first=10, count=10)
    cached_prefix = Prefix(pages=rank_0.allocate(1) or (), length=PAGE_SIZE)
    tables = allocate_block_tables(
        [rank_0, rank_1, rank_1],
        PAGE_SIZE + 1,
        prefix=cached_prefix,
        prefix_cache=rank_0,
        spare_pages={},
        text_length=PAGE_SIZE + 1,
    )
    assert tables.tables == [[1, 2], [11, 12], [11, 13]]
    assert (tables.copies_before, tables.copies_after) == ([], [(1, 11), (2, 12), (2, 13)])
    remote_tables = allocate_block_tables(
        [rank_1],
        PAGE_SIZE + 1,
        prefix=cached_prefix,
        prefix_cache=rank_0,
        spare_pages={},
        text_length=PAGE_SIZE + 1,
    )
    assert remote_tables.tables == [[14, 15]] and remote_tables.copies_before == [(1, 14)]


@pytest.mark.parametrize(("length", "spare"), [(4 * PAGE_SIZE, 0), (3 * PAGE_SIZE, 1)])
def test_too_few_pages_or_spare_pages_allocate_nothing(length: int, spare: int) -> None:
    rank_0, rank_1 = PrefixCache(first=0, count=20), PrefixCache(first=20, count=4)
    text = np.arange(PAGE_SIZE, dtype=np.int32)
    cache_text(rank_0, text)
    cached_prefix = rank_0.find("w", text)
    needed = f"pages for {length} tokens and spare pages for {spare * PAGE_SIZE} tokens are needed"
    message = f"no KV pages for a text of 999 tokens: {needed}, pages for 192 tokens are free"
    with pytest.raises(CapacityError, match=message):
        allocate_block_tables(
            [rank_0, rank_1],
            length,
            prefix=cached_prefix,
            prefix_cache=rank_0,
            spare_pages={rank_1: spare},
            text_length=999,
        )
    assert (rank_0.num_free, rank_1.num_free, rank_0.references, rank_1.references) == (18, 3, {1: 1}, {})


def test_an_allocation_does_not_evict_its_own_prefix() -> None:
    rank_0, text = PrefixCache(first=0, count=3), np.arange(PAGE_SIZE, dtype=np.int32)
    cache_text(rank_0, text)
    with pytest.raises(CapacityError, match="pages for 64 tokens are free"):
        allocate_block_tables(
            [rank_0],
            2 * PAGE_SIZE,
            prefix=rank_0.find("w", text),
            prefix_cache=rank_0,
            spare_pages={rank_0: 1},
            text_length=2 * PAGE_SIZE,
        )
    assert rank_0.find("w", text).length == PAGE_SIZE


def test_spare_pages_stay_free() -> None:
    rank_0 = PrefixCache(first=0, count=5)
    allocate_block_tables(
        [rank_0],
        2 * PAGE_SIZE,
        prefix=NO_PREFIX,
        prefix_cache=rank_0,
        spare_pages={rank_0: 2},
        text_length=2 * PAGE_SIZE,
    )
    assert rank_0.num_free == 2
