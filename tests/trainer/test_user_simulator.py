"""Tests the messages of user models."""

from __future__ import annotations

from typing import Any, cast

import pytest

from src.envs.service.tool_calls import ToolCall, parse
from src.envs.service.user_simulator import EndpointUserModel, ModelUserSimulator, ends
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


class ScriptedUserModel:
    """A model that says the given texts in order."""

    def __init__(self, *texts: str) -> None:
        self._texts = list(texts)

    async def say(self, messages: object, *, tools: object, seed: int) -> str:
        return self._texts.pop(0)

    async def close(self) -> None:
        """There is nothing to release."""


@pytest.mark.parametrize(
    "thought", ["<think>I say ###STOP### later.</think>\n\n", "I say ###STOP### later.\n</think>\n"]
)
async def test_the_agent_reads_no_thoughts_of_the_user(thought: str) -> None:
    reply = await ModelUserSimulator(ScriptedUserModel(f"{thought}Cancel W1."), "", seed=1).reply([])
    assert reply == "Cancel W1." and not ends(reply)


async def test_a_reply_of_thoughts_only_is_repeated() -> None:
    model = ScriptedUserModel("<think>I am cut", " Cancel W1.\n")
    assert await ModelUserSimulator(model, "", seed=1).reply([]) == " Cancel W1.\n"
