"""FakePolicy: answers from a script instead of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from src.core.trajectory import StopReason, Turn
from src.policy.chat import Chat
from src.policy.sampling_policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCall:
    """What one `sample` was asked for."""

    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int | None
    stop: list[int]


class FakePolicy(Policy):
    """Says `replies` one after the other, each cut at `max_tokens`; the last one for ever. An Exception among them is raised.

    Every token has logprob -0.5, and `calls` keeps what was asked.
    """

    def __init__(self, chat: Chat, replies: Sequence[str | Exception], *, version: int = 0) -> None:
        self.version = version
        self.calls: list[SampleCall] = []
        self._chat = chat
        self._replies = list(replies)

    async def sample(
        self, prompt_ids: list[int], *, max_tokens: int, temperature: float, seed: int | None, stop: list[int]
    ) -> Turn:
        reply = self._replies[min(len(self.calls), len(self._replies) - 1)]
        self.calls.append(
            SampleCall(
                prompt_ids=list(prompt_ids),
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                stop=list(stop),
            )
        )
        if isinstance(reply, Exception):
            raise reply
        ids = [*self._chat.tokenizer.encode(reply, add_special_tokens=False), self._chat.turn_end_id]
        completion = ids[:max_tokens]
        return Turn(
            prompt_ids=list(prompt_ids),
            completion_ids=completion,
            logprobs=[-0.5] * len(completion),
            stop_reason=StopReason.STOP if len(completion) == len(ids) else StopReason.LENGTH,
            policy_version=self.version,
        )

    async def logprobs(self, token_ids: list[int]) -> list[float]:
        return [-0.5] * (len(token_ids) - 1)
