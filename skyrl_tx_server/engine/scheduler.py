"""Which work comes next: pure bookkeeping, no threads and no devices.

Rules, each with its test:
- Operations of one model run in submission order, one at a time. Tenants take turns, and within a tenant its models, one step (one
  micro-batch) each.
- When training and sampling both have work they alternate: a decode block between two training steps, a training step between two decode
  blocks. A forward pass beside a long generation therefore waits for one block (and at most PREFILLS_PER_TURN prefills).
- Prefills after which no more rows decode than before (all of them were over with their first token) let running samples have a decode
  block as often as training does.
- A long prompt is prefilled in pieces, and running samples get a decode block between two of them.
- A decode block follows the one before it at once, while the host looks at what that one brought, unless somebody else's turn is next.
- A sample waits for a snapshot that is still being saved, and dropping a snapshot waits for the samples that were asked for before it.

Decode slots and prefill work are shared fairly, first between tenants and then between the requests of a tenant:
- A tenant pays one unit for each decode block of each of its rows, and one for each PROMPT_TOKENS_PER_UNIT prompt tokens that are
  computed. A free slot goes to the tenant that has paid least, where each row that it has in a slot counts as QUANTUM units more. A
  tenant that was idle starts at most QUANTUM units below the busy tenant that has paid least, so idle time cannot be saved up.
- When no slot is free, a row of the tenant with the largest account is paused for the tenant with the smallest, if that is a row and a
  quantum below it. For a small request (at most SMALL_TOKENS tokens in all) it is enough that its tenant has paid no more than the others
  that wait on average, so that a tenant which asks for little waits for a few blocks only. A row decodes for at least MIN_BLOCKS blocks
  before it is paused, and it waits at the head of its request.
- Within a tenant, requests get slots in the order they came, ROWS_PER_ROUND rows each before any of them gets more. A request with more
  rows than that is paused row by row for one that has at least two rows fewer.
- Small requests come before the other requests of their tenant, and rows of those are paused for them, as long as the small requests of
  the tenant have less than a quarter of the slots.
- Prompts that are computed in part stay within `unfinished_tokens` in all, so that they do not displace each other from the cache.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from skyrl_tx_server.engine.operations import DEFAULT_TENANT, DropSnapshot, Op, Sample, SaveSampler

PREFILLS_PER_TURN = 4
"""Prefills before a decode block while training waits, or in a row that fill no slot; otherwise every free slot is filled first."""
PROMPTS_PER_PREFILL = 16
"""Are offered to be computed together: as many as the largest pass has blocks (see `batching`)."""
QUANTUM = 16
"""Units that one tenant may be ahead of another before rows are paused, beyond the difference of one row."""
PROMPT_TOKENS_PER_UNIT = 64
PIECE_TOKENS = 512
"""A prompt up to this length is computed in one piece on every device."""
MIN_BLOCKS = 2
"""Decode blocks that a row runs before it may be paused."""
ROWS_PER_ROUND = 8
"""Rows of one request that get slots before the next request's: rows of one prompt share their pages, so they run together."""
SMALL_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Run one step of the operation `request_id`: one micro-batch of training, or a whole small operation."""

    request_id: int
    op: Op


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRequest:
    """Prefill the prompt of `op` and give samples `first .. first + count - 1` of it a slot each. Of a paused sample, which is always
    alone, the whole text goes on."""

    request_id: int
    op: Sample
    first: int
    count: int
    tenant: str = DEFAULT_TENANT
    paused: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """Admit as many of these, in their order, as are computed together. The others go back by `put_back`."""

    admits: tuple[PrefillRequest, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decode:
    """Run one decode block over all occupied slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """Free the slots of these rows, each (ticket, index of the sample). They are admitted again later. No decode block is under way."""

    rows: tuple[tuple[int, int], ...]


ScheduledWork = Step | Prefill | Decode | Pause


@dataclass(kw_only=True, slots=True)
class _Line:
    """Operations that run in order."""

    tenant: str
    steps: deque[Step] = field(default_factory=deque)


@dataclass(kw_only=True, slots=True, eq=False)
class _Request:
    """A `Sample` some of whose samples wait or have slots."""

    request_id: int
    op: Sample
    tenant: _Tenant
    first: int = 0  # samples from this index on have never had a slot
    paused: list[int] = field(default_factory=list)  # a heap of indices
    rows: dict[int, int] = field(
        default_factory=dict
    )  # by index, those with slots: the number of blocks before their first

    @property
    def num_waiting(self) -> int:
        return self.op.num_samples - self.first + len(self.paused)

    @property
    def has_begun(self) -> bool:
        return bool(self.first or self.paused or self.rows)

    @property
    def is_small(self) -> bool:
        most = self.op.settings.max_tokens
        return most is not None and self.op.num_samples * most <= SMALL_TOKENS

    @property
    def is_long(self) -> bool:
        """Its prompt may take several pieces."""
        return len(self.op.prompt) > PIECE_TOKENS


@dataclass(kw_only=True, slots=True, eq=False)
class _Tenant:
    name: str
    paid: float
    num_requests: int = 0  # those that wait for a snapshot to be saved included
    num_rows: int = 0
    num_small_rows: int = 0
    running: dict[int, _Request] = field(default_factory=dict)  # with rows in slots
    begun: dict[int, _Request] = field(default_factory=dict)  # with some samples waiting, but not all
    fresh: defaultdict[tuple[bool, bool], list[int]] = field(default_factory=lambda: defaultdict(list))
    """Heaps of tickets: of requests that are small or not, with long prompts or not."""

    @property
    def account(self) -> float:
        return self.paid + QUANTUM * self.num_rows


@dataclass(kw_only=True, slots=True)
class _Plan:
    """Rows that are about to get slots, or to lose them."""

    tenants: Counter[str] = field(default_factory=Counter)
    small: Counter[str] = field(default_factory=Counter)
    gained: Counter[int] = field(default_factory=Counter)  # by ticket, rows that get slots
    lost: dict[int, set[int]] = field(
        default_factory=lambda: defaultdict(set)
    )  # by ticket, indices that lose theirs
    begun: defaultdict[str, list[_Request]] = field(
        default_factory=lambda: defaultdict(list)
    )  # by tenant, those that were fresh
    unfinished_tokens: int = 0  # of long prompts that would begin

    def account(self, tenant: _Tenant) -> float:
        return tenant.account + QUANTUM * self.tenants[tenant.name]

    def rows(self, request: _Request) -> int:
        return (
            len(request.rows) + self.gained[request.request_id] - len(self.lost.get(request.request_id, ()))
        )

    def waiting(self, request: _Request) -> int:
        return request.num_waiting - self.gained[request.request_id]

    def gain(self, request: _Request) -> None:
        if request.request_id not in self.gained and not request.has_begun:
            self.begun[request.tenant.name].append(request)
        self.gained[request.request_id] += 1
        self.tenants[request.tenant.name] += 1
        self.small[request.tenant.name] += request.is_small

    def lose(self, request: _Request, index: int) -> None:
        self.lost[request.request_id].add(index)
        self.tenants[request.tenant.name] -= 1
        self.small[request.tenant.name] -= request.is_small


class Scheduler:
    """The queues and whose turn it is. The caller owns the lock."""

    def __init__(self, *, unfinished_tokens: int = 0) -> None:
        self._unfinished_limit = unfinished_tokens
        self._lines: dict[str, _Line] = {}  # by model
        self._order: dict[
            str, dict[str, None]
        ] = {}  # by tenant, its lines; the order of both is the round-robin order
        self._saves: defaultdict[str, dict[int, None]] = defaultdict(
            dict
        )  # by snapshot, tickets of those that save it
        self._tenants: dict[str, _Tenant] = {}  # that sample, or have sampled
        self._requests: dict[int, _Request] = {}
        self._waiting: dict[int, None] = {}  # tickets of requests with waiting samples
        self._waiting_for: defaultdict[str, dict[int, None]] = defaultdict(dict)  # by snapshot, the same
        self._unsaved: defaultdict[str, list[_Request]] = defaultdict(
            list
        )  # by snapshot, those that wait for it to be saved
        self._unfinished: dict[int, int] = {}  # tokens of prompts that are computed in part, by ticket
        self._least_paid = 0.0  # by a busy tenant; never falls
        self._blocks = 0
        self._training_next = True
        self._prefills = 0  # since the last decode block
        self._in_vain = 0  # of them, since the last that left more rows decoding
        self._rows_decoding = 0  # before this turn
        self._held: int | None = None  # the request for which the executor has no room
        self._decode_next = False  # a piece of a prompt was the last turn
        self._may_pause = False  # no decode block is under way
        self._slots = 1
        self._reserved: Counter[int] = Counter()  # by ticket, slots that were freed for it

    def add(self, request_id: int, op: Op, *, tenant: str = DEFAULT_TENANT) -> None:
        """Queue `op`; tickets grow with every submission."""
        if isinstance(op, Sample):
            request = _Request(request_id=request_id, op=op, tenant=self._tenant(tenant))
            self._requests[request_id] = request
            request.tenant.num_requests += 1
            self._wait(request)
            return
        name = _line_of(op)
        if name not in self._lines:
            self._lines[name] = _Line(tenant=tenant)
            self._order.setdefault(tenant, {})[name] = None
        self._lines[name].steps.append(Step(request_id=request_id, op=op))
        if isinstance(op, SaveSampler):
            self._saves[op.weights][request_id] = None

    def next(self, *, free_slots: int, rows_decoding: int) -> ScheduledWork | None:
        """The next turn; None when there is nothing to do until something is added or a row finishes."""
        step = self._runnable_step()
        self._slots = max(1, free_slots + rows_decoding)
        if rows_decoding > self._rows_decoding:
            self._in_vain = 0
        self._rows_decoding = rows_decoding
        if self._may_pause and (pauses := self._pauses(free_slots)):
            return self._pause(pauses)
        decode_next = self._decode_next or self._in_vain >= PREFILLS_PER_TURN
        admits = () if decode_next and rows_decoding else self._admissions(free_slots)
        if step is not None and self._prefills >= PREFILLS_PER_TURN:
            admits = ()
        if step is not None and (self._training_next or not (admits or rows_decoding)):
            self._training_next = False
            self._prefills = 0
            self._go_behind(_line_of(step.op))
            return step
        if admits:
            self._prefills += 1
            self._in_vain += 1
            self._reserved.clear()
            for admit in admits:
                self._take(admit)
            return Prefill(admits=admits)
        if rows_decoding:
            self._training_next = True
            self._decode_next = self._may_pause = False
            self._prefills = self._in_vain = 0
            self._pay_for_block()
            return Decode()
        return None

    def interrupts(self, *, free_slots: int) -> bool:
        """Whether the turn after a decode block is somebody else's."""
        self._may_pause = (
            self._runnable_step() is not None
            or bool(self._admissions(free_slots))
            or bool(self._pauses(free_slots))
        )
        return self._may_pause

    def finish(self, step: Step) -> None:
        """The operation of `step` is over, well or badly; its model's next one may run."""
        name = _line_of(step.op)
        line = self._lines[name]
        assert line.steps[0].request_id == step.request_id
        line.steps.popleft()
        if not line.steps:
            del self._lines[name], self._order[line.tenant][name]
            if not self._order[line.tenant]:
                del self._order[line.tenant]
        if isinstance(step.op, SaveSampler):
            saves = self._saves[step.op.weights]
            del saves[step.request_id]
            if not saves:
                del self._saves[step.op.weights]
            for request in self._unsaved.pop(step.op.weights, []):
                if request.request_id in self._requests:
                    self._queue(request)

    def put_back(self, admits: Sequence[PrefillRequest]) -> None:
        """These wait again, at the places they had."""
        for admit in reversed(admits):
            request = self._requests.get(admit.request_id)
            if request is None:
                continue
            for index in range(admit.first, admit.first + admit.count):
                self._lose_row(request, index)
            if admit.paused:
                heapq.heappush(request.paused, admit.first)
            else:
                request.first = min(request.first, admit.first)
            self._wait(request)

    def hold(self, admits: Sequence[PrefillRequest]) -> None:
        """The executor has no room for the first of these now: it keeps its place until a row finishes or is paused."""
        self.put_back(admits)
        self._held = admits[0].request_id

    def resume(self, admit: PrefillRequest) -> None:
        """A piece of the prompt of `admit` is done: the rest of it waits, and running samples come first."""
        self.put_back([admit])
        self._decode_next = True
        if admit.request_id in self._requests:
            self._unfinished[admit.request_id] = len(admit.op.prompt)
            self.pay_for_prompt(admit.request_id, PIECE_TOKENS)

    def admitted(self, request_id: int, *, prompt_tokens: int) -> None:
        """The rows of a request have their slots, after so many tokens of its prompt were computed."""
        self._unfinished.pop(request_id, None)
        self.pay_for_prompt(request_id, min(prompt_tokens, PIECE_TOKENS))

    def pay_for_prompt(self, request_id: int, tokens: int) -> None:
        if request_id in self._requests:
            self._requests[request_id].tenant.paid += tokens / PROMPT_TOKENS_PER_UNIT

    def row_finished(self, request_id: int, index: int) -> None:
        self._held = None
        request = self._requests.get(request_id)
        if request is not None:
            self._lose_row(request, index)
            if not request.rows and not request.num_waiting:
                del self._requests[request_id]
                request.tenant.num_requests -= 1

    def drop_sample(self, request_id: int) -> None:
        """Forget a failed request."""
        self._held = None
        self._unfinished.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        request.tenant.num_requests -= 1
        for index in list(request.rows):
            self._lose_row(request, index)
        self._no_longer_waits(request)

    @property
    def num_waiting_samples(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_steps(self) -> int:
        return sum(len(line.steps) for line in self._lines.values())

    # --- training and other operations ----------------------------------------------------------------------------------

    def _runnable_step(self) -> Step | None:
        steps = (self._lines[name].steps[0] for lines in self._order.values() for name in lines)
        return next((step for step in steps if self._may_run(step)), None)

    def _may_run(self, step: Step) -> bool:
        match step.op:
            case DropSnapshot(weights=weights):
                waiting = self._waiting_for.get(weights, ())
                return not any(
                    request_id < step.request_id for request_id in waiting
                ) and not self._being_saved(weights, step.request_id)
            case _:
                return True

    def _go_behind(self, name: str) -> None:
        """The line's tenant has had its turn, and the line its turn among those of the tenant."""
        tenant = self._lines[name].tenant
        lines = self._order.pop(tenant)
        del lines[name]
        lines[name] = None
        self._order[tenant] = lines

    def _being_saved(self, weights: str, request_id: int) -> bool:
        return any(save < request_id for save in self._saves.get(weights, ()))

    # --- tenants --------------------------------------------------------------------------------------------------------

    def _tenant(self, name: str) -> _Tenant:
        """The tenant, about to have something to do."""
        tenant = self._tenants.get(name)
        if tenant is None:
            self._forget_tenants()
            tenant = self._tenants[name] = _Tenant(name=name, paid=0.0)
        if not self._waits(tenant):
            others = (
                each.paid for each in self._tenants.values() if each is not tenant and self._is_busy(each)
            )
            self._least_paid = max(self._least_paid, min(others, default=0.0))
            tenant.paid = max(tenant.paid, self._least_paid - QUANTUM)
        return tenant

    def _forget_tenants(self) -> None:
        """Idle tenants that would start again like new ones."""
        for tenant in list(self._tenants.values()):
            if not tenant.num_requests and tenant.paid <= self._least_paid - QUANTUM:
                del self._tenants[tenant.name]

    def _is_busy(self, tenant: _Tenant) -> bool:
        return bool(tenant.num_rows or self._waits(tenant))

    def _waits(self, tenant: _Tenant) -> bool:
        return bool(tenant.begun) or any(tenant.fresh.values())

    def _pay_for_block(self) -> None:
        self._blocks += 1
        for tenant in self._tenants.values():
            tenant.paid += tenant.num_rows

    # --- slots ----------------------------------------------------------------------------------------------------------

    def _wait(self, request: _Request) -> None:
        """Some samples of the request wait."""
        self._waiting[request.request_id] = None
        weights = request.op.weights
        if weights is not None:
            self._waiting_for[weights][request.request_id] = None
            if self._being_saved(weights, request.request_id):
                self._unsaved[weights].append(request)
                return
        self._queue(request)

    def _queue(self, request: _Request) -> None:
        weights = request.op.weights
        if weights is not None and self._being_saved(weights, request.request_id):
            self._unsaved[weights].append(request)
        elif request.has_begun:
            request.tenant.begun[request.request_id] = request
        else:
            heapq.heappush(request.tenant.fresh[request.is_small, request.is_long], request.request_id)

    def _no_longer_waits(self, request: _Request) -> None:
        """Its entry in a heap of fresh requests, if it has one, is dropped when it comes up."""
        self._waiting.pop(request.request_id, None)
        request.tenant.begun.pop(request.request_id, None)
        weights = request.op.weights
        if weights is not None and weights in self._waiting_for:
            self._waiting_for[weights].pop(request.request_id, None)
            if not self._waiting_for[weights]:
                del self._waiting_for[weights]

    def _lose_row(self, request: _Request, index: int) -> None:
        if request.rows.pop(index, None) is None:
            return
        tenant = request.tenant
        tenant.num_rows -= 1
        tenant.num_small_rows -= request.is_small
        if not request.rows:
            del tenant.running[request.request_id]

    def _take(self, admit: PrefillRequest) -> None:
        """The samples of `admit` are about to have slots."""
        request = self._requests[admit.request_id]
        tenant = request.tenant
        if admit.paused:
            request.paused.remove(admit.first)
            heapq.heapify(request.paused)
        else:
            request.first = admit.first + admit.count
        request.rows |= dict.fromkeys(range(admit.first, admit.first + admit.count), self._blocks)
        tenant.num_rows += admit.count
        tenant.num_small_rows += admit.count * request.is_small
        tenant.running[request.request_id] = request
        if request.num_waiting:
            tenant.begun[request.request_id] = request
        else:
            self._no_longer_waits(request)

    def _admissions(self, free_slots: int) -> tuple[PrefillRequest, ...]:
        plan, chosen = _Plan(), dict[int, _Request]()
        reserved = [request_id for request_id in self._reserved.elements() if request_id in self._waiting]
        while free_slots:
            request = self._requests[reserved.pop(0)] if reserved else self._head(plan)
            if request is None or (request.request_id == self._held and not chosen):
                break
            if request.request_id not in chosen:
                if len(chosen) == PROMPTS_PER_PREFILL:
                    break
                chosen[request.request_id] = request
                if not self._needs_no_room(request):
                    plan.unfinished_tokens += len(request.op.prompt)
            if plan.waiting(request) > 0:
                plan.gain(request)
                free_slots -= 1
        self._close(plan)
        admits = [
            admit
            for request in chosen.values()
            for admit in _admits_of(request, plan.gained[request.request_id])
        ]
        return tuple(admits[:PROMPTS_PER_PREFILL])

    def _head(self, plan: _Plan) -> _Request | None:
        """The request that gets the next slot after those of the plan."""
        best: tuple[float, _Request] | None = None
        for tenant in self._tenants.values():
            account = plan.account(tenant)
            if best is not None and account > best[0]:
                continue
            request = self._head_of(tenant, plan)
            if request is not None and (
                best is None or (account, request.request_id) < (best[0], best[1].request_id)
            ):
                best = account, request
        return best and best[1]

    def _head_of(self, tenant: _Tenant, plan: _Plan) -> _Request | None:
        """The tenant's request that gets its next slot."""
        small_first = self._small_first(tenant, plan)
        fresh = [self._first_fresh(heap, plan) for heap in tenant.fresh.values()]
        candidates = [
            *tenant.begun.values(),
            *plan.begun[tenant.name],
            *(request for request in fresh if request is not None),
        ]

        def order(request: _Request) -> tuple[bool, int, int]:
            return (
                not (small_first and request.is_small),
                plan.rows(request) // ROWS_PER_ROUND,
                request.request_id,
            )

        able = (
            request for request in candidates if plan.waiting(request) > 0 and self._has_room(request, plan)
        )
        return min(able, key=order, default=None)

    def _small_first(self, tenant: _Tenant, plan: _Plan) -> bool:
        return tenant.num_small_rows + plan.small[tenant.name] < max(1, self._slots // 4)

    def _first_fresh(self, heap: list[int], plan: _Plan) -> _Request | None:
        """The first that is not in the plan. What is out of date is dropped."""
        while heap:
            request = self._requests.get(heap[0])
            if request is not None and not request.has_begun and heap[0] not in plan.gained:
                return request
            heapq.heappop(heap)
        return None

    def _close(self, plan: _Plan) -> None:
        """Fresh requests of the plan are back in their heaps."""
        for requests in plan.begun.values():
            for request in requests:
                heapq.heappush(request.tenant.fresh[request.is_small, request.is_long], request.request_id)

    def _has_room(self, request: _Request, plan: _Plan) -> bool:
        """Its prompt may be computed beside those that are computed in part."""
        tokens = sum(self._unfinished.values()) + plan.unfinished_tokens
        return (
            self._needs_no_room(request)
            or not tokens
            or tokens + len(request.op.prompt) <= self._unfinished_limit
        )

    def _needs_no_room(self, request: _Request) -> bool:
        return not request.is_long or request.has_begun or request.request_id in self._unfinished

    # --- pauses ---------------------------------------------------------------------------------------------------------

    def _pauses(self, free_slots: int) -> list[tuple[_Request, int, _Request]]:
        """Rows to pause, each as its request and index, and for whom."""
        if free_slots and self._held is None:
            return []
        plan, pauses = _Plan(), list[tuple[_Request, int, _Request]]()
        while len(pauses) < self._slots and (found := self._next_pause(plan)) is not None:
            request, index, waiter = found
            plan.gain(waiter)
            plan.lose(request, index)
            pauses.append(found)
            if self._held is not None:
                break
        self._close(plan)
        return pauses

    def _next_pause(self, plan: _Plan) -> tuple[_Request, int, _Request] | None:
        waiters = [
            (plan.account(tenant), self._head_of(tenant, plan))
            for tenant in self._tenants.values()
            if self._waits(tenant)
        ]
        order = sorted(
            ((account, one.request_id, one) for account, one in waiters if one is not None),
            key=lambda each: each[:2],
        )
        if not order:
            return None
        account, row = self._row_of_most(plan)
        if row is not None:
            least, _, waiter = order[0]
            if row[0].tenant is not waiter.tenant and account - QUANTUM >= least + QUANTUM:
                return *row, waiter
        if self._held is not None:
            return None
        paid, num_waiting = sum(one.tenant.paid for _, _, one in order), len(order)
        for mine, _, waiter in order:
            if (
                row is not None
                and row[0].tenant is not waiter.tenant
                and waiter.is_small
                and self._small_first(waiter.tenant, plan)
            ):
                others = (
                    (paid - waiter.tenant.paid) / (num_waiting - 1) if num_waiting > 1 else account - QUANTUM
                )
                if mine <= others:
                    return *row, waiter
            if (own := self._row_of_same_tenant(waiter, plan)) is not None:
                return *own, waiter
        return None

    def _row_of_most(self, plan: _Plan) -> tuple[float, tuple[_Request, int] | None]:
        """The largest account of a tenant that has rows that may be paused, and one of those rows."""
        for tenant in sorted(
            (each for each in self._tenants.values() if each.num_rows), key=plan.account, reverse=True
        ):
            if (row := self._row_of(tenant.running.values(), plan)) is not None:
                return plan.account(tenant), row
        return 0.0, None

    def _row_of_same_tenant(self, waiter: _Request, plan: _Plan) -> tuple[_Request, int] | None:
        others = [request for request in waiter.tenant.running.values() if request is not waiter]
        if waiter.is_small and self._small_first(waiter.tenant, plan):
            return self._row_of([request for request in others if not request.is_small], plan)
        least = max(ROWS_PER_ROUND + 1, plan.rows(waiter) + 2)
        return self._row_of([request for request in others if plan.rows(request) >= least], plan)

    def _row_of(self, requests: Iterable[_Request], plan: _Plan) -> tuple[_Request, int] | None:
        """The last row that may be paused of the request with the most rows, of those the one that came last."""
        found = [
            (plan.rows(request), request.request_id, index)
            for request in requests
            for index in self._pausable(request, plan)
        ]
        if not found:
            return None
        _, request_id, index = max(found)
        return self._requests[request_id], index

    def _pausable(self, request: _Request, plan: _Plan) -> list[int]:
        lost = plan.lost.get(request.request_id, ())
        return [
            index
            for index, since in request.rows.items()
            if self._blocks - since >= MIN_BLOCKS and index not in lost
        ]

    def _pause(self, pauses: Sequence[tuple[_Request, int, _Request]]) -> Pause:
        self._held = None
        self._reserved.clear()
        for request, index, waiter in pauses:
            self._lose_row(request, index)
            heapq.heappush(request.paused, index)
            self._wait(request)
            self._reserved[waiter.request_id] += 1
        return Pause(rows=tuple((request.request_id, index) for request, index, _ in pauses))


def _admits_of(request: _Request, count: int) -> list[PrefillRequest]:
    """The next samples of a request: first those that are paused."""
    again = heapq.nsmallest(count, request.paused)
    given = {"request_id": request.request_id, "op": request.op, "tenant": request.tenant.name}
    admits = [PrefillRequest(**given, first=index, count=1, paused=True) for index in again]
    if count > len(again):
        admits.append(PrefillRequest(**given, first=request.first, count=count - len(again)))
    return admits


def _line_of(op: Op) -> str:
    """Operations in one line run in order: those of one model, and those on one snapshot that no model owns."""
    assert not isinstance(op, Sample)
    return f"snapshot {op.weights}" if isinstance(op, DropSnapshot) else f"model {op.model_id}"
