"""Sampling requests, their tenants, and the planned assignment of slots."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial

from skyrl_tx_server.engine.operations import Sample
from skyrl_tx_server.engine.scheduled_work import PrefillRequest

SLOT_UNITS = 16
"""Number of units that each sequence with a slot adds to the account of its tenant, which the docstring of
`scheduler` describes."""
CHUNK_TOKENS = 512
"""A prompt of at most this many tokens fits into one prefill batch on every kind of device."""
SMALL_TOKENS = 64
"""A request is small if the max_tokens of all its sequences add up to at most this number."""


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """A `Sample` operation with sequences that wait or have slots."""

    request_id: int
    op: Sample
    tenant: Tenant
    num_started: int = 0  # the sequences with an index below this number have or had a slot
    paused: list[int] = field(default_factory=list)  # the indices of paused sequences, ascending
    running: dict[int, int] = field(default_factory=dict)
    """Index of each sequence with a slot -> `SampleQueue.num_dispatches` when the sequence got the slot."""

    @property
    def num_waiting(self) -> int:
        return self.op.num_samples - self.num_started + len(self.paused)

    @property
    def has_started(self) -> bool:
        return bool(self.num_started or self.paused or self.running)

    @property
    def is_small(self) -> bool:
        max_tokens = self.op.settings.max_tokens
        return max_tokens is not None and self.op.num_samples * max_tokens <= SMALL_TOKENS

    @property
    def is_long(self) -> bool:
        """Whether the prompt may be too long for a prefill batch that contains nothing else."""
        return len(self.op.prompt) > CHUNK_TOKENS

    @property
    def may_need_chunks(self) -> bool:
        """Whether the prompt is long and must still be computed, at least in part."""
        return self.is_long and not self.has_started

    def next_prefills(self, count: int) -> list[PrefillRequest]:
        """Return the work that gives slots to the next `count` sequences, paused ones first."""
        paused = self.paused[:count]
        prefill = partial(PrefillRequest, request_id=self.request_id, op=self.op, tenant=self.tenant.name)
        prefills = [prefill(first=index, count=1, paused=True) for index in paused]
        if count > len(paused):
            prefills.append(prefill(first=self.num_started, count=count - len(paused)))
        return prefills


@dataclass(kw_only=True, slots=True, eq=False)
class Tenant:
    """The requests of a tenant, and the units that the tenant was charged."""

    name: str
    charged: float  # units for decode dispatches and prompt tokens, without those for slots
    num_requests: int = 0  # including requests that wait until a snapshot is saved or dropped
    num_running: int = 0
    num_small_running: int = 0
    running: dict[int, Request] = field(default_factory=dict)
    """Requests with sequences in slots, by id."""
    started: dict[int, Request] = field(default_factory=dict)
    """Requests that have started and have waiting sequences, by id."""
    unstarted: defaultdict[tuple[bool, bool], list[int]] = field(default_factory=lambda: defaultdict(list))
    """(is_small, is_long) -> ids, in ascending order, of the waiting requests that have not started."""

    @property
    def account(self) -> float:
        return self.charged + SLOT_UNITS * self.num_running

    @property
    def has_waiting(self) -> bool:
        return bool(self.started) or any(self.unstarted.values())

    @property
    def has_small_waiting(self) -> bool:
        return any(request.is_small for request in self.started.values()) or any(
            ids for (is_small, _), ids in self.unstarted.items() if is_small
        )

    @property
    def first_waiting(self) -> int:
        """The smallest id of the waiting requests."""
        return min((*self.started, *(ids[0] for ids in self.unstarted.values() if ids)))


type Turns = list[tuple[float, int, str]]
"""A heap with (account, lower bound of the id of the next request, name) of each tenant that may be next."""


@dataclass(kw_only=True, slots=True)
class SlotPlan:
    """A plan that the scheduler has not carried out: the slots that sequences would gain and lose."""

    num_slots: int  # all slots, free or in use
    tenants: Counter[str] = field(default_factory=Counter)  # slots gained minus slots lost
    small: Counter[str] = field(default_factory=Counter)  # the same for small requests only
    gained: Counter[int] = field(default_factory=Counter)  # slots that the request gains, by request_id
    paused: dict[int, set[int]] = field(
        default_factory=lambda: defaultdict(set)
    )  # indices of the sequences that lose their slots, by request_id
    started: defaultdict[str, list[Request]] = field(default_factory=lambda: defaultdict(list))
    """Tenant -> the requests to which the plan gives their first slots."""
    partial_prefill_tokens: int = 0  # prompt tokens of long prompts whose prefill would start

    def has_room_for_small(self, tenant: Tenant) -> bool:
        """Whether small requests of the tenant have less than a quarter of the slots."""
        return tenant.num_small_running + self.small[tenant.name] < max(1, self.num_slots // 4)

    def account(self, tenant: Tenant) -> float:
        return tenant.account + SLOT_UNITS * self.tenants[tenant.name]

    def num_running(self, request: Request) -> int:
        paused = self.paused.get(request.request_id, ())
        return len(request.running) + self.gained[request.request_id] - len(paused)

    def num_waiting(self, request: Request) -> int:
        return request.num_waiting - self.gained[request.request_id]

    def give_slot(self, request: Request) -> None:
        if request.request_id not in self.gained and not request.has_started:
            self.started[request.tenant.name].append(request)
        self.gained[request.request_id] += 1
        self.tenants[request.tenant.name] += 1
        self.small[request.tenant.name] += request.is_small

    def pause(self, request: Request, index: int) -> None:
        self.paused[request.request_id].add(index)
        self.tenants[request.tenant.name] -= 1
        self.small[request.tenant.name] -= request.is_small
