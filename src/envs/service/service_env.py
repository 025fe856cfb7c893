"""`ServiceEnv`, a `MessageEnv` in which the agent calls tools. env=fleet and env=tau_bench use it.

In service domains (`src/envs/service/domains.py`), the agent also talks to a user simulator. The conversation
is graded at its end. `ServiceEnv` parses the agent's answers, counts errors, and ends episodes with too many
errors. A `ServiceEpisode` supplies the tools, the user simulator and the grading. `ToyRetailEpisode` runs the
tools in this process, `Tau2Episode` in a worker process, and `FleetEpisode` on an MCP server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from src.core.trajectory import StopReason
from src.envs.message_env import MessageEnv, ResetResult, StepResult
from src.envs.service.call_forms import text_parameters
from src.envs.service.tool_calls import ToolCall, parse
from src.policy.chat import Message

# The total number of unreadable answers, empty answers and failed calls that ends an episode with the reward
# 0. tau2 has the same limit for failed calls.
MAX_ERRORS = 10
MAX_REFUSALS = 30
REFUSAL = "I am sorry, I cannot help with that."


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionResult:
    """The effect of one answer of the agent."""

    messages: Sequence[Message] = ()  # the results of the calls, or the reply of the user simulator
    is_done: bool = False  # whether the conversation has ended
    num_errors: int = 0  # number of calls that failed


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # e.g. reward_db, reward_communicate
    # Set if a limit of the domain ended the episode. None: the stop reason of the last answer is used.
    stop_reason: StopReason | None = None


class ServiceEpisode(Protocol):
    """One trial of one task, with the state of the tools and, in service domains, the user simulator."""

    async def start(self) -> ResetResult:
        """Return the tools and the messages before the agent's first turn.

        In service domains, a system message contains the policy of the domain: the rules for the agent.
        """
        ...

    async def step(self, content: str, calls: Sequence[ToolCall]) -> ActionResult:
        """Execute `calls`. If there are calls, `content` is not passed to the user simulator.

        Without calls, `content` is passed to the user simulator, or ends the conversation if it contains
        `###STOP###`. In env=fleet, `content` without calls is the final answer.
        """
        ...

    async def grade(self) -> Grade:
        """Grade the conversation. This method is called at most once, after the conversation has ended."""
        ...

    async def close(self) -> None: ...


class ServiceEnv:
    """One trial of a task of a service domain or of env=fleet. Implements `MessageEnv`. As in tau2, an
    episode that a limit ends has the reward 0."""

    def __init__(self, episode: ServiceEpisode, *, parallel_tool_calls: bool = False) -> None:
        """Without `parallel_tool_calls`, only the first call of an answer is executed."""
        self._episode = episode
        self._parallel_tool_calls = parallel_tool_calls
        # The parameters of each tool that accept only text.
        self._text_parameters: Mapping[str, set[str]] = {}
        self._counts: Counter[str] = Counter()

    async def start(self) -> ResetResult:
        result = await self._episode.start()
        self._text_parameters = text_parameters(result.tools)
        return result

    async def step(self, answer: str) -> StepResult:
        parsed = parse(answer, set(self._text_parameters), text_parameters=self._text_parameters)
        self._counts.update(parsed.counts)
        if parsed.problem and not parsed.calls:
            return self._unusable(f"Error: the call could not be read: {parsed.problem}", role="tool")
        if not parsed.calls and not parsed.content:
            return self._unusable("Error: the answer was empty.", role="user")
        calls = parsed.calls if self._parallel_tool_calls else parsed.calls[:1]
        result = await self._episode.step(parsed.content, calls)
        fields = tool_fields(parsed.content, calls, result.messages, num_earlier=self._counts["tool_calls"])
        self._counts.update(tool_calls=len(calls), tool_errors=result.num_errors)
        if result.is_done:
            grade = await self._episode.grade()
            return StepResult(
                messages=result.messages,
                reward=grade.reward,
                is_done=True,
                stop_reason=grade.stop_reason,
                metrics={**self._metrics(), **grade.metrics},
                tool_fields=fields,
            )
        return StepResult(
            messages=result.messages,
            is_done=self._has_too_many_errors(),
            metrics=self._metrics(),
            tool_fields=fields,
        )

    async def close(self) -> None:
        await self._episode.close()

    def _unusable(self, error: str, *, role: str) -> StepResult:
        """Count an answer that reaches neither a tool nor the user simulator, and show `error` to the
        agent.
        """
        self._counts.update(unusable_answers=1)
        return StepResult(
            messages=[{"role": role, "content": error}],
            is_done=self._has_too_many_errors(),
            metrics=self._metrics(),
        )

    def _has_too_many_errors(self) -> bool:
        return self._counts["tool_errors"] + self._counts["unusable_answers"] >= MAX_ERRORS

    def _metrics(self) -> dict[str, float]:
        counts = {name: float(count) for name, count in self._counts.items()}
        return counts | {"too_many_errors": float(self._has_too_many_errors())}


def tool_fields(
    content: str, calls: Sequence[ToolCall], messages: Sequence[Message], *, num_earlier: int
) -> dict[int, Message]:
    """Return `StepResult.tool_fields` of an answer (key 0) and of the messages after it (keys from 1).

    `content` is the text around the calls, and `num_earlier` is the number of calls of earlier answers.
    The arguments of a call are an object, because most chat templates expect an object. In OpenAI's API, the
    arguments are JSON text.
    """
    if not calls:
        return {}
    ids = [f"call_{num_earlier + number}" for number in range(1, len(calls) + 1)]
    results = [index for index, message in enumerate(messages, 1) if message.get("role") == "tool"]
    fields: dict[int, Message] = {
        index: {"tool_call_id": call_id, "name": call.name}
        for index, call_id, call in zip(results, ids, calls, strict=False)
    }
    fields[0] = {
        "content": content,
        "tool_calls": [
            {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for id, call in zip(ids, calls, strict=True)
        ],
    }
    return fields


async def do_nothing(env: MessageEnv) -> float:
    """Return the reward of an agent that refuses every request, for at most `MAX_REFUSALS` turns.

    env=tau_bench and env=fleet pass this function as `EnvSpec.noop_reward`.
    """
    reward = 0.0
    try:
        await env.start()
        for _ in range(MAX_REFUSALS):
            result = await env.step(REFUSAL)
            reward += result.reward
            if result.is_done:
                break
    finally:
        await env.close()
    return reward
