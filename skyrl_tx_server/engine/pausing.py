"""Chooses the running sequences to pause when no slot, KV page or LoRA slot is free.

The docstring of `scheduler` states the rules and describes the account of a tenant.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from skyrl_tx_server.engine.sample_queue import SEQUENCES_PER_ROUND, SampleQueue
from skyrl_tx_server.engine.sample_requests import SLOT_UNITS, Request, SlotPlan, Tenant, Turns

MIN_DISPATCHES = 2
"""A sequence keeps its slot for at least this many decode dispatches before it may be paused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPause:
    """The sequence `index` of `request` is paused, and its slot goes to `waiter`."""

    request: Request
    index: int
    waiter: Request


def plan_pauses(queue: SampleQueue, num_slots: int, *, for_memory: bool) -> list[PlannedPause]:
    """Return the sequences to pause. `num_slots` is the number of all slots, free or in use. `for_memory`
    means that a KV page or a LoRA slot is missing. With `for_memory`, return at most one sequence."""
    plan, pauses, turns = SlotPlan(num_slots=num_slots), list[PlannedPause](), queue.turns()
    while len(pauses) < num_slots:
        pause = _next_pause(queue, turns, plan, for_memory=for_memory)
        if pause is None:
            break
        plan.give_slot(pause.waiter)
        plan.pause(pause.request, pause.index)
        pauses.append(pause)
        if for_memory:
            break
        tenant = pause.request.tenant
        if tenant.has_waiting:  # its account has decreased
            heapq.heappush(turns, (plan.account(tenant), tenant.first_waiting, tenant.name))
    return pauses


def _next_pause(queue: SampleQueue, turns: Turns, plan: SlotPlan, *, for_memory: bool) -> PlannedPause | None:
    """Return one pause in addition to the pauses in `plan`, or None if no sequence should be paused."""
    largest_account, sequence = _sequence_of_largest_account(queue, plan)
    first = None if sequence is None else queue.next_in(turns, plan)
    if sequence is None or first is None:
        return None
    if (
        sequence[0].tenant is not first.tenant
        and largest_account - SLOT_UNITS >= plan.account(first.tenant) + SLOT_UNITS
    ):
        return PlannedPause(request=sequence[0], index=sequence[1], waiter=first)
    if for_memory:
        return None
    # The remaining rules can give a slot only to these tenants.
    waiters = _waiters(
        queue,
        plan,
        [
            tenant
            for tenant in queue.tenants.values()
            if tenant.running or tenant.has_small_waiting or plan.started.get(tenant.name)
        ],
    )
    all_waiters: list[Request] | None = None
    for waiter in waiters:
        tenant = waiter.tenant
        if sequence[0].tenant is not tenant and waiter.is_small and plan.has_room_for_small(tenant):
            if all_waiters is None:
                all_waiters = _waiters(queue, plan, queue.tenants.values())
            max_account = largest_account - SLOT_UNITS
            if len(all_waiters) > 1:
                charged = sum(other.tenant.charged for other in all_waiters)
                max_account = (charged - tenant.charged) / (len(all_waiters) - 1)
            if plan.account(tenant) <= max_account:
                return PlannedPause(request=sequence[0], index=sequence[1], waiter=waiter)
        same_tenant = _sequence_of_same_tenant(queue, waiter, plan)
        if same_tenant is not None:
            return PlannedPause(request=same_tenant[0], index=same_tenant[1], waiter=waiter)
    return None


def _waiters(queue: SampleQueue, plan: SlotPlan, tenants: Iterable[Tenant]) -> list[Request]:
    """Return the next request of each tenant that has one, in the order of the accounts."""
    requests = [
        queue.next_of(tenant, plan)
        for tenant in tenants
        if tenant.has_waiting or plan.started.get(tenant.name)
    ]
    return sorted(
        (request for request in requests if request is not None),
        key=lambda request: (plan.account(request.tenant), request.request_id),
    )


def _sequence_of_largest_account(
    queue: SampleQueue, plan: SlotPlan
) -> tuple[float, tuple[Request, int] | None]:
    """Among the tenants with a sequence that may be paused, choose the tenant that has the largest account
    after the changes in `plan`. Return this account and the sequence to pause, or (0, None) if
    no sequence may be paused."""
    running = [tenant for tenant in queue.tenants.values() if tenant.num_running]
    for tenant in sorted(running, key=plan.account, reverse=True):
        sequence = _sequence_to_pause(queue, tenant.running.values(), plan)
        if sequence is not None:
            return plan.account(tenant), sequence
    return 0.0, None


def _sequence_of_same_tenant(
    queue: SampleQueue, waiter: Request, plan: SlotPlan
) -> tuple[Request, int] | None:
    """Return a sequence that may be paused for `waiter`, from another request of the tenant of `waiter`."""
    requests = [request for request in waiter.tenant.running.values() if request is not waiter]
    if waiter.is_small and plan.has_room_for_small(waiter.tenant):
        return _sequence_to_pause(queue, [request for request in requests if not request.is_small], plan)
    at_least = max(SEQUENCES_PER_ROUND + 1, plan.num_running(waiter) + 2)
    larger = [request for request in requests if plan.num_running(request) >= at_least]
    return _sequence_to_pause(queue, larger, plan)


def _sequence_to_pause(
    queue: SampleQueue, requests: Iterable[Request], plan: SlotPlan
) -> tuple[Request, int] | None:
    """Among the requests with a sequence that may be paused, choose the request with the most running
    sequences. If several requests have equally many, choose the one submitted last. Return the request and
    the largest index of a sequence that may be paused, or None if no request has such a sequence."""
    candidates = [
        (plan.num_running(request), request.request_id, index)
        for request in requests
        for index, since in request.running.items()
        if queue.num_dispatches - since >= MIN_DISPATCHES
        and index not in plan.paused.get(request.request_id, ())
    ]
    if not candidates:
        return None
    _, request_id, index = max(candidates)
    return queue.requests[request_id], index
