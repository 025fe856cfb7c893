"""Block tables of sequences that have a common prompt and may decode in different data-parallel ranks. This
module uses no devices."""

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
    """Allocated pages, one table per sequence. Only the pages of the first sequence are computed. The other
    sequences share or copy these pages."""

    tables: Sequence[Sequence[int]]
    # Copies of pages of the cached prefix to pages of the first sequence, before this sequence is computed.
    copies_before: Sequence[PageCopy]
    # Copies of pages of the first sequence to pages of the other sequences, after the first is computed.
    copies_after: Sequence[PageCopy]


def allocate_block_tables(
    caches: Sequence[PrefixCache],
    num_tokens: int,
    *,
    prefix: Prefix,
    prefix_cache: PrefixCache,
    spare_pages: Mapping[PrefixCache, int],
    text_length: int,
) -> BlockTables:
    """Allocate pages for `num_tokens` tokens of each sequence. `caches` are the prefix caches of the
    sequences' data-parallel ranks, one per sequence.

    The pages of `prefix` belong to `prefix_cache`. The sequences of the rank of `prefix_cache` share the full
    pages of `prefix`. Each other rank gets copies of these pages. Sequences of the same rank share all full
    pages of their tables. If the last page is partly filled, each sequence has its own last page. After the
    allocation, `spare_pages[cache]` pages must still be available in the rank of each cache in `caches`.

    Raises CapacityError, without allocating any page, if too few pages are available. The error message names
    `text_length`, the length of the whole text, because `num_tokens` may cover only the text up to the end of
    a prefill chunk.
    """
    num_full, num_pages = num_tokens // PAGE_SIZE, -(-num_tokens // PAGE_SIZE)
    # by rank: the pages that the next sequence of the rank can share
    shared = {prefix_cache: prefix.pages[: prefix.length // PAGE_SIZE]}
    prefix_cache.incref(prefix.pages)  # so that the allocations below cannot evict these pages
    allocated: dict[PrefixCache, Sequence[int]] = {}
    for cache, num_sequences in Counter(caches).items():
        needed = num_pages - len(shared.get(cache, ())) + (num_sequences - 1) * (num_pages - num_full)
        spare = spare_pages.get(cache, 0)
        pages = cache.allocate(needed + spare)
        if pages is None:
            prefix_cache.free(prefix.pages)
            for earlier_cache, earlier_pages in allocated.items():
                earlier_cache.free(earlier_pages)
            raise CapacityError(
                f"no KV pages for a text of {text_length} tokens: pages for {needed * PAGE_SIZE} tokens and "
                f"spare pages for {spare * PAGE_SIZE} tokens are needed, pages for "
                f"{cache.num_free * PAGE_SIZE} tokens are free; start the server with a larger cache_tokens"
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
        # strict=False: `source` may have fewer pages, because a prefix can cover fewer than `num_tokens`
        # tokens.
        copies.append(list(zip(source[len(beginning) :], rest, strict=False)))
        shared[cache], source = tables[-1][:num_full], tables[0]
    prefix_cache.free(prefix.pages)
    return BlockTables(
        tables=tables, copies_before=copies[0], copies_after=list(chain.from_iterable(copies[1:]))
    )
