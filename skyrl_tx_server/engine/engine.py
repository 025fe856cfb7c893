"""The engine: one thread owns the devices, takes the scheduler's turns, and resolves a future per operation.

HTTP code calls `submit` from any thread. A failing operation fails its own future alone: an error raised on purpose (a `ServerError`)
reaches the caller as it is, anything else is logged with its traceback and reaches the caller as a `ServerError` with type and message.
Only when the device state of all running samples is lost with it (the key-value cache was donated to the program that failed) do these
samples fail together; the executor starts over with an empty cache and waiting requests go on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from skyrl_tx_server.engine.operations import (
    DEFAULT_TENANT,
    CsrMatrix,
    ForwardBackward,
    Op,
    OpResult,
    Sample,
    SampledSequence,
    SampleResult,
    TopkLogprobs,
)
from skyrl_tx_server.engine.scheduler import (
    Decode,
    Pause,
    Prefill,
    PrefillRequest,
    ScheduledWork,
    Scheduler,
    Step,
)
from skyrl_tx_server.errors import CapacityError, ServerError

logger = logging.getLogger(__name__)

STOPPING = "the server is stopping; this request was not finished"
OUT_OF_MEMORY_HINT = "the device is out of memory: ask for less, or start the server with smaller max_num_seqs or train_tokens_per_batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What clients may ask of this engine."""

    base_model: str
    max_context_length: int  # prompt + completion
    max_lora_rank: int
    vocab_size: int
    model_type: str = "qwen3"  # the family, as config.json names it
    eos_token_ids: tuple[int, ...] = ()
    devices: str = ""  # how many of which kind


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRow:
    """Sample `index` of request `request_id` is complete."""

    request_id: int
    index: int
    sequence: SampledSequence


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRow:
    """A sample of request `request_id` went wrong, and with it the request; nobody else is concerned."""

    request_id: int
    error: Exception


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillResult:
    """What prefilling a request brought at once."""

    prompt_logprobs: np.ndarray | None  # [P] float32
    prompt_cache_hit_tokens: int
    finished: Sequence[FinishedRow | FailedRow]  # rows that were over after their first token
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_prompt_logprobs: CsrMatrix | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningRow:
    """Sample `index` of a request, as far as it has come. The sequences grow; copy what is to be kept."""

    index: int
    tokens: Sequence[int]
    logprobs: Sequence[float]


class RowsLostError(ServerError):
    """The device state of every running sample is gone; the executor has an empty cache again."""


class WithdrawnError(ServerError):
    """Nobody waits for this sample any more."""


class Watcher(Protocol):
    """Follows one `Sample` while it runs. Called on the engine's thread, so it must return at once and raise nothing."""

    @property
    def follows(self) -> bool:
        """Whether it wants to hear of tokens."""
        ...

    def tokens(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """What sample `index` has gained since the last call. A row's last tokens come with the result only."""
        ...

    def wanted(self) -> bool:
        """False when nobody waits for the result: its slots go to others."""
        ...


class EngineSide(Protocol):
    """The engine as the HTTP side sees it."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(
        self, op: Op, watcher: Watcher | None = None, *, tenant: str = DEFAULT_TENANT
    ) -> Future[OpResult]: ...

    def stats(self) -> dict[str, object]: ...


class Executor(Protocol):
    """Sole owner of the devices; called from the engine's thread only."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def rows_decoding(self) -> int: ...

    @property
    def unfinished_tokens(self) -> int:
        """How many tokens of prompts that are computed in part the cache keeps without harm to others."""
        ...

    def run(self, op: Op) -> Generator[None, None, OpResult]:
        """Execute anything but a `Sample`, yielding after each micro-batch; the generator's return value is the result."""
        ...

    def admit(self, admits: Sequence[PrefillRequest]) -> Sequence[PrefillResult | None]:
        """Compute the first of these, or the first several together, and give their samples a slot each: an admission for each that was
        taken. None: a piece of a long prompt has been computed and there is more; ask again.

        CapacityError: no room for the first now. RowsLostError: see there. After any other error nothing has changed.
        """
        ...

    def decode(self) -> bool:
        """Compute one decode block over all occupied slots, if none is under way, and wait for it: whether it ended rows. `collect` must
        follow. After any exception no slot is occupied."""
        ...

    def collect(self, *, go_on: bool) -> Sequence[FinishedRow | FailedRow]:
        """What became of the block's rows. Where the caller would `go_on` with another block at once, that one is begun first."""
        ...

    def pause(self, rows: Sequence[tuple[int, int]]) -> None:
        """Free the slots of these rows, each (ticket, index), until they are admitted again. Only after a `collect` without `go_on`."""
        ...

    def running(self, request_id: int) -> Sequence[RunningRow]:
        """The rows of a request that are not complete yet."""
        ...

    def release(self, request_id: int) -> None:
        """Free the slots of a request that failed."""
        ...

    def stats(self) -> dict[str, object]: ...


@dataclass(kw_only=True, slots=True)
class _Sampling:
    """A `Sample` on its way: rows arrive one by one, in any order."""

    op: Sample
    watcher: Watcher | None = None  # None: the result is all that is asked for
    reported: dict[int, int] = field(
        default_factory=dict
    )  # how many tokens of each sample the watcher has seen
    sequences: dict[int, SampledSequence] = field(default_factory=dict)
    admission: PrefillResult | None = None  # of its first rows


class Engine:
    """Operations in, futures out. `start` it once, `stop` it once."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._scheduler = Scheduler(unfinished_tokens=executor.unfinished_tokens)
        self._work = threading.Condition()  # guards every attribute below and the scheduler
        self._futures: dict[int, Future[OpResult]] = {}
        self._watchers: dict[int, Watcher] = {}  # of samples that have not begun
        self._last_ticket = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        # The engine's thread alone:
        self._jobs: dict[int, Generator[None, None, OpResult]] = {}
        self._sampling: dict[int, _Sampling] = {}
        tokens = (
            "tokens_sampled",
            "tokens_prefilled",
            "tokens_from_prefix_cache",
            "tokens_trained",
            "tokens_forward",
        )
        self._counts = dict.fromkeys(("ops_finished", "ops_failed", *tokens, "decode_dispatches"), 0)
        self._seconds = {
            "step": 0.0,
            "prefill": 0.0,
            "decode": 0.0,
            "pause": 0.0,
        }  # spent on turns of each kind

    @property
    def info(self) -> EngineInfo:
        return self._executor.info

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the turn under way, then fail what is pending. Safe to call twice, and without `start`."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self.abandon(STOPPING)

    def abandon(self, reason: str) -> None:
        """Stop without waiting for the turn under way, which may never end; what is pending fails with `reason`."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
            pending, self._futures = self._futures, {}
        for future in pending.values():
            with contextlib.suppress(InvalidStateError):  # answered or withdrawn already
                future.set_exception(ServerError(reason))

    def submit(
        self, op: Op, watcher: Watcher | None = None, *, tenant: str = DEFAULT_TENANT
    ) -> Future[OpResult]:
        """Queue `op` on behalf of `tenant`, with whom others share the devices equally (see `scheduler`). Cancelling the future before its
        first turn withdraws the operation; a `Sample` may also be watched."""
        future: Future[OpResult] = Future()
        with self._work:
            if self._stopping:
                future.set_exception(ServerError("the server is stopping; this request was not accepted"))
                return future
            self._last_ticket += 1
            self._futures[self._last_ticket] = future
            if watcher is not None:
                self._watchers[self._last_ticket] = watcher
            self._scheduler.add(self._last_ticket, op, tenant=tenant)
            self._work.notify()
        return future

    def stats(self) -> dict[str, object]:
        """Counters and gauges for metrics and tests; the executor's own (slots, compilations by name) among them."""
        with self._work:
            queues = {
                "ops_pending": len(self._futures),
                "samples_waiting": self._scheduler.num_waiting_samples,
                "steps_waiting": self._scheduler.num_waiting_steps,
            }
        return {**queues, **self._counts, "work_seconds": dict(self._seconds), **self._executor.stats()}

    def _loop(self) -> None:
        try:
            while (turn := self._next_turn()) is not None:
                began = time.perf_counter()
                match turn:
                    case Step():
                        kind = "step"
                        self._step(turn)
                    case Prefill():
                        kind = "prefill"
                        self._prefill(turn.admits)
                    case Decode():
                        kind = "decode"
                        self._decode()
                    case Pause():
                        kind = "pause"
                        self._executor.pause(turn.rows)
                self._seconds[kind] += time.perf_counter() - began
        except BaseException:  # only a bug of ours gets here; nobody may wait for ever because of it
            logger.exception("the engine thread died")
            self.abandon(STOPPING)
            raise

    def _next_turn(self) -> ScheduledWork | None:
        """Wait for work; None when stopping."""
        with self._work:
            while not self._stopping:
                decoding = self._executor.rows_decoding
                turn = self._scheduler.next(
                    free_slots=self._executor.num_slots - decoding, rows_decoding=decoding
                )
                if turn is not None:
                    return turn
                self._work.wait()
            return None

    def _step(self, step: Step) -> None:
        if step.request_id not in self._jobs and not self._begin(step.request_id):
            self._finish(step)
            return
        try:
            if step.request_id not in self._jobs:
                self._jobs[step.request_id] = self._executor.run(step.op)
            next(self._jobs[step.request_id])
        except StopIteration as finished:
            self._finish(step)
            if isinstance(step.op, ForwardBackward):
                num_tokens = sum(len(datum.tokens) for datum in step.op.data)
                self._counts["tokens_forward" if step.op.forward_only else "tokens_trained"] += num_tokens
            self._resolve(step.request_id, finished.value)
        except Exception as error:
            self._finish(step)
            self._fail(step.request_id, error, what=type(step.op).__name__)

    def _finish(self, step: Step) -> None:
        self._jobs.pop(step.request_id, None)
        with self._work:
            self._scheduler.finish(step)

    def _prefill(self, offered: Sequence[PrefillRequest]) -> None:
        admits = [admit for admit in offered if self._still_wanted(admit.request_id)]
        for request_id in {admit.request_id for admit in offered} - {admit.request_id for admit in admits}:
            with self._work:
                self._scheduler.drop_sample(request_id)
        if not admits:
            return
        try:
            admissions = self._executor.admit(admits)
        except CapacityError as error:
            if self._executor.rows_decoding:  # a row that finishes makes room
                with self._work:
                    self._scheduler.hold(admits)
            else:
                self._put_back(admits[1:])
                self._fail_sample(admits[0].request_id, error)
        except RowsLostError as error:
            self._fail_all_samples(error, *(admit.request_id for admit in admits))
        except Exception as error:
            self._put_back(admits[1:])
            if len(admits) > 1:  # who is at fault fails alone
                self._prefill(admits[:1])
            else:
                self._fail_sample(admits[0].request_id, error)
        else:
            self._put_back(admits[len(admissions) :])
            for admit, admission in zip(admits, admissions, strict=False):
                self._admitted(admit, admission)

    def _still_wanted(self, request_id: int) -> bool:
        with self._work:
            future = self._futures.get(request_id)
            withdrawn = future is None or future.cancelled()
        return not withdrawn or self._begin(request_id)

    def _put_back(self, admits: Sequence[PrefillRequest]) -> None:
        with self._work:
            self._scheduler.put_back(admits)

    def _admitted(self, admit: PrefillRequest, admission: PrefillResult | None) -> None:
        if admit.request_id not in self._sampling:
            if not self._begin(admit.request_id):
                self._executor.release(admit.request_id)
                with self._work:
                    self._scheduler.drop_sample(admit.request_id)
                return
            self._sampling[admit.request_id] = _Sampling(
                op=admit.op, watcher=self._watchers.pop(admit.request_id, None)
            )
        if admission is None:
            with self._work:
                self._scheduler.resume(admit)
        else:
            self._counts["tokens_prefilled"] += len(admit.op.prompt) - admission.prompt_cache_hit_tokens
            self._counts["tokens_from_prefix_cache"] += admission.prompt_cache_hit_tokens
            sampling = self._sampling[admit.request_id]
            sampling.admission = sampling.admission or admission
            with self._work:
                self._scheduler.admitted(
                    admit.request_id, prompt_tokens=len(admit.op.prompt) - admission.prompt_cache_hit_tokens
                )
            self._collect(admission.finished)
        self._report([admit.request_id])

    def _decode(self) -> None:
        self._counts["decode_dispatches"] += 1
        try:
            ended = self._executor.decode()
            finished = self._executor.collect(go_on=self._decodes_next(free_slots=1 if ended else 0))
        except Exception as error:
            self._fail_all_samples(error)
        else:
            self._collect(finished)
            self._report(list(self._sampling))

    def _decodes_next(self, *, free_slots: int) -> bool:
        """Whether nobody else wants the devices, where so many more slots are about to be free."""
        with self._work:
            free_slots += self._executor.num_slots - self._executor.rows_decoding
            return not self._stopping and not self._scheduler.interrupts(free_slots=free_slots)

    def _collect(self, rows: Sequence[FinishedRow | FailedRow]) -> None:
        for row in rows:
            sampling = self._sampling.get(row.request_id)
            if sampling is None:  # another row of the request has failed
                continue
            if isinstance(row, FailedRow):
                self._fail_sample(row.request_id, row.error)
                continue
            sampling.sequences[row.index] = row.sequence
            with self._work:
                self._scheduler.row_finished(row.request_id, row.index)
            self._counts["tokens_sampled"] += len(row.sequence.tokens)
            if len(sampling.sequences) == sampling.op.num_samples:
                del self._sampling[row.request_id]
                admission = sampling.admission
                assert admission is not None, "rows finish after they are admitted"
                result = SampleResult(
                    sequences=tuple(sampling.sequences[index] for index in range(sampling.op.num_samples)),
                    prompt_logprobs=admission.prompt_logprobs,
                    prompt_cache_hit_tokens=admission.prompt_cache_hit_tokens,
                    topk_prompt_logprobs=admission.topk_prompt_logprobs,
                    target_prompt_logprobs=admission.target_prompt_logprobs,
                )
                self._resolve(row.request_id, result)

    def _report(self, request_ids: Sequence[int]) -> None:
        """Tell the watchers what their samples have gained, and give up those nobody waits for."""
        for request_id in request_ids:
            sampling = self._sampling.get(request_id)
            if sampling is None or sampling.watcher is None:
                continue
            if not sampling.watcher.wanted():
                self._fail_sample(request_id, WithdrawnError("withdrawn: the client has gone"))
                continue
            for row in self._executor.running(request_id) if sampling.watcher.follows else ():
                seen = sampling.reported.get(row.index, 0)
                if len(row.tokens) > seen:
                    sampling.watcher.tokens(row.index, row.tokens[seen:], row.logprobs[seen:])
                    sampling.reported[row.index] = len(row.tokens)

    def _fail_sample(self, request_id: int, error: Exception) -> None:
        begun = self._sampling.pop(request_id, None) is not None or self._begin(request_id)
        with self._work:
            self._scheduler.drop_sample(request_id)
        if not begun:
            return
        self._executor.release(request_id)
        self._fail(request_id, error, what="Sample")

    def _fail_all_samples(self, error: Exception, *beginning: int) -> None:
        """Every request that has begun, or was about to, shares the fate of the lost cache; those still waiting do not."""
        for request_id in {**dict.fromkeys(self._sampling), **dict.fromkeys(beginning)}:
            self._fail_sample(request_id, error)

    def _begin(self, request_id: int) -> bool:
        """False when the caller has withdrawn the operation, or all are abandoned."""
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

    def _fail(self, request_id: int, error: Exception, *, what: str) -> None:
        self._counts["ops_failed"] += 1
        if not isinstance(error, ServerError):
            logger.error("%s failed: %s", what, error, exc_info=error)
            unexpected = error
            hint = f"{OUT_OF_MEMORY_HINT}; " if "RESOURCE_EXHAUSTED" in str(error) else ""
            error = ServerError(
                f"{what} failed in the engine: {hint}{type(unexpected).__name__}: {unexpected}"
            )
            error.__cause__ = unexpected
        self._deliver(request_id, lambda future: future.set_exception(error))

    def _deliver(self, request_id: int, put: Callable[[Future[OpResult]], None]) -> None:
        with self._work:
            future = self._futures.pop(request_id, None)
            self._watchers.pop(request_id, None)  # of a sample that failed before it began
        if future is not None:  # None: stop() has answered already
            put(future)
