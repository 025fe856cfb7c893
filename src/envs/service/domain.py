"""A service agent at work: it answers a customer and calls tools, until one of them ends the conversation and what was done is graded.

`ServiceEnv` is the message environment of every domain of this kind. It reads the agent's answers, counts what went wrong, and leaves
the rest to a `ServiceEpisode`: our own domains in this process, others wherever they run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from src.core.trajectory import StopReason
from src.envs.message_env import MessageEnv, ResetResult, StepResult
from src.envs.service.tool_calls import ToolCall, parse
from src.policy.chat import Message

MAX_ERRORS = (
    10  # unreadable or empty answers and failed calls that end an episode without a reward, as in tau2
)
MAX_REFUSALS = 30
DECLINES = "I am sorry, I cannot help with that."


@dataclass(frozen=True, kw_only=True, slots=True)
class Reaction:
    """What an answer of the agent led to."""

    messages: Sequence[Message] = ()  # results of its calls, or what the customer says
    is_done: bool = False  # somebody ended the conversation
    num_errors: int = 0  # calls that failed


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # e.g. reward_db, reward_communicate
    stop_reason: StopReason | None = None  # where a limit of the domain's ended it


class ServiceEpisode(Protocol):
    """One attempt at one task of a domain, with its customer and its database."""

    async def start(self) -> ResetResult:
        """The policy as system message and what is said before the agent's first turn, with the tools."""
        ...

    async def step(self, content: str, calls: Sequence[ToolCall]) -> Reaction:
        """What the agent does: it makes `calls`, in which case the customer does not hear `content`, or it says `content`."""
        ...

    async def grade(self) -> Grade:
        """How it went; asked once, when the conversation has been ended."""
        ...

    async def close(self) -> None: ...


class ServiceEnv:
    """Implements `MessageEnv`. Episodes that a limit ends are worth nothing, as in tau2."""

    def __init__(self, episode: ServiceEpisode, *, parallel_tool_calls: bool = False) -> None:
        """Without `parallel_tool_calls` the first of several calls is made and the others are not."""
        self._episode = episode
        self._parallel = parallel_tool_calls
        self._names: set[str] = set()
        self._counts: Counter[str] = Counter()

    async def start(self) -> ResetResult:
        opening = await self._episode.start()
        self._names = names_of(opening.tools)
        return opening

    async def step(self, answer: str) -> StepResult:
        parsed = parse(answer, self._names)
        self._counts.update(parsed.counts)
        if parsed.problem and not parsed.calls:
            return self._refused(f"Error: the call could not be read: {parsed.problem}", role="tool")
        if not parsed.calls and not parsed.content:
            return self._refused("Error: the answer was empty.", role="user")
        calls = parsed.calls if self._parallel else parsed.calls[:1]
        reaction = await self._episode.step(parsed.content, calls)
        self._counts.update(tool_calls=len(calls), tool_errors=reaction.num_errors)
        if reaction.is_done:
            grade = await self._episode.grade()
            metrics = {**self._metrics(), **grade.metrics}
            return StepResult(
                messages=reaction.messages,
                reward=grade.reward,
                is_done=True,
                stop_reason=grade.stop_reason,
                metrics=metrics,
            )
        return StepResult(messages=reaction.messages, is_done=self._is_hopeless(), metrics=self._metrics())

    async def close(self) -> None:
        await self._episode.close()

    def _refused(self, text: str, *, role: str) -> StepResult:
        """An answer that reaches neither tools nor customer."""
        self._counts.update(unusable_answers=1)
        return StepResult(
            messages=[{"role": role, "content": text}], is_done=self._is_hopeless(), metrics=self._metrics()
        )

    def _is_hopeless(self) -> bool:
        return self._counts["tool_errors"] + self._counts["unusable_answers"] >= MAX_ERRORS

    def _metrics(self) -> dict[str, float]:
        return {name: float(count) for name, count in self._counts.items()} | {
            "too_many_errors": float(self._is_hopeless())
        }


def names_of(tools: Sequence[Mapping[str, object]]) -> set[str]:
    return {str(function["name"]) for tool in tools if isinstance(function := tool["function"], Mapping)}


async def do_nothing(env: MessageEnv) -> float:
    """The reward of an agent that declines whatever it is asked: the floor of the task. A customer who never leaves is left."""
    reward = 0.0
    try:
        await env.start()
        for _ in range(MAX_REFUSALS):
            observation = await env.step(DECLINES)
            reward += observation.reward
            if observation.is_done:
                break
    finally:
        await env.close()
    return reward
