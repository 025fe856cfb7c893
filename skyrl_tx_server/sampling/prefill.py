"""Prefill: compute the texts (the prompt and the tokens sampled so far) of these sequences in chunks.

- New sequences.
- Preempted sequences. They have lost their KV pages, and a slot stays reserved for each of them.
- Paused sequences, which gave their slots to other sequences, in two cases: they have lost their pages, or
  the data-parallel rank that holds their pages has no free slot. In the second case, the text is computed
  again for a slot of another rank.

A new or paused sequence gets a slot when the last chunk of its text is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from skyrl_tx_server.engine.executor_protocol import (
    FailedSequence,
    FinishedSequence,
    PrefillResult,
    SequencesLostError,
)
from skyrl_tx_server.engine.operations import Sample
from skyrl_tx_server.engine.scheduled_work import PrefillRequest
from skyrl_tx_server.errors import CapacityError
from skyrl_tx_server.sampling.adapter_cache import AdapterCache
from skyrl_tx_server.sampling.allocation import PageAllocator
from skyrl_tx_server.sampling.completion import CompletionChecker
from skyrl_tx_server.sampling.model_runner import ModelRunner
from skyrl_tx_server.sampling.preemption import MAX_DISPATCHES_PREEMPTED, SequencePool
from skyrl_tx_server.sampling.prefill_batch import ChunkOutputs, PrefillChunk
from skyrl_tx_server.sampling.prefill_plan import PlannedChunk, PrefillPlanner, UnfinishedPrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefiller:
    """Computes the chunks that `PrefillPlanner` plans, and starts their sequences."""

    planner: PrefillPlanner
    adapters: AdapterCache
    pages: PageAllocator
    pool: SequencePool
    runner: ModelRunner
    completion: CompletionChecker

    @property
    def unfinished(self) -> dict[int, UnfinishedPrompt]:
        """The partly computed prompts, by request id."""
        return self.planner.unfinished

    def prefill(self, requests: Sequence[PrefillRequest]) -> list[PrefillResult | None]:
        """Compute one prefill batch, which contains the next chunk of each of the first requests.
        `PrefillPlanner.plan` determines the number of these requests. Start the sequences whose texts are
        complete. A paused sequence that still has its pages, and whose rank has a free slot, is unpaused
        without a chunk.

        `executor_protocol.Sampler.prefill` describes the result and the errors.
        """
        requests = list(takewhile(lambda request: not self._must_wait(request.tenant), requests))
        if not requests:
            raise CapacityError("preempted sequences are restored before new sequences start")
        planned = self.planner.plan(requests)
        chunks = [plan.chunk for plan in planned if isinstance(plan, PlannedChunk)]
        try:
            outputs = iter(self._compute(chunks) if chunks else [])
            return [
                self._start_if_complete(plan, next(outputs))
                if isinstance(plan, PlannedChunk)
                else _unpaused(request)
                for request, plan in zip(requests, planned, strict=False)
            ]
        except Exception as error:
            for plan in planned:
                if isinstance(plan, int):
                    self.pool.pause_slot(plan)
            if isinstance(error, SequencesLostError):
                error.num_requests = len(planned)
            raise
        finally:
            for chunk in chunks:
                self.adapters.unpin(chunk.weights)

    def restore(self) -> FinishedSequence | FailedSequence | None:
        """Compute the next chunk of the oldest preempted sequence if enough pages are available for it. Some
        pages must also remain available for the next tokens of the running sequences: see `keep_spare` in
        `PrefillPlanner._allocate`.

        Return the result of the sequence if the token after its last chunk completes it, otherwise None.
        """
        try:
            chunk = self.planner.plan_preempted(self.pool.preempted[0])
        except CapacityError:
            return None
        (outputs,) = self._compute([chunk])
        if not chunk.is_last:
            self.pages.free_chunk(chunk)
            return None
        del self.pool.preempted[0]
        return next(iter(self._begin(chunk, outputs)), None)

    def _must_wait(self, tenant: str) -> bool:
        """Return whether preempted sequences must be restored before a new or paused sequence of `tenant`
        gets a slot."""
        return any(
            sequence.tenant == tenant or sequence.dispatches_preempted >= MAX_DISPATCHES_PREEMPTED
            for sequence in self.pool.preempted
        )

    def _compute(self, chunks: Sequence[PrefillChunk]) -> list[ChunkOutputs]:
        """Run the prefill program and add the pages of the chunks to the prefix cache. If the program fails,
        free these pages."""
        try:
            outputs = self.runner.prefill(chunks)
        except Exception:
            for chunk in chunks:
                self.pages.free_chunk(chunk)
            raise
        for chunk in chunks:
            self.pages.insert_chunk(chunk, weights=self.adapters.key(chunk.weights))
        return outputs

    def _start_if_complete(self, plan: PlannedChunk, outputs: ChunkOutputs) -> PrefillResult | None:
        """Start the sequences of a request if this chunk is the last one. None: more chunks remain."""
        request, chunk = plan.request, plan.chunk
        key = (request.request_id, request.first)
        if key in self.pool.paused:
            if not chunk.is_last:
                self.pages.free_chunk(chunk)
                return None
            sequence, _ = self.pool.paused.pop(key)
            self.adapters.pin(sequence.weights)
            self.adapters.release(sequence.weights)
            return replace(_unpaused(request), finished=self._begin(chunk, outputs))
        op, request_id = request.op, request.request_id
        if request_id not in self.unfinished:
            self.unfinished[request_id] = UnfinishedPrompt(
                hit_tokens=chunk.cached, logprobs=np.full(len(op.prompt) + 1, np.nan, np.float32)
            )
        prompt = self.unfinished[request_id]
        if chunk.wants_logprobs:
            prompt.logprobs[chunk.cached + 1 : chunk.length + 1] = outputs.logprobs
            prompt.num_scored = chunk.length
        if not chunk.is_last:
            self.pages.free_chunk(chunk)
            return None
        del self.unfinished[request_id]
        for sequence in chunk.sequences:
            self.adapters.pin(sequence.weights)
        return PrefillResult(
            prompt_logprobs=_prompt_logprobs(op, prompt.logprobs) if chunk.wants_logprobs else None,
            prompt_cache_hit_tokens=prompt.hit_tokens,
            finished=self._begin(chunk, outputs),
            topk_prompt_logprobs=plan.topk,
            target_prompt_logprobs=plan.targets,
        )

    def _begin(self, chunk: PrefillChunk, outputs: ChunkOutputs) -> list[FinishedSequence | FailedSequence]:
        """Put the sequences of a chunk into their slots, and append to each sequence the token that was
        sampled after the chunk. Return the results of the sequences that end with this token."""
        self.pool.begin(chunk)
        sampled = zip(chunk.slots, outputs.first_tokens, outputs.first_logprobs, strict=True)
        results = [self.completion.append(slot, [token], [logprob]) for slot, token, logprob in sampled]
        return [result for result in results if result is not None]


def _unpaused(request: PrefillRequest) -> PrefillResult:
    """Return the result for an unpaused sequence, whose prompt has already been computed."""
    return PrefillResult(prompt_logprobs=None, prompt_cache_hit_tokens=len(request.op.prompt), finished=())


def _prompt_logprobs(op: Sample, logprobs: np.ndarray) -> np.ndarray:
    """Return the logprobs [P] float32 of the prompt tokens, NaN for the first one and where not requested."""
    logprobs = logprobs[: len(op.prompt)].copy()
    logprobs[: max(1, len(op.prompt) - (op.prompt_logprobs_last_n or len(op.prompt)))] = np.nan
    return logprobs
