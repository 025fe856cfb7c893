"""A decode block may begin before the host has looked at the one before it: nobody's samples change, and nothing else goes wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from skyrl_tx_server.engine.engine import FailedRow, FinishedRow
from skyrl_tx_server.engine.operations import Sample, SampledSequence, SamplingSettings, StopReason
from skyrl_tx_server.engine.scheduler import PrefillRequest
from skyrl_tx_server.errors import CapacityError
from skyrl_tx_server.executor.executor import DeviceExecutor
from tests.fakes.tiny_model import CONFIG, make_model, make_settings

MODEL = replace(CONFIG, hidden_size=64, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=64)
"""Rows of matrices are summed alike whatever their number from this width on, so equal means equal to the bit."""
BLOCK, SLOTS = 8, 4
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


SHORT, LONG = len(REQUESTS), len(REQUESTS) + 1
REQUESTS += [
    replace(
        REQUESTS[0], settings=SamplingSettings(max_tokens=length, seed=0, stop_at_eos=False), num_samples=1
    )
    for length in (BLOCK - 2, 3 * BLOCK)
]


@dataclass
class Driver:
    """Does as an engine does, at moments of the test's choice."""

    executor: DeviceExecutor
    finished: dict[tuple[int, int], SampledSequence] = field(default_factory=dict)
    failed: list[Exception] = field(default_factory=list)

    def admit(self, request_id: int) -> None:
        while (
            admission := self.executor.admit(
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

    def block(self, *, go_on: bool) -> None:
        self.executor.decode()
        self._collect(self.executor.collect(go_on=go_on))

    def _collect(self, rows: Sequence[FinishedRow | FailedRow]) -> None:
        for row in rows:
            if isinstance(row, FailedRow):
                self.failed.append(row.error)
            else:
                assert (row.request_id, row.index) not in self.finished, "a row is over once"
                self.finished[row.request_id, row.index] = row.sequence


@pytest.fixture(scope="module", params=[None, 448], ids=["room for all", "too little room"])
def driver(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Driver:
    folder = tmp_path_factory.mktemp("ahead")
    settings = make_settings(
        make_model(folder / "model", MODEL),
        folder,
        max_num_seqs=SLOTS,
        decode_steps_per_dispatch=BLOCK,
        max_context_length=192,
        cache_tokens=request.param,
    )
    return Driver(DeviceExecutor(settings))


@pytest.fixture(autouse=True)
def idle(driver: Driver) -> Iterator[None]:
    if driver.executor._slots._flight is not None:  # all its rows have gone
        driver.block(go_on=False)
    driver.finished.clear()
    yield
    assert not driver.executor.rows_decoding and not driver.failed
    assert {users for pages in driver.executor._slots._pages for users in pages._users.values()} == {1}, (
        "nobody but the tree has a page"
    )


@pytest.fixture(scope="module")
def alone(driver: Driver) -> dict[tuple[int, int], SampledSequence]:
    """What each request samples alone, a block at a time."""
    for request_id in range(len(REQUESTS)):
        driver.admit(request_id)
        while driver.executor.rows_decoding:
            driver.block(go_on=False)
    return dict(driver.finished)


@pytest.mark.parametrize("seed", range(4))
def test_whoever_comes_and_goes_meanwhile_all_sample_what_they_do_alone(
    driver: Driver, alone: dict, seed: int
) -> None:
    """Requests enter, are withdrawn and finish (by length, stop token, stop string) while blocks are under way, and are set aside where
    the cache is too small for all."""
    executor, random = driver.executor, np.random.default_rng(seed)
    before, released = executor.stats(), set()
    waiting = random.permutation(len(REQUESTS)).tolist()
    running: set[int] = set()
    while waiting or executor.rows_decoding:
        free = SLOTS - executor.rows_decoding
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
                driver.block(go_on=True)
        elif running and random.random() < 0.04:
            request_id = running.pop()
            executor.release(request_id)
            released.add(request_id)
        elif executor.rows_decoding:
            driver.block(go_on=random.random() < 0.8)
    stats = executor.stats()
    assert stats["decode_dispatches_ahead"] > before["decode_dispatches_ahead"]
    assert stats["cache_pages_free"] + stats["cache_pages_cached"] == stats["cache_pages"]
    set_aside = stats["num_preemptions"] > before["num_preemptions"]
    assert set_aside == (stats["cache_pages"] == 7)
    expected = {key: sequence for key, sequence in alone.items() if key[0] not in released}
    assert expected.keys() <= driver.finished.keys() <= alone.keys()
    for key, sequence in driver.finished.items():
        np.testing.assert_array_equal(sequence.tokens, alone[key].tokens)
        np.testing.assert_allclose(
            sequence.logprobs, alone[key].logprobs, atol=1e-4 if set_aside else 0, rtol=0
        )
        assert sequence.stop_reason is alone[key].stop_reason


def test_rows_end_in_every_way(alone: dict) -> None:
    """Or the test above would show little."""
    ways = {
        (REQUESTS[request_id].settings.stop_strings != (), sequence.stop_reason)
        for (request_id, _), sequence in alone.items()
    }
    assert ways >= {(True, StopReason.STOP), (False, StopReason.STOP), (False, StopReason.LENGTH)}


def failing_second(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """From here on the second block cannot begin; those that were to are in the list."""
    slots = driver.executor._slots
    begin, begun = slots._begin, []

    def failing(*arguments: object) -> object:
        begun.append(arguments)
        if len(begun) == 2:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return begin(*arguments)

    monkeypatch.setattr(slots, "_begin", failing)
    return begun


def test_a_block_that_cannot_begin_takes_nothing_from_the_one_before(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.admit(SHORT)
    driver.admit(LONG)
    begun = failing_second(driver, monkeypatch)
    driver.block(go_on=True)
    assert {request_id for request_id, _ in driver.finished} == {SHORT} and len(begun) == 2
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        driver.executor.decode()
    assert not driver.executor.rows_decoding
    driver.finished.clear()
    driver.admit(SHORT)
    driver.block(go_on=True)
    assert not driver.executor.rows_decoding


def test_a_block_that_cannot_begin_is_nothing_to_who_comes_after_its_rows(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.admit(LONG)
    begun = failing_second(driver, monkeypatch)
    driver.block(go_on=True)
    driver.executor.release(LONG)
    driver.admit(SHORT)
    driver.block(go_on=True)
    assert {request_id for request_id, _ in driver.finished} == {SHORT} and len(begun) == 3


def test_nothing_begins_where_all_rows_have_ended(driver: Driver, alone: dict) -> None:
    before = driver.executor.stats()["decode_dispatches_ahead"]
    settings = replace(
        REQUESTS[LONG].settings, stop_token_ids=(int(alone[LONG, 0].tokens[4]),)
    )  # it might have gone on
    for op in (REQUESTS[SHORT], replace(REQUESTS[LONG], settings=settings)):
        driver.executor.admit([PrefillRequest(request_id=99, op=op, first=0, count=1)])
        assert driver.executor.decode()
        assert len(driver.executor.collect(go_on=True)) == 1
    assert driver.executor.stats()["decode_dispatches_ahead"] == before


def test_a_row_that_is_set_aside_has_its_slot_and_is_back_as_soon_as_there_are_pages(driver: Driver) -> None:
    """Four rows of two pages each where there are seven; two of them end."""
    executor = driver.executor
    is_small = executor.stats()["cache_pages"] == 7
    for request_id, length in enumerate((40, 40, 100, 100), start=101):
        prompt = np.random.default_rng(request_id).integers(0, 256, 40).astype(np.int32)
        op = Sample(
            weights=None,
            prompt=prompt,
            settings=SamplingSettings(max_tokens=length, seed=0, stop_at_eos=False),
        )
        executor.admit([PrefillRequest(request_id=request_id, op=op, first=0, count=1)])
    for _ in range(4):
        driver.block(go_on=True)
    assert executor.stats()["sequences_preempted"] == is_small
    assert executor.rows_decoding == SLOTS and all(
        len(executor.running(request_id)) == 1 for request_id in (101, 102, 103, 104)
    )
    if is_small:
        with pytest.raises(CapacityError, match="come first"):
            driver.admit(SHORT)
    while len(driver.finished) < 2:
        driver.block(go_on=True)
    driver.block(go_on=True)
    assert executor.stats()["sequences_preempted"] == 0 and executor.rows_decoding == 2
    for request_id in (103, 104):
        executor.release(request_id)


def test_a_row_that_is_set_aside_can_be_withdrawn(driver: Driver) -> None:
    executor = driver.executor
    for request_id in range(101, 105):
        prompt = np.random.default_rng(request_id).integers(0, 256, 40).astype(np.int32)
        op = Sample(
            weights=None, prompt=prompt, settings=SamplingSettings(max_tokens=100, seed=0, stop_at_eos=False)
        )
        executor.admit([PrefillRequest(request_id=request_id, op=op, first=0, count=1)])
    for _ in range(4):
        driver.block(go_on=False)
    executor.release(104)
    stats = executor.stats()
    assert (executor.rows_decoding, stats["sequences_preempted"], executor.running(104)) == (3, 0, [])
    for request_id in range(101, 104):
        executor.release(request_id)
    stats = executor.stats()
    assert stats["cache_pages_free"] + stats["cache_pages_cached"] == stats["cache_pages"]


def test_a_row_that_a_stop_token_ended_samples_nothing_in_the_block_that_has_begun(
    driver: Driver, alone: dict
) -> None:
    stop = int(alone[LONG, 0].tokens[4])
    settings = replace(REQUESTS[LONG].settings, max_tokens=100, stop_token_ids=(stop,))
    driver.admit(LONG)
    driver.executor.admit(
        [PrefillRequest(request_id=99, op=replace(REQUESTS[LONG], settings=settings), first=0, count=1)]
    )
    slots: Any = driver.executor._slots
    (slot,) = (at for at, row in enumerate(slots._rows) if row is not None and row.request_id == 99)
    driver.block(go_on=True)
    assert driver.finished[99, 0].tokens[-1] == stop and slot in dict(slots._flight.block.live)
    driver.executor.decode()
    assert (slots._flight.sampled.tokens[slot] == -1).all()
    driver.executor.release(LONG)
