"""Tests the messages about long waits, with a clock that the tests set."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from src.core.wait_notice import WaitNotice

type SetTime = Callable[[float], Awaitable[None]]


@pytest.fixture
async def set_time(monkeypatch: pytest.MonkeyPatch) -> SetTime:
    """Return a function that sets the time of the event loop, in seconds, and runs the due timers."""
    now = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)

    async def set_time(seconds: float) -> None:
        nonlocal now
        now = seconds
        for _ in range(2):  # iterations of the event loop
            await asyncio.sleep(0)

    return set_time


async def test_a_wait_is_explained_and_then_reported_every_30_s(set_time: SetTime) -> None:
    said: list[str] = []
    notice = WaitNotice(said.append)
    notice.start("the update", explanation="it may be slow")
    await set_time(4.9)
    assert said == []
    for seconds in (5, 6, 30, 31, 60):
        await set_time(seconds)
    assert said == [
        "waiting for the update; it may be slow",
        "still waiting for the update (30 s)",
        "still waiting for the update (60 s)",
    ]
    notice.stop()
    await set_time(90)
    assert len(said) == 3


async def test_a_wait_without_an_explanation_is_reported_after_30_s(set_time: SetTime) -> None:
    said: list[str] = []
    notice = WaitNotice(said.append)
    notice.start("the update")
    await set_time(29)
    assert said == []
    await set_time(30)
    assert said == ["still waiting for the update (30 s)"]
    notice.stop()


async def test_only_the_latest_wait_is_reported_until_it_is_over(set_time: SetTime) -> None:
    said: list[str] = []
    is_over = False
    notice = WaitNotice(said.append)
    notice.start("a", explanation="b")
    notice.start("c", explanation="d", is_over=lambda: is_over)
    await set_time(5)
    is_over = True
    await set_time(30)
    assert said == ["waiting for c; d"]
    notice.stop()
