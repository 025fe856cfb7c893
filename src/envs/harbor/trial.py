"""One Harbor trial in this process, from its configuration to a graded trajectory or a failure."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig
from harbor.models.trial.result import TrialResult
from harbor.trial.trial import Trial as RunnableTrial

from src.core.errors import BackendError, VerifierError
from src.core.exception_origin import described
from src.core.trajectory import FailureKind, StopReason, Task, Trajectory, TrialFailure, ZeroReason
from src.envs.harbor.agent import AgentSession, register_session, tool_fields
from src.envs.harbor.grading import Grading, graded
from src.envs.harbor.grading_method import GradingMethod
from src.envs.harbor.timed_policy import TimedPolicy
from src.envs.harbor.tinker_llm import SamplingLimits, TinkerLLM
from src.envs.harbor.trial_directory import DirectorySummary, JobsQuota
from src.envs.harbor.trial_result import (
    describe_exception,
    failure_kind,
    run_with_deadline,
    seconds,
    timed_out,
    zero_reason,
)
from src.envs.harbor.verifier_reward import verifier_reward
from src.envs.options import HarborTrainingOptions
from src.policy.chat import Chat
from src.policy.sampling_policy import Policy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningTrial:
    """The objects of a trial that has been created."""

    trial: RunnableTrial
    session: AgentSession
    policy: TimedPolicy
    grading: Grading
    started: float  # `time.monotonic()` at the start of the trial


@dataclass(kw_only=True, slots=True)
class HarborTrial:
    """One attempt to run a trial of a Harbor task; a failed attempt may be repeated. Implements the protocols
    `Trial` and `DeadlineAware` of `src/envs/base.py`."""

    task: Task
    settings: HarborTrainingOptions
    chat: Chat
    environment: Mapping[str, object]
    quota: JobsQuota
    grading: GradingMethod
    directory: Path
    seed: int
    temperature: float
    _name: str = ""  # Harbor chooses the name. The directory of the trial has the same name.
    _running: RunningTrial | None = None

    async def run(self, policy: Policy) -> Trajectory | TrialFailure:
        try:
            outcome = await self._run(policy)
        finally:
            directory = await self._limit_directory()
        if not isinstance(outcome, Trajectory):
            return outcome
        directory_metrics = {
            "files_left_out": float(not directory.is_complete),
            "essential_files_only": float(directory.is_essential_only),
        }
        return replace(outcome, metrics={**outcome.metrics, **directory_metrics})

    def timeout_result(self) -> Trajectory | None:
        running = self._running
        if running is None or not running.session.llm.turns:
            return None
        agent_ended_at = running.grading.agent_ended_at or time.monotonic()
        if not running.policy.agent_used_most(agent_ended_at):
            return None
        return self._trajectory(running.trial.result, running, 0.0, ZeroReason.TIMEOUT)

    async def _limit_directory(self) -> DirectorySummary:
        """Apply the limits to the trial's directory in a thread, because the directory can be large."""
        if not self._name:  # Harbor has not created the directory.
            return DirectorySummary(size=0, is_complete=True)
        try:
            return await asyncio.to_thread(self.quota.enforce, self.directory / self._name)
        except OSError as error:
            logger.warning(
                "the limits could not be applied to the directory of trial %s: %s", self._name, error
            )
            return DirectorySummary(size=0, is_complete=False)

    async def _run(self, policy: Policy) -> Trajectory | TrialFailure:
        started = time.monotonic()
        key = uuid.uuid4().hex
        timed_policy = TimedPolicy(policy)
        llm = TinkerLLM(
            policy=timed_policy,
            chat=self.chat,
            limits=SamplingLimits(
                temperature=self.temperature,
                seed=self.seed,
                lengths=self.settings.length_limits,
                max_consecutive_truncations=self.settings.max_consecutive_truncations,
                summarize=self.settings.enable_summarize,
            ),
            model_name=self.settings.model_name,
        )
        session = AgentSession(llm=llm)
        config = self._config(key)
        self._name = config.trial_name
        try:
            with register_session(key, session):
                trial = await RunnableTrial.create(config)
                async with graded(trial, self.grading) as grading:
                    running = RunningTrial(
                        trial=trial, session=session, policy=timed_policy, grading=grading, started=started
                    )
                    self._running = running
                    try:
                        # The deadline is None, because the caller of `HarborTrial.run` enforces one.
                        result = await run_with_deadline(trial.run(), None)
                    except Exception as error:
                        if not llm.turns or await grading.attribute(ZeroReason.AGENT_ERROR) is None:
                            raise
                        logger.warning("%s: the agent made the trial fail", self.task.id, exc_info=True)
                        faulty = self._trajectory(trial.result, running, 0.0, ZeroReason.AGENT_ERROR)
                        return replace(faulty, zero_detail=described(error))
                    return await self._outcome(result, running)
        except Exception as error:
            return self._failure(FailureKind.HARBOR, described(error))

    def _config(self, key: str) -> TrialConfig:
        settings = self.settings
        agent_options = {
            "max_turns": settings.max_turns,
            "suppress_max_turns_warning": True,
            "enable_summarize": settings.enable_summarize,
            "proactive_summarization_threshold": settings.proactive_summarization_threshold,
            "record_terminal_session": False,
            "collect_rollout_details": False,
            "llm_backend": "policy",
            "llm_kwargs": {"session": key},
        }
        return TrialConfig(
            task=TaskConfig(path=self.task.path),
            trials_dir=self.directory,
            agent_timeout_multiplier=settings.agent_timeout_multiplier,
            verifier_timeout_multiplier=settings.verifier_timeout_multiplier,
            agent=AgentConfig(
                import_path="src.envs.harbor.agent:TrainingTerminus2",
                model_name=settings.model_name,
                kwargs={name: value for name, value in agent_options.items() if value is not None},
            ),
            environment=EnvironmentConfig.model_validate(dict(self.environment)),
            verifier=VerifierConfig(import_path="src.envs.harbor.verifier:TrainingVerifier"),
        )

    async def _outcome(self, result: TrialResult, running: RunningTrial) -> Trajectory | TrialFailure:
        session = running.session
        if isinstance(session.error, BackendError):
            return self._failure(FailureKind.BACKEND, str(session.error))
        waited_s = sampler_timeout_s(result, running)
        if waited_s and not (session.llm.turns and await running.policy.responds()):
            return self._failure(
                FailureKind.BACKEND,
                f"the agent reached its time limit after it waited {waited_s:.0f} s for an answer; if the "
                "server is slow, raise agent_timeout_multiplier or lower max_tokens",
            )
        reason, detail = None, ""
        try:
            reward = verifier_reward(result.verifier_result.rewards if result.verifier_result else None)
        except VerifierError as error:
            message = describe_exception(result) or str(error)
            if session.llm.turns:
                reason = await running.grading.attribute(zero_reason(result, session.error))
            if reason is None:
                return self._failure(failure_kind(result, session.error), message)
            logger.warning(
                "%s: reward 0, because the agent prevented its grading (%s): %s",
                self.task.id,
                reason,
                message,
            )
            reward, detail = 0.0, message
        if not session.llm.turns:
            return self._failure(FailureKind.AGENT, "the agent gave no answer")
        return replace(self._trajectory(result, running, reward, reason), zero_detail=detail)

    def _trajectory(
        self, result: TrialResult, running: RunningTrial, reward: float, reason: ZeroReason | None
    ) -> Trajectory:
        session, llm = running.session, running.session.llm
        is_timeout = timed_out(result) or reason is ZeroReason.TIMEOUT
        stop_reason = StopReason.AGENT_TIMEOUT if is_timeout else session.stop_reason
        return Trajectory(
            task_id=self.task.id,
            turns=llm.all_turns if self.settings.train_subagents == "all" else llm.turns,
            reward=reward,
            stop_reason=stop_reason or StopReason.SESSION_CLOSED,
            trial_name=self._name,
            conversation=llm.conversation,
            tool_fields=tool_fields(llm.conversation),
            zero_reason=reason,
            metrics={
                "duration_s": time.monotonic() - running.started,
                "environment_setup_s": seconds(result.environment_setup),
                "agent_s": seconds(result.agent_execution),
                "verifier_s": seconds(result.verifier),
                "grading_s": running.grading.extra_s,
                "prefix_breaks": float(llm.prefix_breaks),
                "empty_completions": float(llm.empty_completions),
                "subagent_turns": float(len(llm.subagent_turns)),
                "tool_calls": float(session.num_commands),
                "parse_failures": float(session.num_parse_failures),
            },
        )

    def _failure(self, kind: FailureKind, message: str) -> TrialFailure:
        logger.warning("trial of %s failed (%s): %s", self.task.id, kind.value, message)
        return TrialFailure(task_id=self.task.id, kind=kind, message=message, trial_name=self._name)


def sampler_timeout_s(result: TrialResult, running: RunningTrial) -> float:
    """Return the waiting time of the unanswered sampling call if this call made the agent reach its time
    limit, else 0.

    The call is assumed to be the cause if it took more than half of the agent's time, or if no sampling call
    of the agent has been answered. Harbor grades an agent that reached its time limit, but an agent that
    waited for a lost server must not be graded.
    """
    if not timed_out(result):
        return 0.0
    unanswered_s = running.policy.unanswered_s
    if running.session.llm.turns and unanswered_s <= seconds(result.agent_execution) / 2:
        return 0.0
    return unanswered_s
