"""The interface between training and environments: a task source creates single-use trials."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from src.core.errors import BackendError
from src.core.exception_origin import described
from src.core.trajectory import FailureKind, Task, Trajectory, TrialFailure
from src.policy.sampling_policy import Policy

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
CLEANING_S = 90.0  # longest time for a cancelled trial to free its sandbox
DEFAULT_DEADLINE_S = 7200.0
"""The deadline of a trial if the option `trial_timeout_s` is not set."""


class Trial(Protocol):
    """One attempt of a trial. `run` is called once."""

    async def run(self, policy: Policy) -> Trajectory | TrialFailure:
        """Run the task with `policy` and grade the result.

        Raises nothing except CancelledError. If `run` is cancelled, it frees the resources of the trial.
        """
        ...


@runtime_checkable
class DeadlineAware(Protocol):
    """A trial that can determine whether its agent caused the trial to exceed its deadline."""

    def timeout_result(self) -> Trajectory | None:
        """Return a trajectory with the reward 0 and a graded-zero reason if the agent caused the timeout.
        Otherwise the timeout is an infrastructure failure; return None.

        The agent did not cause the timeout if it gave no answer, or if it used at most half of the time from
        the start of the trial until the agent ended or the deadline was reached. The agent's time does not
        include sampling.

        `run_trial` calls this method if `run` has not finished at the deadline, and then cancels `run`.
        """
        ...


async def run_trial(
    create: Callable[[], Trial], policy: Policy, task: Task, *, timeout_s: float | None
) -> Trajectory | TrialFailure:
    """Create a trial of `task`, run it and return its result. An exception becomes a TrialFailure.

    A trial that does not finish within `timeout_s` (None: two hours) is cancelled. Its result is that of
    `DeadlineAware.timeout_result`, or else a TrialFailure.
    """
    deadline_s = timeout_s or DEFAULT_DEADLINE_S
    try:
        trial = create()
    except Exception as error:
        logger.exception("%s: the trial could not be created", task.id)
        return TrialFailure(task_id=task.id, kind=FailureKind.HARBOR, message=described(error))
    running = asyncio.ensure_future(trial.run(policy))
    try:
        await asyncio.wait({running}, timeout=deadline_s)
        if not running.done():
            message = f"not finished after {deadline_s:g} s"
            graded = trial.timeout_result() if isinstance(trial, DeadlineAware) else None
            if graded is None:
                return TrialFailure(task_id=task.id, kind=FailureKind.TIMEOUT, message=message)
            logger.warning(
                "%s: the trial has reward 0, because the agent used up the time (%s): %s",
                task.id,
                graded.zero_reason,
                message,
            )
            return graded
        if running.cancelled():  # `trial.run` cancelled itself; the caller of this function was not cancelled
            message = "a call inside the trial cancelled the trial"
            return TrialFailure(task_id=task.id, kind=FailureKind.HARBOR, message=message)
        return running.result()
    except BackendError as error:
        return TrialFailure(task_id=task.id, kind=FailureKind.BACKEND, message=str(error))
    except Exception as error:
        logger.exception("%s: the trial raised an exception", task.id)
        return TrialFailure(task_id=task.id, kind=FailureKind.HARBOR, message=described(error))
    finally:
        await _end(running, task)


async def _end(running: asyncio.Future[Trajectory | TrialFailure], task: Task) -> None:
    """Cancel a trial that still runs, and wait up to CLEANING_S for it to free its sandbox."""
    if not running.done():
        running.cancel()
        await asyncio.wait({running}, timeout=CLEANING_S)
        if not running.done():
            logger.error(
                "%s: a cancelled trial still runs after %g s; its sandbox is freed when this process ends",
                task.id,
                CLEANING_S,
            )


@runtime_checkable
class TaskSource(Protocol):
    """The tasks of a run, split into training tasks and held-out tasks."""

    train: Sequence[Task]
    eval: Sequence[Task]

    def trial(self, task: Task, *, directory: Path, seed: int, temperature: float, member: int = 0) -> Trial:
        """Create a trial of `task` that writes its files below `directory`.

        `seed` is the seed of the sampled answers. `member` is the index of the trial in its group. Random
        choices of the environment depend only on the seed of the run, the task and `member`. They are
        therefore the same in every step.
        """
        ...

    async def noop_reward(self, task: Task) -> float | None:
        """Return the reward of an agent that does nothing, or None if the environment cannot measure it.

        Raises the errors of the environment.
        """
        ...

    def batch_ended(self, directory: Path) -> None:
        """Summarize the trials below `directory`, all of which have ended. This call blocks."""
        ...

    async def close(self) -> None:
        """Free the resources that the trials of the run share."""
        ...

    def text(self, token_ids: Sequence[int], clean: bool) -> str:
        """Decode tokens, for files that people read. `clean` omits special tokens."""
        ...


async def close_quietly(source: TaskSource) -> None:
    """Close the source. Errors and timeouts are logged, not raised, so that they do not replace the result of
    the run."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await source.close()
    except Exception as error:
        logger.warning("the environment did not close: %s: %s", type(error).__name__, error)
