"""Allocation of KV pages in all data-parallel ranks. A decode slot uses only pages of its rank."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from skyrl_tx_server.model.shapes import PAGE_SIZE, num_tiles
from skyrl_tx_server.sampling.model_runner import CacheSize
from skyrl_tx_server.sampling.prefill_batch import PrefillChunk
from skyrl_tx_server.sampling.prefix_cache import Prefix, PrefixCache
from skyrl_tx_server.sampling.sequences import SequenceState


class PageAllocator:
    """Allocates the pages of sequences and prefill chunks. `caches` has one prefix cache per data-parallel
    rank. The argument `weights` of the methods is a key from `AdapterCache.key`."""

    def __init__(self, size: CacheSize, dp_ranks: int) -> None:
        self.size = size
        self.num_slots = size.slots * dp_ranks
        self._dp_ranks = dp_ranks
        self.reset()

    def reset(self) -> None:
        """Free all pages and forget their contents."""
        count = self.size.pages
        self.caches = [PrefixCache(first=rank * count, count=count) for rank in range(self._dp_ranks)]

    @property
    def max_partial_prefill_tokens(self) -> int:
        """The maximum total number of tokens of all partly computed prompts: as many as fit into a quarter of
        one rank's pages. A single partly computed prompt may be longer."""
        return (self.size.pages - 1) * PAGE_SIZE // 4

    def stats(self) -> dict[str, object]:
        return {
            "cache_pages": (self.size.pages - 1) * len(self.caches),
            "cache_pages_free": sum(cache.num_free for cache in self.caches),
            "cache_pages_cached": sum(cache.num_cached for cache in self.caches),
        }

    def cache_of(self, slot: int) -> PrefixCache:
        """Return the prefix cache of the rank to which `slot` belongs."""
        return self.caches[slot // self.size.slots]

    def find_prefix(
        self,
        weights: Hashable,
        tokens: np.ndarray,
        *,
        limit: int,
        free_slots: Mapping[PrefixCache, Sequence[int]],
    ) -> tuple[Prefix, PrefixCache]:
        """Choose a rank. Return its longest cached prefix of `tokens[:limit]`, and its cache.

        The rank with the fewest prefill tiles left to compute is chosen. Among equal ranks, the rank with the
        most free slots is chosen. The prefix is empty if it does not reduce the number of tiles.
        """
        prefixes = {cache: cache.find(weights, tokens[:limit]) for cache in self.caches}
        tiles_left = {cache: num_tiles(len(tokens) - prefix.length) for cache, prefix in prefixes.items()}
        best = min(self.caches, key=lambda cache: (tiles_left[cache], -len(free_slots[cache])))
        return prefixes[best] if tiles_left[best] < num_tiles(len(tokens)) else Prefix(), best

    def extend(self, sequence: SequenceState, cache: PrefixCache, num_tokens: int) -> bool:
        """Allocate the pages that `sequence` needs for its next `num_tokens` tokens. Return False, without
        allocating any page, if too few are available."""
        missing = -(-(sequence.position + num_tokens) // PAGE_SIZE) - len(sequence.block_table)
        if missing <= 0:
            return True
        pages = cache.allocate(missing)
        sequence.block_table += pages or ()
        return pages is not None

    def free(self, sequence: SequenceState, cache: PrefixCache, *, weights: Hashable) -> None:
        """Free the pages of `sequence` and keep their contents in the prefix cache, where other sequences
        with the same `weights` can reuse them."""
        cache.insert(weights, sequence.cached_tokens, sequence.block_table)
        self.discard(sequence, cache)

    def discard(self, sequence: SequenceState, cache: PrefixCache) -> None:
        """Free the pages of `sequence` without adding them to the prefix cache."""
        cache.free(sequence.block_table)
        sequence.block_table = []

    def insert_chunk(self, chunk: PrefillChunk, *, weights: Hashable) -> None:
        """Add the pages of a computed chunk to the prefix cache of each rank that has a copy of them."""
        tables = {self.cache_of(slot): table for slot, table in zip(chunk.slots, chunk.tables, strict=True)}
        for cache, table in tables.items():
            cache.insert(weights, chunk.tokens[: chunk.length], table)

    def free_chunk(self, chunk: PrefillChunk) -> None:
        """Free the pages of a chunk that starts no sequence, because it is not the last chunk of its text or
        because planning or prefill failed."""
        for slot, table in zip(chunk.slots, chunk.tables, strict=True):
            self.cache_of(slot).free(table)
