"""The interface between training and environments: a task source creates single-use trials."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from src.core.trajectory import FailureKind, Task, Trajectory, TrialFailure
from src.policy.sampling_policy import Policy

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0


DEFAULT_DEADLINE_S = 7200.0
"""The deadline of a trial if the option `trial_timeout_s` is not set."""


class Trial(Protocol):
    """One attempt of a trial. `run` is called once."""

    async def run(self, policy: Policy) -> Trajectory | TrialFailure:
        """Run the task with `policy` and grade the result.

        Raises nothing except CancelledError. If `run` is cancelled, it frees the resources of the trial.
        """
        ...


async def run_with_timeout(
    trial: Trial, policy: Policy, task: Task, timeout_s: float | None
) -> Trajectory | TrialFailure:
    """Run a trial. Return a TrialFailure if the trial does not finish within `timeout_s` (None: two hours),
    or if a call inside the trial cancels the trial."""
    timeout_s = timeout_s or DEFAULT_DEADLINE_S
    running = asyncio.ensure_future(trial.run(policy))
    try:
        await asyncio.wait({running}, timeout=timeout_s)
        if running.done() and not running.cancelled():
            return running.result()
        kind, message = FailureKind.TIMEOUT, f"not finished after {timeout_s:g} s"
        if running.cancelled():
            kind, message = FailureKind.HARBOR, "a call inside the trial cancelled the trial"
        return TrialFailure(task_id=task.id, kind=kind, message=message)
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait({running})


@runtime_checkable
class DeadlineAware(Protocol):
    """A trial that can determine whether its agent caused the trial to exceed its deadline."""

    def timeout_result(self) -> Trajectory | None:
        """Return a trajectory with the reward 0 and a graded-zero reason if the agent caused the timeout.
        Otherwise the timeout is an infrastructure failure; return None.

        The agent did not cause the timeout if it gave no answer, or if it used at most half of the time from
        the start of the trial until the agent ended or the deadline was reached. The agent's time does not
        include sampling.

        `src.rollouts.group_rollout` calls this method if `run` has not finished at the deadline, and then
        cancels `run`.
        """
        ...


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
