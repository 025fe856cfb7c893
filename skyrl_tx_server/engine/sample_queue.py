"""The sampling requests of each tenant, and the choice of the request that gets the next slot. The docstring
of `scheduler` states the rules. A tenant is busy if it has running sequences or waiting requests."""

from __future__ import annotations

import bisect
import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import islice

from skyrl_tx_server.engine.operations import Sample
from skyrl_tx_server.engine.sample_requests import CHUNK_TOKENS, SLOT_UNITS, Request, SlotPlan, Tenant, Turns
from skyrl_tx_server.engine.scheduled_work import PrefillRequest

PROMPTS_PER_PREFILL = 16
"""The largest number of prefill requests that are offered for one prefill batch. A batch has at most this
number of tiles of 64 prompt tokens (see `GPU_PREFILL` in `model/shapes.py`). Each request takes at least one
tile, except a request for a paused sequence that still has its KV pages."""
PROMPT_TOKENS_PER_UNIT = 64
"""The number of computed prompt tokens for which a tenant is charged one unit. One unit is also the charge
for one running sequence in one decode dispatch."""
SEQUENCES_PER_ROUND = 8
"""The number of sequences of one request that get slots before the next request gets a slot. The sequences of
a request share the KV pages of the prompt, so they should run together."""


class SampleQueue:
    """All sampling requests. `is_changing(weights, request_id)` returns whether an unfinished operation that
    was submitted before the request saves or drops the snapshot `weights`."""

    def __init__(self, *, max_partial_prefill_tokens: int, is_changing: Callable[[str, int], bool]) -> None:
        self._partial_prefill_limit = max_partial_prefill_tokens
        self._is_changing = is_changing
        self.tenants: dict[str, Tenant] = {}  # tenants that have, or had, requests
        self.requests: dict[int, Request] = {}
        self._waiting: dict[int, None] = {}  # ids of the requests with waiting sequences
        self._waiting_for: defaultdict[str, dict[int, None]] = defaultdict(dict)
        """The ids in `_waiting`, by the snapshot that the request needs."""
        self._unsaved: defaultdict[str, list[Request]] = defaultdict(list)
        """Snapshot -> the requests that wait until this snapshot is saved or dropped."""
        self._partial_prefills: Counter[int] = Counter()
        """request_id -> tokens charged so far, for prompts of which only some chunks are computed."""
        self._min_charged = 0.0  # C in the docstring of `scheduler`, as of the last call of `_tenant`
        self.num_dispatches = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def num_waiting_sequences(self, *, at_most: int) -> int:
        """Return the number of waiting sequences of all requests, or `at_most` if there are more. Requests
        that wait until a snapshot is saved or dropped do not count."""
        requests = map(self.requests.__getitem__, self._waiting)
        ready = (request for request in requests if request.op.weights not in self._unsaved)
        # Each request has at least one waiting sequence, so `at_most` requests suffice.
        return min(at_most, sum(request.num_waiting for request in islice(ready, at_most)))

    def __contains__(self, request_id: int) -> bool:
        """Whether the request has waiting sequences."""
        return request_id in self._waiting

    def add(self, request_id: int, op: Sample, *, tenant: str) -> None:
        request = Request(request_id=request_id, op=op, tenant=self._tenant(tenant))
        self.requests[request_id] = request
        request.tenant.num_requests += 1
        self.wait(request)

    def waiting_for(self, weights: str) -> Iterable[int]:
        """Return the request_ids of the requests that wait and need the snapshot."""
        return self._waiting_for.get(weights, ())

    def wait(self, request: Request) -> None:
        """Queue a request that has waiting sequences."""
        self._waiting[request.request_id] = None
        weights = request.op.weights
        if weights is not None:
            self._waiting_for[weights][request.request_id] = None
        self._queue(request)

    def snapshot_changed(self, weights: str) -> None:
        """Queue the requests that have waited until the snapshot is saved or dropped."""
        for request in self._unsaved.pop(weights, []):
            if request.request_id in self.requests:
                self._queue(request)

    def start(self, prefill: PrefillRequest) -> None:
        """Count the sequences of `prefill` as running."""
        request = self.requests[prefill.request_id]
        tenant = request.tenant
        self._remove_unstarted(request)
        if prefill.paused:
            request.paused.remove(prefill.first)
        else:
            request.num_started = prefill.first + prefill.count
        indices = range(prefill.first, prefill.first + prefill.count)
        request.running |= dict.fromkeys(indices, self.num_dispatches)
        tenant.num_running += prefill.count
        tenant.num_small_running += prefill.count * request.is_small
        tenant.running[request.request_id] = request
        if request.num_waiting:
            tenant.started[request.request_id] = request
        else:
            self._stop_waiting(request)

    def requeue(self, prefill: PrefillRequest) -> None:
        """Undo `start`."""
        request = self.requests.get(prefill.request_id)
        if request is None:
            return
        for index in range(prefill.first, prefill.first + prefill.count):
            self._free_slot(request, index)
        if prefill.paused:
            bisect.insort(request.paused, prefill.first)
        else:
            request.num_started = min(request.num_started, prefill.first)
        self.wait(request)

    def pause(self, request: Request, index: int) -> None:
        self._free_slot(request, index)
        bisect.insort(request.paused, index)
        self.wait(request)

    def finish_sequence(self, request_id: int, index: int) -> None:
        request = self.requests.get(request_id)
        if request is None:
            return
        self._free_slot(request, index)
        if not request.running and not request.num_waiting:
            del self.requests[request_id]
            request.tenant.num_requests -= 1

    def drop(self, request_id: int) -> None:
        """Remove a request that failed or was cancelled."""
        self._partial_prefills.pop(request_id, None)
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        request.tenant.num_requests -= 1
        for index in list(request.running):
            self._free_slot(request, index)
        self._stop_waiting(request)

    # --- charges ---

    def prefill_continues(self, prefill: PrefillRequest) -> None:
        """Charge CHUNK_TOKENS tokens, an estimate, for a prefill chunk of a prompt that needs more chunks.
        Charge nothing for a paused sequence, as in `prefill_finished`."""
        if prefill.request_id in self.requests:
            tokens = 0 if prefill.paused else CHUNK_TOKENS
            self._partial_prefills[prefill.request_id] += tokens
            self._charge_prompt(prefill.request_id, tokens)

    def prefill_finished(self, request_id: int, *, prompt_tokens: int) -> None:
        """Charge a computed prompt. `prompt_tokens` is the number of tokens that all its chunks computed, or
        0 for a paused sequence, even if its prefix was computed again. The tokens that `prefill_continues`
        has charged are subtracted."""
        charged = self._partial_prefills.pop(request_id, 0)
        self._charge_prompt(request_id, max(0, prompt_tokens - charged))

    def charge_dispatch(self) -> None:
        """Charge each tenant one unit for each of its running sequences."""
        self.num_dispatches += 1
        for tenant in self.tenants.values():
            tenant.charged += tenant.num_running

    def _charge_prompt(self, request_id: int, tokens: int) -> None:
        if request_id in self.requests:
            self.requests[request_id].tenant.charged += tokens / PROMPT_TOKENS_PER_UNIT

    def _tenant(self, name: str) -> Tenant:
        """Return the tenant of a new request. If the tenant has no waiting requests yet, its charge is raised
        to at least `_min_charged` - SLOT_UNITS units."""
        tenant = self.tenants.get(name)
        if tenant is None:
            self._remove_idle_tenants()
            tenant = self.tenants[name] = Tenant(name=name, charged=0.0)
        if not tenant.has_waiting:
            charges_of_busy_tenants = (
                other.charged
                for other in self.tenants.values()
                if other is not tenant and (other.num_running or other.has_waiting)
            )
            self._min_charged = max(self._min_charged, min(charges_of_busy_tenants, default=0.0))
            tenant.charged = max(tenant.charged, self._min_charged - SLOT_UNITS)
        return tenant

    def _remove_idle_tenants(self) -> None:
        """Remove the tenants without requests whose charge is so low that `_tenant` would raise it anyway."""
        for tenant in list(self.tenants.values()):
            if not tenant.num_requests and tenant.charged <= self._min_charged - SLOT_UNITS:
                del self.tenants[tenant.name]

    # --- the next request ---

    def plan_prefills(
        self, free_slots: int, num_slots: int, *, reserved: list[int], deferred: int | None
    ) -> tuple[PrefillRequest, ...]:
        """Return the prefills for `free_slots` of the `num_slots` slots. The requests in `reserved` get the
        first slots.

        If the first slot would go to the request `deferred`, no prefill is returned.
        """
        plan, chosen = SlotPlan(num_slots=num_slots), dict[int, Request]()
        reserved = [request_id for request_id in reserved if request_id in self._waiting]
        turns = self.turns() if free_slots else []
        while free_slots:
            request = self.requests[reserved.pop(0)] if reserved else self.next_in(turns, plan)
            if request is None or (request.request_id == deferred and not chosen):
                break
            if request.request_id not in chosen:
                if len(chosen) == PROMPTS_PER_PREFILL:
                    break
                chosen[request.request_id] = request
                if self._adds_partial_prefill(request):
                    plan.partial_prefill_tokens += len(request.op.prompt)
            if plan.num_waiting(request) > 0:
                plan.give_slot(request)
                free_slots -= 1
        requests = list(chosen.values())
        requests[1:] = sorted(requests[1:], key=lambda request: request.may_need_chunks)
        prefills = [
            prefill
            for request in requests
            for prefill in request.next_prefills(plan.gained[request.request_id])
        ]
        return tuple(prefills[:PROMPTS_PER_PREFILL])

    def next_of(self, tenant: Tenant, plan: SlotPlan) -> Request | None:
        """Return the tenant's request that gets the next slot once the slots of `plan` are assigned. None: no
        request of the tenant can get a slot."""
        small_first = plan.has_room_for_small(tenant)
        candidates = [*tenant.started.values(), *plan.started[tenant.name]]
        for request_ids in tenant.unstarted.values():
            first = next((request_id for request_id in request_ids if request_id not in plan.gained), None)
            if first is not None:
                candidates.append(self.requests[first])

        def order(request: Request) -> tuple[bool, int, int]:
            round_number = plan.num_running(request) // SEQUENCES_PER_ROUND
            return not (small_first and request.is_small), round_number, request.request_id

        eligible = (
            request
            for request in candidates
            if plan.num_waiting(request) > 0 and self._may_prefill(request, plan)
        )
        return min(eligible, key=order, default=None)

    def turns(self) -> Turns:
        """Return the tenants that have waiting requests, for `next_in`."""
        turns = [
            (tenant.account, tenant.first_waiting, tenant.name)
            for tenant in self.tenants.values()
            if tenant.has_waiting
        ]
        heapq.heapify(turns)
        return turns

    def next_in(self, turns: Turns, plan: SlotPlan) -> Request | None:
        """Return the request that gets the next slot once the slots of `plan` are assigned. None: no request
        can get a slot. For each tenant, `turns` must have an entry whose account is not larger than the
        account in `plan`. An entry with a smaller account is corrected when it is the first of the heap."""
        while turns:
            turn = heapq.heappop(turns)
            tenant = self.tenants[turn[2]]
            request = self.next_of(tenant, plan)
            if request is not None:
                current = plan.account(tenant), request.request_id, tenant.name
                heapq.heappush(turns, current)
                if current == turn:
                    return request
        return None

    def _may_prefill(self, request: Request, plan: SlotPlan) -> bool:
        """Whether the prompt may be computed now. The first chunk of a long prompt must wait if other
        prompts are partly computed and have, together with this prompt, more than
        `max_partial_prefill_tokens` tokens."""
        partial = sum(len(self.requests[request_id].op.prompt) for request_id in self._partial_prefills)
        tokens = partial + plan.partial_prefill_tokens
        return (
            not self._adds_partial_prefill(request)
            or not tokens
            or tokens + len(request.op.prompt) <= self._partial_prefill_limit
        )

    def _adds_partial_prefill(self, request: Request) -> bool:
        """Whether the prompt is long and its first chunk is not computed yet."""
        return request.may_need_chunks and request.request_id not in self._partial_prefills

    # --- queues ---

    def _queue(self, request: Request) -> None:
        weights = request.op.weights
        if weights is not None and self._is_changing(weights, request.request_id):
            self._unsaved[weights].append(request)
        elif request.has_started:
            request.tenant.started[request.request_id] = request
        else:
            bisect.insort(request.tenant.unstarted[request.is_small, request.is_long], request.request_id)

    def _remove_unstarted(self, request: Request) -> None:
        """Remove the request from the requests of its tenant that have not started, if it is one of them."""
        request_ids = request.tenant.unstarted[request.is_small, request.is_long]
        place = bisect.bisect_left(request_ids, request.request_id)
        if request_ids[place : place + 1] == [request.request_id]:
            del request_ids[place]

    def _stop_waiting(self, request: Request) -> None:
        """Remove the request from the queues."""
        self._waiting.pop(request.request_id, None)
        request.tenant.started.pop(request.request_id, None)
        self._remove_unstarted(request)
        weights = request.op.weights
        if weights is not None and weights in self._waiting_for:
            self._waiting_for[weights].pop(request.request_id, None)
            if not self._waiting_for[weights]:
                del self._waiting_for[weights]

    def _free_slot(self, request: Request, index: int) -> None:
        if request.running.pop(index, None) is None:
            return
        tenant = request.tenant
        tenant.num_running -= 1
        tenant.num_small_running -= request.is_small
        if not request.running:
            del tenant.running[request.request_id]
