"""The future store: polls, idempotency keys and bounded retention."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest

from skyrl_tx_server.engine import futures
from skyrl_tx_server.engine.futures import FutureStore, Outcome, RequestKey, Retention
from skyrl_tx_server.engine.operations import Done, ForwardBackwardResult, OpResult
from skyrl_tx_server.errors import FutureLostError, StorageError, UserError


class Work:
    """Replaces the call that submits an operation to the engine. `futures` are the futures of all calls."""

    def __init__(self) -> None:
        self.futures: list[Future[OpResult]] = []

    def __call__(self) -> Future[OpResult]:
        self.futures.append(Future())
        return self.futures[-1]


def submit(
    store: FutureStore,
    work: Callable[[], Future[OpResult]],
    seq_id: int | None = None,
    kind: str = "optim_step",
) -> str:
    return store.submit(
        work, kind=kind, key=None if seq_id is None else RequestKey(scope="s:train:0", seq_id=seq_id)
    )


async def test_a_poll_wakes_when_the_result_arrives() -> None:
    store, work = FutureStore(Retention(hold_s=30)), Work()
    request_id = submit(store, work)
    poll = asyncio.create_task(store.wait(request_id))
    await asyncio.sleep(0)
    assert not poll.done()
    work.futures[0].set_result(Done())
    outcome = await asyncio.wait_for(poll, 60)
    assert outcome is not None and outcome.result == Done()


async def test_a_poll_that_times_out_is_pending_and_can_be_repeated() -> None:
    store, work = FutureStore(Retention(hold_s=0.01)), Work()
    request_id = submit(store, work)
    assert await store.wait(request_id) is None
    work.futures[0].set_result(Done())
    assert await _eventually(store, request_id) is not None


async def test_a_repeated_request_runs_once_and_keeps_its_id() -> None:
    store, work = FutureStore(Retention()), Work()
    first = submit(store, work, seq_id=1)
    assert submit(store, work, seq_id=1) == first
    work.futures[0].set_result(Done())
    await store.wait(first)
    assert submit(store, work, seq_id=1) == first
    assert submit(store, work, seq_id=2) != first
    assert len(work.futures) == 2


async def test_a_save_that_the_disk_refuses_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    store, work = FutureStore(Retention()), Work()
    caplog.set_level(logging.INFO)
    for error in (StorageError("the disk is full"), UserError("over the quota")):
        request_id = submit(store, work, kind="save_weights")
        work.futures[-1].set_exception(error)
        await store.wait(request_id)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "save_weights failed (server): the disk is full"),
        ("INFO", "save_weights failed (user): over the quota"),
    ]


async def test_one_seq_id_for_two_kinds_of_request_is_refused() -> None:
    store = FutureStore(Retention())
    submit(store, Work(), seq_id=1)
    with pytest.raises(UserError, match="is used by an earlier optim_step request"):
        submit(store, Work(), seq_id=1, kind="forward_backward")


async def test_a_failed_submission_leaves_no_state() -> None:
    store = FutureStore(Retention())

    def fail() -> Future[OpResult]:
        raise UserError("no")

    with pytest.raises(UserError):
        submit(store, fail, seq_id=1)
    work = Work()
    submit(store, work, seq_id=1)
    assert len(work.futures) == 1


async def test_an_engine_error_is_the_outcome_of_its_future() -> None:
    store, work = FutureStore(Retention()), Work()
    first, second = submit(store, work), submit(store, work)
    work.futures[0].set_exception(UserError("too odd"))
    work.futures[1].set_exception(KeyError("lost"))
    outcomes = [await store.wait(first), await store.wait(second)]
    assert [
        (str(outcome.error), outcome.error.category)
        for outcome in outcomes
        if outcome is not None and outcome.error is not None
    ] == [
        ("too odd", "user"),
        ("optim_step failed on the server: KeyError: 'lost'", "server"),
    ]


async def test_when_done_runs_before_any_client_can_see_the_result() -> None:
    recorded: list[Outcome] = []
    store, work = FutureStore(Retention()), Work()
    request_id = store.submit(work, kind="create_model", key=None, when_done=recorded.append)
    work.futures[0].set_result(Done())
    outcome = await store.wait(request_id)
    assert recorded == [outcome]


async def test_an_error_of_when_done_is_the_outcome_of_the_request() -> None:
    def raise_full_disk(outcome: Outcome) -> None:
        raise OSError(28, "No space left on device")

    store, work = FutureStore(Retention()), Work()
    request_id = store.submit(work, kind="save_weights", key=None, when_done=raise_full_disk)
    work.futures[0].set_result(Done())
    async with asyncio.timeout(60):
        outcome = await store.wait(request_id)
    assert outcome is not None and "record it: [Errno 28] No space left" in str(outcome.error)


async def test_an_unknown_id_is_reported_as_lost() -> None:
    with pytest.raises(FutureLostError, match="restarted"):
        await FutureStore(Retention()).wait("optim_step-before-a-restart")


async def test_a_delivered_result_is_kept_for_the_grace_period() -> None:
    now = [0.0]
    store, work = FutureStore(Retention(grace_s=10), clock=lambda: now[0]), Work()
    request_id = submit(store, work, seq_id=1)
    work.futures[0].set_result(Done())
    await store.wait(request_id)
    now[0] = 9
    store.prune()
    assert await store.wait(request_id) is not None
    now[0] = 11
    store.prune()
    with pytest.raises(FutureLostError):
        await store.wait(request_id)
    assert submit(store, work, seq_id=1) == request_id, (
        "an operation does not run again after its result is dropped"
    )
    assert store.stats() == {"pending": 0, "finished": 0, "finished_bytes": 0, "evicted_undelivered": 0}


async def test_a_result_whose_delivery_waits_is_kept() -> None:
    now = [0.0]
    store, work = FutureStore(Retention(hold_s=0.01, grace_s=60), clock=lambda: now[0]), Work()
    request_id = submit(store, work)

    async def never(outcome: Outcome) -> None:
        await asyncio.Event().wait()

    work.futures[0].set_result(Done())
    assert await store.wait(request_id, never) is None
    now[0] = 61
    store.prune()
    assert await store.wait(request_id) is not None


async def test_the_byte_limit_drops_delivered_results_first() -> None:
    store, work = FutureStore(Retention(max_bytes=9_000)), Work()
    ids = [submit(store, work) for _ in range(3)]
    # each result takes about 4,300 bytes
    result = ForwardBackwardResult(logprobs=(np.zeros(1000, np.float32),), metrics={"loss:sum": 0.0})
    work.futures[0].set_result(result)
    work.futures[1].set_result(result)
    assert await store.wait(ids[1]) is not None
    work.futures[2].set_result(result)
    assert await store.wait(ids[2]) is not None
    assert await store.wait(ids[0]) is not None
    with pytest.raises(FutureLostError):
        await store.wait(ids[1])


async def test_the_newest_result_is_kept_whatever_its_size() -> None:
    store, work = FutureStore(Retention(max_bytes=1)), Work()
    request_id = submit(store, work)
    work.futures[0].set_result(Done())
    await asyncio.sleep(0)  # the result exists before the first poll
    assert await store.wait(request_id) is not None


async def test_the_oldest_key_is_removed_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "MAX_KEYS_PER_SCOPE", 2)
    store, work = FutureStore(Retention()), Work()
    ids = [submit(store, work, seq_id=seq_id) for seq_id in range(3)]
    assert [submit(store, work, seq_id=seq_id) for seq_id in (2, 1)] == [ids[2], ids[1]]
    assert submit(store, work, seq_id=0) != ids[0]


async def test_the_limit_on_results_counts_undelivered_results() -> None:
    store, work = FutureStore(Retention(max_finished=2)), Work()
    ids = [submit(store, work) for _ in range(4)]
    for future in work.futures:
        future.set_result(Done())
    assert await store.wait(ids[3]) is not None
    assert store.stats()["evicted_undelivered"] == 2
    with pytest.raises(FutureLostError):
        await store.wait(ids[0])


async def test_the_end_of_a_session_withdraws_its_waiting_operations() -> None:
    now = [0.0]
    store, work = FutureStore(Retention(grace_s=10, hold_s=30), clock=lambda: now[0]), Work()
    ids = [store.submit(work, kind="sample", key=None, session_id="s") for _ in range(3)]
    other_session = store.submit(work, kind="sample", key=None, session_id="t")
    work.futures[0].set_result(Done())
    assert work.futures[1].set_running_or_notify_cancel()
    assert await store.wait(ids[0]) is not None
    store.abandon("s")
    assert [future.cancelled() for future in work.futures] == [False, False, True, False]
    withdrawn = await store.wait(ids[2])
    assert withdrawn is not None and "its session ended" in str(withdrawn.error)
    work.futures[1].set_result(Done())
    assert await store.wait(ids[1]) is not None
    now[0] = 11
    store.prune()
    assert store.stats() == {"pending": 1, "finished": 0, "finished_bytes": 0, "evicted_undelivered": 0}
    work.futures[3].set_result(Done())
    assert await store.wait(other_session) is not None


async def test_a_result_after_its_session_is_kept_for_the_grace_period() -> None:
    now = [0.0]
    store, work = FutureStore(Retention(grace_s=10), clock=lambda: now[0]), Work()
    store.submit(work, kind="sample", key=None, session_id="s")
    assert work.futures[0].set_running_or_notify_cancel()
    store.abandon("s")
    work.futures[0].set_result(Done())
    await asyncio.sleep(0)
    assert store.stats()["finished"] == 1
    now[0] = 11
    store.prune()
    assert store.stats()["finished"] == 0


async def test_closing_ends_every_waiting_poll() -> None:
    store = FutureStore(Retention(hold_s=30))
    poll = asyncio.create_task(store.wait(submit(store, Work())))
    await asyncio.sleep(0)
    store.close()
    assert await asyncio.wait_for(poll, 60) is None


async def _eventually(store: FutureStore, request_id: str) -> Outcome | None:
    """Poll until the result has arrived. Return None if 100 polls time out."""
    for _ in range(100):
        if (outcome := await store.wait(request_id)) is not None:
            return outcome
    return None


async def test_the_end_of_a_session_withdraws_its_started_operations() -> None:
    store, work = FutureStore(Retention()), Work()
    withdrawn: list[str] = []
    for session_id in ("one", "other"):
        store.submit(
            work,
            kind="sample",
            key=None,
            session_id=session_id,
            withdraw=lambda session_id=session_id: withdrawn.append(session_id),
        )
        work.futures[-1].set_running_or_notify_cancel()
    store.abandon("one")
    assert withdrawn == ["one"]


async def test_keys_of_samples_are_pruned_and_keys_of_steps_are_kept() -> None:
    store, work = FutureStore(Retention(max_finished=0)), Work()
    for kind in ("sample", "optim_step"):
        for seq_id in range(3):
            request_id = store.submit(work, kind=kind, key=RequestKey(scope=kind, seq_id=seq_id))
            work.futures[-1].set_result(Done())
            await store.wait(request_id)
    store.prune()
    is_known = {
        kind: [
            store.find(RequestKey(scope=kind, seq_id=seq_id), kind=kind) is not None for seq_id in range(3)
        ]
        for kind in ("sample", "optim_step")
    }
    assert is_known == {"sample": [False] * 3, "optim_step": [True] * 3}
