"""Plans the next prefill chunks, and allocates their slots and KV pages.

A prompt is computed in chunks, and the chunks of several requests are computed together. A chunk consists of
tiles of PREFILL_TILE tokens. It starts after the longest cached prefix of its text (the prompt and the tokens
sampled so far), unless the reuse of this prefix saves no tile. If prompt logprobs are requested, a chunk
reuses only cached tokens whose logprobs were computed in earlier chunks of the prompt.
If two prompts for the same weights have a common beginning that is not cached yet, and its reuse would save
tiles, they are not computed together: the second prompt waits, and then reuses the pages of the first.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from skyrl_tx_server.distributed.multihost import RankGroup
from skyrl_tx_server.engine.operations import CsrMatrix, TopkLogprobs
from skyrl_tx_server.engine.scheduled_work import PrefillRequest
from skyrl_tx_server.errors import CapacityError
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.shapes import PREFILL_TILE, common_length, num_tiles
from skyrl_tx_server.sampling.adapter_cache import AdapterCache
from skyrl_tx_server.sampling.allocation import PageAllocator
from skyrl_tx_server.sampling.block_tables import allocate_block_tables
from skyrl_tx_server.sampling.completion import CompletionChecker
from skyrl_tx_server.sampling.model_runner import ModelRunner
from skyrl_tx_server.sampling.preemption import SequencePool
from skyrl_tx_server.sampling.prefill_batch import PrefillChunk
from skyrl_tx_server.sampling.prefix_cache import PrefixCache
from skyrl_tx_server.sampling.sequences import SequenceState, stop_tokens_of


@dataclass(kw_only=True, slots=True)
class UnfinishedPrompt:
    """A partly computed prompt."""

    hit_tokens: int  # number of cached tokens that the first chunk of the prompt reused
    # [P + 1] float32 by position, NaN if not computed or not requested; the last element is not used
    logprobs: np.ndarray
    num_scored: int = 0  # number of tokens up to the end of the last chunk with logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedChunk:
    request: PrefillRequest
    chunk: PrefillChunk
    # `topk` and `targets` are None if they are not requested, if the prompt has further chunks, if `request`
    # does not contain the first sequence, or if its sequence is paused.
    topk: TopkLogprobs | None = None  # the likeliest tokens at each prompt position
    targets: CsrMatrix | None = None  # the logprobs of the target tokens


type PlannedPrefill = PlannedChunk | int
"""A chunk to compute, or the slot of a sequence that was unpaused with its pages and needs no chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillPlanner:
    """Plans chunks without computing them, and pins their adapters. Before the last chunk of a prompt is
    computed, the planner runs the scoring program for the prompt if the request needs it."""

    config: ModelConfig
    adapters: AdapterCache
    pages: PageAllocator
    pool: SequencePool
    runner: ModelRunner
    completion: CompletionChecker
    max_context_length: int
    ranks: RankGroup
    unfinished: dict[int, UnfinishedPrompt] = field(default_factory=dict)  # by request_id

    def plan(self, requests: Sequence[PrefillRequest]) -> list[PlannedPrefill]:
        """Plan the requests in order. Stop at the first request for which there is no capacity, or which
        cannot be computed together with the requests before it. Raises CapacityError if there is no capacity
        for the first request."""
        planned: list[PlannedPrefill] = []
        try:
            for request in requests:
                chunks = [plan.chunk for plan in planned if isinstance(plan, PlannedChunk)]
                plan = self.pool.unpause((request.request_id, request.first), chunks)
                if plan is None:
                    plan = self._plan_request(request, chunks)
                if plan is None:
                    break
                planned.append(plan)
        except CapacityError:
            if not planned:
                raise
        except Exception:
            for plan in planned:
                if isinstance(plan, PlannedChunk):
                    self.pages.free_chunk(plan.chunk)
                    self.adapters.unpin(plan.chunk.weights)
                else:
                    self.pool.pause_slot(plan)
            raise
        return planned

    def plan_preempted(self, sequence: SequenceState) -> PrefillChunk:
        """Plan the next chunk of a preempted sequence. Its adapter is already pinned. Raises CapacityError if
        there are too few pages."""
        text = sequence.text
        chunk = self._allocate(text, [sequence], limit=len(text) - 1, wants_logprobs=False, keep_spare=True)
        assert chunk is not None, "the first chunk of a batch is always planned"
        return chunk

    def _plan_request(self, request: PrefillRequest, planned: Sequence[PrefillChunk]) -> PlannedChunk | None:
        """Plan the next chunk of a request. Return None if the chunk must not be computed together with the
        `planned` chunks."""
        paused = self.pool.paused.get((request.request_id, request.first))
        if paused is not None:
            return self._plan_paused(request, paused[0], planned)
        op = request.op
        self.adapters.check_current(op.weights)
        stop_tokens = stop_tokens_of(op.settings, self.config)
        self.completion.prepare(op.settings)
        max_tokens, seed = op.settings.max_tokens, op.settings.seed
        if max_tokens is None:
            max_tokens = self.max_context_length - len(op.prompt)
        if seed is None:
            seed = self.ranks.broadcast_from_rank0(lambda: secrets.randbits(64))
        wants_logprobs = op.prompt_logprobs and request.first == 0
        limit = len(op.prompt) - 1
        if wants_logprobs:  # cached tokens have no logprobs, except those of earlier chunks of this prompt
            unfinished = self.unfinished.get(request.request_id)
            limit = unfinished.num_scored if unfinished else 0
        adapter_slot = self.adapters.pin(op.weights)
        sequences = [
            SequenceState(
                request_id=request.request_id,
                index=index,
                tenant=request.tenant,
                weights=op.weights,
                adapter_slot=adapter_slot,
                settings=op.settings,
                seed=seed,
                stop_tokens=stop_tokens,
                prompt=op.prompt,
                max_tokens=max_tokens,
                topk=op.topk_sample_logprobs,
            )
            for index in range(request.first, request.first + request.count)
        ]
        chunk = topk = targets = None
        try:
            chunk = self._allocate(
                op.prompt, sequences, limit=limit, wants_logprobs=wants_logprobs, planned=planned
            )
            if chunk is not None and chunk.is_last and request.first == 0:
                topk, targets = self.runner.score_prompt(op, adapter_slot)
        except Exception:
            if chunk is not None:
                self.pages.free_chunk(chunk)
            self.adapters.unpin(op.weights)
            raise
        if chunk is None:
            self.adapters.unpin(op.weights)
            return None
        return PlannedChunk(request=request, chunk=chunk, topk=topk, targets=targets)

    def _plan_paused(
        self, request: PrefillRequest, sequence: SequenceState, planned: Sequence[PrefillChunk]
    ) -> PlannedChunk | None:
        """Plan the next chunk of a paused sequence that has lost its pages, or whose data-parallel rank has
        no free slot. In the second case, free its pages first."""
        text = sequence.text
        self.pool.reclaim_paused(sequence.key)
        sequence.adapter_slot = self.adapters.pin(sequence.weights)
        chunk = None
        try:
            chunk = self._allocate(
                text,
                [sequence],
                limit=len(text) - 1,
                wants_logprobs=False,
                planned=planned,
                keep_spare=self.pool.num_running > 0,
            )
        finally:
            if chunk is None:
                self.adapters.unpin(sequence.weights)
        return chunk and PlannedChunk(request=request, chunk=chunk)

    def _allocate(
        self,
        tokens: np.ndarray,
        sequences: Sequence[SequenceState],
        *,
        limit: int,
        wants_logprobs: bool,
        planned: Sequence[PrefillChunk] = (),
        keep_spare: bool = False,
    ) -> PrefillChunk | None:
        """Return the next prefill chunk of `tokens` with allocated KV pages. The chunk reuses at most `limit`
        cached tokens.

        With `keep_spare`, each data-parallel rank that provides pages keeps one available page for each of
        its occupied or planned slots and one more page. Return None if the `planned` chunks fill the prefill
        batch, or if the text can reuse a prefix of these chunks and would then have fewer tiles left. If too
        few pages are available, paused sequences lose their pages. Raises CapacityError, without allocating
        any page, if there are still too few.
        """
        weights = sequences[0].weights
        free = self.pool.free_slots(planned)
        prefix, prefix_cache = self.pages.find_prefix(
            self.adapters.key(weights), tokens, limit=limit, free_slots=free
        )
        future_prefix = max(
            (
                common_length(chunk.tokens[: chunk.length], tokens[:limit])
                for chunk in planned
                if chunk.weights == weights
            ),
            default=0,
        )
        max_tiles = self.runner.prefill_layout.shapes.max_tiles - sum(len(chunk.tiles) for chunk in planned)
        if not max_tiles or num_tiles(len(tokens) - future_prefix) < num_tiles(len(tokens) - prefix.length):
            return None
        length = min(prefix.length + max_tiles * PREFILL_TILE, len(tokens))
        beginning = sequences if length == len(tokens) else ()
        nearest = sorted(free, key=lambda cache: (cache is not prefix_cache, -len(free[cache])))
        slots = list(chain.from_iterable(free[cache] for cache in nearest))[: len(beginning) or 1]
        spare_pages: dict[PrefixCache, int] = {}
        if keep_spare:
            spare_pages = {cache: self.pages.size.slots - len(free[cache]) + 1 for cache in free}
        while True:
            try:
                block_tables = allocate_block_tables(
                    [self.pages.cache_of(slot) for slot in slots],
                    length,
                    prefix=prefix,
                    prefix_cache=prefix_cache,
                    spare_pages=spare_pages,
                    text_length=len(tokens),
                )
                break
            except CapacityError:
                if not self.pool.reclaim():
                    raise
        return PrefillChunk(
            tokens=tokens,
            cached=prefix.length,
            length=length,
            weights=weights,
            adapter_slot=sequences[0].adapter_slot,
            wants_logprobs=wants_logprobs,
            slots=slots,
            tables=block_tables.tables,
            copies_before=block_tables.copies_before,
            copies_after=block_tables.copies_after,
            sequences=beginning,
        )
