"""Decides which work the engine does next. Pure bookkeeping: no threads and no devices.

Each rule has a test:
- Operations of one model run in submission order, one at a time. Tenants take turns, and within a tenant its
  models, one step (one micro-batch) each.
- When training and sampling both have work they alternate: one decode dispatch between two training steps,
  one training step between two decode dispatches. A forward pass that is submitted during a long generation
  therefore waits for one decode dispatch (and at most PREFILLS_PER_DISPATCH prefill batches).
- Prefill batches after which no more sequences run than before (all of them ended with their first token)
  give running sequences a decode dispatch as often as training does.
- A long prompt is prefilled in chunks, and running sequences get a decode dispatch between two of them.
- A decode dispatch directly follows the previous one, while the host reads the previous result, unless other
  work is next.
- A sample waits for a snapshot that is still being saved, and dropping a snapshot waits for the samples that
  were submitted before it.

Slots and prefill work are shared fairly, first between tenants and then between the requests of a tenant
(deficit round robin):
- A tenant is charged one unit for each decode dispatch of each of its sequences, and one for each
  PROMPT_TOKENS_PER_UNIT prompt tokens that are computed. A free slot goes to the tenant with the smallest
  account: the units charged, and SLOT_UNITS units for each sequence that has a slot. A tenant that was idle
  starts at most SLOT_UNITS units below the busy tenant that was charged least, so idle time is not saved.
- When no slot is free, a sequence of the tenant with the largest account is paused for the tenant with the
  smallest, if the accounts differ by at least 2 * SLOT_UNITS. For a small request (at most SMALL_TOKENS
  tokens in all) it is enough that its tenant was charged no more than the average of the other waiting
  tenants, so small requests wait for a few dispatches only. A sequence decodes for at least MIN_DISPATCHES
  dispatches before it is paused, and it is the first of its request to get a slot again.
- Within a tenant, requests get slots in submission order, SEQUENCES_PER_ROUND sequences each before any of
  them gets more. A request with more sequences than that is paused, sequence by sequence, for one that has at
  least two sequences fewer.
- Small requests precede the other requests of their tenant, and sequences of those are paused for them, as
  long as the small requests of the tenant have less than a quarter of the slots.
- Prompts of which only some chunks are computed have at most `max_partial_prefill_tokens` tokens in total, so
  that they do not evict each other from the prefix cache.
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
    Pause,
    Prefill,
    PrefillRequest,
    ScheduledWork,
    Step,
)

PREFILLS_PER_DISPATCH = 4
"""Prefill batches before a decode dispatch while training waits, or that add no running sequence. Otherwise
all free slots are filled first."""


class Scheduler:
    """The queues, and the choice between them. The caller holds a lock."""

    def __init__(self, *, max_partial_prefill_tokens: int = 0) -> None:
        self._operations = OperationQueue()
        self._samples = SampleQueue(
            max_partial_prefill_tokens=max_partial_prefill_tokens,
            is_being_saved=self._operations.is_being_saved,
        )
        self._training_next = True
        self._prefills = 0  # since the last decode dispatch
        self._prefills_in_vain = 0  # of them, those since the number of running sequences last grew
        self._num_running = 0  # before the current work
        self._deferred: int | None = None  # the request for which the executor has no KV pages
        self._decode_next = False  # the last work was a chunk of a prompt that needs more
        self._may_pause = False  # no decode steps are in flight
        self._num_slots = 1
        self._reserved: Counter[int] = Counter()  # by request_id, slots that were freed for it

    def add(self, request_id: int, op: Op, *, tenant: str = DEFAULT_TENANT) -> None:
        """Queue `op`. Every request_id must be larger than the previous one."""
        if isinstance(op, Sample):
            self._samples.add(request_id, op, tenant=tenant)
        else:
            self._operations.add(request_id, op, tenant=tenant)

    def next(self, *, free_slots: int, num_running: int) -> ScheduledWork | None:
        """Return the next work, or None if there is none until something is added or a sequence finishes."""
        step = self._operations.next(self._may_run)
        self._num_slots = max(1, free_slots + num_running)
        if num_running > self._num_running:
            self._prefills_in_vain = 0
        self._num_running = num_running
        if self._may_pause and (pauses := self._pauses(free_slots)):
            return self._pause(pauses)
        decode_next = self._decode_next or self._prefills_in_vain >= PREFILLS_PER_DISPATCH
        prefills = () if decode_next and num_running else self._next_prefills(free_slots)
        if step is not None and self._prefills >= PREFILLS_PER_DISPATCH:
            prefills = ()
        if step is not None and (self._training_next or not (prefills or num_running)):
            self._training_next = False
            self._prefills = 0
            self._operations.rotate(step.op)
            return step
        if prefills:
            self._prefills += 1
            self._prefills_in_vain += 1
            self._reserved.clear()
            for prefill in prefills:
                self._samples.start(prefill)
            return Prefill(requests=prefills)
        if num_running:
            self._training_next = True
            self._decode_next = self._may_pause = False
            self._prefills = self._prefills_in_vain = 0
            self._samples.charge_dispatch()
            return Decode()
        return None

    def interrupts(self, *, free_slots: int) -> bool:
        """Whether the work after the current decode dispatch is not another decode dispatch."""
        self._may_pause = (
            self._operations.next(self._may_run) is not None
            or bool(self._next_prefills(free_slots))
            or bool(self._pauses(free_slots))
        )
        return self._may_pause

    def finish(self, step: Step) -> None:
        """The operation of `step` has succeeded or failed; the next one of its model may run."""
        self._operations.finish(step)
        if isinstance(step.op, SaveSampler):
            self._samples.snapshot_saved(step.op.weights)

    def requeue(self, prefills: Sequence[PrefillRequest]) -> None:
        """Queue these again, at the places they had."""
        for prefill in reversed(prefills):
            self._samples.requeue(prefill)

    def defer(self, prefills: Sequence[PrefillRequest]) -> None:
        """Queue these again. The executor has no KV pages for the first until a sequence finishes or is
        paused."""
        self.requeue(prefills)
        self._deferred = prefills[0].request_id

    def prefill_continues(self, prefill: PrefillRequest) -> None:
        """A chunk of the prompt is computed, and the prompt needs more; a decode dispatch comes first."""
        self.requeue([prefill])
        self._decode_next = True
        self._samples.prefill_continues(prefill.request_id)

    def prefill_finished(self, request_id: int, *, prompt_tokens: int) -> None:
        """The sequences of a request have their slots; `prompt_tokens` tokens of its prompt were computed."""
        self._samples.prefill_finished(request_id, prompt_tokens=prompt_tokens)

    def sequence_finished(self, request_id: int, index: int) -> None:
        self._deferred = None
        self._samples.finish_sequence(request_id, index)

    def drop_request(self, request_id: int) -> None:
        """Remove a request that failed."""
        self._deferred = None
        self._samples.drop(request_id)

    @property
    def num_waiting_samples(self) -> int:
        """The number of requests with waiting samples."""
        return len(self._samples)

    @property
    def num_waiting_steps(self) -> int:
        """The number of operations that have not finished, samples excepted."""
        return len(self._operations)

    def _may_run(self, step: Step) -> bool:
        match step.op:
            case DropSnapshot(weights=weights):
                waiting = self._samples.waiting_for(weights)
                return not any(
                    request_id < step.request_id for request_id in waiting
                ) and not self._operations.is_being_saved(weights, step.request_id)
            case _:
                return True

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
