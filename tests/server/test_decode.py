"""Samples stay the same if a decode dispatch starts before the host has read the results of the previous
dispatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from skyrl_tx_server.engine.executor_protocol import FailedSequence, FinishedSequence, SequencesLostError
from skyrl_tx_server.engine.operations import Sample, SampledSequence, SamplingSettings, StopReason
from skyrl_tx_server.engine.scheduled_work import PrefillRequest
from skyrl_tx_server.errors import CapacityError
from skyrl_tx_server.executor.executor import DeviceExecutor
from skyrl_tx_server.sampling.decode import InFlightBatch
from skyrl_tx_server.sampling.decode_batch import DecodeDispatch
from skyrl_tx_server.sampling.decode_step import Carry, DecodeOutputs
from tests.fakes.tiny_model import CONFIG, make_model, make_settings

MODEL = replace(CONFIG, hidden_size=64, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=64)
"""With hidden_size 64 or more, each row of a matrix product has the same bits in batches of all sizes."""
STEPS, SLOTS = 8, 4
rng = np.random.default_rng(5)
REQUESTS = [
    Sample(
        weights=None,
        prompt=rng.integers(0, 256, rng.integers(1, 70)).astype(np.int32),
        settings=SamplingSettings(
            max_tokens=int(rng.integers(1, 110)),
            seed=number,
            stop_at_eos=False,
            stop_token_ids=tuple(rng.integers(0, 256, 3).tolist()) if number % 3 == 0 else (),
            stop_strings=tuple("aeiou" if number % 3 == 1 else ()),
        ),
        num_samples=int(rng.integers(1, 3)),
    )
    for number in range(24)
]


# request ids: SHORT ends within one decode dispatch, LONG needs three
SHORT, LONG = len(REQUESTS), len(REQUESTS) + 1
REQUESTS += [
    replace(
        REQUESTS[0], settings=SamplingSettings(max_tokens=length, seed=0, stop_at_eos=False), num_samples=1
    )
    for length in (STEPS - 2, 3 * STEPS)
]


@dataclass
class Driver:
    """Calls the executor as the engine does, so that a test controls the order of the calls."""

    executor: DeviceExecutor
    finished: dict[tuple[int, int], SampledSequence] = field(default_factory=dict)
    failed: list[Exception] = field(default_factory=list)

    def admit(self, request_id: int) -> None:
        """Prefill the whole prompt of a request, in as many calls as it needs."""
        while (
            admission := self.executor.sampler.prefill(
                [
                    PrefillRequest(
                        request_id=request_id,
                        op=REQUESTS[request_id],
                        first=0,
                        count=REQUESTS[request_id].num_samples,
                    )
                ]
            )[0]
        ) is None:
            pass
        self._collect(admission.finished)

    def dispatch(self, *, dispatch_next: bool) -> None:
        self.executor.sampler.decode()
        self._collect(self.executor.sampler.poll(dispatch_next=dispatch_next))

    def _collect(self, rows: Sequence[FinishedSequence | FailedSequence]) -> None:
        for row in rows:
            if isinstance(row, FailedSequence):
                self.failed.append(row.error)
            else:
                assert (row.request_id, row.index) not in self.finished, "a sequence finished twice"
                self.finished[row.request_id, row.index] = row.sequence


@pytest.fixture(scope="module", params=[None, 448], ids=["enough pages", "too few pages"])
def driver(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Driver:
    directory = tmp_path_factory.mktemp("decode")
    settings = make_settings(
        make_model(directory / "model", MODEL),
        directory,
        max_num_seqs=SLOTS,
        decode_steps_per_dispatch=STEPS,
        max_context_length=192,
        cache_tokens=request.param,
    )
    return Driver(DeviceExecutor(settings))


@pytest.fixture(autouse=True)
def drained(driver: Driver) -> Iterator[None]:
    """Start each test without a dispatch in flight, and check that each test ends all its sequences."""
    if driver.executor.sampler.pipeline.in_flight is not None:
        driver.dispatch(dispatch_next=False)
    driver.finished.clear()
    yield
    assert not driver.executor.sampler.num_running and not driver.failed
    for cache in driver.executor.sampler.pages.caches:
        assert set(cache.references.values()) <= {1}, "only the prefix cache holds pages"


@pytest.fixture(scope="module")
def alone(driver: Driver) -> dict[tuple[int, int], SampledSequence]:
    """Return the samples of each request when it runs alone. Each dispatch waits for the previous one."""
    for request_id in range(len(REQUESTS)):
        driver.admit(request_id)
        while driver.executor.sampler.num_running:
            driver.dispatch(dispatch_next=False)
    return dict(driver.finished)


@pytest.mark.parametrize("seed", range(4))
def test_samples_do_not_depend_on_other_requests(driver: Driver, alone: dict, seed: int) -> None:
    """Requests start, are released or finish by length, stop token or stop string, in random order. If the
    cache is too small, sequences are preempted."""
    executor, random = driver.executor, np.random.default_rng(seed)
    before: dict[str, Any] = executor.stats()
    released = set()
    waiting = random.permutation(len(REQUESTS)).tolist()
    running: set[int] = set()
    while waiting or executor.sampler.num_running:
        free = SLOTS - executor.sampler.num_running
        if (
            waiting
            and REQUESTS[waiting[-1]].num_samples <= free
            and not executor.stats()["sequences_preempted"]
            and random.random() < 0.6
        ):
            try:
                driver.admit(waiting[-1])
                running.add(waiting.pop())
            except CapacityError:
                driver.dispatch(dispatch_next=True)
        elif running and random.random() < 0.04:
            request_id = running.pop()
            executor.sampler.release(request_id)
            released.add(request_id)
        elif executor.sampler.num_running:
            driver.dispatch(dispatch_next=random.random() < 0.8)
    stats: dict[str, Any] = executor.stats()
    assert stats["decode_dispatches_ahead"] > before["decode_dispatches_ahead"]
    assert stats["cache_pages_free"] + stats["cache_pages_cached"] == stats["cache_pages"]
    preempted = stats["num_preemptions"] > before["num_preemptions"]
    assert preempted == (stats["cache_pages"] == 7)
    expected = {key: sequence for key, sequence in alone.items() if key[0] not in released}
    assert expected.keys() <= driver.finished.keys() <= alone.keys()
    for key, sequence in driver.finished.items():
        np.testing.assert_array_equal(sequence.tokens, alone[key].tokens)
        np.testing.assert_allclose(
            sequence.logprobs, alone[key].logprobs, atol=1e-4 if preempted else 0, rtol=0
        )
        assert sequence.stop_reason is alone[key].stop_reason


def test_the_requests_end_with_every_stop_reason(alone: dict) -> None:
    """`test_samples_do_not_depend_on_other_requests` relies on requests with each of these stop reasons."""
    stop_reasons = {
        (REQUESTS[request_id].settings.stop_strings != (), sequence.stop_reason)
        for (request_id, _), sequence in alone.items()
    }
    assert stop_reasons >= {(True, StopReason.STOP), (False, StopReason.STOP), (False, StopReason.LENGTH)}


def fail_second_dispatch(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Make the second dispatch after this call fail to start. Return a list that grows with each dispatch."""
    runner = driver.executor.sampler.runner
    decode, dispatches = runner.decode, []

    def decode_or_fail(dispatch: DecodeDispatch, carry: Carry) -> DecodeOutputs:
        dispatches.append((dispatch, carry))
        if len(dispatches) == 2:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return decode(dispatch, carry)

    monkeypatch.setattr(runner, "decode", decode_or_fail)
    return dispatches


def test_a_dispatch_that_fails_to_start_keeps_earlier_results(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.admit(SHORT)
    driver.admit(LONG)
    dispatches = fail_second_dispatch(driver, monkeypatch)
    driver.dispatch(dispatch_next=True)
    assert {request_id for request_id, _ in driver.finished} == {SHORT} and len(dispatches) == 2
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        driver.executor.sampler.decode()
    assert not driver.executor.sampler.num_running
    driver.finished.clear()
    driver.admit(SHORT)
    driver.dispatch(dispatch_next=True)
    assert not driver.executor.sampler.num_running


def test_a_dispatch_that_fails_to_start_fails_no_later_request(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.admit(LONG)
    dispatches = fail_second_dispatch(driver, monkeypatch)
    driver.dispatch(dispatch_next=True)
    driver.executor.sampler.release(LONG)
    driver.admit(SHORT)
    driver.dispatch(dispatch_next=True)
    assert {request_id for request_id, _ in driver.finished} == {SHORT} and len(dispatches) == 3


def test_no_dispatch_starts_when_all_sequences_have_ended(driver: Driver, alone: dict) -> None:
    before = driver.executor.stats()["decode_dispatches_ahead"]
    # a stop token that LONG samples within its first dispatch
    settings = replace(REQUESTS[LONG].settings, stop_token_ids=(int(alone[LONG, 0].tokens[4]),))
    for op in (REQUESTS[SHORT], replace(REQUESTS[LONG], settings=settings)):
        driver.executor.sampler.prefill([PrefillRequest(request_id=99, op=op, first=0, count=1)])
        assert driver.executor.sampler.decode()
        assert len(driver.executor.sampler.poll(dispatch_next=True)) == 1
    assert driver.executor.stats()["decode_dispatches_ahead"] == before


def test_a_preempted_sequence_keeps_its_slot_and_is_restored(driver: Driver) -> None:
    """Four sequences do not fit into 7 pages, so one is preempted until two others have ended."""
    executor = driver.executor
    is_small_cache = executor.stats()["cache_pages"] == 7
    for request_id, length in enumerate((40, 40, 100, 100), start=101):
        prompt = np.random.default_rng(request_id).integers(0, 256, 40).astype(np.int32)
        op = Sample(
            weights=None,
            prompt=prompt,
            settings=SamplingSettings(max_tokens=length, seed=0, stop_at_eos=False),
        )
        executor.sampler.prefill([PrefillRequest(request_id=request_id, op=op, first=0, count=1)])
    for _ in range(4):
        driver.dispatch(dispatch_next=True)
    assert executor.stats()["sequences_preempted"] == is_small_cache
    assert executor.sampler.num_running == SLOTS and all(
        len(executor.sampler.running(request_id)) == 1 for request_id in (101, 102, 103, 104)
    )
    if is_small_cache:
        with pytest.raises(CapacityError, match="are restored before"):
            driver.admit(SHORT)
    while len(driver.finished) < 2:
        driver.dispatch(dispatch_next=True)
    driver.dispatch(dispatch_next=True)
    assert executor.stats()["sequences_preempted"] == 0 and executor.sampler.num_running == 2
    for request_id in (103, 104):
        executor.sampler.release(request_id)


def test_a_preempted_sequence_can_be_released(driver: Driver) -> None:
    executor = driver.executor
    for request_id in range(101, 105):
        prompt = np.random.default_rng(request_id).integers(0, 256, 40).astype(np.int32)
        op = Sample(
            weights=None, prompt=prompt, settings=SamplingSettings(max_tokens=100, seed=0, stop_at_eos=False)
        )
        executor.sampler.prefill([PrefillRequest(request_id=request_id, op=op, first=0, count=1)])
    for _ in range(4):
        driver.dispatch(dispatch_next=False)
    executor.sampler.release(104)
    stats = executor.stats()
    assert (executor.sampler.num_running, stats["sequences_preempted"], executor.sampler.running(104)) == (
        3,
        0,
        [],
    )
    for request_id in range(101, 104):
        executor.sampler.release(request_id)
    stats: dict[str, Any] = executor.stats()
    assert stats["cache_pages_free"] + stats["cache_pages_cached"] == stats["cache_pages"]


def test_a_preempted_sequence_precedes_requests_of_its_tenant(driver: Driver) -> None:
    sampler = driver.executor.sampler
    is_small_cache = driver.executor.stats()["cache_pages"] == 7
    settings = SamplingSettings(max_tokens=100, seed=0, stop_at_eos=False)
    for request_id in range(101, 105):
        prompt = np.random.default_rng(request_id).integers(0, 256, 40).astype(np.int32)
        op = Sample(weights=None, prompt=prompt, settings=settings)
        sampler.prefill([PrefillRequest(request_id=request_id, op=op, first=0, count=1, tenant="a")])
    for _ in range(4):
        driver.dispatch(dispatch_next=False)
    for request_id in (101, 102):
        sampler.release(request_id)
    op = replace(REQUESTS[SHORT], prompt=np.arange(5, dtype=np.int32))
    requests = [
        PrefillRequest(request_id=number, op=op, first=0, count=1, tenant=tenant)
        for number, tenant in ((105, "b"), (106, "a"))
    ]
    assert len(sampler.prefill(requests)) == (1 if is_small_cache else 2)
    for request_id in range(103, 107):
        sampler.release(request_id)


def test_a_failed_empty_dispatch_fails_paused_sequences(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = driver.executor.sampler
    op = replace(REQUESTS[LONG], settings=replace(REQUESTS[LONG].settings, max_tokens=100))
    for request_id in (101, 102):
        sampler.prefill([PrefillRequest(request_id=request_id, op=op, first=0, count=1)])
    sampler.pause([(101, 0)])
    sampler.decode()
    sampler.poll(dispatch_next=True)
    sampler.release(102)

    def fail() -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(sampler.runner, "wait", fail)
    waiting = [PrefillRequest(request_id=103, op=op, first=0, count=1)]
    with pytest.raises(SequencesLostError, match="RESOURCE_EXHAUSTED") as error:
        sampler.prefill(waiting)
    assert error.value.num_requests == 0, "the waiting request has not failed"
    assert len(sampler.prefill(waiting)) == 1
    for request_id in (101, 103):
        sampler.release(request_id)


def test_an_ended_sequence_samples_nothing_in_the_next_dispatch(driver: Driver, alone: dict) -> None:
    stop_token = int(alone[LONG, 0].tokens[4])
    settings = replace(REQUESTS[LONG].settings, max_tokens=100, stop_token_ids=(stop_token,))
    driver.admit(LONG)
    driver.executor.sampler.prefill(
        [PrefillRequest(request_id=99, op=replace(REQUESTS[LONG], settings=settings), first=0, count=1)]
    )
    sampler = driver.executor.sampler
    (slot,) = (slot for slot, sequence in sampler.pool.decoding if sequence.request_id == 99)
    driver.dispatch(dispatch_next=True)
    in_flight = sampler.pipeline.in_flight
    assert isinstance(in_flight, InFlightBatch)
    assert driver.finished[99, 0].tokens[-1] == stop_token and slot in [
        slot for _, slot, _ in in_flight.dispatch.sequences
    ]
    sampler.decode()
    assert in_flight.host_outputs is not None and (in_flight.host_outputs.tokens[slot] == -1).all()
    sampler.release(LONG)
