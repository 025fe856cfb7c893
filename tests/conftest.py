"""Selects the test files of the fast tier (`pytest -m fast`), and cleans up after tests that use the official
SDK in the process of pytest.
"""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

SDK_MARK = "official_sdk"
SLOW_TRAINER_FILES = {  # files of tests/trainer that start processes or sandboxes, or perform whole runs
    *(
        "test_add_a_metric_page",
        "test_analyze",
        "test_bubblewrap",
        "test_damaged_run_files",
        "test_data_environment",
        "test_environments_page",
    ),
    *("test_batch_collector", "test_console", "test_document_metrics", "test_exact_tokens"),
    *("test_exactly_once", "test_fault_matrix", "test_fleet", "test_grading_method"),
    *("test_harbor_environment",),
    *("test_harbor_trial", "test_metrics_table", "test_published_chat_templates", "test_quickstart_data"),
    *("test_reconnect", "test_run", "test_run_result", "test_sft"),
    *("test_sandbox_environment", "test_service_run", "test_subprocess_pool", "test_tau2"),
    *("test_tau2_benchmark", "test_terminal_patterns", "test_tracking", "test_train"),
    *("test_unresponsive_server", "test_validate"),
}
FAST_SERVER_FILES = {  # files of tests/server that compile no program
    *("test_app", "test_checkpoints", "test_contract_page", "test_engine"),
    *("test_futures", "test_model_registry", "test_openai", "test_prefix_cache"),
    *("test_run_index", "test_scheduler", "test_wire"),
}


def is_fast(path: Path) -> bool:
    """Return whether the tests of a file belong to the fast tier."""
    if path.parent.name == "trainer":
        return path.stem not in SLOW_TRAINER_FILES
    return path.parent.name == "server" and path.stem in FAST_SERVER_FILES


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m fast`, ignore test files outside the fast tier, so that pytest does not import them."""
    is_test = collection_path.suffix == ".py" and collection_path.stem.startswith("test_")
    return True if config.option.markexpr == "fast" and is_test and not is_fast(collection_path) else None


def pytest_sessionstart() -> None:
    """State that the main thread has no event loop.

    Otherwise, LiteLLM creates a loop for a synchronous call and does not close the loop. The garbage
    collector reports the loop later, and the test that runs at this time fails.
    """
    asyncio.set_event_loop(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_fast(item.path):
            item.add_marker(pytest.mark.fast)
        if item.get_closest_marker(SDK_MARK):
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(autouse=True)
def clean_up_the_sdk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the sockets and tasks that a test with the mark `official_sdk` leaves open.

    The SDK leaves sockets to the garbage collector, which warns about them. The collection runs here, where
    the mark ignores the warning, and not in a later test. gc.freeze() excludes the objects that existed
    before the test, so that the collection takes milliseconds.
    """
    if request.node.get_closest_marker(SDK_MARK) is None:
        yield
        return
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    gc.freeze()
    yield
    _cancel_tasks_of_the_sdk()
    gc.collect()
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def collect_objects_of_module_fixtures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collect the sockets of SDK clients that fixtures of the module have created, without a warning.

    Such an object exists before the test that uses it, so `clean_up_the_sdk` does not collect it.
    """
    yield
    items = (item for item in request.session.items if item.path == request.path)
    if any(item.get_closest_marker(SDK_MARK) for item in items):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def _cancel_tasks_of_the_sdk() -> None:
    """Cancel the tasks in the SDK's thread, whose log lines would appear in later tests.

    Heartbeats never end, and attempts to close a session take minutes.
    """
    from tinker.lib.internal_client_holder import _internal_client_holder_thread_singleton as sdk_thread

    async def cancel_all() -> None:
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    loop = sdk_thread.loop_if_started()
    if loop is not None:
        asyncio.run_coroutine_threadsafe(cancel_all(), loop).result(60)
