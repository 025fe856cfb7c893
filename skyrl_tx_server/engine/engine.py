"""The engine: one thread uses the devices, does the work that the scheduler chooses, and resolves one future
per operation.

HTTP code calls `submit` from any thread. An operation that fails affects only its own future, with one
exception: if a failed prefill has destroyed the KV cache, or if a decode dispatch (one program call that
samples the next tokens of all running sequences) fails, all running sequences lose their state, and their
requests fail together. The executor then continues with an empty cache, and waiting requests are not
affected. A server with several processes stops instead. A `ServerError` reaches the caller unchanged. Any
other exception is logged with its traceback, and the caller gets a `ServerError` with the type and the
message of the exception.

This file is long because the engine thread is one state machine.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

from skyrl_tx_server.engine.executor_protocol import (
    EngineInfo,
    Executor,
    FailedSequence,
    FinishedSequence,
    Job,
    PrefillResult,
    SequencesLostError,
)
from skyrl_tx_server.engine.operations import (
    DEFAULT_TENANT,
    ForwardBackward,
    Op,
    Operation,
    OpResult,
    Sample,
    SampledSequence,
    SampleResult,
)
from skyrl_tx_server.engine.scheduled_work import (
    Decode,
    OperationStep,
    Pause,
    Prefill,
    PrefillRequest,
    ScheduledWork,
)
from skyrl_tx_server.engine.scheduler import Scheduler
from skyrl_tx_server.errors import CapacityError, ServerError

logger = logging.getLogger(__name__)

STOPPING = "the server is stopping; this request was not finished"
RESTART_HINT = (
    "the log contains the traceback; start the server again and continue from a checkpoint in checkpoints_dir"
)
OUT_OF_MEMORY_HINT = (
    "the device is out of memory: send a smaller request, or start the server with smaller max_num_seqs or "
    "train_tokens_per_batch"
)


class WithdrawnError(ServerError):
    """The client has cancelled the request or disconnected."""


class Watcher(Protocol):
    """Receives the progress of one `Sample`. The engine thread calls the methods, which must return at once
    and not raise an exception."""

    @property
    def streams_tokens(self) -> bool:
        """Whether `tokens` is called while the sequences are generated."""
        ...

    def tokens(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Receive the tokens and logprobs of sequence `index` since the previous call. The tokens of the last
        dispatch of a sequence are not reported; the result contains them."""
        ...

    def is_waiting(self) -> bool:
        """Whether the client still waits for the result. If not, the slots of the request are freed."""
        ...


class EngineClient(Protocol):
    """The methods of the engine that the HTTP side calls."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def failure(self) -> str | None:
        """Why the engine cannot run operations any more. None: it has not failed."""
        ...

    def submit[R](
        self, op: Operation[R], watcher: Watcher | None = None, *, tenant: str = DEFAULT_TENANT
    ) -> Future[R]: ...

    def stats(self) -> dict[str, object]: ...


@dataclass(kw_only=True, slots=True)
class _Sampling:
    """A `Sample` that has started. Its sequences finish one by one, in any order."""

    op: Sample
    watcher: Watcher | None = None
    reported: dict[int, int] = field(default_factory=dict)  # sequence index -> number of tokens reported
    sequences: dict[int, SampledSequence] = field(default_factory=dict)
    prefill: PrefillResult | None = None  # the result of the first prefill


class Engine:
    """Executes operations and resolves their futures. Call `start` once, and `stop` at the end."""

    def __init__(
        self,
        executor: Executor,
        *,
        train_share: float | None = None,
        on_failure: Callable[[str], None] = logger.error,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`train_share`: see `Scheduler`. If the engine thread ends with an exception, it calls `on_failure`
        with one line. `clock` returns the time in seconds."""
        self._clock = clock
        self._on_failure = on_failure
        self._failure: str | None = None
        self._executor, self._sampler = executor, executor.sampler
        self._scheduler = Scheduler(
            max_partial_prefill_tokens=self._sampler.max_partial_prefill_tokens,
            prefills_per_dispatch=self._sampler.prefills_per_dispatch,
            train_share=train_share,
        )
        self._work = threading.Condition()  # guards the scheduler and the next four attributes
        self._futures: dict[int, Future[Any]] = {}
        self._watchers: dict[int, Watcher] = {}  # watchers of operations that have not started
        self._last_request_id = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        # Only the engine's thread uses these attributes, except that `stats` reads `_counts` and `_seconds`.
        self._jobs: dict[int, Job[OpResult]] = {}
        # request id -> (step, future that the step waits for)
        self._waits: dict[int, tuple[OperationStep, Future[Any]]] = {}
        self._sampling: dict[int, _Sampling] = {}
        token_counters = (
            "tokens_sampled",
            "tokens_prefilled",
            "tokens_from_prefix_cache",
            "tokens_trained",
            "tokens_forward",
        )
        self._counts = dict.fromkeys(("ops_finished", "ops_failed", *token_counters, "decode_dispatches"), 0)
        self._seconds = dict.fromkeys(("step", "prefill", "decode", "pause"), 0.0)  # by kind of work

    @property
    def info(self) -> EngineInfo:
        return self._executor.info

    @property
    def failure(self) -> str | None:
        return self._failure

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the current work and the operations that wait for another thread, such as checkpoint writes.
        Then fail the other operations. May be called twice, and without `start`."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self.abandon(STOPPING)

    def abandon(self, reason: str) -> None:
        """Stop without waiting for the current work, which may never end. Pending operations fail with
        `reason`."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
            pending, self._futures = self._futures, {}
        for future in pending.values():
            with contextlib.suppress(InvalidStateError):  # resolved or cancelled already
                future.set_exception(ServerError(reason))

    def submit[R](
        self, op: Operation[R], watcher: Watcher | None = None, *, tenant: str = DEFAULT_TENANT
    ) -> Future[R]:
        """Queue `op` for `tenant`, and report the progress of a `Sample` to `watcher`. Cancelling the future
        withdraws the operation if it has not started. The future fails with ServerError if the engine stops.
        """
        future: Future[R] = Future()
        with self._work:
            if self._stopping:
                reason = self._failure or "the server is stopping; this request was not accepted"
                future.set_exception(ServerError(reason))
                return future
            self._last_request_id += 1
            self._futures[self._last_request_id] = future
            if watcher is not None:
                self._watchers[self._last_request_id] = watcher
            self._scheduler.add(self._last_request_id, cast("Op", op), tenant=tenant)
            self._work.notify()
            future.add_done_callback(partial(self._remove_if_cancelled, self._last_request_id))
        return future

    def stats(self) -> dict[str, object]:
        """Return counters and gauges, including those of the executor."""
        with self._work:
            queues = {
                "ops_pending": len(self._futures),
                "samples_waiting": self._scheduler.num_waiting_samples,
                "steps_waiting": self._scheduler.num_waiting_steps,
            }
        return {**queues, **self._counts, "work_seconds": dict(self._seconds), **self._executor.stats()}

    def _loop(self) -> None:
        try:
            while (work := self._next_work()) is not None:
                started = self._clock()
                match work:
                    case OperationStep():
                        kind = "step"
                        self._step(work)
                    case Prefill():
                        kind = "prefill"
                        self._prefill(work.requests)
                    case Decode():
                        kind = "decode"
                        self._decode()
                    case Pause():
                        kind = "pause"
                        self._sampler.pause(work.sequences)
                seconds = self._clock() - started
                self._seconds[kind] += seconds
                with self._work:
                    self._scheduler.count_time(work, seconds)
            while self._waits:
                step, future = next(iter(self._waits.values()))
                wait([future])
                self._step(step)
        except ServerError as error:  # another process of the server was lost
            self._end(str(error))
        except BaseException as error:  # a bug; fail the futures so that clients do not wait forever
            logger.exception("the engine thread failed")
            line = str(error).partition("\n")[0]
            self._end(f"the engine failed ({type(error).__name__}: {line}); {RESTART_HINT}")

    def _end(self, failure: str) -> None:
        self._failure = failure
        self.abandon(failure)
        self._on_failure(failure)

    def _next_work(self) -> ScheduledWork | None:
        """Wait for work. Return None when the engine stops."""
        with self._work:
            while not self._stopping:
                running = self._sampler.num_running
                work = self._scheduler.next(free_slots=self._sampler.num_slots - running, num_running=running)
                if work is not None:
                    return work
                self._work.wait()
            return None

    def _step(self, step: OperationStep) -> None:
        if step.request_id not in self._jobs and not self._begin(step.request_id):
            self._finish(step)
            return
        self._waits.pop(step.request_id, None)
        try:
            if step.request_id not in self._jobs:
                self._jobs[step.request_id] = self._executor.run(step.op)
            future = next(self._jobs[step.request_id])
            if future is not None:
                self._waits[step.request_id] = step, future
                with self._work:
                    self._scheduler.block(step.request_id)
                future.add_done_callback(lambda _: self._unblock(step.request_id))
        except StopIteration as finished:
            self._finish(step)
            if isinstance(step.op, ForwardBackward):
                num_tokens = sum(len(datum.tokens) for datum in step.op.data)
                self._counts["tokens_forward" if step.op.forward_only else "tokens_trained"] += num_tokens
            self._resolve(step.request_id, finished.value)
        except Exception as error:
            self._finish(step)
            self._fail(step.request_id, error, operation=type(step.op).__name__)

    def _unblock(self, request_id: int) -> None:
        with self._work:
            self._scheduler.unblock(request_id)
            self._work.notify()

    def _finish(self, step: OperationStep) -> None:
        self._jobs.pop(step.request_id, None)
        with self._work:
            self._scheduler.finish(step)

    def _prefill(self, offered: Sequence[PrefillRequest]) -> None:
        requests = [request for request in offered if self._is_pending(request.request_id)]
        if not requests:
            return
        try:
            results = self._sampler.prefill(requests)
        except CapacityError as error:
            if self._sampler.num_running:  # a sequence that finishes frees KV pages or a LoRA slot
                with self._work:
                    self._scheduler.defer(requests)
            else:
                self._requeue(requests[1:])
                self._fail_sample(requests[0].request_id, error)
        except SequencesLostError as error:
            self._requeue(requests[error.num_requests :])
            self._fail_all_samples(error, *(request.request_id for request in requests[: error.num_requests]))
        except Exception as error:
            self._requeue(requests[1:])
            if len(requests) > 1:  # run the first alone, so that each request fails only for its own error
                self._prefill(requests[:1])
            else:
                self._fail_sample(requests[0].request_id, error)
        else:
            self._requeue(requests[len(results) :])
            for request, result in zip(requests, results, strict=False):
                self._prefilled(request, result)

    def _is_pending(self, request_id: int) -> bool:
        """Whether the request has started or can still start. Removes a cancelled request."""
        with self._work:
            future = self._futures.get(request_id)
            is_pending = (future is not None and not future.cancelled()) or self._begin(request_id)
            if not is_pending:
                self._scheduler.drop_request(request_id)
            return is_pending

    def _remove_if_cancelled(self, request_id: int, future: Future[Any]) -> None:
        """Remove a cancelled operation from its queue at once. Otherwise it would occupy memory until the
        scheduler chooses it. A `Sample` would also delay the `DropSnapshot` of its snapshot, and the
        scheduler could pause running sequences for it."""
        if future.cancelled() and not self._begin(request_id):
            with self._work:
                self._scheduler.cancel(request_id)
                self._work.notify()

    def _requeue(self, requests: Sequence[PrefillRequest]) -> None:
        with self._work:
            self._scheduler.requeue(requests)

    def _prefilled(self, request: PrefillRequest, result: PrefillResult | None) -> None:
        """Record the result of one prefill. None means that the prompt needs further prefill chunks."""
        request_id = request.request_id
        if request_id not in self._sampling:
            if not self._begin(request_id):
                self._sampler.release(request_id)
                with self._work:
                    self._scheduler.drop_request(request_id)
                return
            self._sampling[request_id] = _Sampling(
                op=request.op, watcher=self._watchers.pop(request_id, None)
            )
        if result is None:
            with self._work:
                self._scheduler.prefill_continues(request)
        else:
            num_computed = len(request.op.prompt) - result.prompt_cache_hit_tokens
            if not request.paused:  # the prompt was counted when the paused sequence started
                self._counts["tokens_prefilled"] += num_computed
                self._counts["tokens_from_prefix_cache"] += result.prompt_cache_hit_tokens
            sampling = self._sampling[request_id]
            sampling.prefill = sampling.prefill or result
            with self._work:
                self._scheduler.prefill_finished(request_id, prompt_tokens=num_computed)
            self._collect(result.finished)
        self._report([request_id])

    def _decode(self) -> None:
        self._counts["decode_dispatches"] += 1
        num_preempted = self._sampler.num_preempted
        try:
            any_ended = self._sampler.decode()
            if self._sampler.num_preempted < num_preempted:
                with self._work:
                    self._scheduler.retry_deferred()
            finished = self._sampler.poll(dispatch_next=self._decodes_next(free_slots=1 if any_ended else 0))
        except Exception as error:
            self._fail_all_samples(error)
        else:
            self._collect(finished)
            self._report(list(self._sampling))

    def _decodes_next(self, *, free_slots: int) -> bool:
        """Whether another decode dispatch is the next work if `free_slots` more slots become free."""
        with self._work:
            free_slots += self._sampler.num_slots - self._sampler.num_running
            return not self._stopping and not self._scheduler.interrupts(free_slots=free_slots)

    def _collect(self, ended: Sequence[FinishedSequence | FailedSequence]) -> None:
        for outcome in ended:
            sampling = self._sampling.get(outcome.request_id)
            if sampling is None:  # another sequence of the request has failed
                continue
            if isinstance(outcome, FailedSequence):
                self._fail_sample(outcome.request_id, outcome.error)
                continue
            sampling.sequences[outcome.index] = outcome.sequence
            with self._work:
                self._scheduler.sequence_finished(outcome.request_id, outcome.index)
            self._counts["tokens_sampled"] += len(outcome.sequence.tokens)
            if len(sampling.sequences) == sampling.op.num_samples:
                del self._sampling[outcome.request_id]
                prefill = sampling.prefill
                assert prefill is not None, "a sequence finishes after its prefill"
                result = SampleResult(
                    sequences=tuple(sampling.sequences[index] for index in range(sampling.op.num_samples)),
                    prompt_logprobs=prefill.prompt_logprobs,
                    prompt_cache_hit_tokens=prefill.prompt_cache_hit_tokens,
                    topk_prompt_logprobs=prefill.topk_prompt_logprobs,
                    target_prompt_logprobs=prefill.target_prompt_logprobs,
                )
                self._resolve(outcome.request_id, result)

    def _report(self, request_ids: Sequence[int]) -> None:
        """Report new tokens to the watchers, and fail the requests for which no client waits."""
        for request_id in request_ids:
            sampling = self._sampling.get(request_id)
            if sampling is None or sampling.watcher is None:
                continue
            if not sampling.watcher.is_waiting():
                self._fail_sample(
                    request_id, WithdrawnError("withdrawn: the client disconnected or cancelled the request")
                )
                continue
            for sequence in self._sampler.running(request_id) if sampling.watcher.streams_tokens else ():
                start = sampling.reported.get(sequence.index, 0)
                if len(sequence.tokens) > start:
                    tokens, logprobs = sequence.tokens[start:], sequence.logprobs[start:]
                    sampling.watcher.tokens(sequence.index, tokens, logprobs)
                    sampling.reported[sequence.index] = len(sequence.tokens)

    def _fail_sample(self, request_id: int, error: Exception) -> None:
        started = self._sampling.pop(request_id, None) is not None or self._begin(request_id)
        with self._work:
            self._scheduler.drop_request(request_id)
        if not started:
            return
        unfinished = self._sampler.running(request_id)
        self._counts["tokens_sampled"] += sum(len(sequence.tokens) for sequence in unfinished)
        self._sampler.release(request_id)
        self._fail(request_id, error, operation="Sample")

    def _fail_all_samples(self, error: Exception, *starting: int) -> None:
        """Fail every `Sample` that has started, and the requests `starting`, because all sequences are lost.
        Waiting requests are not affected."""
        for request_id in {**dict.fromkeys(self._sampling), **dict.fromkeys(starting)}:
            self._fail_sample(request_id, error)

    def _begin(self, request_id: int) -> bool:
        """Mark the future of a request as running. Return False if the caller has cancelled the future, or if
        `abandon` has removed it."""
        with self._work:
            future = self._futures.get(request_id)
            if future is not None and future.set_running_or_notify_cancel():
                return True
            self._futures.pop(request_id, None)
            self._watchers.pop(request_id, None)
            return False

    def _resolve(self, request_id: int, result: OpResult) -> None:
        self._counts["ops_finished"] += 1
        self._deliver(request_id, lambda future: future.set_result(result))

    def _fail(self, request_id: int, error: Exception, *, operation: str) -> None:
        self._counts["ops_failed"] += 1
        if not isinstance(error, ServerError):
            logger.error("%s failed: %s", operation, error, exc_info=error)
            unexpected = error
            hint = f"{OUT_OF_MEMORY_HINT}; " if "RESOURCE_EXHAUSTED" in str(error) else ""
            error = ServerError(
                f"{operation} failed in the engine: {hint}{type(unexpected).__name__}: {unexpected}"
            )
            error.__cause__ = unexpected
        self._deliver(request_id, lambda future: future.set_exception(error))

    def _deliver(self, request_id: int, resolve: Callable[[Future[Any]], None]) -> None:
        with self._work:
            future = self._futures.pop(request_id, None)
            self._watchers.pop(request_id, None)  # present if a `Sample` failed before it started
        if future is not None:  # None: `abandon` has resolved it already
            resolve(future)
