import numpy as np
import pytest

from skyrl_tx_server.errors import CapacityError
from skyrl_tx_server.model.shapes import PAGE
from skyrl_tx_server.sampling.block_tables import take_tables
from skyrl_tx_server.sampling.prefix_cache import Prefix, PrefixCache

NOTHING = Prefix()


def users(pages: PrefixCache) -> dict[int, int]:
    return dict(pages._users)


def remembered(pages: PrefixCache, text: np.ndarray) -> None:
    """A row has computed `text`, from the first free page on, and is gone."""
    taken = pages.take(-(-len(text) // PAGE))
    assert taken is not None
    pages.remember("w", text, taken)
    pages.give_back(taken)


def test_rows_in_one_place_share_the_pages_that_are_full() -> None:
    home = PrefixCache(first=0, count=10)
    tables = take_tables(
        [home] * 3, 2 * PAGE + 1, found=NOTHING, home=home, spare={}, text_length=2 * PAGE + 1
    )
    assert tables.of_rows == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert (tables.before, tables.after) == ([], [(3, 4), (3, 5)])
    assert users(home) == {1: 3, 2: 3, 3: 1, 4: 1, 5: 1}


def test_what_was_found_is_shared_as_far_as_it_is_full_and_else_copied() -> None:
    home, text = PrefixCache(first=0, count=10), np.arange(2 * PAGE, dtype=np.int32)
    remembered(home, text[: PAGE + 9])
    found = home.find("w", text)
    tables = take_tables([home] * 2, 2 * PAGE, found=found, home=home, spare={}, text_length=2 * PAGE)
    assert tables.of_rows == [[1, 3], [1, 3]] and (tables.before, tables.after) == ([(2, 3)], [])
    assert users(home) == {1: 3, 2: 1, 3: 2}, "the tree has the first two"


def test_a_row_elsewhere_gets_copies_of_all() -> None:
    home, other = PrefixCache(first=0, count=10), PrefixCache(first=10, count=10)
    found = Prefix(pages=home.take(1) or (), length=PAGE)
    tables = take_tables(
        [home, other, other], PAGE + 1, found=found, home=home, spare={}, text_length=PAGE + 1
    )
    assert tables.of_rows == [[1, 2], [11, 12], [11, 13]]
    assert (tables.before, tables.after) == ([], [(1, 11), (2, 12), (2, 13)])
    away = take_tables([other], PAGE + 1, found=found, home=home, spare={}, text_length=PAGE + 1)
    assert away.of_rows == [[14, 15]] and away.before == [(1, 14)]


@pytest.mark.parametrize(("length", "spare"), [(4 * PAGE, 0), (3 * PAGE, 1)])
def test_nothing_is_taken_where_there_are_too_few_or_none_would_be_left(length: int, spare: int) -> None:
    home, other = PrefixCache(first=0, count=20), PrefixCache(first=20, count=4)
    text = np.arange(PAGE, dtype=np.int32)
    remembered(home, text)
    found = home.find("w", text)
    with pytest.raises(CapacityError, match="keys and values of 999 tokens, 192 are free"):
        take_tables([home, other], length, found=found, home=home, spare={other: spare}, text_length=999)
    assert (home.num_free, other.num_free, users(home), users(other)) == (18, 3, {1: 1}, {})


def test_what_was_found_is_not_given_up_for_what_goes_on_from_it() -> None:
    home, text = PrefixCache(first=0, count=3), np.arange(PAGE, dtype=np.int32)
    remembered(home, text)
    with pytest.raises(CapacityError, match="64 are free"):
        take_tables(
            [home], 2 * PAGE, found=home.find("w", text), home=home, spare={home: 1}, text_length=2 * PAGE
        )
    assert home.find("w", text).length == PAGE


def test_what_is_spared_stays_free() -> None:
    home = PrefixCache(first=0, count=5)
    take_tables([home], 2 * PAGE, found=NOTHING, home=home, spare={home: 2}, text_length=2 * PAGE)
    assert home.num_free == 2
