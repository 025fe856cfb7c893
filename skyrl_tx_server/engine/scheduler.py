"""Decides which work the engine does next. The module uses no threads and no devices.

Each of these rules has a test:
- Operations of one model run in submission order, one at a time. After each operation step (in training,
  one micro-batch), the scheduler alternates between tenants, and between the models of a tenant.
- When training and sampling both have work, operation steps and decode dispatches alternate. A decode
  dispatch is one program call that samples the next tokens of all running sequences. A forward pass that is
  submitted while sequences are sampled therefore waits for at most one decode dispatch and
  PREFILLS_PER_DISPATCH prefill batches.
- With `train_share`, the choice depends on the time instead. An operation step is next if the previous
  operation steps took at most this share of the time in which both training and sampling had work.
- A prefill batch adds no running sequence if all its sequences end with their first token. Running sequences
  get a decode dispatch after at most PREFILLS_PER_DISPATCH such batches.
- A long prompt is prefilled in chunks. The prompt is unfinished until its last chunk is computed. During a
  decode dispatch between two chunks, the slots that waiting sequences could use are idle. The dispatch
  therefore waits until the time that it wastes on idle slots (`_prefill_budget` contains the formula) is at
  most MAX_IDLE_SHARE of the time of the prefill batches with an unfinished prompt since the last dispatch.
- In a prefill batch, the first request is followed by requests whose prompt has at most CHUNK_TOKENS tokens
  or is already computed, and then by requests with a longer prompt.
- A decode dispatch starts before the host processes the result of the previous one, unless other work is
  next.
- A `Sample` operation waits until earlier operations have saved or dropped its snapshot. A `DropSnapshot`
  waits until its snapshot is saved and no sequence of an earlier `Sample` operation of this snapshot waits
  for a slot. A `SaveSampler` waits until earlier operations have dropped the snapshot with its name.

Slots and prefill work are shared fairly, first between tenants and then between the requests of a tenant:
- In each decode dispatch, a tenant is charged one unit for each of its running sequences. It is also charged
  one unit for each PROMPT_TOKENS_PER_UNIT prompt tokens that are computed. A prefill chunk of an unfinished
  prompt counts as CHUNK_TOKENS tokens, and the last chunk counts as the rest of the computed tokens. If the
  prefix of a paused or preempted sequence is computed again, nothing is charged.
- The account of a tenant is the number of its charged units plus SLOT_UNITS units for each of its sequences
  that has a slot. A free slot goes to the tenant with the smallest account. When a tenant without waiting
  requests submits one, its charge is raised to C - SLOT_UNITS units if it is below this value, so the tenant
  gains little from idle time. C is the lowest charge of the other tenants that have running sequences or
  waiting requests, and C never decreases.
- If no slot is free, or if a KV page or a LoRA slot is missing, a sequence of the tenant with the largest
  account is paused for the tenant with the smallest account. The accounts must differ by at least
  2 * SLOT_UNITS. A sequence keeps its slot for at least MIN_DISPATCHES dispatches before it is paused. The
  paused sequences of a request get slots before its other waiting sequences.
- If no slot is free, a sequence is also paused in the cases of the next three rules. If a KV page or a LoRA
  slot is missing, these rules pause no sequence.
- For a small request (at most SMALL_TOKENS completion tokens in total), a sequence of the tenant with the
  largest account is paused if the account of the waiting tenant is at most the mean of the units charged to
  the other waiting tenants. If no other tenant waits, the account must be at least SLOT_UNITS units below the
  largest account. With this rule, small requests wait for only a few dispatches. The rule applies only while
  the small requests of the waiting tenant have less than a quarter of the slots.
- Within a tenant, requests get slots in submission order. Each request gets SEQUENCES_PER_ROUND slots before
  any request gets more. A sequence of a request with more than SEQUENCES_PER_ROUND slots is paused for a
  request of the same tenant that has at least two slots fewer.
- As long as the small requests of a tenant have less than a quarter of the slots, small requests precede the
  other requests of the tenant, and sequences of the other requests are paused for small requests.
- Prompts of which only some chunks are computed have at most `max_partial_prefill_tokens` tokens in total, so
  that they do not evict each other from the prefix cache. A single prompt may be longer, and prompts of at
  most CHUNK_TOKENS tokens have no limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from skyrl_tx_server.engine.operation_queue import OperationQueue
from skyrl_tx_server.engine.operations import DEFAULT_TENANT, DropSnapshot, Op, Sample, SaveSampler
from skyrl_tx_server.engine.pausing import PlannedPause, plan_pauses
from skyrl_tx_server.engine.sample_queue import SampleQueue
from skyrl_tx_server.engine.scheduled_work import (
    Decode,
    OperationStep,
    Pause,
    Prefill,
    PrefillRequest,
    ScheduledWork,
)

PREFILLS_PER_DISPATCH = 4
"""The maximum number of prefill batches before a decode dispatch. If training waits and `train_share` is not
set, every prefill batch counts. Otherwise, a batch counts only if it adds neither a running sequence nor a
chunk of an unfinished prompt. Apart from this limit and `_prefill_budget`, all free slots are filled before a
decode dispatch."""
MAX_COUNTED_S = 30.0
"""The maximum number of seconds that one `ScheduledWork` counts for `train_share`, because the first run of a
program includes its compilation."""
MAX_IDLE_SHARE = 0.125
"""The maximum time that a decode dispatch may waste on idle slots, as a share of the time of the prefill
batches with an unfinished prompt since the last dispatch."""


class Scheduler:
    """Owns the queues and chooses the next work. The caller must hold a lock during each call."""

    def __init__(
        self,
        *,
        max_partial_prefill_tokens: int = 0,
        prefills_per_dispatch: float = 0.0,
        train_share: float | None = None,
    ) -> None:
        """`prefills_per_dispatch` is the estimated duration of a decode dispatch, divided by that of a full
        prefill batch. It is not the limit PREFILLS_PER_DISPATCH. If `train_share` is None, operation steps
        and decode dispatches alternate."""
        self._operations = OperationQueue()
        self._samples = SampleQueue(
            max_partial_prefill_tokens=max_partial_prefill_tokens,
            is_changing=lambda weights, request_id: (
                self._operations.is_being_saved(weights, request_id)
                or self._operations.is_being_dropped(weights, request_id)
            ),
        )
        self._blocked: set[int] = set()  # operations that wait for another thread, by request_id
        self._prefills_per_dispatch = prefills_per_dispatch
        self._train_share = train_share
        self._training_ahead_s = 0.0  # the time by which training has exceeded `train_share`
        self._dispatch_s = 0.0  # the duration of the last decode dispatch
        self._is_shared = False  # whether both training and sampling have work
        self._training_next = True
        self._prefills = 0  # prefill batches since the last decode dispatch or operation step
        # prefill batches since the latest of these events: a decode dispatch, a batch that added a running
        # sequence, and a batch with a chunk of an unfinished prompt
        self._prefills_without_growth = 0
        self._num_running = 0  # at the previous call of `next`
        self._deferred: int | None = None  # the request that `defer` has queued again
        # whether the last prefill batch has a chunk of a prompt that needs more chunks
        self._has_chunk = False
        self._chunk_batches = 0  # batches with such a chunk since the last decode dispatch
        self._may_pause = False  # whether sequences may be paused: no decode steps are in flight
        self._num_slots = 1
        self._reserved: Counter[int] = Counter()  # request_id -> number of slots that pauses freed for it

    def add(self, request_id: int, op: Op, *, tenant: str = DEFAULT_TENANT) -> None:
        """Queue `op`. Every request_id must be larger than the previous one."""
        if isinstance(op, Sample):
            self._samples.add(request_id, op, tenant=tenant)
        else:
            self._operations.add(request_id, op, tenant=tenant)

    def next(self, *, free_slots: int, num_running: int) -> ScheduledWork | None:
        """Return the next work, or None if there is none until an operation is added or unblocked."""
        step = self._operations.next(self._may_run)
        self._num_slots = max(1, free_slots + num_running)
        if num_running > self._num_running or self._has_chunk:
            self._prefills_without_growth = 0
        self._chunk_batches += self._has_chunk
        self._has_chunk = False
        self._num_running = num_running
        if self._may_pause and (pauses := self._pauses(free_slots)):
            return self._pause(pauses)
        decode_next = self._prefills_without_growth >= PREFILLS_PER_DISPATCH or (
            self._chunk_batches >= max(1.0, self._prefill_budget(free_slots, num_running))
        )
        prefills = () if decode_next and num_running else self._next_prefills(free_slots)
        if step is not None and self._prefills >= PREFILLS_PER_DISPATCH and self._train_share is None:
            prefills = ()
        has_samples = bool(prefills or num_running)
        self._is_shared = step is not None and has_samples
        if step is not None and (self._is_training_next() or not has_samples):
            self._training_next = False
            self._prefills = 0
            self._operations.rotate(step.op)
            return step
        if prefills:
            self._prefills += 1
            self._prefills_without_growth += 1
            self._reserved.clear()
            for prefill in prefills:
                self._samples.start(prefill)
            return Prefill(requests=prefills)
        if num_running:
            self._training_next = True
            self._may_pause = False
            self._prefills = self._prefills_without_growth = self._chunk_batches = 0
            self._samples.charge_dispatch()
            return Decode()
        return None

    def interrupts(self, *, free_slots: int) -> bool:
        """Whether other work than a decode dispatch follows the current decode dispatch."""
        self._may_pause = (
            (self._operations.next(self._may_run) is not None and self._is_training_next(self._dispatch_s))
            or bool(self._next_prefills(free_slots))
            or bool(self._pauses(free_slots))
        )
        return self._may_pause

    def count_time(self, work: ScheduledWork, seconds: float) -> None:
        """Count the time of the last work for `train_share`. Time in which only training has work does not
        count. Time in which only sampling has work makes up for earlier training above its share, but does
        not allow more training later."""
        share, counted_s = self._train_share, min(seconds, MAX_COUNTED_S)
        if share is None:
            return
        if isinstance(work, Decode):
            self._dispatch_s = counted_s
        if isinstance(work, OperationStep):
            self._training_ahead_s += (1 - share) * counted_s * self._is_shared
        elif self._is_shared:
            self._training_ahead_s -= share * counted_s
        else:
            self._training_ahead_s = max(0.0, self._training_ahead_s - share * counted_s)

    def block(self, request_id: int) -> None:
        """Note that the operation waits for another thread. No operation of its model runs until `unblock` is
        called."""
        self._blocked.add(request_id)

    def unblock(self, request_id: int) -> None:
        self._blocked.discard(request_id)

    def finish(self, step: OperationStep) -> None:
        """Note that the operation of `step` has ended. The next operation of its model may run."""
        self._operations.finish(step)
        if isinstance(step.op, SaveSampler | DropSnapshot):
            self._samples.snapshot_changed(step.op.weights)

    def cancel(self, request_id: int) -> None:
        """Remove an operation that was cancelled before it started. Ignore an operation that was removed
        already."""
        step = self._operations.waiting(request_id)
        if step is None:
            self.drop_request(request_id)
        else:
            self.finish(step)

    def requeue(self, prefills: Sequence[PrefillRequest]) -> None:
        """Queue these requests again, at their previous places."""
        for prefill in reversed(prefills):
            self._samples.requeue(prefill)

    def defer(self, prefills: Sequence[PrefillRequest]) -> None:
        """Queue these requests again. The first of them must wait for KV pages, a LoRA slot or preempted
        sequences. It can run again after one of these events: a sequence finishes or is paused, a request
        fails or is cancelled, or `retry_deferred` is called."""
        self.requeue(prefills)
        first = prefills[0].request_id
        self._deferred = first if first in self._samples else None  # a client may have cancelled the request

    def retry_deferred(self) -> None:
        """Offer the deferred request again, because a preempted sequence was restored."""
        self._deferred = None

    def prefill_continues(self, prefill: PrefillRequest) -> None:
        """Note that a chunk of the prompt was computed and that the prompt has more chunks."""
        self.requeue([prefill])
        self._has_chunk = True
        self._samples.prefill_continues(prefill)

    def prefill_finished(self, request_id: int, *, prompt_tokens: int) -> None:
        """Note that the sequences of a request have slots. `prompt_tokens` tokens of its prompt were
        computed."""
        self._samples.prefill_finished(request_id, prompt_tokens=prompt_tokens)

    def sequence_finished(self, request_id: int, index: int) -> None:
        self._deferred = None
        self._samples.finish_sequence(request_id, index)

    def drop_request(self, request_id: int) -> None:
        """Remove a request that failed or was cancelled."""
        self._deferred = None
        self._samples.drop(request_id)

    @property
    def num_waiting_samples(self) -> int:
        """The number of requests with waiting sequences."""
        return len(self._samples)

    @property
    def num_waiting_steps(self) -> int:
        """The number of operations other than `Sample` that have not finished."""
        return len(self._operations)

    def _may_run(self, step: OperationStep) -> bool:
        if step.request_id in self._blocked:
            return False
        match step.op:
            case DropSnapshot(weights=weights):
                waiting = self._samples.waiting_for(weights)
                return not any(
                    request_id < step.request_id for request_id in waiting
                ) and not self._operations.is_being_saved(weights, step.request_id)
            case SaveSampler(weights=weights):
                return not self._operations.is_being_dropped(weights, step.request_id)
            case _:
                return True

    def _is_training_next(self, after_s: float = 0.0) -> bool:
        """Whether an operation step is the next work after `after_s` more seconds of sampling."""
        if self._train_share is None:
            return self._training_next
        return self._training_ahead_s <= self._train_share * after_s

    def _prefill_budget(self, free_slots: int, num_running: int) -> float:
        """Return how many prefill batches with an unfinished prompt should precede a decode dispatch.

        R sequences run, F waiting sequences could use free slots, and a dispatch takes as long as D batches.
        A dispatch now would waste the share F / (R + F) of its time on idle slots, which is the time of
        D F / (R + F) batches. The budget is this number divided by MAX_IDLE_SHARE. It is at most
        D / MAX_IDLE_SHARE, so the delay of a dispatch is bounded.
        """
        waiting = self._samples.num_waiting_sequences(at_most=free_slots)
        idle = waiting / max(1, num_running + waiting)
        return self._prefills_per_dispatch * idle / MAX_IDLE_SHARE

    def _next_prefills(self, free_slots: int) -> tuple[PrefillRequest, ...]:
        return self._samples.plan_prefills(
            free_slots, self._num_slots, reserved=list(self._reserved.elements()), deferred=self._deferred
        )

    def _pauses(self, free_slots: int) -> list[PlannedPause]:
        if free_slots and self._deferred is None:
            return []
        return plan_pauses(self._samples, self._num_slots, for_memory=self._deferred is not None)

    def _pause(self, pauses: Sequence[PlannedPause]) -> Pause:
        self._deferred = None
        self._reserved.clear()
        for pause in pauses:
            self._samples.pause(pause.request, pause.index)
            self._reserved[pause.waiter.request_id] += 1
        return Pause(sequences=tuple((pause.request.request_id, pause.index) for pause in pauses))
