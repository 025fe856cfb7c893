"""Pages of a prefix cache: allocation, reference counts, lookup and eviction."""

import sys
from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_tx_server.model.shapes import PAGE_SIZE
from skyrl_tx_server.sampling.prefix_cache import PrefixCache


def text(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 4, length).astype(np.int32)


def cache_tokens(pages: PrefixCache, tokens: np.ndarray) -> list[int]:
    """Cache `tokens` as the server does when a sequence ends. Return the ids of the sequence's pages."""
    page_ids = pages.allocate(-(-len(tokens) // PAGE_SIZE))
    assert page_ids is not None
    pages.insert("w", tokens, page_ids)
    pages.free(page_ids)
    return page_ids


def test_find_returns_the_longest_prefix_of_the_same_weights():
    pages = PrefixCache(first=0, count=20)
    first = text(3 * PAGE_SIZE + 10)
    page_ids = cache_tokens(pages, first)
    second = np.concatenate([first[: PAGE_SIZE + 5], 3 - first[PAGE_SIZE + 5 : 2 * PAGE_SIZE]])
    branch = cache_tokens(pages, second)
    assert pages.find("w", first).length == len(first) and list(pages.find("w", first).pages) == page_ids
    assert pages.find("w", first[: PAGE_SIZE + 3]).length == PAGE_SIZE + 3
    # The cache keeps the first page of the first sequence and no second copy.
    assert list(pages.find("w", np.concatenate([second, text(99)])).pages[:2]) == [
        page_ids[0],
        branch[1],
    ]
    assert pages.find("w", 3 - first).length == 0 == len(pages.find("w", 3 - first).pages)
    assert pages.find("v", first).length == 0


def test_a_page_that_fills_up_is_cached_once():
    pages = PrefixCache(first=0, count=10)
    whole = text(2 * PAGE_SIZE)
    page_ids = pages.allocate(2)
    assert page_ids is not None
    for length in (5, 20, PAGE_SIZE, PAGE_SIZE + 7, 2 * PAGE_SIZE):
        pages.insert("w", whole[:length], page_ids)
    assert pages.num_cached == 2
    pages.insert("w", whole[:10], page_ids)  # the tokens are cached already, so no page is added
    assert pages.num_cached == 2 and pages.find("w", whole).length == 2 * PAGE_SIZE


def test_a_page_that_filled_up_and_was_evicted_is_not_found():
    pages = PrefixCache(first=0, count=3)
    whole = text(PAGE_SIZE)
    page_ids = pages.allocate(1)
    assert page_ids is not None
    for length in (5, PAGE_SIZE):
        pages.insert("w", whole[:length], page_ids)
    pages.free(page_ids)
    assert pages.allocate(2) is not None and pages.num_cached == 0
    assert pages.find("w", whole).length == 0


def test_the_least_recently_used_free_page_is_evicted():
    pages = PrefixCache(first=0, count=7)
    old, new = text(2 * PAGE_SIZE, seed=1), text(2 * PAGE_SIZE, seed=2)
    cache_tokens(pages, old)
    cache_tokens(pages, new)
    pages.find("w", old)
    held = pages.allocate(4)  # two pages have never been used, so two pages are evicted
    assert (
        held is not None and pages.find("w", old).length == 2 * PAGE_SIZE and pages.find("w", new).length == 0
    )
    kept = pages.find("w", old)
    pages.incref(kept.pages)
    assert pages.allocate(1) is None and pages.find("w", old).length == 2 * PAGE_SIZE
    pages.free(kept.pages)
    # Of the two pages of `old`, the last one is evicted first.
    assert pages.allocate(1) is not None and pages.find("w", old).length == PAGE_SIZE


def test_inserting_cached_tokens_counts_as_use() -> None:
    pages = PrefixCache(first=0, count=6)
    old, new = text(PAGE_SIZE, seed=1), text(PAGE_SIZE, seed=2)
    for tokens in (old, new, old):
        cache_tokens(pages, tokens)
    assert pages.allocate(4) is not None
    assert pages.find("w", old).length == PAGE_SIZE and pages.find("w", new).length == 0


def test_the_parent_of_a_held_page_is_not_evicted() -> None:
    """The cache contains the first page of the text. A sequence holds two pages with the whole text, so it
    has its own copy of the first page. The parent of its second page in the cache is the cached first page.
    """
    pages = PrefixCache(first=0, count=4)
    whole = text(2 * PAGE_SIZE)
    cache_tokens(pages, whole[:PAGE_SIZE])
    held = pages.allocate(2)
    assert held is not None
    pages.insert("w", whole, held)
    assert pages.allocate(1) is None and pages.find("w", whole).length == 2 * PAGE_SIZE
    pages.free(held)
    assert pages.allocate(3) is not None and pages.num_cached == 0


def test_find_returns_the_branch_with_the_longest_match() -> None:
    pages = PrefixCache(first=0, count=50)
    prefix, ends = text(PAGE_SIZE + 10, seed=1), np.eye(40, dtype=np.int32)
    branches = [np.concatenate([prefix, end]) for end in ends]
    for tokens in branches:
        cache_tokens(pages, tokens)
    for number, tokens in enumerate(branches):
        diverging = np.concatenate([prefix, ends[number][: number + 1], [7, 7]]).astype(np.int32)
        assert pages.find("w", tokens).length == len(tokens)
        assert pages.find("w", diverging).length == len(prefix) + number + 1


def count_calls(run: Callable[[], object]) -> int:
    """Return the number of function calls of `run`."""
    count = 0

    def count_call(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(count_call)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_a_lookup_costs_the_same_for_any_number_of_branches() -> None:
    def lookup(num_branches: int) -> int:
        pages, prefix = PrefixCache(first=0, count=num_branches + 9), text(PAGE_SIZE + 10)
        for branch in range(num_branches):
            cache_tokens(pages, np.append(prefix, branch).astype(np.int32))
        tokens = np.append(prefix, 5).astype(np.int32)
        return count_calls(lambda: pages.find("w", tokens))

    assert lookup(10_000) == lookup(10)


def test_eviction_costs_the_same_for_any_number_of_held_pages() -> None:
    def evict(num_held: int) -> int:
        pages = PrefixCache(first=0, count=num_held + 2)
        for number in range(num_held):
            tokens = np.full(PAGE_SIZE, number, np.int32)
            held = pages.allocate(1)
            assert held is not None
            pages.insert("w", tokens, held)
        cache_tokens(pages, np.full(PAGE_SIZE, -1, np.int32))
        assert pages.num_free == 0
        return count_calls(lambda: pages.allocate(1))

    assert evict(5000) == evict(10)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_operations_lose_no_page(data: st.DataObject):
    """Sequences begin, share pages and end. The pages of a cached prefix always contain its tokens."""
    pages = PrefixCache(first=3, count=12)
    running: list[tuple[np.ndarray, list[int]]] = []
    contents: dict[int, bytes] = {}  # the tokens that the device would hold, by page
    for _ in range(data.draw(st.integers(1, 40))):
        if running and data.draw(st.booleans()):
            tokens, page_ids = running.pop(data.draw(st.integers(0, len(running) - 1)))
            pages.insert("w", tokens, page_ids)
            pages.free(page_ids)
            continue
        tokens = text(data.draw(st.integers(1, 3 * PAGE_SIZE)), seed=data.draw(st.integers(0, 3)))
        cached_prefix = pages.find("w", tokens)
        for index, page in enumerate(cached_prefix.pages):
            chunk = tokens[index * PAGE_SIZE : min((index + 1) * PAGE_SIZE, cached_prefix.length)].tobytes()
            assert contents[page].startswith(chunk)
        whole = cached_prefix.length // PAGE_SIZE
        shared = list(cached_prefix.pages[:whole])
        pages.incref(shared)
        new = pages.allocate(-(-len(tokens) // PAGE_SIZE) - whole)
        if new is None:
            pages.free(shared)
            continue
        page_ids = [*shared, *new]
        contents |= {
            page: tokens[number * PAGE_SIZE : (number + 1) * PAGE_SIZE].tobytes()
            for number, page in enumerate(new, start=whole)
        }
        running.append((tokens, page_ids))
        held = {page for _, page_ids in running for page in page_ids}
        assert pages.null_page not in held and held <= set(range(4, 15))
    for _, page_ids in running:
        pages.free(page_ids)
    assert pages.num_free + pages.num_cached == 11
    assert pages.allocate(11) is not None
