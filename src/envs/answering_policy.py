"""Policies whose answers are texts instead of samples of a model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

from src.core.trajectory import Turn
from src.policy.openai_client import END, MessageCodec, pseudo_turn
from src.policy.sampling_policy import Policy, SampleRequest


class AnsweringPolicy:
    """A policy whose answers come from `answer`, a function of the messages so far. Implements `Policy`."""

    def __init__(self, answer: Callable[[Sequence[dict[str, str]]], str]) -> None:
        self.version = 0
        self._answer = answer
        self._codec = MessageCodec()

    async def sample(self, request: SampleRequest) -> Turn:
        text = await asyncio.to_thread(self._answer, self._codec.messages(request.prompt_ids))
        ids = self._codec.encode(text.replace(END, "") + END, add_special_tokens=False)
        return pseudo_turn(request, ids[: request.max_tokens], was_cut=len(ids) > request.max_tokens)


def scripted(lines: Sequence[str]) -> Policy:
    """Return a policy that answers each conversation with the lines in order and repeats the last one. The
    first request of a conversation may already contain assistant messages. Their number must be the same in
    all conversations."""
    num_given = sys.maxsize  # number of assistant messages in the first request of a conversation

    def answer(messages: Sequence[dict[str, str]]) -> str:
        nonlocal num_given
        num_answers = sum(message["role"] == "assistant" for message in messages)
        num_given = min(num_given, num_answers)
        return lines[min(num_answers - num_given, len(lines) - 1)]

    return AnsweringPolicy(answer)
