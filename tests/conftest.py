"""What tests that use the official SDK in their own process share: an end of all it does there, and the sockets it leaves open."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

SDK_MARK = "official_sdk"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker(SDK_MARK):
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(autouse=True)
def nothing_left_of_the_sdk(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Sockets are collected here, where the mark forgives them, rather than in some later test of the same process, which would fail
    for them. What was there before the test is not looked at, so this takes milliseconds.
    """
    if request.node.get_closest_marker(SDK_MARK) is None:
        yield
        return
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    gc.freeze()
    yield
    _end_what_the_sdk_still_does()
    gc.collect()
    gc.unfreeze()


def _end_what_the_sdk_still_does() -> None:
    """For minutes, in a thread of its own, it tries to close the session of a server that is gone; its heart beats for ever there. What
    that logs would be among the records of a later test."""
    from tinker.lib.internal_client_holder import _internal_client_holder_thread_singleton as of_the_process

    async def end() -> None:
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    loop = of_the_process.loop_if_started()
    if loop is not None:
        asyncio.run_coroutine_threadsafe(end(), loop).result(60)
