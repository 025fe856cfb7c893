"""`FakePolicy`: a policy that samples from a script."""

from __future__ import annotations

from collections.abc import Sequence

from src.core.trajectory import StopReason, Turn
from src.policy.chat import Chat
from src.policy.sampling_policy import SampleRequest


class FakePolicy:
    """Samples `replies` in order, each truncated to `max_tokens` tokens, and repeats the last reply.

    If a reply is an exception, `sample` raises it. Every token has the logprob -0.5. `calls` contains all
    requests.
    """

    def __init__(self, chat: Chat, replies: Sequence[str | Exception], *, version: int = 0) -> None:
        self.version = version
        self.calls: list[SampleRequest] = []
        self._chat = chat
        self._replies = list(replies)

    async def sample(self, request: SampleRequest) -> Turn:
        reply = self._replies[min(len(self.calls), len(self._replies) - 1)]
        self.calls.append(request)
        if isinstance(reply, Exception):
            raise reply
        ids = [*self._chat.tokenizer.encode(reply, add_special_tokens=False), self._chat.turn_end_id]
        completion = ids[: request.max_tokens]
        return Turn(
            prompt_ids=list(request.prompt_ids),
            completion_ids=completion,
            logprobs=[-0.5] * len(completion),
            stop_reason=StopReason.STOP if len(completion) == len(ids) else StopReason.LENGTH,
            policy_version=self.version,
        )


class UnusedPolicy:
    """A policy whose `sample` must not be called."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    async def sample(self, request: SampleRequest) -> Turn:
        raise AssertionError("nothing may be sampled here")
