"""The sequences that have started. A sequence is preempted when KV pages run out. The scheduler pauses
sequences when no slot, KV page or LoRA slot is free for a waiting request.

Preempt: a sequence loses its KV pages, and its prefix is computed again when pages are free. A slot stays
reserved for it. The youngest sequence of the tenant with the most pages is preempted. A restored sequence
keeps its sampled tokens. Its next tokens use the random numbers that they would use without preemption.

Pause: a sequence loses its slot to another request and keeps its pages. It can be unpaused in any slot of its
data-parallel rank with bit-identical results. Paused sequences lose their pages before another sequence is
preempted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from skyrl_tx_server.sampling.adapter_cache import AdapterCache
from skyrl_tx_server.sampling.allocation import PageAllocator
from skyrl_tx_server.sampling.prefill_batch import PrefillChunk
from skyrl_tx_server.sampling.prefix_cache import PrefixCache
from skyrl_tx_server.sampling.sequences import SequenceKey, SequenceState

MAX_DISPATCHES_PREEMPTED = 32
"""A preempted sequence is restored before new or paused sequences of its tenant get slots. After this many
decode dispatches, it is restored before new or paused sequences of any tenant get slots."""


class SequencePool:
    """The sequences that are in decode slots, and those that are preempted or paused.

    A sequence that is in a slot or preempted pins its adapter in a LoRA slot. A paused sequence only retains
    its adapter (`AdapterCache.retain`), so the adapter can be evicted from its LoRA slot.
    """

    def __init__(self, adapters: AdapterCache, pages: PageAllocator) -> None:
        self._adapters = adapters
        self._pages = pages
        self.slots: list[SequenceState | None] = [None] * pages.num_slots
        self.preempted: list[SequenceState] = []  # oldest first
        self.paused: dict[SequenceKey, tuple[SequenceState, PrefixCache]] = {}  # longest pause first
        self._num_preemptions = self._num_pauses = 0

    @property
    def num_running(self) -> int:
        """The number of sequences with a slot, including preempted sequences, whose slots stay reserved."""
        return sum(sequence is not None for sequence in self.slots) + len(self.preempted)

    @property
    def decoding(self) -> list[tuple[int, SequenceState]]:
        """(slot, sequence) of all occupied slots."""
        return [(slot, sequence) for slot, sequence in enumerate(self.slots) if sequence is not None]

    def stats(self) -> dict[str, object]:
        return {
            "sequences_preempted": len(self.preempted),
            "num_preemptions": self._num_preemptions,
            "sequences_paused": len(self.paused),
            "num_pauses": self._num_pauses,
        }

    def of_request(self, request_id: int) -> list[SequenceState]:
        """Return all sequences of a request."""
        sequences = [
            *(sequence for _, sequence in self.decoding),
            *self.preempted,
            *(sequence for sequence, _ in self.paused.values()),
        ]
        return [sequence for sequence in sequences if sequence.request_id == request_id]

    def free_slots(self, planned: Sequence[PrefillChunk]) -> dict[PrefixCache, list[int]]:
        """Return the free slots of each data-parallel rank, without the slots in which sequences of `planned`
        chunks will start."""
        reserved = {slot for chunk in planned for slot in chunk.slots if chunk.is_last}
        free: dict[PrefixCache, list[int]] = {cache: [] for cache in self._pages.caches}
        for slot, sequence in enumerate(self.slots):
            if sequence is None and slot not in reserved:
                free[self._pages.cache_of(slot)].append(slot)
        return free

    def begin(self, chunk: PrefillChunk) -> None:
        """Put the sequences of a computed chunk into their slots."""
        for slot, sequence, table in zip(chunk.slots, chunk.sequences, chunk.tables, strict=True):
            sequence.block_table = list(table)
            self.slots[slot] = sequence

    def compact(self) -> None:
        """Move the sequences of each data-parallel rank to its first slots, so that a decode batch with fewer
        slots can hold them. No dispatch may be in flight."""
        per_rank = self._pages.size.slots
        for first in range(0, len(self.slots), per_rank):
            running = [sequence for sequence in self.slots[first : first + per_rank] if sequence is not None]
            self.slots[first : first + per_rank] = [*running, *[None] * (per_rank - len(running))]

    def finish(self, slot: int) -> None:
        """Remove a complete sequence and keep its pages in the prefix cache."""
        sequence = self._leave(slot)
        self._adapters.unpin(sequence.weights)

    def fail(self, slot: int) -> None:
        """Remove a sequence whose pages may be invalid."""
        sequence = self._remove(slot)
        self._pages.discard(sequence, self._pages.cache_of(slot))
        self._adapters.unpin(sequence.weights)

    def release(self, request_id: int) -> None:
        """Remove all sequences of a request."""
        for slot, sequence in self.decoding:
            if sequence.request_id == request_id:
                self.fail(slot)
        for sequence in [sequence for sequence in self.preempted if sequence.request_id == request_id]:
            self.preempted.remove(sequence)
            self._adapters.unpin(sequence.weights)
        for key in [key for key in self.paused if key[0] == request_id]:
            sequence, cache = self.paused.pop(key)
            self._pages.discard(sequence, cache)
            self._adapters.release(sequence.weights)

    def clear(self) -> None:
        """Remove all sequences after the KV cache was lost. Their pages are not freed, because the caller
        resets the page allocator."""
        for sequence in (*(sequence for _, sequence in self.decoding), *self.preempted):
            self._adapters.unpin(sequence.weights)
        for sequence, _ in self.paused.values():
            self._adapters.release(sequence.weights)
        self.slots[:] = [None] * len(self.slots)
        self.preempted, self.paused = [], {}

    # --- preemption ---

    def preempt(self, slot: int) -> None:
        """Remove the sequence from `slot`. Its pages stay in the prefix cache until they are evicted, and its
        adapter stays pinned."""
        sequence = self._leave(slot)
        sequence.dispatches_preempted = 0
        self.preempted = sorted((*self.preempted, sequence), key=lambda preempted: preempted.key)
        self._num_preemptions += 1

    def allocate_next(self, sequences: Sequence[tuple[int, SequenceState]], steps: int) -> bool:
        """Allocate pages for the next `steps` tokens of each sequence, the oldest first. Stop and return
        False at the first sequence for which there are too few pages."""
        ordered = sorted(sequences, key=lambda occupied: occupied[1].key)
        return all(self._allocate(slot, sequence, steps) for slot, sequence in ordered)

    def preempt_and_allocate(self, steps: int) -> None:
        """Allocate pages for the next `steps` tokens of every sequence in a slot, the oldest first. Preempt
        sequences if there are too few pages."""
        for slot, sequence in sorted(self.decoding, key=lambda occupied: occupied[1].key):
            while self.slots[slot] is sequence and not self._allocate(slot, sequence, steps):
                self.preempt(self._victim(self._pages.cache_of(slot)))

    def _victim(self, cache: PrefixCache) -> int:
        """Return the slot of the youngest sequence of the tenant with the most pages in `cache`."""
        candidates = [
            (slot, sequence) for slot, sequence in self.decoding if self._pages.cache_of(slot) is cache
        ]
        pages = Counter[str]()
        for _, sequence in candidates:
            pages[sequence.tenant] += len(sequence.block_table)
        return max(candidates, key=lambda occupied: (pages[occupied[1].tenant], *occupied[1].key))[0]

    def _allocate(self, slot: int, sequence: SequenceState, steps: int) -> bool:
        cache = self._pages.cache_of(slot)
        while not (allocated := self._pages.extend(sequence, cache, min(steps, sequence.remaining))):
            if not self.reclaim(cache):
                break
        return allocated

    # --- pausing ---

    def pause(self, keys: Collection[SequenceKey]) -> None:
        """Pause these sequences, which are in slots or preempted. Sequences in slots keep their pages."""
        for sequence in [sequence for sequence in self.preempted if sequence.key in keys]:
            self.preempted.remove(sequence)
            self._adapters.retain(sequence.weights)
            # The sequence has no pages, so the cache of any rank can be stored.
            self.paused[sequence.key] = sequence, self._pages.caches[0]
        for slot, sequence in self.decoding:
            if sequence.key in keys:
                self.pause_slot(slot)
        self._num_pauses += len(keys)

    def pause_slot(self, slot: int) -> None:
        """Remove the sequence from `slot`. It keeps its pages, but its adapter may be evicted."""
        sequence = self._remove(slot)
        self._adapters.retain(sequence.weights)
        self.paused[sequence.key] = sequence, self._pages.cache_of(slot)

    def unpause(self, key: SequenceKey, planned: Sequence[PrefillChunk]) -> int | None:
        """Put a paused sequence with its pages into a free slot of its rank and return the slot. None: the
        sequence is not paused, it has no pages, or its rank has no free slot. Raises CapacityError if no LoRA
        slot is free."""
        sequence, cache = self.paused.get(key, (None, None))
        if sequence is None or cache is None or not sequence.block_table:
            return None
        free = self.free_slots(planned)[cache]
        if not free:
            return None
        sequence.adapter_slot = self._adapters.pin(sequence.weights)
        self._adapters.release(sequence.weights)
        del self.paused[key]
        self.slots[free[0]] = sequence
        return free[0]

    def reclaim(self, cache: PrefixCache | None = None) -> bool:
        """Free the pages of the most recently paused sequence with pages in `cache` (None: in any rank).
        Return False if there is no such sequence."""
        for sequence, sequence_cache in reversed(self.paused.values()):
            if sequence.block_table and (cache is None or cache is sequence_cache):
                self._free(sequence, sequence_cache)
                return True
        return False

    def reclaim_paused(self, key: SequenceKey) -> None:
        """Free the pages of one paused sequence."""
        sequence, cache = self.paused[key]
        if sequence.block_table:
            self._free(sequence, cache)

    def _remove(self, slot: int) -> SequenceState:
        sequence = self.slots[slot]
        assert sequence is not None
        self.slots[slot] = None
        return sequence

    def _leave(self, slot: int) -> SequenceState:
        """Remove a sequence from its slot and keep its pages in the prefix cache."""
        sequence = self._remove(slot)
        self._free(sequence, self._pages.cache_of(slot))
        return sequence

    def _free(self, sequence: SequenceState, cache: PrefixCache) -> None:
        self._pages.free(sequence, cache, weights=self._adapters.key(sequence.weights))
