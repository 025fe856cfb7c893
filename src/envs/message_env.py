"""run_episode: a policy and a message environment talk until one of them ends it, token in and token out.

The rules are those of SkyRL's skyrl_gym_generator in its multi-turn mode:

- the context is measured before each answer; one of exactly `max_input_length` tokens is still answered
- an answer cut at `max_generate_length` is an answer like any other; only the last one's ending is the episode's
- an episode that outgrows its context is not graded: it has the rewards given so far
- what comes after the last answer is not part of the trajectory
- an empty answer is shown to the environment and trains nothing

    prompt -> answer -> observation -> prompt + answer + observation -> answer -> ...
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from src.core.errors import AgentFault, BackendError, TrainerError, boundary
from src.core.length_limits import LengthLimits
from src.core.trajectory import FailureKind, StopReason, Trajectory, TrialFailure, Turn, ZeroReason
from src.policy.chat import Chat, Message
from src.policy.sampling_policy import Policy, SampleRequest

logger = logging.getLogger(__name__)

SEED_STRIDE = 1_000_003
MAX_SEED = 2**31 - 1
CLOSE_TIMEOUT_S = 30.0
TOOLS_IN_WORDS = 'You can call a function by answering with {"name": ..., "arguments": {...}} and nothing else. The functions:'


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetResult:
    """What the agent sees first."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] = ()  # OpenAI schemas
    use_native_tool_calling: bool = (
        False  # whether the chat template may show them, where the run wants that too
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The environment's side of one exchange. Without messages the agent simply goes on."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    is_done: bool = False
    stop_reason: StopReason | None = None  # where it is done, why; None: as the last answer ended
    metrics: Mapping[str, float] = field(default_factory=dict)


class MessageEnv(Protocol):
    """One attempt at one task, played in messages and used once."""

    async def start(self) -> ResetResult:
        """Whatever it raises becomes a `TrialFailure`: the attempt never was."""
        ...

    async def step(self, answer: str) -> StepResult:
        """React to an answer, which may be empty or cut off. A bad answer is worth an observation.

        ConnectionError, TimeoutError and the errors of `src.core.errors` say that something fails which no answer can cause: the trial is a
        failure. Whatever else is raised counts as the answer's doing: the trial has the reward 0, with the reason `env_error`.
        """
        ...

    async def close(self) -> None:
        """Free what the attempt holds; called exactly once, however it ended."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSettings:
    """How one episode is played. With the same seed the same policy gives the same answers."""

    temperature: float
    seed: int
    max_turns: int | None = None
    use_native_tool_calling: bool = (
        False  # let the chat template show the environment's tools, where that agrees
    )
    step_wise: bool = False  # render the whole history for each answer, as the template shows it by then, instead of extending the tokens


async def run_episode(
    env: MessageEnv,
    policy: Policy,
    chat: Chat,
    limits: LengthLimits,
    settings: EpisodeSettings,
    *,
    task_id: str,
    trial_name: str = "",
) -> Trajectory | TrialFailure:
    """Play one episode to its end. Never raises but for cancellation; `env` is closed either way."""
    episode = _Episode(env, policy, chat, limits, settings)
    started = time.monotonic()
    failure: tuple[FailureKind, str] | None = None
    try:
        try:
            await episode.play()
        except AgentFault as fault:
            logger.warning("%s: reward 0 (%s): %s", task_id, fault.reason, fault, exc_info=True)
            episode.ended_by(fault)
        json.dumps(episode.conversation)  # they are written down as they are
    except BackendError as error:
        failure = (FailureKind.BACKEND, str(error))
    except (Exception, SystemExit) as error:  # no event loop survives a SystemExit
        logger.warning(
            "%s: the environment broke", task_id, exc_info=True
        )  # the author's only sight of the line
        failure = (episode.blame, f"{type(error).__name__}: {error}")
    finally:
        await _close(env)
    if failure is not None:
        return TrialFailure(task_id=task_id, kind=failure[0], message=failure[1], trial_name=trial_name)
    return episode.trajectory(task_id, trial_name, duration_s=time.monotonic() - started)


class _Episode:
    """The state of one episode; `blame` is who is at work, for when that fails."""

    def __init__(
        self, env: MessageEnv, policy: Policy, chat: Chat, limits: LengthLimits, settings: EpisodeSettings
    ) -> None:
        self.blame = FailureKind.ENV_INIT_FAILED
        self.stop_reason = StopReason.STOP
        self._env, self._policy, self._chat = env, policy, chat
        self._limits, self._settings = limits, settings
        self._turns: list[Turn] = []
        self._rewards: list[float] = []  # one per turn
        self._reward = 0.0
        self._num_answers = 0
        self._num_empty = 0
        self._num_cut = 0
        self._metrics: dict[str, float] = {}
        self._zero_reason: ZeroReason | None = None
        self.conversation: list[Message] = []

    async def play(self) -> None:
        opening = await self._env.start()
        self.blame = FailureKind.ENV_ERROR
        history = self.conversation
        messages, tools = shown(opening, self._settings)
        history += messages
        prompt_ids: Sequence[int] = self._chat.render(history, tools=tools)
        while True:
            room = self._limits.room(len(prompt_ids))
            if room == 0:
                self.stop_reason = StopReason.CONTEXT_LENGTH
                return
            if self._num_answers == self._settings.max_turns:
                self.stop_reason = StopReason.MAX_TURNS
                return
            turn = await self._answer(prompt_ids, max_tokens=room)
            text = self._chat.decode(turn.completion_ids)
            observation = await self._observation(turn, text)
            self._record(turn, observation)
            history += [{"role": "assistant", "content": text}, *observation.messages]
            if observation.is_done:
                self.stop_reason = observation.stop_reason or self.stop_reason
                return
            if self._settings.step_wise:
                prompt_ids = self._chat.render(history, tools=tools)
            else:
                prompt_ids = self._chat.extend(turn.prompt_ids, turn.completion_ids, observation.messages)

    def ended_by(self, fault: AgentFault) -> None:
        """The whole episode is worth 0, whatever it has earned so far."""
        self._zero_reason = fault.reason
        self._reward = 0.0
        self._rewards = [0.0] * len(self._turns)

    async def _observation(self, turn: Turn, text: str) -> StepResult:
        """The environment's answer. AgentFault where the agent's made it raise."""
        try:
            return await self._env.step(text)
        except (TrainerError, ConnectionError, TimeoutError) as error:
            if not isinstance(error, AgentFault):
                raise
            fault = error
        except (Exception, SystemExit) as error:  # no event loop survives a SystemExit
            fault = AgentFault(ZeroReason.ENV_ERROR, f"{type(error).__name__}: {error}")
            fault.__cause__ = error
        self._take(turn, 0.0)
        self.conversation.append({"role": "assistant", "content": text})
        raise fault

    def trajectory(self, task_id: str, trial_name: str, *, duration_s: float) -> Trajectory:
        own = {
            "duration_s": duration_s,
            "empty_completions": float(self._num_empty),
            "cut_answers": float(self._num_cut),
            "input_overflow": float(self.stop_reason == StopReason.CONTEXT_LENGTH),
        }
        return Trajectory(
            task_id=task_id,
            turns=self._turns,
            reward=self._reward,
            stop_reason=self.stop_reason,
            trial_name=trial_name,
            metrics=self._metrics | own,
            turn_rewards=self._rewards,
            conversation=self.conversation,
            zero_reason=self._zero_reason,
        )

    async def _answer(self, prompt_ids: Sequence[int], *, max_tokens: int) -> Turn:
        settings, self._num_answers = self._settings, self._num_answers + 1
        with boundary(BackendError, "sampling"):
            turn = await self._policy.sample(
                SampleRequest(
                    prompt_ids=prompt_ids,
                    max_tokens=max_tokens,
                    temperature=settings.temperature,
                    seed=turn_seed(settings.seed, self._num_answers),
                    stop_token_ids=self._chat.stop_token_ids,
                )
            )
        self.stop_reason = turn.stop_reason
        self._num_cut += turn.stop_reason == StopReason.LENGTH
        return turn

    def _record(self, turn: Turn, observation: StepResult) -> None:
        """Rewards stay with the turn that earned them; an empty answer's go to the turn before."""
        reward = float(observation.reward)  # environments reckon in numpy, records are JSON
        if not math.isfinite(reward):
            self._take(turn, 0.0)
            raise AgentFault(
                ZeroReason.UNREADABLE_REWARD, f"the environment gave a reward that is no number: {reward}"
            )
        self._reward += reward
        self._metrics |= {name: float(value) for name, value in observation.metrics.items()}
        self._take(turn, reward)

    def _take(self, turn: Turn, reward: float) -> None:
        if turn.completion_ids:
            self._turns.append(turn)
            self._rewards.append(reward)
        else:
            self._num_empty += 1
            if self._rewards:
                self._rewards[-1] += reward


def shown(
    opening: ResetResult, settings: EpisodeSettings
) -> tuple[Sequence[Message], Sequence[Mapping[str, object]]]:
    """The first messages, and the tools that the template shows: in native mode, which environment and run must both want.

    In text mode the tools are described in the system message instead.
    """
    if not opening.tools or (opening.use_native_tool_calling and settings.use_native_tool_calling):
        return opening.messages, opening.tools
    described = TOOLS_IN_WORDS + "".join(f"\n- {in_words(tool)}" for tool in opening.tools)
    first = opening.messages[0] if opening.messages else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": described}, *opening.messages], ()
    return [{**first, "content": f"{first['content']}\n\n{described}"}, *opening.messages[1:]], ()


def in_words(tool: Mapping[str, object]) -> str:
    """A tool's signature and what it is for.

    >>> in_words({"function": {"name": "f", "description": "Does it.", "parameters": {"properties": {"n": {"type": "integer"}}}}})
    'f(n: integer): Does it.'
    """
    function: Any = tool["function"]
    properties = function.get("parameters", {}).get("properties", {})
    arguments = ", ".join(f"{name}: {schema.get('type', 'any')}" for name, schema in properties.items())
    return f"{function['name']}({arguments}): {function.get('description', '')}"


def turn_seed(seed: int, number: int) -> int:
    """The seed of an episode's nth sampling call."""
    return (seed * SEED_STRIDE + number) % MAX_SEED


async def _close(env: MessageEnv) -> None:
    """A failing or hanging `close` must not hide how the episode went."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await env.close()
    except (Exception, SystemExit):
        logger.warning("an environment did not close", exc_info=True)
