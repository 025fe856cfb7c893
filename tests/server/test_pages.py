"""The pages of the key-value cache: who has them, what is remembered, what gives way."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_tx_server.model.shapes import PAGE
from skyrl_tx_server.sampling.prefix_cache import PrefixCache


def text(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 4, length).astype(np.int32)


def computed(pages: PrefixCache, tokens: np.ndarray, weights: str = "w") -> list[int]:
    """A row that computed `tokens` and has left."""
    own = pages.take(-(-len(tokens) // PAGE))
    assert own is not None
    pages.remember(weights, tokens, own)
    pages.give_back(own)
    return own


def test_a_prompt_finds_the_longest_beginning_under_its_own_weights():
    pages = PrefixCache(first=0, count=20)
    first = text(3 * PAGE + 10)
    own = computed(pages, first)
    other = np.concatenate([first[: PAGE + 5], 3 - first[PAGE + 5 : 2 * PAGE]])
    branch = computed(pages, other)
    assert pages.find("w", first).length == len(first) and list(pages.find("w", first).pages) == own
    assert pages.find("w", first[: PAGE + 3]).length == PAGE + 3
    assert list(pages.find("w", np.concatenate([other, text(99)])).pages[:2]) == [
        own[0],
        branch[1],
    ]  # its first page was there already
    assert pages.find("w", 3 - first).length == 0 == len(pages.find("w", 3 - first).pages)
    assert pages.find("v", first).length == 0


def test_a_page_that_fills_up_is_remembered_once():
    pages = PrefixCache(first=0, count=10)
    whole = text(2 * PAGE)
    own = pages.take(2)
    assert own is not None
    for length in (5, 20, PAGE, PAGE + 7, 2 * PAGE):
        pages.remember("w", whole[:length], own)
    assert pages.num_remembered == 2
    pages.remember("w", whole[:10], own)  # less of the same is nothing new
    assert pages.num_remembered == 2 and pages.find("w", whole).length == 2 * PAGE


def test_a_page_that_filled_up_and_was_forgotten_is_found_no_more():
    pages = PrefixCache(first=0, count=3)
    whole = text(PAGE)
    own = pages.take(1)
    assert own is not None
    for length in (5, PAGE):
        pages.remember("w", whole[:length], own)
    pages.give_back(own)
    assert pages.take(2) is not None and pages.num_remembered == 0
    assert pages.find("w", whole).length == 0


def test_what_was_unused_longest_gives_way_and_never_what_a_row_has():
    pages = PrefixCache(first=0, count=7)
    old, new = text(2 * PAGE, seed=1), text(2 * PAGE, seed=2)
    computed(pages, old)
    computed(pages, new)
    pages.find("w", old)
    row = pages.take(4)  # two are free
    assert row is not None and pages.find("w", old).length == 2 * PAGE and pages.find("w", new).length == 0
    kept = pages.find("w", old)
    pages.share(kept.pages)
    assert pages.take(1) is None and pages.find("w", old).length == 2 * PAGE
    pages.give_back(kept.pages)
    assert pages.take(1) is not None and pages.find("w", old).length == PAGE  # the end of it first


def test_what_was_computed_again_has_been_used() -> None:
    pages = PrefixCache(first=0, count=6)
    old, new = text(PAGE, seed=1), text(PAGE, seed=2)
    for tokens in (old, new, old):
        computed(pages, tokens)
    assert pages.take(4) is not None
    assert pages.find("w", old).length == PAGE and pages.find("w", new).length == 0


def test_what_a_row_goes_on_from_is_kept_though_it_has_a_copy_of_its_own() -> None:
    """Its first page was computed twice, and is remembered where it lay before; its second hangs on that."""
    pages = PrefixCache(first=0, count=4)
    whole = text(2 * PAGE)
    computed(pages, whole[:PAGE])
    row = pages.take(2)
    assert row is not None
    pages.remember("w", whole, row)
    assert pages.take(1) is None and pages.find("w", whole).length == 2 * PAGE
    pages.give_back(row)
    assert pages.take(3) is not None and pages.num_remembered == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_page_is_free_or_has_an_owner_whatever_happens(data: st.DataObject):
    """Rows come, grow, share and leave; what is found is always what was remembered there."""
    pages = PrefixCache(first=3, count=12)
    rows: list[tuple[np.ndarray, list[int]]] = []
    contents: dict[int, bytes] = {}  # what the device would hold
    for _ in range(data.draw(st.integers(1, 40))):
        if rows and data.draw(st.booleans()):
            tokens, own = rows.pop(data.draw(st.integers(0, len(rows) - 1)))
            pages.remember("w", tokens, own)
            pages.give_back(own)
            continue
        tokens = text(data.draw(st.integers(1, 3 * PAGE)), seed=data.draw(st.integers(0, 3)))
        found = pages.find("w", tokens)
        for index, page in enumerate(found.pages):
            chunk = tokens[index * PAGE : min((index + 1) * PAGE, found.length)].tobytes()
            assert contents[page].startswith(chunk)
        whole = found.length // PAGE
        shared = list(found.pages[:whole])
        pages.share(shared)
        new = pages.take(-(-len(tokens) // PAGE) - whole)
        if new is None:
            pages.give_back(shared)
            continue
        own = [*shared, *new]
        contents |= {
            page: tokens[(whole + at) * PAGE : (whole + at + 1) * PAGE].tobytes()
            for at, page in enumerate(new)
        }
        rows.append((tokens, own))
        held = {page for _, own in rows for page in own}
        assert pages.nowhere not in held and held <= set(range(4, 15))
    for _, own in rows:
        pages.give_back(own)
    assert pages.num_free + pages.num_remembered == 11
    assert pages.take(11) is not None
