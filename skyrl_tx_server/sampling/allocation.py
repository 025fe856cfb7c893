"""KV pages of all data-parallel ranks. The decode slots of a rank use its pages only."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from skyrl_tx_server.model.shapes import PAGE_SIZE, blocks_of
from skyrl_tx_server.sampling.model_runner import CacheSize
from skyrl_tx_server.sampling.prefill_batch import PrefillChunk
from skyrl_tx_server.sampling.prefix_cache import Prefix, PrefixCache
from skyrl_tx_server.sampling.sequences import SequenceState


class PageAllocator:
    """Allocates the pages of sequences and chunks; `caches` has one prefix cache per data-parallel rank."""

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
        """The tokens that fit into a quarter of one rank's pages. Prompts of which only some chunks are
        computed may have at most this many tokens in total."""
        return (self.size.pages - 1) * PAGE_SIZE // 4

    def stats(self) -> dict[str, object]:
        return {
            "cache_pages": (self.size.pages - 1) * len(self.caches),
            "cache_pages_free": sum(cache.num_free for cache in self.caches),
            "cache_pages_cached": sum(cache.num_cached for cache in self.caches),
        }

    def cache_of(self, slot: int) -> PrefixCache:
        """The prefix cache of the rank to which `slot` belongs."""
        return self.caches[slot // self.size.slots]

    def find_prefix(
        self,
        weights: Hashable,
        tokens: np.ndarray,
        *,
        limit: int,
        free_slots: Mapping[PrefixCache, Sequence[int]],
    ) -> tuple[Prefix, PrefixCache]:
        """Return the cached prefix of `tokens`, of at most `limit` tokens, and the rank that has it.

        It is the rank with the fewest tiles left to compute and, among equal ones, with the most free slots.
        The prefix is empty if it does not save a whole tile.
        """
        prefixes = {cache: cache.find(weights, tokens[:limit]) for cache in self.caches}
        tiles_left = {cache: blocks_of(len(tokens) - prefix.length) for cache, prefix in prefixes.items()}
        best = min(self.caches, key=lambda cache: (tiles_left[cache], -len(free_slots[cache])))
        return prefixes[best] if tiles_left[best] < blocks_of(len(tokens)) else Prefix(), best

    def extend(self, sequence: SequenceState, cache: PrefixCache, num_tokens: int) -> bool:
        """Allocate the pages that `sequence` needs for its next `num_tokens` tokens. False: there are not
        enough, and none is allocated."""
        missing = -(-(sequence.position + num_tokens) // PAGE_SIZE) - len(sequence.block_table)
        if missing <= 0:
            return True
        pages = cache.allocate(missing)
        sequence.block_table += pages or ()
        return pages is not None

    def free(self, sequence: SequenceState, cache: PrefixCache, *, weights: Hashable) -> None:
        """Free the pages of `sequence`, which stay cached for others with the same `weights`."""
        cache.insert(weights, sequence.cached_tokens, sequence.block_table)
        self.discard(sequence, cache)

    def discard(self, sequence: SequenceState, cache: PrefixCache) -> None:
        """Free the pages of `sequence`, whose contents may be invalid."""
        cache.free(sequence.block_table)
        sequence.block_table = []

    def insert_chunk(self, chunk: PrefillChunk, *, weights: Hashable) -> None:
        """Cache the pages of a computed chunk, once in each rank that has a copy."""
        tables = {self.cache_of(slot): table for slot, table in zip(chunk.slots, chunk.tables, strict=True)}
        for cache, table in tables.items():
            cache.insert(weights, chunk.tokens[: chunk.length], table)

    def free_chunk(self, chunk: PrefillChunk) -> None:
        """Free the pages of a chunk whose sequences do not begin."""
        for slot, table in zip(chunk.slots, chunk.tables, strict=True):
            self.cache_of(slot).free(table)
