"""`ScriptedEnv`: a message environment that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from src.envs.message_env import ResetResult, StepResult
from src.policy.chat import Message


def saying(
    *texts: str, role: str = "user", reward: float = 0.0, is_done: bool = False, **metrics: float
) -> StepResult:
    """Return a result with one message per text."""
    return StepResult(
        messages=[{"role": role, "content": text} for text in texts],
        reward=reward,
        is_done=is_done,
        metrics=metrics,
    )


def ending(reward: float = 1.0) -> StepResult:
    return StepResult(reward=reward, is_done=True)


class ScriptedEnv:
    """Starts with `opening` and returns one result of the script per answer.

    Raises the exceptions that the script contains, and IndexError after its end. Step number `hang_at`,
    counted from 1, never returns.
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
        observation = self._script[len(self.answers) - 1]
        if isinstance(observation, Exception):
            raise observation
        return observation

    async def close(self) -> None:
        self.num_closed += 1
