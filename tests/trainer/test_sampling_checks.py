"""Tests the checks of stop tokens and of the context limit with a fake endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import tinker

from src.evaluate.probe.endpoint_probe import Probe
from src.evaluate.probe.sampling_checks import check_context, check_stops

REQUEST = httpx.Request("POST", "http://h/api/v1/asample")


def sampling_probe(tokens: Sequence[int]) -> Probe:
    """Return a probe whose samples have these tokens, up to the first stop token."""

    def sample(sampler: object, prompt: object = None, *, stop: Sequence[int] = ()) -> SimpleNamespace:
        end = next((index + 1 for index, token in enumerate(tokens) if token in stop), None)
        return SimpleNamespace(tokens=tokens[:end], stop_reason="length" if end is None else "stop")

    return cast(Any, SimpleNamespace(base_sampler=lambda: None, sample=sample))


@pytest.mark.parametrize("tokens", [[7] * 24, [7, 8] * 12, [7, 7] + [8] * 22, list(range(24))])
def test_repeated_tokens_do_not_break_the_check_of_stop_tokens(tokens: list[int]) -> None:
    assert check_stops(sampling_probe(tokens)) == "the stop token ends the sample and is included"


def context_probe(error: Exception) -> Probe:
    """Return a probe with a context limit whose samples raise `error`."""

    def sample(*arguments: object, **params: object) -> None:
        raise error

    return cast(Any, SimpleNamespace(max_context_length=40, base_sampler=lambda: None, sample=sample))


def test_a_refused_prompt_shows_that_the_limit_is_enforced() -> None:
    error = tinker.BadRequestError("too long", response=httpx.Response(400, request=REQUEST), body=None)
    assert check_context(context_probe(error)) == "36 + 16 tokens are rejected with a limit of 40"


@pytest.mark.parametrize(
    "error",
    [
        tinker.APIConnectionError(REQUEST),
        tinker.InternalServerError("broken", response=httpx.Response(500, request=REQUEST), body=None),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_endpoint_that_fails_has_not_refused_the_prompt(error: Exception) -> None:
    with pytest.raises(type(error)):
        check_context(context_probe(error))
