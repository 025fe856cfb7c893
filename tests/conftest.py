"""What tests that use the official SDK in their own process share: an end of all it does there, and the
sockets it leaves open."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

SDK_MARK = "official_sdk"
NOT_FAST = {  # files of tests/trainer that start processes or sandboxes, or play whole runs
    *("test_add_a_metric_page", "test_bubblewrap", "test_damaged_run_files", "test_environments_page"),
    *("test_batch_collector", "test_console", "test_data_environment", "test_exact_tokens"),
    *("test_exactly_once", "test_fault_matrix", "test_grading_method", "test_harbor_environment"),
    *("test_harbor_trial", "test_metrics_table", "test_quickstart_data", "test_reconnect", "test_run"),
    *("test_sandbox_environment", "test_service_run", "test_subprocess_pool", "test_tau2"),
    *("test_tau2_benchmark", "test_tracking", "test_train", "test_unresponsive_server", "test_validate"),
}
FAST = {  # files of tests/server that compile no program
    *("test_app", "test_checkpoints", "test_contract_page", "test_engine"),
    *("test_futures", "test_model_registry", "test_openai", "test_prefix_cache"),
    *("test_run_index", "test_scheduler", "test_wire"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name, folder = item.path.stem, item.path.parent.name
        if (folder == "trainer" and name not in NOT_FAST) or (folder == "server" and name in FAST):
            item.add_marker(pytest.mark.fast)
        if item.get_closest_marker(SDK_MARK):
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(autouse=True)
def nothing_left_of_the_sdk(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Sockets are collected here, where the mark forgives them, rather than in some later test of the same
    process, which would fail for them. What was there before the test is not looked at, so this takes
    milliseconds.
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
    """For minutes, in a thread of its own, it tries to close the session of a server that is gone; its heart
    beats for ever there. What that logs would be among the records of a later test."""
    from tinker.lib.internal_client_holder import _internal_client_holder_thread_singleton as of_the_process

    async def end() -> None:
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    loop = of_the_process.loop_if_started()
    if loop is not None:
        asyncio.run_coroutine_threadsafe(end(), loop).result(60)
