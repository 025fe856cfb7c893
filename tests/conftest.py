"""What tests that use the official SDK in their own process share: the sockets it leaves open."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

SDK_MARK = "official_sdk"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker(SDK_MARK):
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(autouse=True)
def sockets_left_open_by_the_sdk(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collected here, where the mark forgives them, rather than in some later test of the same process, which would fail for them.

    What was there before the test is not looked at, so this takes milliseconds.
    """
    if request.node.get_closest_marker(SDK_MARK) is None:
        yield
        return
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()
