"""Runs the sequences of many requests in one decode batch.

    PageAllocator   allocates KV pages, with a prefix cache per data-parallel rank
    SequencePool    holds the sequences that are in decode slots, preempted or paused
    Prefiller       computes prompts and starts their sequences
    DecodePipeline  runs decode steps for all sequences, with at most one dispatch in flight
    ModelRunner     holds the compiled programs and the KV cache

The device holds the KV cache and the outputs of the last dispatch. The host holds all other state of the
sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

import jax

from skyrl_tx_server.distributed.multihost import SINGLE_RANK, RankGroup
from skyrl_tx_server.engine.executor_protocol import (
    FailedSequence,
    FinishedSequence,
    PrefillResult,
    RunningSequence,
    SequencesLostError,
)
from skyrl_tx_server.engine.scheduled_work import PrefillRequest
from skyrl_tx_server.model.model_config import ModelConfig
from skyrl_tx_server.model.shapes import GPU_PREFILL, PREFILL_TILE
from skyrl_tx_server.sampling.adapter_cache import AdapterCache
from skyrl_tx_server.sampling.allocation import PageAllocator
from skyrl_tx_server.sampling.completion import CompletionChecker
from skyrl_tx_server.sampling.decode import DecodePipeline
from skyrl_tx_server.sampling.model_runner import CacheSize, ModelRunner
from skyrl_tx_server.sampling.preemption import SequencePool
from skyrl_tx_server.sampling.prefill import Prefiller
from skyrl_tx_server.sampling.prefill_plan import PrefillPlanner
from skyrl_tx_server.sampling.sequences import SequenceKey

logger = logging.getLogger(__name__)

GPU_PREFILLS_PER_STEP = 0.46
"""The estimated time of a decode step, divided by that of a prefill batch. On an H200 with Qwen3-4B, a decode
step of 64 sequences of 2,048 tokens takes 9.7 ms, and a prefill batch of 1,024 tokens takes 23.2 ms, which is
a quotient of 0.42 (docs/devices.md). With longer contexts, the quotient is larger."""
CPU_DECODE_COST = 1.5
"""The estimated time per token of a decode step, divided by that of a prefill batch."""


class BatchRunner:
    """Runs sequences: `prefill` starts them, and `decode` and `poll` advance them until they are complete.
    Implements `executor_protocol.Sampler`, which describes the methods."""

    def __init__(
        self,
        config: ModelConfig,
        runner: ModelRunner,
        adapters: AdapterCache,
        *,
        size: CacheSize,
        dp_ranks: int,
        max_context_length: int,
        model_dir: Path,
        ranks: RankGroup = SINGLE_RANK,
    ) -> None:
        """Each of the `dp_ranks` data-parallel ranks has a KV cache of size `size`."""
        self.runner = runner
        self.pages = PageAllocator(size, dp_ranks)
        self.num_slots = self.pages.num_slots
        self.max_partial_prefill_tokens = self.pages.max_partial_prefill_tokens
        self.pool = SequencePool(adapters, self.pages)
        completion = CompletionChecker(self.pool, runner, model_dir=model_dir)
        planner = PrefillPlanner(
            config=config,
            adapters=adapters,
            pages=self.pages,
            pool=self.pool,
            runner=runner,
            completion=completion,
            max_context_length=max_context_length,
            ranks=ranks,
        )
        self.prefiller = Prefiller(
            planner=planner,
            adapters=adapters,
            pages=self.pages,
            pool=self.pool,
            runner=runner,
            completion=completion,
        )
        self.pipeline = DecodePipeline(self.pool, runner, completion)
        # The result of a sequence that ended while it was restored. The next `poll` returns it.
        self._restored: FinishedSequence | FailedSequence | None = None

    @property
    def num_running(self) -> int:
        return self.pool.num_running

    @property
    def num_preempted(self) -> int:
        return len(self.pool.preempted)

    @property
    def prefills_per_dispatch(self) -> float:
        shapes = self.runner.prefill_layout.shapes
        if shapes == GPU_PREFILL:
            return GPU_PREFILLS_PER_STEP * self.runner.steps
        tokens_per_prefill = shapes.max_tiles * PREFILL_TILE
        return CPU_DECODE_COST * self.num_slots * self.runner.steps / tokens_per_prefill

    def stats(self) -> dict[str, object]:
        return {**self.pages.stats(), **self.pool.stats(), **self.pipeline.stats()}

    def prefill(self, requests: Sequence[PrefillRequest]) -> list[PrefillResult | None]:
        self._discard_orphaned()
        try:
            return self.prefiller.prefill(requests)
        except SequencesLostError:
            self._clear()
            raise

    def decode(self) -> bool:
        """Sample up to `runner.steps` more tokens for every sequence in a slot. If no dispatch is in flight,
        first try to restore the oldest preempted sequence."""
        try:
            for sequence in self.pool.preempted:
                sequence.dispatches_preempted += 1
            if self.pool.preempted and self.pipeline.in_flight is None:
                self._restored = self.prefiller.restore()
            return self.pipeline.decode()
        except Exception:
            self._clear()
            raise

    def poll(self, *, dispatch_next: bool) -> Sequence[FinishedSequence | FailedSequence]:
        """With `dispatch_next`, the next dispatch starts before the tokens of the last dispatch are
        processed."""
        restored, self._restored = self._restored, None
        return [*([restored] if restored else []), *self.pipeline.poll(dispatch_next=dispatch_next)]

    def pause(self, sequences: Collection[SequenceKey]) -> None:
        assert self.pipeline.in_flight is None, "a sequence cannot leave its slot during a dispatch"
        self.pool.pause(sequences)

    def running(self, request_id: int) -> Sequence[RunningSequence]:
        return [
            RunningSequence(index=sequence.index, tokens=sequence.tokens, logprobs=sequence.logprobs)
            for sequence in self.pool.of_request(request_id)
        ]

    def release(self, request_id: int) -> None:
        self.prefiller.unfinished.pop(request_id, None)
        self.pool.release(request_id)

    def _discard_orphaned(self) -> None:
        """Discard the dispatch in flight if no sequence has a slot: all have ended or were released. If the
        dispatch has failed, empty the KV cache. With several processes, then raise the error of the dispatch.
        With one process, raise SequencesLostError if sequences are paused."""
        if self.pipeline.in_flight is None or self.num_running:
            return
        self.pipeline.in_flight = None
        try:
            self.runner.wait()
        except Exception as error:
            logger.warning(
                "a decode dispatch whose sequences had ended has failed; the KV cache was cleared: %s", error
            )
            has_paused = bool(self.pool.paused)
            self._clear()
            if jax.process_count() > 1:  # the dispatch may have failed on this rank only
                raise
            if has_paused:
                lost = SequencesLostError(f"a decode dispatch failed: {error}")
                lost.num_requests = 0
                raise lost from error

    def _clear(self) -> None:
        """Discard all sequences and empty the KV cache."""
        self.pool.clear()
        self.pages.reset()
        self.pipeline.in_flight = self._restored = None
        self.runner.reset()
