"""Tests the log levels of the trainer."""

from __future__ import annotations

import logging

import pytest

from src.core.log_setup import set_log_levels


@pytest.mark.parametrize("client", ["httpx", "httpx2"])
def test_http_requests_are_not_logged(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", client):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "level", logger.level)
    set_log_levels()
    assert not logging.getLogger(client).isEnabledFor(logging.INFO)
    assert logging.getLogger("src.cli").isEnabledFor(logging.INFO)
