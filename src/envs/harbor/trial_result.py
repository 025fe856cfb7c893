"""Failure kinds, graded-zero reasons, error messages and durations from Harbor's result of a trial."""

from __future__ import annotations

import asyncio
import logging

from harbor.models.trial.result import TimingInfo, TrialResult

from src.core.errors import SandboxError, TrainerError, VerifierError
from src.core.trajectory import FailureKind, ZeroReason

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 60.0
NO_STDERR = ". Stderr: None. "  # the end of Harbor's message about a failed Docker command
# A trial whose agent ended with one of these exceptions is graded.
GRADED_ENDS = ("AgentTimeoutError", "NonZeroAgentExitCodeError")
ZERO_REASONS = {  # by the type of the exception that Harbor recorded
    "VerifierTimeoutError": ZeroReason.VERIFIER_TIMEOUT,
    "RewardFileNotFoundError": ZeroReason.NO_REWARD,
    "RewardFileEmptyError": ZeroReason.NO_REWARD,
    "VerifierOutputParseError": ZeroReason.UNREADABLE_REWARD,
    # This entry is for an AgentFault of TrainingVerifier, which could not read the reward file. An AgentFault
    # of a step of `Grading` after the agent's end is in `Grading.fault`, and `Grading.attribute` uses the
    # reason of this fault instead.
    "AgentFault": ZeroReason.UNREADABLE_REWARD,
    "SandboxError": ZeroReason.SANDBOX_BROKEN,
    "CommandTimeout": ZeroReason.SANDBOX_BROKEN,
}


async def run_with_deadline[T](work: asyncio.Future[T] | object, deadline_s: float | None) -> T:
    """Return the result of `work`. Cancel `work` at the deadline (None: no deadline) or if the caller is
    cancelled.

    Cancelled work has `CANCEL_GRACE_S` seconds to free its resources, because Harbor limits neither the time
    to stop an environment nor the time to collect logs. Raises TimeoutError if `work` was cancelled or has
    not ended after that time.
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
                    "a cancelled trial still runs after %g s; its sandbox may remain until the run ends",
                    CANCEL_GRACE_S,
                )
    if not task.done() or task.cancelled():
        raise TimeoutError
    return task.result()


def timed_out(result: TrialResult) -> bool:
    """Return whether the agent reached its own time limit."""
    return result.exception_info is not None and result.exception_info.exception_type == "AgentTimeoutError"


def require_graded_end(result: TrialResult) -> None:
    """Raise VerifierError if the agent ended with an exception that is not in GRADED_ENDS.

    Harbor 0.24 does not run the verifier of such a trial, but Harbor 0.26 usually does. Harbor records only
    the first exception of a trial, so the result still contains the exception of the agent.
    """
    info = result.exception_info
    if info is not None and info.exception_type not in GRADED_ENDS:
        raise VerifierError(f"a trial whose agent ended with {info.exception_type} is not graded")


def failure_kind(result: TrialResult, agent_error: TrainerError | None) -> FailureKind:
    """Return the failure kind of a trial without a grade: SANDBOX for a SandboxError, else the kind of the
    last phase that began. `agent_error` is the error that ended the agent; None: there was none.
    """
    info = result.exception_info
    if isinstance(agent_error, SandboxError) or (
        info is not None and info.exception_type == SandboxError.__name__
    ):
        return FailureKind.SANDBOX
    if result.verifier is not None:
        return FailureKind.VERIFIER
    if result.agent_execution is not None:
        return FailureKind.AGENT
    return FailureKind.SANDBOX if result.environment_setup is not None else FailureKind.HARBOR


def zero_reason(result: TrialResult, agent_error: TrainerError | None) -> ZeroReason:
    """Return the graded-zero reason of a trial that could not be graded because of its agent."""
    if isinstance(agent_error, SandboxError):
        return ZeroReason.SANDBOX_BROKEN
    if result.exception_info is None or timed_out(result):
        return ZeroReason.UNREADABLE_REWARD if result.verifier_result is not None else ZeroReason.NO_REWARD
    default = ZeroReason.AGENT_ERROR if result.verifier is None else ZeroReason.VERIFIER_ERROR
    return ZERO_REASONS.get(result.exception_info.exception_type, default)


def describe_exception(result: TrialResult) -> str:
    """Return one line about the exception that Harbor recorded, or an empty string."""
    info = result.exception_info
    if info is None:
        return ""
    lines = [line for line in info.exception_message.removesuffix(NO_STDERR).splitlines() if line.strip()]
    if not lines:
        return f"{info.exception_type}: no message"
    summary, is_command, _ = lines[0].partition(". Command: ")
    if is_command and len(lines) > 1:  # The last line of a build's output contains the cause.
        return f"{info.exception_type}: {summary}: {lines[-1].strip(' .')}"
    return f"{info.exception_type}: {lines[0].strip()}"


def seconds(timing: TimingInfo | None) -> float:
    """Return the duration of a phase, or 0 if it did not take place or did not end."""
    if timing is None or timing.started_at is None or timing.finished_at is None:
        return 0.0
    return (timing.finished_at - timing.started_at).total_seconds()
