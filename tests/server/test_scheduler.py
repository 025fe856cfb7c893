import math
import random
import sys
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from skyrl_tx_server.engine.operations import (
    AdamSettings,
    CreateModel,
    DropSnapshot,
    ForwardBackward,
    LoraSpec,
    LossFn,
    Op,
    OptimStep,
    Sample,
    SamplingSettings,
    SaveSampler,
)
from skyrl_tx_server.engine.pausing import plan_pauses
from skyrl_tx_server.engine.sample_queue import PROMPT_TOKENS_PER_UNIT, PROMPTS_PER_PREFILL, SampleQueue
from skyrl_tx_server.engine.sample_requests import SLOT_UNITS, Request, SlotPlan, Tenant
from skyrl_tx_server.engine.scheduled_work import Decode, OperationStep, Pause, Prefill, PrefillRequest
from skyrl_tx_server.engine.scheduler import MAX_COUNTED_S, MAX_IDLE_SHARE, PREFILLS_PER_DISPATCH, Scheduler


def sample(weights: str | None = None, num_samples: int = 1) -> Sample:
    return Sample(
        weights=weights, prompt=np.array([1], np.int32), settings=SamplingSettings(), num_samples=num_samples
    )


def optim(model_id: str) -> OptimStep:
    return OptimStep(model_id=model_id, adam=AdamSettings())


def forward(model_id: str) -> ForwardBackward:
    return ForwardBackward(model_id=model_id, data=(), loss_fn=LossFn.CROSS_ENTROPY, forward_only=True)


def queue(*ops: Op) -> Scheduler:
    scheduler = Scheduler()
    for request_id, op in enumerate(ops, start=1):
        scheduler.add(request_id, op)
    return scheduler


def run_steps(scheduler: Scheduler) -> list[int]:
    """Return request ids in the order in which they run if every operation takes one step and no
    sequence is sampled."""
    order = []
    while isinstance(work := scheduler.next(free_slots=0, num_running=0), OperationStep):
        order.append(work.request_id)
        scheduler.finish(work)
    return order


def next_work(
    scheduler: Scheduler, *, free_slots: int, num_running: int
) -> OperationStep | PrefillRequest | Decode | None:
    """Return the next work for an executor that computes one prompt at a time."""
    work = scheduler.next(free_slots=free_slots, num_running=num_running)
    assert not isinstance(work, Pause)
    if not isinstance(work, Prefill):
        return work
    scheduler.requeue(work.requests[1:])
    return work.requests[0]


def test_an_idle_scheduler_returns_none():
    assert Scheduler().next(free_slots=4, num_running=0) is None


def test_models_take_turns_and_keep_their_order_of_operations():
    scheduler = queue(forward("a"), optim("a"), forward("a"), forward("b"), optim("b"))
    assert run_steps(scheduler) == [1, 4, 2, 5, 3]


def test_an_unfinished_operation_blocks_its_own_model_only():
    scheduler = queue(forward("a"), optim("a"), forward("b"))
    order = [scheduler.next(free_slots=0, num_running=0) for _ in range(4)]
    assert [work.request_id for work in order if isinstance(work, OperationStep)] == [1, 3, 1, 3]


def test_training_and_decoding_alternate_when_both_have_work():
    scheduler = queue(*[forward("a") for _ in range(3)])
    kinds = []
    for _ in range(6):
        work = scheduler.next(free_slots=0, num_running=2)
        kinds.append(type(work))
        if isinstance(work, OperationStep):
            scheduler.finish(work)
    assert kinds == [OperationStep, Decode, OperationStep, Decode, OperationStep, Decode]


def test_a_forward_waits_for_at_most_one_decode_dispatch():
    scheduler = Scheduler()
    for _ in range(5):
        assert isinstance(scheduler.next(free_slots=3, num_running=1), Decode)
    scheduler.add(1, forward("a"))
    assert isinstance(scheduler.next(free_slots=3, num_running=1), OperationStep)
    scheduler.add(2, forward("b"))
    assert isinstance(scheduler.next(free_slots=3, num_running=1), Decode)
    assert isinstance(scheduler.next(free_slots=3, num_running=1), OperationStep)


def run_shared(scheduler: Scheduler, seconds: float, *, step_s: float, dispatch_s: float) -> float:
    """Run training and decoding for `seconds`, and return the seconds that training used."""
    training_s = total_s = 0.0
    while total_s < seconds:
        work = scheduler.next(free_slots=0, num_running=2)
        assert isinstance(work, OperationStep | Decode)
        duration_s = step_s if isinstance(work, OperationStep) else dispatch_s
        training_s += duration_s * isinstance(work, OperationStep)
        total_s += duration_s
        scheduler.count_time(work, duration_s)
    return training_s


@pytest.mark.parametrize("train_share", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("step_s", [0.1, 1.0, 4.0])
def test_training_gets_its_share_of_the_time(train_share: float, step_s: float):
    scheduler = Scheduler(train_share=train_share)
    scheduler.add(1, forward("a"))
    training_s = run_shared(scheduler, 400, step_s=step_s, dispatch_s=1.0)
    assert training_s / 400 == pytest.approx(train_share, abs=0.02)


def test_time_without_work_does_not_count_for_the_share():
    scheduler = Scheduler(train_share=0.5)
    for _ in range(100):
        work = scheduler.next(free_slots=0, num_running=2)
        assert isinstance(work, Decode)
        scheduler.count_time(work, 1.0)
    scheduler.add(1, forward("a"))
    assert isinstance(scheduler.next(free_slots=0, num_running=2), OperationStep), (
        "a forward waits for one dispatch"
    )
    assert run_shared(scheduler, 20, step_s=1.0, dispatch_s=1.0) == pytest.approx(10, abs=1)
    for _ in range(100):
        work = scheduler.next(free_slots=2, num_running=0)
        assert isinstance(work, OperationStep)
        scheduler.count_time(work, 1.0)
    assert run_shared(scheduler, 20, step_s=1.0, dispatch_s=1.0) == pytest.approx(10, abs=1)


def test_dispatches_continue_while_training_waits():
    scheduler = Scheduler(train_share=0.5)
    scheduler.add(1, forward("a"))
    continued = []
    for _ in range(10):
        work = scheduler.next(free_slots=0, num_running=2)
        assert isinstance(work, OperationStep | Decode)
        if isinstance(work, Decode):
            continued.append(not scheduler.interrupts(free_slots=0))
        scheduler.count_time(work, 4.0 if isinstance(work, OperationStep) else 1.0)
    assert continued[1:8] == [True, True, False, True, True, True, False]


def test_a_compilation_counts_for_a_limited_time():
    scheduler = Scheduler(train_share=0.5)
    scheduler.add(1, forward("a"))
    work = scheduler.next(free_slots=0, num_running=2)
    assert isinstance(work, OperationStep)
    scheduler.count_time(work, 600.0)
    assert run_shared(scheduler, MAX_COUNTED_S, step_s=1.0, dispatch_s=1.0) == 0
    assert run_shared(scheduler, 10, step_s=1.0, dispatch_s=1.0) > 0


def test_waiting_samples_start_in_order_and_in_parts():
    scheduler = queue(sample(num_samples=3), sample(num_samples=2))
    first = next_work(scheduler, free_slots=2, num_running=0)
    assert isinstance(first, PrefillRequest) and (first.request_id, first.first, first.count) == (1, 0, 2)
    assert isinstance(next_work(scheduler, free_slots=0, num_running=2), Decode)
    rest = next_work(scheduler, free_slots=2, num_running=0)
    assert isinstance(rest, PrefillRequest) and (rest.request_id, rest.first, rest.count) == (1, 2, 1)
    second = next_work(scheduler, free_slots=1, num_running=1)
    assert isinstance(second, PrefillRequest) and (second.request_id, second.first, second.count) == (2, 0, 1)


@pytest.mark.parametrize(
    ("num_chunks", "tokens", "charged"), [(0, 300, 300), (1, 300, 512), (7, 8192, 8192), (15, 8000, 8000)]
)
def test_the_chunks_of_a_prompt_are_charged_once(num_chunks: int, tokens: int, charged: int) -> None:
    queue = SampleQueue(max_partial_prefill_tokens=10_000, is_changing=lambda weights, request_id: False)
    queue.add(1, long_sample(1, prompt_tokens=tokens), tenant="a")
    (prefill,) = queue.plan_prefills(1, 1, reserved=[], deferred=None)
    for _ in range(num_chunks):
        queue.prefill_continues(prefill)
    queue.prefill_finished(1, prompt_tokens=tokens)
    assert queue.tenants["a"].charged == pytest.approx(charged / PROMPT_TOKENS_PER_UNIT)


def test_a_prefix_that_is_computed_again_is_not_charged() -> None:
    queue = SampleQueue(max_partial_prefill_tokens=10_000, is_changing=lambda weights, request_id: False)
    queue.add(1, long_sample(2, prompt_tokens=8192), tenant="a")
    (prefill,) = queue.plan_prefills(2, 2, reserved=[], deferred=None)
    queue.start(prefill)
    queue.prefill_finished(1, prompt_tokens=8192)
    queue.pause(queue.requests[1], 1)
    (again,) = queue.plan_prefills(1, 2, reserved=[], deferred=None)
    assert again.paused and again.first == 1
    for _ in range(15):
        queue.start(again)
        queue.requeue(again)
        queue.prefill_continues(again)
    queue.start(again)
    queue.prefill_finished(1, prompt_tokens=0)
    assert queue.tenants["a"].charged == 8192 / PROMPT_TOKENS_PER_UNIT


def test_prompts_are_offered_together_and_keep_their_places():
    scheduler = queue(
        sample(num_samples=3),
        SaveSampler(model_id="a", weights="s"),
        sample("s"),
        sample(num_samples=2),
        sample(),
    )
    save = scheduler.next(free_slots=5, num_running=0)
    offered = scheduler.next(free_slots=5, num_running=0)
    assert isinstance(save, OperationStep) and isinstance(offered, Prefill)
    assert [(request.request_id, request.first, request.count) for request in offered.requests] == [
        (1, 0, 3),
        (4, 0, 2),
    ]
    scheduler.requeue(offered.requests[1:])
    scheduler.finish(save)
    offered = scheduler.next(free_slots=2, num_running=3)
    assert isinstance(offered, Prefill)
    assert [(request.request_id, request.first, request.count) for request in offered.requests] == [
        (3, 0, 1),
        (4, 0, 1),
    ]
    assert isinstance(scheduler.next(free_slots=0, num_running=5), Decode)
    offered = scheduler.next(free_slots=2, num_running=3)
    assert isinstance(offered, Prefill)
    assert [(request.request_id, request.first, request.count) for request in offered.requests] == [
        (4, 1, 1),
        (5, 0, 1),
    ]

    scheduler = queue(*[sample() for _ in range(PROMPTS_PER_PREFILL + 1)])
    offered = scheduler.next(free_slots=100, num_running=0)
    assert isinstance(offered, Prefill) and len(offered.requests) == PROMPTS_PER_PREFILL


def test_free_slots_fill_before_decoding_unless_training_waits():
    scheduler = queue(*[sample() for _ in range(8)])
    order = [next_work(scheduler, free_slots=8 - n, num_running=n) for n in range(9)]
    assert [type(work) for work in order] == [PrefillRequest] * 8 + [Decode]

    scheduler = queue(*[sample() for _ in range(8)], forward("a"), optim("a"))
    order = [next_work(scheduler, free_slots=8, num_running=0)]
    assert isinstance(order[0], OperationStep)
    scheduler.finish(order[0])
    order += [next_work(scheduler, free_slots=8 - n, num_running=n) for n in range(PREFILLS_PER_DISPATCH + 2)]
    assert [type(work) for work in order] == [OperationStep] + [PrefillRequest] * PREFILLS_PER_DISPATCH + [
        Decode,
        OperationStep,
    ]


def test_a_request_that_waits_for_training_is_queued_once():
    samples = SampleQueue(max_partial_prefill_tokens=0, is_changing=lambda weights, request_id: False)
    for request_id in (1, 2, 3):
        samples.add(request_id, sample(), tenant="a")
    for free_slots in (1, 2, 8) * 10:
        prefills = samples.plan_prefills(free_slots, 8, reserved=[], deferred=None)
        assert [prefill.request_id for prefill in prefills] == [1, 2, 3][:free_slots]
        samples.start(prefills[0])
        samples.requeue(prefills[0])
    assert sorted(samples.tenants["a"].unstarted[False, False]) == [1, 2, 3]


def test_requests_that_end_in_prefill_do_not_starve_training():
    scheduler = queue(*[sample() for _ in range(20)], forward("a"), optim("a"))
    first = next_work(scheduler, free_slots=4, num_running=0)
    assert isinstance(first, OperationStep)
    scheduler.finish(first)
    order = [next_work(scheduler, free_slots=4, num_running=0) for _ in range(PREFILLS_PER_DISPATCH + 1)]
    assert [type(work) for work in order] == [PrefillRequest] * PREFILLS_PER_DISPATCH + [OperationStep]
    assert isinstance(next_work(scheduler, free_slots=4, num_running=0), PrefillRequest), (
        "training does not starve prefill"
    )


def test_requests_that_end_in_prefill_do_not_starve_sampling():
    scheduler = queue(*[sample() for _ in range(20)])
    order = [next_work(scheduler, free_slots=3, num_running=1) for _ in range(2 * PREFILLS_PER_DISPATCH + 3)]
    assert [type(work) for work in order] == [PrefillRequest] * PREFILLS_PER_DISPATCH + [Decode] + [
        PrefillRequest
    ] * PREFILLS_PER_DISPATCH + [
        Decode,
        PrefillRequest,
    ]


def test_a_sample_waits_for_its_snapshot_and_lets_others_pass():
    scheduler = queue(optim("a"), SaveSampler(model_id="a", weights="s"), sample("s"), sample("saved before"))
    first = next_work(scheduler, free_slots=4, num_running=0)
    assert isinstance(first, OperationStep) and first.request_id == 1
    scheduler.finish(first)
    passing = next_work(scheduler, free_slots=4, num_running=0)
    assert isinstance(passing, PrefillRequest) and passing.request_id == 4
    next_work(scheduler, free_slots=3, num_running=1)
    save = next_work(scheduler, free_slots=3, num_running=1)
    assert isinstance(save, OperationStep) and save.request_id == 2
    scheduler.finish(save)
    waited = next_work(scheduler, free_slots=3, num_running=1)
    assert isinstance(waited, PrefillRequest) and waited.request_id == 3


def test_dropping_a_snapshot_waits_for_earlier_samples():
    scheduler = queue(sample("s"), DropSnapshot(weights="s"))
    assert next_work(scheduler, free_slots=0, num_running=0) is None
    assert isinstance(next_work(scheduler, free_slots=1, num_running=0), PrefillRequest)
    drop = next_work(scheduler, free_slots=0, num_running=1)
    assert isinstance(drop, OperationStep) and drop.request_id == 2
    assert run_steps(queue(DropSnapshot(weights="s"), sample("s"))) == [1]
    assert run_steps(queue(sample("s"), DropSnapshot(weights="s"), DropSnapshot(weights="nobody's"))) == [3]


def test_a_sample_waits_until_earlier_operations_drop_its_weights():
    """The path of a deleted checkpoint can be used again, and the sample then needs the new weights."""
    scheduler = queue(DropSnapshot(weights="s"), sample("s"))
    drop = next_work(scheduler, free_slots=4, num_running=0)
    assert isinstance(drop, OperationStep) and drop.request_id == 1
    assert next_work(scheduler, free_slots=4, num_running=0) == drop
    scheduler.finish(drop)
    assert isinstance(next_work(scheduler, free_slots=4, num_running=0), PrefillRequest)


def test_dropping_a_snapshot_waits_for_its_save():
    save = SaveSampler(model_id="a", weights="s")
    assert run_steps(queue(optim("a"), save, DropSnapshot(weights="s"))) == [1, 2, 3]


def test_saving_a_snapshot_waits_until_it_is_dropped():
    drop, save = DropSnapshot(weights="s"), SaveSampler(model_id="a", weights="s")
    scheduler = queue(optim("a"), sample("s"), drop, save, SaveSampler(model_id="b", weights="other"))
    for request_id in (1, 5):
        step = scheduler.next(free_slots=0, num_running=0)
        assert isinstance(step, OperationStep) and step.request_id == request_id
        scheduler.finish(step)
    assert scheduler.next(free_slots=0, num_running=0) is None
    scheduler.drop_request(2)
    assert run_steps(scheduler) == [3, 4]


def test_requeued_samples_keep_their_order():
    scheduler = queue(*[sample(num_samples=2)] * 3)

    def offers(free_slots: int) -> list[tuple[int, int, int]]:
        offered = scheduler.next(free_slots=free_slots, num_running=0)
        assert isinstance(offered, Prefill)
        scheduler.requeue(offered.requests[-1:] if free_slots == 3 else offered.requests)
        return [(request.request_id, request.first, request.count) for request in offered.requests]

    for _ in range(2):
        assert offers(5) == [(1, 0, 2), (2, 0, 2), (3, 0, 1)]
    assert offers(3) == [(1, 0, 2), (2, 0, 1)]
    assert offers(9) == [(2, 0, 2), (3, 0, 2)]
    first = scheduler.next(free_slots=1, num_running=0)
    assert isinstance(first, Prefill)
    assert [offers(9) for _ in range(2)] == [[(2, 1, 1), (3, 0, 2)]] * 2, (
        "a request that has begun offers its remaining samples"
    )


def test_a_deferred_sample_keeps_its_place_until_a_sequence_ends():
    scheduler = queue(sample("s"), sample())
    request = next_work(scheduler, free_slots=2, num_running=1)
    assert isinstance(request, PrefillRequest)
    scheduler.defer([request])
    assert not scheduler.interrupts(free_slots=2)
    assert isinstance(next_work(scheduler, free_slots=2, num_running=1), Decode)
    scheduler.sequence_finished(99, 0)
    assert scheduler.interrupts(free_slots=2) and not scheduler.interrupts(free_slots=0)
    assert next_work(scheduler, free_slots=2, num_running=1) == request


def test_blocked_requests_do_not_increase_the_prefill_budget():
    """Blocked requests cannot use the free slots. Running sequences decode as often as if no request were
    blocked.
    """

    def kinds(num_blocked: int) -> list[type]:
        scheduler = Scheduler(max_partial_prefill_tokens=10**6, prefills_per_dispatch=1.0)
        scheduler.add(1, SaveSampler(model_id="m", weights="s"))
        assert isinstance(scheduler.next(free_slots=12, num_running=4), OperationStep)
        scheduler.block(1)
        if num_blocked:
            scheduler.add(2, sample("s", num_samples=num_blocked))
        settings = SamplingSettings()
        scheduler.add(3, Sample(weights=None, prompt=np.zeros(100_000, np.int32), settings=settings))
        found = []
        for _ in range(12):
            work = scheduler.next(free_slots=12, num_running=4)
            found.append(type(work))
            for request in work.requests if isinstance(work, Prefill) else ():
                scheduler.prefill_continues(request)
        return found

    assert kinds(100) == kinds(0) and Prefill in kinds(0) and Decode in kinds(0)


def test_running_samples_decode_between_two_prefill_chunks():
    scheduler = queue(sample(), sample())
    for _ in range(3):
        request = next_work(scheduler, free_slots=2, num_running=1)
        assert isinstance(request, PrefillRequest) and request.request_id == 1
        scheduler.prefill_continues(request)
        assert isinstance(next_work(scheduler, free_slots=2, num_running=1), Decode)
    request = next_work(scheduler, free_slots=2, num_running=0)
    assert isinstance(request, PrefillRequest) and request.request_id == 1
    scheduler.prefill_continues(request)
    last = next_work(scheduler, free_slots=2, num_running=0)  # no sequence is running
    assert isinstance(last, PrefillRequest) and last.request_id == 1


def test_chunks_precede_a_dispatch_while_most_slots_are_idle():
    def chunks(num_running: int, *, waiting: int) -> int:
        scheduler = Scheduler(prefills_per_dispatch=4)
        for number in range(waiting):
            scheduler.add(number + 1, sample())
        count = 0
        while isinstance(
            work := scheduler.next(free_slots=8 - num_running, num_running=num_running), Prefill
        ):
            scheduler.prefill_continues(work.requests[0])
            scheduler.requeue(work.requests[1:])
            count += 1
        assert isinstance(work, Decode)
        return count

    assert [chunks(running, waiting=8) for running in (1, 4, 6, 7)] == [
        math.ceil(4 * share / MAX_IDLE_SHARE) for share in (7 / 8, 4 / 8, 2 / 8, 1 / 8)
    ]
    assert chunks(1, waiting=1) == 4 / MAX_IDLE_SHARE / 2, (
        "free slots without a waiting sequence are not idle"
    )


def test_whole_prompts_follow_the_first_before_chunks_of_others():
    lengths = (2000, 2000, 100, 2000, 300)
    scheduler = Scheduler(max_partial_prefill_tokens=10_000)
    for number, length in enumerate(lengths, start=1):
        scheduler.add(number, long_sample(1, prompt_tokens=length))
    offered = scheduler.next(free_slots=8, num_running=0)
    assert isinstance(offered, Prefill)
    assert [request.request_id for request in offered.requests] == [1, 3, 5, 2, 4]


def test_a_dropped_request_does_not_start():
    scheduler = queue(
        sample(), sample(num_samples=3), sample(), CreateModel(model_id="a", lora=LoraSpec(rank=1))
    )
    scheduler.drop_request(2)
    assert isinstance(next_work(scheduler, free_slots=4, num_running=0), OperationStep)
    offered = scheduler.next(free_slots=4, num_running=0)
    assert isinstance(offered, Prefill) and [request.request_id for request in offered.requests] == [1, 3]


# --- fair shares ---


def long_sample(num_samples: int, *, prompt_tokens: int = 1, max_tokens: int | None = None) -> Sample:
    return Sample(
        weights=None,
        prompt=np.arange(prompt_tokens, dtype=np.int32),
        settings=SamplingSettings(max_tokens=max_tokens),
        num_samples=num_samples,
    )


@dataclass(kw_only=True)
class Simulation:
    """Runs a scheduler as an engine with `slots` slots does. `submit` sets the number of decode dispatches
    after which each sample of a request ends."""

    slots: int
    max_partial_prefill_tokens: int = 0
    chunk_tokens: int = 512  # prompt tokens of one prefill batch
    prefills_per_dispatch: float = 0.0
    scheduler: Scheduler = field(init=False)
    # remaining dispatches by request id and index
    running: dict[tuple[int, int], int] = field(default_factory=dict)
    paused: dict[tuple[int, int], int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)  # dispatches of a sample by request id
    tenants: dict[int, str] = field(default_factory=dict)
    prompts: Counter[int] = field(default_factory=Counter)  # computed tokens by request id
    ended: dict[int, int] = field(default_factory=dict)  # number of dispatches at the end, by request id
    dispatches: int = 0
    history: list[OperationStep | Prefill | Decode | Pause] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            max_partial_prefill_tokens=self.max_partial_prefill_tokens,
            prefills_per_dispatch=self.prefills_per_dispatch,
        )

    def submit(self, op: Op, tenant: str = "default", *, dispatches: int = 10**9) -> int:
        request_id = len(self.tenants) + 1
        self.tenants[request_id], self.lengths[request_id] = tenant, dispatches
        self.scheduler.add(request_id, op, tenant=tenant)
        return request_id

    def run(self, dispatches: int) -> None:
        until = self.dispatches + dispatches
        while self.dispatches < until and self.run_next():
            pass

    def dispatches_until_end(self, request_id: int) -> int:
        start = self.dispatches
        while request_id not in self.ended and self.dispatches < start + 1000 and self.run_next():
            pass
        return self.dispatches - start

    def run_next(self) -> bool:
        work = self.scheduler.next(free_slots=self.slots - len(self.running), num_running=len(self.running))
        if work is None:
            return False
        self.history.append(work)
        match work:
            case Prefill():
                self._prefill(work.requests)
            case Pause():
                for row in work.sequences:
                    self.paused[row] = self.running.pop(row)
            case Decode():
                self._decode()
            case OperationStep():
                self.scheduler.finish(work)
        assert len(self.running) <= self.slots
        return True

    def _prefill(self, requests: tuple[PrefillRequest, ...]) -> None:
        budget, taken = self.chunk_tokens, 0
        for request in requests:
            if not request.paused and request.first == 0:
                if not budget:
                    break
                computed = min(budget, len(request.op.prompt) - self.prompts[request.request_id])
                budget -= computed
                self.prompts[request.request_id] += computed
                if self.prompts[request.request_id] < len(request.op.prompt):
                    self.scheduler.prefill_continues(request)
                    taken += 1
                    continue
            taken += 1
            for index in range(request.first, request.first + request.count):
                assert (request.request_id, index) not in self.running
                assert request.paused == ((request.request_id, index) in self.paused)
                self.running[request.request_id, index] = self.paused.pop(
                    (request.request_id, index), self.lengths[request.request_id]
                )
            self.scheduler.prefill_finished(
                request.request_id, prompt_tokens=0 if request.paused else len(request.op.prompt)
            )
        self.scheduler.requeue(requests[taken:])

    def _decode(self) -> None:
        self.dispatches += 1
        finished = [row for row, remaining in self.running.items() if remaining == 1]
        self.scheduler.interrupts(free_slots=self.slots - len(self.running) + bool(finished))
        self.running = {row: remaining - 1 for row, remaining in self.running.items() if remaining > 1}
        for request_id, index in finished:
            self.scheduler.sequence_finished(request_id, index)
            if not any(key[0] == request_id for key in (*self.running, *self.paused)):
                self.ended[request_id] = self.dispatches

    def num_running_of(self, tenant: str) -> int:
        return sum(self.tenants[request_id] == tenant for request_id, _ in self.running)

    @property
    def pauses(self) -> int:
        return sum(len(work.sequences) for work in self.history if isinstance(work, Pause))


def test_two_tenants_with_large_requests_share_the_slots_equally():
    simulation = Simulation(slots=32)
    simulation.submit(long_sample(4096), "a")
    simulation.run(10)
    assert simulation.num_running_of("a") == 32, "a tenant gets all slots while no other request waits"
    simulation.submit(long_sample(4096), "b")
    simulation.run(5)
    assert abs(simulation.num_running_of("a") - simulation.num_running_of("b")) <= 2


def test_shares_are_by_tenant_and_not_by_number_of_requests():
    simulation = Simulation(slots=32)
    for _ in range(100):
        simulation.submit(long_sample(8), "many")
    simulation.submit(long_sample(4096), "one")
    served: Counter[str] = Counter()
    for _ in range(200):
        simulation.run(1)
        served.update({name: simulation.num_running_of(name) for name in ("many", "one")})
    assert served["one"] > 0.9 * served["many"] and served["many"] > 0.9 * served["one"]


def test_a_small_request_of_another_tenant_gets_a_slot_soon():
    simulation = Simulation(slots=32)
    simulation.submit(long_sample(4096), "hostile")
    simulation.run(10)
    assert simulation.dispatches_until_end(simulation.submit(sample(), "neighbour", dispatches=1)) <= 3


def test_small_requests_wait_briefly_beside_64_large_tenants():
    simulation = Simulation(slots=32)
    for number in range(64):
        simulation.submit(long_sample(4096), f"hostile {number}")
    simulation.run(100)
    small = long_sample(1, max_tokens=4)
    waits = [
        simulation.dispatches_until_end(simulation.submit(small, "neighbour", dispatches=1))
        for _ in range(200)
    ]
    assert max(waits) <= 6
    per_tenant = Counter[str]()
    for _ in range(400):
        simulation.run(1)
        per_tenant.update(
            {f"hostile {number}": simulation.num_running_of(f"hostile {number}") for number in range(64)}
        )
    assert max(per_tenant.values()) <= 1.5 * min(per_tenant.values()), "large tenants have equal shares"


def test_a_sequence_runs_for_a_quantum_before_it_is_paused():
    simulation = Simulation(slots=1)
    for name in ("a", "b"):
        simulation.submit(long_sample(10), name)
    simulation.run(400)
    assert 10 <= simulation.pauses <= 400 / SLOT_UNITS


def test_idle_tenants_accumulate_no_share():
    simulation = Simulation(slots=8)
    simulation.submit(long_sample(1), "modest")
    simulation.submit(long_sample(4096), "busy")
    simulation.run(1000)
    simulation.submit(long_sample(4096), "modest")
    simulation.submit(long_sample(4096), "idle before")
    simulation.run(30)
    served: Counter[str] = Counter()
    for _ in range(60):
        simulation.run(1)
        served.update({name: simulation.num_running_of(name) for name in ("modest", "busy", "idle before")})
    assert min(served.values()) >= 0.75 * max(served.values())


def test_a_small_request_does_not_wait_for_a_large_one():
    simulation = Simulation(slots=32)
    simulation.submit(long_sample(4096, max_tokens=2000))
    simulation.run(10)
    assert simulation.dispatches_until_end(simulation.submit(long_sample(1, max_tokens=4), dispatches=1)) <= 3
    for _ in range(60):
        simulation.submit(long_sample(8, max_tokens=2000))
    simulation.run(10)
    assert simulation.dispatches_until_end(simulation.submit(long_sample(1, max_tokens=4), dispatches=1)) <= 3


def test_the_next_request_of_a_tenant_shares_its_slots():
    simulation = Simulation(slots=32)
    simulation.submit(long_sample(4096))
    simulation.run(10)
    second = simulation.submit(long_sample(64))
    simulation.run(4)
    assert sum(request_id == second for request_id, _ in simulation.running) == 16
    third = simulation.submit(long_sample(4))
    simulation.run(4)
    assert sum(request_id == third for request_id, _ in simulation.running) == 4


def test_small_requests_leave_most_slots_to_large_ones():
    simulation = Simulation(slots=8)
    large = simulation.submit(long_sample(4096))
    served = 0
    for _ in range(100):
        for _ in range(8):
            simulation.submit(long_sample(1, max_tokens=4), dispatches=1)
        simulation.run(1)
        served += sum(request_id == large for request_id, _ in simulation.running)
    assert served >= 100 * 8 * 0.7


def test_groups_of_one_tenant_run_whole_in_order_without_pauses():
    simulation = Simulation(slots=32)
    for _ in range(64):
        simulation.submit(long_sample(8), dispatches=50)
    simulation.run(1)
    assert sorted(simulation.running) == [
        (request_id, index) for request_id in range(1, 5) for index in range(8)
    ]
    simulation.run(100)
    assert simulation.pauses == 0
    assert list(simulation.ended) == list(range(1, 9))


def test_one_large_request_alone_is_never_interrupted():
    scheduler = queue(long_sample(4096))
    work = scheduler.next(free_slots=32, num_running=0)
    assert isinstance(work, Prefill)
    scheduler.prefill_finished(1, prompt_tokens=1)
    for _ in range(50):
        assert isinstance(scheduler.next(free_slots=0, num_running=32), Decode)
        assert not scheduler.interrupts(free_slots=0)


def test_nothing_is_paused_during_a_decode_dispatch():
    scheduler = queue(long_sample(4096))
    scheduler.next(free_slots=4, num_running=0)
    for _ in range(5):
        assert isinstance(scheduler.next(free_slots=0, num_running=4), Decode)
    assert not scheduler.interrupts(free_slots=0)
    scheduler.add(2, sample(), tenant="b")
    assert isinstance(scheduler.next(free_slots=0, num_running=4), Decode)
    assert scheduler.interrupts(free_slots=0)
    assert scheduler.next(free_slots=0, num_running=4) == Pause(sequences=((1, 3),))
    assert next_work(scheduler, free_slots=1, num_running=3) == PrefillRequest(
        request_id=2, op=sample(), first=0, count=1, tenant="b"
    )


def test_long_prompts_delay_another_tenants_prompt_briefly():
    simulation = Simulation(slots=32, max_partial_prefill_tokens=100_000)
    for _ in range(50):
        simulation.submit(long_sample(1, prompt_tokens=30_000), "hostile")
    for _ in range(20):
        simulation.run_next()
    start = len(simulation.history)
    short = simulation.submit(long_sample(1, prompt_tokens=100), "neighbour", dispatches=1)
    simulation.dispatches_until_end(short)
    prefills = [work for work in simulation.history[start:] if isinstance(work, Prefill)]
    assert len(prefills) <= 2


@pytest.mark.parametrize("prompt_tokens", [700, 1500, 30_000])
def test_running_sequences_never_wait_long_for_a_dispatch(prompt_tokens: int):
    simulation = Simulation(slots=16, max_partial_prefill_tokens=100_000, prefills_per_dispatch=3)
    for _ in range(60):
        simulation.submit(long_sample(1, prompt_tokens=prompt_tokens), dispatches=7)
    delay, longest = 0, 0
    while simulation.run_next():
        delay = delay + 1 if isinstance(simulation.history[-1], Prefill) and len(simulation.running) else 0
        longest = max(longest, delay)
    assert longest <= 3 / MAX_IDLE_SHARE + 16
    assert len(simulation.ended) == 60


def test_prompts_computed_in_part_stay_within_their_limit():
    simulation = Simulation(slots=8, max_partial_prefill_tokens=10_000)
    request_ids = [
        simulation.submit(long_sample(1, prompt_tokens=4000), f"tenant {number}", dispatches=1)
        for number in range(6)
    ]
    giant = simulation.submit(long_sample(1, prompt_tokens=30_000), "giant", dispatches=1)
    while len(simulation.ended) < 7 and simulation.run_next():
        unfinished = [
            num_computed
            for request_id, num_computed in simulation.prompts.items()
            if num_computed < (30_000 if request_id == giant else 4000)
        ]
        assert len(unfinished) <= 2
    assert set(simulation.ended) == {*request_ids, giant}


def test_tenants_take_turns_in_training_and_so_do_their_models():
    scheduler = Scheduler()
    for number in range(100):
        scheduler.add(number + 1, forward(f"model {number}"), tenant="many")
    for number in range(3):
        scheduler.add(101 + number, forward("alone"), tenant="one")
    assert run_steps(scheduler)[:6] == [1, 101, 2, 102, 3, 103]


def test_ten_thousand_waiting_requests_cost_little_more():
    def count_calls(waiting: int) -> int:
        """Return the number of Python function calls in 100 dispatches. Before each dispatch a request is
        withdrawn and another is submitted."""
        simulation = Simulation(slots=32)
        for number in range(waiting):
            simulation.submit(long_sample(1), f"tenant {number % 4}", dispatches=1 + number % 32)
        simulation.run(1)
        calls = 0

        def count_call(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count_call)
        try:
            for number in range(100):
                simulation.scheduler.drop_request(waiting - number)
                simulation.submit(long_sample(1), "tenant 0", dispatches=5)
                simulation.run(1)
        finally:
            sys.setprofile(None)
        return calls

    assert count_calls(10_000) < 2 * count_calls(500)


@pytest.mark.parametrize("seed", range(20))
def test_every_request_of_a_random_workload_is_served(seed: int) -> None:
    """Tenants start and stop, and some of their samples wait until a snapshot is saved."""
    draw = random.Random(seed)
    simulation = Simulation(slots=4, max_partial_prefill_tokens=2048)
    request_ids: list[int] = []
    for number in range(150):
        tenant, weights = f"tenant {draw.randrange(40)}", None
        if draw.random() < 0.4:
            weights = f"snapshot {number}"
            simulation.submit(SaveSampler(model_id=f"model {tenant}", weights=weights), tenant)
        tokens = np.ones(draw.choice((1, 100, 700)), np.int32)
        settings = SamplingSettings(max_tokens=draw.choice((4, 2000)))
        op = Sample(weights=weights, prompt=tokens, settings=settings, num_samples=draw.choice((1, 1, 3, 12)))
        request_ids.append(simulation.submit(op, tenant, dispatches=draw.randrange(1, 6)))
        if weights is not None:
            simulation.submit(DropSnapshot(weights=weights), tenant)
        for _ in range(draw.randrange(12)):
            simulation.run_next()
    while simulation.run_next():
        pass
    assert set(request_ids) <= set(simulation.ended)
    assert simulation.scheduler.num_waiting_samples == simulation.scheduler.num_waiting_steps == 0


class CountingQueue(SampleQueue):
    """Counts the calls of `next_of`, which take most of the time in which the scheduler chooses a request."""

    num_calls = 0

    def next_of(self, tenant: Tenant, plan: SlotPlan) -> Request | None:
        self.num_calls += 1
        return super().next_of(tenant, plan)


def test_the_cost_of_a_choice_does_not_grow_with_the_tenants() -> None:
    queue = CountingQueue(max_partial_prefill_tokens=0, is_changing=lambda weights, request_id: False)
    for number in range(1000):
        queue.add(number + 1, long_sample(2), tenant=str(number))
    for expected in (range(1, 17), range(17, 33)):
        prefills = queue.plan_prefills(16, 32, reserved=[], deferred=None)
        assert [prefill.request_id for prefill in prefills] == list(expected)
        for prefill in prefills:
            queue.start(prefill)
    for _ in range(32):
        queue.charge_dispatch()
    pauses = plan_pauses(queue, 32, for_memory=False)
    assert len(pauses) == 32 and pauses[0].waiter.request_id == 33
    assert queue.num_calls < 500
