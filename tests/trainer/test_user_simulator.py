"""Tests the messages of a user model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

from typing import Any, cast

import pytest

from src.envs.service.tool_calls import ToolCall, parse
from src.envs.service.user_simulator import EndpointUserModel
from src.policy.openai_client import ChatReply


class FakeEndpoint:
    """An endpoint that answers each request with a call of the tool `f`."""

    def __init__(self, arguments: str) -> None:
        self._arguments = arguments

    async def reply(self, messages: object, **options: object) -> ChatReply:
        return ChatReply(text="Wait.", tool_calls=[{"name": "f", "arguments": self._arguments}])


@pytest.mark.parametrize(("arguments", "expected"), [('{"a": 1}', {"a": 1}), ("{}", {}), ("", {})])
async def test_a_call_of_the_user_is_parsed_from_its_message(
    arguments: str, expected: dict[str, object]
) -> None:
    model = EndpointUserModel(cast(Any, FakeEndpoint(arguments)), temperature=0.0)
    parsed = parse(await model.say([], tools=[], seed=1), {"f"})
    assert (parsed.content, parsed.calls) == ("Wait.", [ToolCall(name="f", arguments=expected)])
