import asyncio
from typing import cast

import pytest

from src.core.errors import BackendError, ServerLost
from src.core.trajectory import Turn
from src.policy.options import WatchdogOptions
from src.policy.sampling_policy import SampleRequest
from src.rollouts.watchdog import WatchedPolicy, WatchedReference, watching
from tests.fakes.virtual_time import in_virtual_time

SETTINGS = WatchdogOptions(heartbeat_timeout_s=0.1, request_timeout_s=0.05)


async def alive():
    pass


async def no_answer():
    raise BackendError("no server answers")


async def lost_session():
    raise ServerLost("the server has lost the session")


async def for_ever(cancelled_waits):
    try:
        await asyncio.Event().wait()
    finally:
        cancelled_waits.append(True)


@in_virtual_time
async def test_the_watchdog_returns_the_answer():
    async with watching(alive, SETTINGS) as watchdog:
        assert await watchdog.answer(asyncio.sleep(0, 7), "training") == 7
    assert len(asyncio.all_tasks()) == 1


@in_virtual_time
async def test_a_missing_answer_ends_only_its_own_wait():
    cancelled_waits = []
    async with watching(alive, SETTINGS) as watchdog:
        with pytest.raises(BackendError, match=r"^saving: no answer within request_timeout_s=0.05$") as error:
            await watchdog.answer(for_ever(cancelled_waits), "saving")
        assert not isinstance(error.value, ServerLost) and cancelled_waits
        assert (
            await watchdog.guard(asyncio.sleep(0.1, 7), "rolling out") == 7
        )  # Trials have their own deadlines.


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (
            no_answer,
            r"the server has passed no health check for heartbeat_timeout_s=0.1 \(no server answers\)",
        ),
        (lost_session, "the server has lost the session"),
    ],
)
@in_virtual_time
async def test_a_lost_server_ends_every_wait(check, message):
    cancelled_waits = []
    async with watching(check, WatchdogOptions(heartbeat_timeout_s=0.1, request_timeout_s=60)) as watchdog:
        waits = [
            watchdog.guard(for_ever(cancelled_waits), "rolling out"),
            watchdog.answer(for_ever(cancelled_waits), "training"),
        ]
        errors = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 5)
    assert [type(error) for error in errors] == [ServerLost, ServerLost]
    with pytest.raises(ServerLost, match=f"rolling out: {message}"):
        raise cast(ServerLost, errors[0])
    assert len(cancelled_waits) == 2 and len(asyncio.all_tasks()) == 1


@in_virtual_time
async def test_a_few_failed_probes_do_not_end_the_run():
    failures = iter([True, True, False, True])

    async def sometimes_busy():
        if next(failures, False):
            raise BackendError("busy")

    async with watching(
        sometimes_busy, WatchdogOptions(heartbeat_timeout_s=0.1, request_timeout_s=60)
    ) as watchdog:
        assert await watchdog.guard(asyncio.sleep(0.3, 7), "rolling out") == 7


@in_virtual_time
async def test_a_silent_server_is_reported_every_30_seconds(caplog):
    options = WatchdogOptions(heartbeat_timeout_s=70, request_timeout_s=600)
    async with watching(no_answer, options) as watchdog:
        with pytest.raises(ServerLost):
            await watchdog.guard(asyncio.Event().wait(), "rolling out")
    assert caplog.messages == [
        f"health checks have failed for {silent_s} s; the server counts as lost after "
        "heartbeat_timeout_s=70: no server answers"
        for silent_s in (0, 30, 60)
    ]


@in_virtual_time
async def test_errors_and_cancellation_pass_through_the_watchdog():
    cancelled_waits = []
    async with watching(alive, SETTINGS) as watchdog:
        with pytest.raises(BackendError, match=r"^no server answers$"):
            await watchdog.answer(no_answer(), "training")
        waiting = asyncio.ensure_future(watchdog.guard(for_ever(cancelled_waits), "rolling out"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert cancelled_waits


@in_virtual_time
async def test_a_watched_policy_adds_a_deadline():
    class Stuck:
        version = 5

        async def sample(self, request) -> Turn:
            await asyncio.Event().wait()
            raise AssertionError("the event is never set")

        async def logprobs(self, token_ids):
            return [-1.0]

    async with watching(alive, SETTINGS) as watchdog:
        policy = WatchedPolicy(Stuck(), watchdog)
        assert policy.version == 5
        assert await WatchedReference(Stuck(), watchdog).logprobs([1, 2]) == [-1.0]
        with pytest.raises(BackendError, match="sampling: no answer within"):
            await policy.sample(SampleRequest(prompt_ids=[1], max_tokens=1, temperature=1.0))
