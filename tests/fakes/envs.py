"""`ScriptedEnv`: a message environment that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from src.envs.message_env import ResetResult, StepResult
from src.policy.chat import Message


def saying(
    *texts: str, role: str = "user", reward: float = 0.0, is_done: bool = False, **metrics: float
) -> StepResult:
    """Return a step result with one message per text."""
    return StepResult(
        messages=[{"role": role, "content": text} for text in texts],
        reward=reward,
        is_done=is_done,
        metrics=metrics,
    )


def ending(reward: float = 1.0) -> StepResult:
    """Return the last step result of an episode, without messages."""
    return StepResult(reward=reward, is_done=True)


class ScriptedEnv:
    """An environment whose reset returns `opening` and whose n-th step returns the n-th entry of `script`.

    If the entry or `opening` is an exception, the call raises it. A step after the end of the script raises
    IndexError. Step number `hang_at`, counted from 1, sets the event `hangs` and never returns.
    """

    def __init__(
        self,
        script: Sequence[StepResult | Exception],
        *,
        opening: str | Sequence[Message] | Exception = "x",
        tools: Sequence[Mapping[str, object]] = (),
        use_native_tool_calling: bool = False,
        hang_at: int | None = None,
    ) -> None:
        self.answers: list[str] = []
        self.num_closed = 0
        self.hangs = asyncio.Event()
        self._script = script
        self._opening = opening
        self._tools = tools
        self._native = use_native_tool_calling
        self._hang_at = hang_at

    async def start(self) -> ResetResult:
        if isinstance(self._opening, Exception):
            raise self._opening
        messages = (
            [{"role": "user", "content": self._opening}] if isinstance(self._opening, str) else self._opening
        )
        return ResetResult(messages=messages, tools=self._tools, use_native_tool_calling=self._native)

    async def step(self, answer: str) -> StepResult:
        self.answers.append(answer)
        if self._hang_at == len(self.answers):
            self.hangs.set()
            await asyncio.Event().wait()
        result = self._script[len(self.answers) - 1]
        if isinstance(result, Exception):
            raise result
        return result

    async def close(self) -> None:
        self.num_closed += 1
