"""Message environments, which exchange messages with the agent, and `run_episode`, which runs one episode.

Without `step_wise`, the next prompt is the previous prompt, the answer and the observation:

    prompt 1 -> answer 1 -> observation 1
    prompt 2 = prompt 1 + answer 1 + observation 1 -> answer 2 -> ...

Sampled tokens are then never encoded again from their text.

The rules are those of SkyRL's skyrl_gym_generator in its multi-turn mode:

- The length of the prompt is checked before each answer. If the prompt exceeds `max_input_length` or fills
  `context_limit`, the episode ends, and its reward is the sum of the rewards so far. A prompt of exactly
  `max_input_length` tokens is allowed.
- An answer that is cut at `max_generate_length` tokens is treated as a complete answer.
- If the environment ends the episode without a stop reason, the stop reason is that of the last answer.
- Messages after the last answer are part of the conversation, but not of any turn.
- An answer without tokens is passed to the environment, but it adds no turn to the trajectory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from src.core.errors import AgentFault, BackendError, EnvServerError, PromptTooLong, TrainerError, boundary
from src.core.exception_origin import described, users_exc_info
from src.core.length_limits import LengthLimits
from src.core.trajectory import FailureKind, StopReason, Trajectory, TrialFailure, Turn, ZeroReason
from src.envs.result_checks import NotAsyncError, metric_value, require_async, require_messages, require_type
from src.policy.chat import Chat, Message
from src.policy.sampling_policy import Policy, SampleRequest
from src.policy.tool_messages import with_described_tools
from src.records.reading import LIMIT, is_readable

logger = logging.getLogger(__name__)

SEED_STRIDE = 1_000_003
MAX_SEED = 2**31 - 1
CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetResult:
    """The first messages that the agent sees, and the tools that it can call."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] = ()  # OpenAI schemas
    # Permits the chat template to render the tools. The option of the same name must also be set.
    use_native_tool_calling: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The reaction of an environment to one answer. If `messages` is empty and the episode is not done, the
    agent answers again without a new message in between."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    is_done: bool = False
    stop_reason: StopReason | None = None  # used if `is_done`; None: that of the last answer
    metrics: Mapping[str, float] = field(default_factory=dict)
    # Structured tool calls, as in `Trajectory.tool_fields`, but with other keys: 0 is the answer, and i + 1
    # is `messages[i]`.
    tool_fields: Mapping[int, Message] = field(default_factory=dict)


class MessageEnv(Protocol):
    """The environment of one trial, which exchanges messages with the agent.

    An object is used for one episode.
    """

    async def start(self) -> ResetResult:
        """Return the first messages.

        An EnvServerError becomes a `TrialFailure` of kind `env_server`, and a BackendError becomes a
        `TrialFailure` of kind `backend`. In both cases, the attempt is repeated, up to `trial_attempts`
        attempts. An AgentFault gives the trial the reward 0 with the reason of the AgentFault. Any other
        exception becomes a `TrialFailure` of kind `env_init_failed`.
        """
        ...

    async def step(self, answer: str) -> StepResult:
        """React to an answer, which may be empty or cut off. Return an observation for an invalid answer too.

        Exceptions have these effects:

        - ConnectionError, TimeoutError and the errors of `src.core.errors` except AgentFault and
          PromptTooLong report a failure that the answer did not cause. The trial becomes a `TrialFailure` of
          the kind `env_server` for an EnvServerError, `backend` for a BackendError and `env_error` for the
          others. An attempt that fails with `env_error` is not repeated.
        - An AgentFault, a PromptTooLong and any exception not named above are attributed to the answer. The
          trial has the reward 0. The graded-zero reason is that of the AgentFault, and `env_error` for the
          others.
        """
        ...

    async def close(self) -> None:
        """Free the resources of the trial. This method is called exactly once in every case."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSettings:
    """The settings of one episode. The same seed, policy and observations give the same answers."""

    temperature: float
    seed: int
    max_turns: int | None = None  # the maximum number of answers; None: no limit
    # Let the chat template render the tools of an environment that permits it.
    use_native_tool_calling: bool = False
    # Before each answer, render the whole conversation with the chat template instead of extending the
    # tokens of the previous prompt.
    step_wise: bool = False


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
    """Run one episode to its end and close `env`. Raises nothing except CancelledError."""
    episode = _Episode(env, policy, chat, limits, settings)
    started = time.monotonic()

    def failure(kind: FailureKind, message: str) -> TrialFailure:
        return TrialFailure(task_id=task_id, kind=kind, message=message, trial_name=trial_name)

    try:
        try:
            await episode.run()
        except AgentFault as fault:
            shown = users_exc_info(fault.__cause__ or fault)
            logger.warning("%s: reward 0 (%s): %s", task_id, fault.reason, fault, exc_info=shown)
            episode.set_zero_reward(fault)
        # This call raises an exception if a message has no JSON form. The run directory stores messages as
        # JSON.
        json.dumps([episode.conversation, episode.tool_fields])
    except BackendError as error:
        return failure(FailureKind.BACKEND, str(error))
    except EnvServerError as error:
        return failure(FailureKind.ENV_SERVER, str(error))
    except (Exception, SystemExit) as error:  # A SystemExit would end the event loop of all trials.
        logger.warning("%s: the environment failed", task_id, exc_info=users_exc_info(error))
        return failure(episode.failure_kind, described(error))
    finally:
        await _close(env)
    return episode.trajectory(task_id, trial_name, duration_s=time.monotonic() - started)


class _Episode:
    """The state of one episode."""

    def __init__(
        self, env: MessageEnv, policy: Policy, chat: Chat, limits: LengthLimits, settings: EpisodeSettings
    ) -> None:
        # The failure kind of an exception that the environment raises in the current phase.
        self.failure_kind = FailureKind.ENV_INIT_FAILED
        self.stop_reason = StopReason.STOP
        self.conversation: list[Message] = []
        self.tool_fields: dict[int, Message] = {}
        self._env, self._policy, self._chat = env, policy, chat
        self._limits, self._settings = limits, settings
        self._turns: list[Turn] = []
        self._turn_rewards: list[float] = []  # one per turn
        self._reward = 0.0
        self._num_answers = 0
        self._num_empty = 0
        self._num_cut = 0
        self._metrics: dict[str, float] = {}
        self._zero_reason: ZeroReason | None = None
        self._zero_detail = ""

    async def run(self) -> None:
        pending = self._env.start()
        require_async(self._env, "start", pending)
        reset_result = await pending
        self.failure_kind = FailureKind.ENV_ERROR
        require_type(self._env, "start", reset_result, ResetResult)
        if not reset_result.messages:
            raise TypeError(f"start of {type(self._env).__name__} returned no messages; return at least one")
        require_messages(self._env, "start", reset_result.messages)
        messages, tools = native_or_described_tools(reset_result, self._settings)
        self.conversation += messages
        prompt_ids: Sequence[int] = self._chat.render(self.conversation, tools=tools)
        while True:
            max_tokens = self._limits.max_new_tokens(len(prompt_ids))
            if max_tokens == 0:
                self.stop_reason = StopReason.CONTEXT_LENGTH
                return
            if self._num_answers == self._settings.max_turns:
                self.stop_reason = StopReason.MAX_TURNS
                return
            try:
                turn = await self._sample(prompt_ids, max_tokens=max_tokens)
            except PromptTooLong:
                # The endpoint refuses the first prompt only if `context_limit` exceeds the endpoint's
                # context. The trial then fails.
                if self._num_answers == 1:
                    raise
                self.stop_reason = StopReason.CONTEXT_LENGTH
                return
            answer = self._chat.decode(turn.completion_ids)
            step_result = await self._step(turn, answer)
            require_type(self._env, "step", step_result, StepResult)
            require_messages(self._env, "step", step_result.messages)
            start = len(self.conversation)
            self.tool_fields |= {start + i: fields for i, fields in step_result.tool_fields.items()}
            self.conversation += [{"role": "assistant", "content": answer}, *step_result.messages]
            self._record(turn, step_result)
            if step_result.is_done:
                self.stop_reason = StopReason(step_result.stop_reason or self.stop_reason)
                return
            if self._settings.step_wise:
                prompt_ids = self._chat.render(self.conversation, tools=tools)
            else:
                prompt_ids = self._chat.extend(turn.prompt_ids, turn.completion_ids, step_result.messages)

    def set_zero_reward(self, fault: AgentFault) -> None:
        """Replace the rewards of the whole episode by 0."""
        self._zero_reason, self._zero_detail = fault.reason, str(fault)
        self._reward = 0.0
        self._turn_rewards = [0.0] * len(self._turns)

    def trajectory(self, task_id: str, trial_name: str, *, duration_s: float) -> Trajectory:
        episode_metrics = {
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
            metrics=self._metrics | episode_metrics,
            turn_rewards=self._turn_rewards,
            conversation=self.conversation,
            tool_fields=self.tool_fields,
            zero_reason=self._zero_reason,
            zero_detail=self._zero_detail,
        )

    async def _sample(self, prompt_ids: Sequence[int], *, max_tokens: int) -> Turn:
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

    async def _step(self, turn: Turn, answer: str) -> StepResult:
        """Return the environment's reaction to `answer`. Raises AgentFault if the environment raises an
        exception that is attributed to the answer."""
        try:
            pending = self._env.step(answer)
            require_async(self._env, "step", pending)
            return await pending
        except NotAsyncError:
            raise
        except AgentFault as error:
            fault = error
        except PromptTooLong as error:
            # The prompt of the user simulator or of the judge, which contains the answers, is too long.
            fault = AgentFault(ZeroReason.ENV_ERROR, str(error))
        except (TrainerError, ConnectionError, TimeoutError):
            raise
        except (Exception, SystemExit) as error:  # A SystemExit would end the event loop of all trials.
            fault = AgentFault(ZeroReason.ENV_ERROR, described(error))
            fault.__cause__ = error
        self._append(turn, 0.0)
        self.conversation.append({"role": "assistant", "content": answer})
        raise fault

    def _record(self, turn: Turn, step_result: StepResult) -> None:
        reward = float(step_result.reward)  # NumPy scalars cannot be stored as JSON.
        if not is_readable(self._reward + reward):
            self._append(turn, 0.0)
            raise AgentFault(
                ZeroReason.UNREADABLE_REWARD,
                f"the reward {reward} of the environment, or the sum of the rewards, is not finite or has an "
                f"absolute value of {LIMIT:g} or more",
            )
        self._reward += reward
        self._metrics |= {
            name: metric_value(self._env, name, value) for name, value in step_result.metrics.items()
        }
        self._append(turn, reward)

    def _append(self, turn: Turn, reward: float) -> None:
        """Append a turn with its reward. An empty answer adds its reward to the preceding turn, if any."""
        if turn.completion_ids:
            self._turns.append(turn)
            self._turn_rewards.append(reward)
        else:
            self._num_empty += 1
            if self._turn_rewards:
                self._turn_rewards[-1] += reward


def native_or_described_tools(
    reset_result: ResetResult, settings: EpisodeSettings
) -> tuple[Sequence[Message], Sequence[Mapping[str, object]]]:
    """Return the first messages, and the tools that the chat template renders. If the environment or the run
    does not enable native tool calling, no tools are returned, and the system message describes them."""
    messages, tools = reset_result.messages, reset_result.tools
    if not tools or (reset_result.use_native_tool_calling and settings.use_native_tool_calling):
        return messages, tools
    return with_described_tools(messages, tools), ()


def turn_seed(seed: int, number: int) -> int:
    """Return the seed of one sampling call. `seed` is the seed of its trial or user simulator, and `number`
    distinguishes the calls that have this seed."""
    return (seed * SEED_STRIDE + number) % MAX_SEED


async def _close(env: MessageEnv) -> None:
    """Close `env`. An exception or a timeout of `close` does not change the result of the episode."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await env.close()
    except (Exception, SystemExit):
        logger.warning("an environment could not be closed", exc_info=True)
