"""Block tables of sequences with a common prompt, in whichever data-parallel ranks they decode. Host
bookkeeping without devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from skyrl_tx_server.errors import CapacityError
from skyrl_tx_server.model.shapes import PAGE_SIZE
from skyrl_tx_server.sampling.prefix_cache import Prefix, PrefixCache

type PageCopy = tuple[int, int]
"""(source page, destination page)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTables:
    """Allocated pages, one table per sequence. Only the first sequence is computed; the others share or copy
    its pages."""

    tables: Sequence[Sequence[int]]
    copies_before: Sequence[PageCopy]  # made before the first sequence is computed: from the cached prefix
    copies_after: Sequence[PageCopy]  # made after it: from the first sequence's pages to the others'


def allocate_block_tables(
    caches: Sequence[PrefixCache],
    num_tokens: int,
    *,
    prefix: Prefix,
    prefix_cache: PrefixCache,
    spare_pages: Mapping[PrefixCache, int],
    text_length: int,
) -> BlockTables:
    """Allocate pages for `num_tokens` tokens of each sequence. `caches` has the cache of each sequence's
    data-parallel rank.

    The pages of `prefix` belong to `prefix_cache` and are shared by the sequences of that rank. Full pages
    are shared within a rank, so only a partly filled last page is allocated per sequence. `spare_pages` must
    remain available in each rank.

    Raises CapacityError, which names the length of the whole text, if there are too few pages. Nothing is
    allocated then.
    """
    num_full, num_pages = num_tokens // PAGE_SIZE, -(-num_tokens // PAGE_SIZE)
    # by rank, the pages that its next sequence can share
    shared = {prefix_cache: prefix.pages[: prefix.length // PAGE_SIZE]}
    prefix_cache.incref(prefix.pages)  # protects them from eviction by the allocations below
    allocated: dict[PrefixCache, Sequence[int]] = {}
    for cache, num_sequences in Counter(caches).items():
        needed = num_pages - len(shared.get(cache, ())) + (num_sequences - 1) * (num_pages - num_full)
        pages = cache.allocate(needed + spare_pages.get(cache, 0))
        if pages is None:
            prefix_cache.free(prefix.pages)
            for other, other_pages in allocated.items():
                other.free(other_pages)
            raise CapacityError(
                f"no KV pages for {text_length} tokens, {cache.num_free * PAGE_SIZE} tokens are free; start "
                "the server with a larger cache_tokens"
            )
        allocated[cache] = pages[:needed]
        cache.free(pages[needed:])
    tables: list[Sequence[int]] = []
    copies: list[list[PageCopy]] = []
    source, unused = prefix.pages, {cache: iter(pages) for cache, pages in allocated.items()}
    for cache in caches:
        beginning = shared.get(cache, ())
        cache.incref(beginning)
        rest = list(islice(unused[cache], num_pages - len(beginning)))
        tables.append([*beginning, *rest])
        copies.append(list(zip(source[len(beginning) :], rest, strict=False)))  # prefix may have fewer pages
        shared[cache], source = tables[-1][:num_full], tables[0]
    prefix_cache.free(prefix.pages)
    return BlockTables(
        tables=tables, copies_before=copies[0], copies_after=list(chain.from_iterable(copies[1:]))
    )
