"""A judge and tool calls for the tests of tau2-bench."""

from __future__ import annotations

import json

from src.policy.openai_client import ChatReply


def tool_call_text(name: str, **arguments: object) -> str:
    """Return a completion that calls the tool `name`."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class FixedJudge:
    """A judge that always gives the same reply."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.requests: list[object] = []

    async def reply(self, messages: object, *, temperature: float, seed: int | None) -> ChatReply:
        self.requests.append(messages)
        return ChatReply(text=self.answer)
