"""Tests of waiting for samples without a server."""

from __future__ import annotations

import asyncio
import gc
import logging
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from skyrl_tx_server.engine.operations import Sample, SampleResult
from skyrl_tx_server.errors import CapacityError
from skyrl_tx_server.http.streaming import StreamWatcher, wait_for_results


async def test_a_refused_sample_withdraws_the_earlier_ones() -> None:
    watchers: list[StreamWatcher] = []
    future = Future[SampleResult]()

    def submit(op: Sample, watcher: StreamWatcher) -> Future[SampleResult]:
        if watchers:
            raise CapacityError("too many tokens")
        watchers.append(watcher)
        return future

    state = cast("Any", SimpleNamespace(engine=SimpleNamespace(submit=submit)))
    with pytest.raises(CapacityError):
        await wait_for_results(state, cast("Any", None), [cast("Any", None)] * 2)
    assert [watcher.is_waiting() for watcher in watchers] == [False]
    assert future.cancelled(), "the engine would start the request"


def test_a_disconnect_is_not_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    futures: list[Future[SampleResult]] = []

    def submit(op: Sample, watcher: StreamWatcher) -> Future[SampleResult]:
        futures.append(Future())
        return futures[-1]

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    state = cast("Any", SimpleNamespace(engine=SimpleNamespace(submit=submit)))
    request = cast("Any", SimpleNamespace(receive=receive))
    with caplog.at_level(logging.ERROR):
        assert asyncio.run(wait_for_results(state, request, [cast("Any", None)] * 2)) is None
        gc.collect()  # When a future is deleted whose exception was never read, asyncio logs the exception.
    assert all(future.cancelled() for future in futures)
    assert not caplog.records
