"""One Harbor trial in process, from its configuration to a graded trajectory or a failure with a kind."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig
from harbor.models.trial.result import TimingInfo, TrialResult
from harbor.trial.trial import Trial as RunnableTrial

from src.core.errors import BackendError, SandboxError, VerifierError
from src.core.trajectory import (
    FailureKind,
    StopReason,
    Task,
    Trajectory,
    TrialFailure,
    TrialTime,
    Turn,
    ZeroReason,
)
from src.envs.harbor.agent import Session, registered
from src.envs.harbor.grading import Grading, graded
from src.envs.harbor.grading_choice import Choice
from src.envs.harbor.tinker_llm import SamplingLimits, TinkerLLM
from src.envs.harbor.trial_folder import JobsQuota, Kept
from src.envs.harbor.verifier_reward import score
from src.envs.options import HarborSettings
from src.policy.chat import Chat
from src.policy.sampling_policy import Policy, PolicyWrapper, SampleRequest

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 60.0
ANSWERS_WITHIN_S = 20.0
NO_STDERR = ". Stderr: None. "  # how Harbor's account of a command of Docker's ends


class HarborTrial:
    """One attempt at one Harbor task, used once."""

    def __init__(
        self,
        *,
        task: Task,
        settings: HarborSettings,
        chat: Chat,
        environment: Mapping[str, object],
        quota: JobsQuota,
        grading: Choice,
        directory: Path,
        seed: int,
        temperature: float,
    ) -> None:
        self._task = task
        self._settings = settings
        self._chat = chat
        self._environment = environment
        self._quota = quota
        self._grading = grading
        self._directory = directory
        self._name = ""  # Harbor gives it, and the trial's folder the same
        self._played: tuple[RunnableTrial, Session, TimedPolicy, Grading, float] | None = None
        self._limits = SamplingLimits(
            temperature=temperature,
            seed=seed,
            lengths=settings.length_limits,
            max_consecutive_truncations=settings.max_consecutive_truncations,
            summarize=settings.enable_summarize,
        )

    async def run(self, policy: Policy) -> Trajectory | TrialFailure:
        """Play and grade. Never raises but for cancellation, after which the sandbox is gone."""
        try:
            outcome = await self._play(policy)
        finally:
            kept = await self._settled()
        if not isinstance(outcome, Trajectory):
            return outcome
        measured = {
            "files_left_out": float(not kept.is_whole),
            "essential_files_only": float(kept.is_essential_only),
        }
        return replace(outcome, metrics={**outcome.metrics, **measured})

    async def _settled(self) -> Kept:
        """The trial's folder, bounded; in a thread, for it is as large as the agent made it."""
        if not self._name:  # Harbor has made no folder
            return Kept(size=0, is_whole=True)
        try:
            return await asyncio.to_thread(self._quota.settle, self._directory / self._name)
        except OSError as error:
            logger.warning("the folder of trial %s could not be bounded: %s", self._name, error)
            return Kept(size=0, is_whole=False)

    async def _play(self, policy: Policy) -> Trajectory | TrialFailure:
        started = time.monotonic()
        key = uuid.uuid4().hex
        timed = TimedPolicy(policy)
        session = Session(
            llm=TinkerLLM(
                policy=timed, chat=self._chat, limits=self._limits, model_name=self._settings.model_name
            )
        )
        config = self._config(key)
        self._name = config.trial_name
        try:
            with registered(key, session):
                trial = await RunnableTrial.create(config)
                async with graded(trial, self._grading) as grading:
                    self._played = (trial, session, timed, grading, started)
                    try:
                        result = await finish_within(
                            trial.run(), None
                        )  # the runner has a deadline of its own, and cancels
                    except Exception:
                        if not session.llm.turns or await grading.blame(ZeroReason.AGENT_ERROR) is None:
                            raise
                        logger.warning(
                            "%s: the trial broke on what its agent did", self._task.id, exc_info=True
                        )
                        return self._trajectory(
                            trial.result, session, grading, 0.0, ZeroReason.AGENT_ERROR, started
                        )
                    return await self._outcome(result, session, timed, grading, started)
        except Exception as error:
            return self._failure(FailureKind.HARBOR, f"{type(error).__name__}: {error}")

    def expired(self) -> Trajectory | None:
        if self._played is None:
            return None
        trial, session, policy, grading, started = self._played
        if not session.llm.turns or not policy.spent.agent_used_most(
            grading.agent_ended_at or time.monotonic()
        ):
            return None
        return self._trajectory(trial.result, session, grading, 0.0, ZeroReason.TIMEOUT, started)

    def _config(self, key: str) -> TrialConfig:
        settings = self._settings
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
            task=TaskConfig(path=self._task.path),
            trials_dir=self._directory,
            agent=AgentConfig(
                import_path="src.envs.harbor.agent:TrainingTerminus2",
                model_name=settings.model_name,
                kwargs={name: value for name, value in agent_options.items() if value is not None},
            ),
            environment=EnvironmentConfig.model_validate(dict(self._environment)),
            verifier=VerifierConfig(import_path="src.envs.harbor.verifier:TrainingVerifier"),
        )

    async def _outcome(
        self, result: TrialResult, session: Session, policy: TimedPolicy, grading: Grading, started: float
    ) -> Trajectory | TrialFailure:
        if isinstance(session.error, BackendError):
            return self._failure(FailureKind.BACKEND, str(session.error))
        if (lost_s := starved(result, session, policy)) and not (
            session.llm.turns and await policy.answers()
        ):
            return self._failure(
                FailureKind.BACKEND,
                f"the agent's time ran out on an answer that had not come for {lost_s:.0f} s",
            )
        reason = None
        try:
            reward = score(result.verifier_result.rewards if result.verifier_result else None)
        except VerifierError as error:
            message = what_happened(result) or str(error)
            reason = await grading.blame(reason_for_zero(result, session)) if session.llm.turns else None
            if reason is None:
                return self._failure(failed_phase(result, session), message)
            logger.warning(
                "%s: reward 0, the agent prevented its grading (%s): %s", self._task.id, reason, message
            )
            reward = 0.0
        if not session.llm.turns:
            return self._failure(FailureKind.AGENT, "the agent gave no answer")
        return self._trajectory(result, session, grading, reward, reason, started)

    def _trajectory(
        self,
        result: TrialResult,
        session: Session,
        grading: Grading,
        reward: float,
        reason: ZeroReason | None,
        started: float,
    ) -> Trajectory:
        llm = session.llm
        stop_reason = StopReason.AGENT_TIMEOUT if timed_out(result) else session.stop_reason
        return Trajectory(
            task_id=self._task.id,
            turns=llm.all_turns if self._settings.train_subagents == "all" else llm.turns,
            reward=reward,
            stop_reason=stop_reason or StopReason.SESSION_CLOSED,
            trial_name=self._name,
            conversation=llm.conversation,
            zero_reason=reason,
            metrics={
                "duration_s": time.monotonic() - started,
                "environment_setup_s": _seconds(result.environment_setup),
                "agent_s": _seconds(result.agent_execution),
                "verifier_s": _seconds(result.verifier),
                "grading_s": grading.extra_s,
                "prefix_breaks": float(llm.prefix_breaks),
                "empty_completions": float(llm.empty_completions),
                "subagent_turns": float(len(llm.subagent_turns)),
                "tool_calls": float(session.num_commands),
                "parse_failures": float(session.num_parse_failures),
            },
        )

    def _failure(self, kind: FailureKind, message: str) -> TrialFailure:
        logger.warning("trial of %s failed (%s): %s", self._task.id, kind.value, message)
        return TrialFailure(task_id=self._task.id, kind=kind, message=message, trial_name=self._name)


class TimedPolicy(PolicyWrapper):
    """A policy that knows for how long its last call went unanswered."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.unanswered_s = 0.0
        self.spent = TrialTime(started=time.monotonic())
        self._last_prompt: Sequence[int] = ()

    async def sample(self, request: SampleRequest) -> Turn:
        asked = time.monotonic()
        self._last_prompt = request.prompt_ids
        try:
            turn = await super().sample(request)
        except asyncio.CancelledError:
            self.unanswered_s = time.monotonic() - asked
            raise
        finally:
            if self.spent.first_answer is not None:
                self.spent.sampling_s += time.monotonic() - asked
        self.spent.first_answer = self.spent.first_answer or time.monotonic()
        return turn

    async def answers(self) -> bool:
        """Whether one token of an answer comes soon: then a late answer was a long one, and nothing was wrong with the server."""
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                await self.policy.sample(
                    SampleRequest(prompt_ids=self._last_prompt[:1], max_tokens=1, temperature=1.0)
                )
        except Exception:
            return False
        return True


def starved(result: TrialResult, session: Session, policy: TimedPolicy) -> float:
    """The seconds that the last call had waited where the back end used up the agent's time, else 0: all of it, or more than half.

    Harbor grades an agent whose time is up. One that was waiting for a dead server all the while has shown nothing to be graded.
    """
    if not timed_out(result) or (
        session.llm.turns and policy.unanswered_s <= _seconds(result.agent_execution) / 2
    ):
        return 0.0
    return policy.unanswered_s


def timed_out(result: TrialResult) -> bool:
    return result.exception_info is not None and result.exception_info.exception_type == "AgentTimeoutError"


async def finish_within[T](work: asyncio.Future[T] | object, deadline_s: float | None) -> T:
    """The result of `work`, which is cancelled past the deadline or with its caller, and then given a moment to free what it holds.

    Raises TimeoutError. Harbor itself bounds neither stopping an environment nor collecting logs.
    """
    task: asyncio.Task[T] = asyncio.ensure_future(work)  # type: ignore[arg-type]
    try:
        await asyncio.wait({task}, timeout=deadline_s)
    finally:
        if not task.done():
            task.cancel()
            _, pending = await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
            if pending:
                logger.error(
                    "a cancelled trial still runs after %g s; its sandbox may outlive it until the run ends",
                    CANCEL_GRACE_S,
                )
    if not task.done() or task.cancelled():
        raise TimeoutError
    return task.result()


def failed_phase(result: TrialResult, session: Session) -> FailureKind:
    """Which part of an ungraded trial is to blame."""
    info = result.exception_info
    if isinstance(session.error, SandboxError) or (
        info is not None and info.exception_type == SandboxError.__name__
    ):
        return FailureKind.SANDBOX
    if result.verifier is not None:
        return FailureKind.VERIFIER
    if result.agent_execution is not None:
        return FailureKind.AGENT
    return FailureKind.SANDBOX if result.environment_setup is not None else FailureKind.HARBOR


REASONS = {  # by the type of the exception that Harbor recorded
    "VerifierTimeoutError": ZeroReason.VERIFIER_TIMEOUT,
    "RewardFileNotFoundError": ZeroReason.NO_REWARD,
    "RewardFileEmptyError": ZeroReason.NO_REWARD,
    "VerifierOutputParseError": ZeroReason.UNREADABLE_REWARD,
    "AgentFault": ZeroReason.UNREADABLE_REWARD,  # of the verifier; any other is known to the grading
    "SandboxError": ZeroReason.SANDBOX_BROKEN,
    "CommandTimeout": ZeroReason.SANDBOX_BROKEN,
}


def reason_for_zero(result: TrialResult, session: Session) -> ZeroReason:
    """What an ungraded trial is called where its agent is to blame."""
    if isinstance(session.error, SandboxError):
        return ZeroReason.SANDBOX_BROKEN
    if result.exception_info is None or timed_out(result):
        return ZeroReason.UNREADABLE_REWARD if result.verifier_result is not None else ZeroReason.NO_REWARD
    in_general = ZeroReason.AGENT_ERROR if result.verifier is None else ZeroReason.VERIFIER_ERROR
    return REASONS.get(result.exception_info.exception_type, in_general)


def what_happened(result: TrialResult) -> str:
    """Harbor's own account of a failure, in one line."""
    info = result.exception_info
    if info is None:
        return ""
    lines = [line for line in info.exception_message.removesuffix(NO_STDERR).splitlines() if line.strip()]
    if not lines:
        return f"{info.exception_type}: no message"
    failed, is_command, _ = lines[0].partition(". Command: ")
    if is_command and len(lines) > 1:  # a build's output, which says last why it failed
        return f"{info.exception_type}: {failed}: {lines[-1].strip(' .')}"
    return f"{info.exception_type}: {lines[0].strip()}"


def _seconds(timing: TimingInfo | None) -> float:
    if timing is None or timing.started_at is None or timing.finished_at is None:
        return 0.0
    return (timing.finished_at - timing.started_at).total_seconds()
