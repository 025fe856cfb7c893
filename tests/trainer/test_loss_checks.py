"""Tests which errors of an endpoint count as a rejection of an unknown loss or setting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import tinker

from src.evaluate.probe.endpoint_probe import Defect, Probe
from src.evaluate.probe.loss_checks import check_unknown_is_refused

REQUEST = httpx.Request("POST", "http://h/api/v1/forward_backward")
REJECTIONS = [
    tinker.BadRequestError("unknown loss", response=httpx.Response(400, request=REQUEST), body=None),
    tinker.RequestFailedError("unknown loss", "1", tinker.types.RequestErrorCategory.User),
    ValueError("the SDK does not know the loss"),
]
FAILURES = [
    tinker.APIConnectionError(REQUEST),
    tinker.InternalServerError("broken", response=httpx.Response(500, request=REQUEST), body=None),
]


def probe_of(error: Exception | None) -> Probe:
    """Return a probe whose requests raise `error`, or succeed if it is None."""

    def result() -> object:
        if error is not None:
            raise error
        return None

    client = SimpleNamespace(forward_backward=lambda *arguments: SimpleNamespace(result=result))
    return cast(Any, SimpleNamespace(client=lambda: client))


@pytest.mark.parametrize("error", REJECTIONS, ids=lambda error: type(error).__name__)
def test_a_rejection_of_the_unknown_holds(error: Exception) -> None:
    assert check_unknown_is_refused(probe_of(error)).endswith("are rejected")


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_an_endpoint_that_fails_has_not_refused_the_unknown(error: Exception) -> None:
    with pytest.raises(type(error)):
        check_unknown_is_refused(probe_of(error))


def test_an_error_before_the_request_is_no_rejection() -> None:
    def client() -> None:
        raise ValueError("no adapter is free")

    with pytest.raises(ValueError, match="no adapter is free"):
        check_unknown_is_refused(cast(Any, SimpleNamespace(client=client)))


def test_an_accepted_unknown_loss_is_a_defect() -> None:
    with pytest.raises(Defect, match="the loss no_such_loss was accepted"):
        check_unknown_is_refused(probe_of(None))
