"""Groups of trials: one semaphore for all, a deadline and one retry for each, and the border where a trial's error becomes a record."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from src.envs.base import TaskSource
from src.errors import TrainerError
from src.policy import Policy
from src.trajectory import FailureKind, Task, Trajectory, TrajectoryGroup, TrialFailure

logger = logging.getLogger(__name__)

DEFAULT_DEADLINE_S = 7200.0
# Nothing the agent did: the same trial may well succeed when it is played again.
INFRASTRUCTURE = frozenset({FailureKind.SANDBOX, FailureKind.BACKEND, FailureKind.VERIFIER})


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings:
    n_parallel_envs: int
    trial_timeout_sec: float | None
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPlan:
    """How one batch of groups is played."""

    step: int
    purpose: str  # "step" | "refill-1", ... | "eval": part of the folder's name and of the seeds
    group_size: int
    temperature: float
    directory: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedGroup:
    """A group and how long it took from its first trial's start to its last one's end."""

    group: TrajectoryGroup
    duration_s: float


class Rollouts:
    """Plays trials, never more than `n_parallel_envs` at once over all groups."""

    def __init__(self, source: TaskSource, settings: RolloutSettings) -> None:
        self._source = source
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.n_parallel_envs)

    async def play(
        self, tasks: Sequence[Task], policy: Policy, plan: RolloutPlan, on_group: Callable[[FinishedGroup], None]
    ) -> list[TrajectoryGroup]:
        """One group per task, in order; `on_group` hears of each as it ends. TrainerError when not a single trial could be graded."""
        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(self._group(task, policy, plan, on_group)) for task in tasks]
        groups = [task.result() for task in playing]
        if tasks and not any(group.trajectories for group in groups):
            raise TrainerError(all_failed(groups, plan))
        return groups

    async def _group(self, task: Task, policy: Policy, plan: RolloutPlan, on_group: Callable[[FinishedGroup], None]) -> TrajectoryGroup:
        started: list[float] = []
        async with asyncio.TaskGroup() as group:
            members = [group.create_task(self._member(task, policy, plan, member, started)) for member in range(plan.group_size)]
        results = [member.result() for member in members]
        finished = TrajectoryGroup(
            task=task,
            trajectories=[result for result in results if isinstance(result, Trajectory)],
            failures=[result for result in results if isinstance(result, TrialFailure)],
        )
        on_group(FinishedGroup(group=finished, duration_s=time.monotonic() - started[0]))
        return finished

    async def _member(self, task: Task, policy: Policy, plan: RolloutPlan, member: int, started: list[float]) -> Trajectory | TrialFailure:
        """One trial, and a second one when the first was lost to infrastructure. The seed stays the same."""
        seed = trial_seed(self._settings.seed, plan, task.id, member)
        async with self._slots:
            started.append(time.monotonic())
            result = await self._trial(task, policy, plan, seed)
            if isinstance(result, TrialFailure) and result.kind in INFRASTRUCTURE:
                logger.warning("%s: trial lost (%s: %s); trying once more", task.id, result.kind, result.message)
                result = await self._trial(task, policy, plan, seed)
        if isinstance(result, TrialFailure):
            logger.warning("%s: trial could not be graded (%s: %s)", task.id, result.kind, result.message)
        return result

    async def _trial(self, task: Task, policy: Policy, plan: RolloutPlan, seed: int) -> Trajectory | TrialFailure:
        deadline_s = self._settings.trial_timeout_sec or DEFAULT_DEADLINE_S
        trial = self._source.trial(task, directory=plan.directory, seed=seed, temperature=plan.temperature)
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                return await trial.run(policy)
        except TimeoutError as error:
            if deadline.expired():
                return TrialFailure(task_id=task.id, kind=FailureKind.TIMEOUT, message=f"not finished after {deadline_s:g} s")
            return TrialFailure(task_id=task.id, kind=FailureKind.HARBOR, message=f"TimeoutError: {error}")
        except Exception as error:
            logger.exception("%s: the trial broke", task.id)
            return TrialFailure(task_id=task.id, kind=FailureKind.HARBOR, message=f"{type(error).__name__}: {error}")


def trial_seed(seed: int, plan: RolloutPlan, task_id: str, member: int) -> int:
    """A 31-bit seed that depends on nothing but the run's seed and the trial's place in it."""
    step = 0 if plan.purpose == "eval" else plan.step  # evaluations differ by their weights alone
    place = f"{seed}/{plan.purpose}/{step}/{task_id}/{member}"
    return int.from_bytes(hashlib.sha256(place.encode()).digest()[:4], "big") >> 1


def all_failed(groups: Sequence[TrajectoryGroup], plan: RolloutPlan) -> str:
    """The one line that says what went wrong most often, with an example."""
    failures = [failure for group in groups for failure in group.failures]
    kind, count = Counter(failure.kind for failure in failures).most_common(1)[0]
    example = next(failure.message for failure in failures if failure.kind == kind)
    first_line = (example.splitlines() or [""])[0]
    what = "evaluation" if plan.purpose == "eval" else "step"
    return (
        f"none of the {len(failures)} trials of {what} {plan.step} could be graded; {count} failed by {kind}, e.g. {first_line}; "
        f"see {plan.directory}"
    )
