"""Roll out groups of trials.

One semaphore limits the number of concurrent trials. A trial has up to `trial_attempts` attempts, each with a
deadline. A rollout is a trial with its exact tokens, as the run stores it on disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from src.core.errors import TooManyFailuresError
from src.core.trajectory import FailureKind, Task, Trajectory, TrajectoryGroup, TrialFailure
from src.envs.base import DEFAULT_DEADLINE_S, TaskSource, run_trial
from src.policy.sampling_policy import Policy
from src.records.journal import RolloutKey
from src.records.rollout_store import FinishedRollout, FinishedRollouts
from src.rollouts.judge import Judge
from src.rollouts.options import RolloutOptions

logger = logging.getLogger(__name__)

LONGEST_WAIT_S = 60.0  # longest wait before another attempt; `back_off` then adds up to 50 % to it
# An attempt is repeated if its failure is of one of these kinds.
REPEATED_FAILURES = frozenset(
    {FailureKind.SANDBOX, FailureKind.BACKEND, FailureKind.VERIFIER, FailureKind.ENV_SERVER}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPlan:
    """The settings with which the groups of one batch are rolled out."""

    step: int
    # "step", "eval" or "refill-<n>", the nth further batch that dynamic sampling runs in the step. The names
    # of directories and the seeds of trials depend on it.
    purpose: str
    group_size: int
    temperature: float
    directory: Path

    @property
    def is_training(self) -> bool:
        """Whether the groups are trained on."""
        return self.purpose != "eval"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedGroup:
    """A group, and the time from the start of its first trial to the end of its last trial."""

    group: TrajectoryGroup
    duration_s: float
    num_retries: int = 0  # number of repeated attempts in the group


class Rollouts:
    """Runs trials. At most `n_parallel_envs` trials of all groups run at the same time. Rollouts that
    `FinishedRollouts.load` returns are not repeated.

    The `judge` adds a bonus to training trials only. If `judge` is None, no bonus is added.
    """

    def __init__(
        self,
        source: TaskSource,
        options: RolloutOptions,
        finished: FinishedRollouts,
        judge: Judge | None = None,
    ) -> None:
        self._source = source
        self._judge = judge
        self._options = options
        self._finished = finished
        self._slots = asyncio.Semaphore(options.n_parallel_envs)
        self._noop_rewards: dict[str, float | None] = {}  # by task id; None: the reward could not be measured

    async def groups(
        self, tasks: Sequence[Task], policy: Policy, plan: RolloutPlan, on_group: Callable[[TimedGroup], None]
    ) -> list[TimedGroup]:
        """Roll out one group per task. Return the groups in the order of the tasks.

        `on_group` is called with each group when the group ends.
        """
        kept = self._finished.load(plan.purpose, plan.step)

        async def roll_out(task: Task) -> TimedGroup:
            timed = await self.group(task, policy, plan, kept)
            on_group(timed)
            return timed

        return await all_results(roll_out(task) for task in tasks)

    async def noop_rewards(self, tasks: Sequence[Task]) -> dict[str, float]:
        """Return, by task id, the reward of an agent that does nothing.

        Each reward is measured once. Tasks whose reward cannot be measured are left out.
        """
        new_tasks = [task for task in tasks if task.id not in self._noop_rewards]
        await asyncio.gather(*map(self._measure_noop_reward, new_tasks))
        return {task.id: reward for task in tasks if (reward := self._noop_rewards[task.id]) is not None}

    async def _measure_noop_reward(self, task: Task) -> None:
        async with self._slots:
            try:
                async with asyncio.timeout(self._options.trial_timeout_s or DEFAULT_DEADLINE_S):
                    self._noop_rewards[task.id] = await self._source.noop_reward(task)
            except (Exception, asyncio.CancelledError) as error:  # an environment can raise any exception
                this_task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and this_task and this_task.cancelling():
                    raise  # this measurement was cancelled, and not only a call inside the environment
                logger.warning(
                    "%s: the reward of an agent that does nothing could not be measured: %s: %s",
                    task.id,
                    type(error).__name__,
                    error,
                )
                self._noop_rewards[task.id] = None

    async def group(
        self, task: Task, policy: Policy, plan: RolloutPlan, kept: Mapping[RolloutKey, FinishedRollout]
    ) -> TimedGroup:
        """Roll out the group of one task. Rollouts in `kept` are not repeated."""
        started: list[float] = []
        rollouts = await all_results(
            self._member(task, policy, plan, member, kept, started) for member in range(plan.group_size)
        )
        finished = TrajectoryGroup(
            task=task,
            trajectories=[rollout.result for rollout in rollouts if isinstance(rollout.result, Trajectory)],
            failures=[rollout.result for rollout in rollouts if isinstance(rollout.result, TrialFailure)],
            step=plan.step,
        )
        duration_s = time.monotonic() - started[0] if started else 0.0
        num_retries = sum(rollout.attempts - 1 for rollout in rollouts)
        return TimedGroup(group=finished, duration_s=duration_s, num_retries=num_retries)

    async def _member(
        self,
        task: Task,
        policy: Policy,
        plan: RolloutPlan,
        member: int,
        kept: Mapping[RolloutKey, FinishedRollout],
        started: list[float],
    ) -> FinishedRollout:
        """Return the rollout of the trial with the index `member` in the group. If `kept` does not contain
        it, run the trial and store the rollout.

        An attempt that ends with one of REPEATED_FAILURES is repeated with the same seed, up to
        `trial_attempts` attempts. `started` receives the start time of each attempt.
        """
        options = self._options
        key = RolloutKey(purpose=plan.purpose, step=plan.step, task=task.id, member=member)
        seed = trial_seed(options.seed, plan, task.id, member)
        if key in kept and kept[key].seed == seed:
            return kept[key]
        create = partial(
            self._source.trial,
            task,
            directory=plan.directory,
            seed=seed,
            temperature=plan.temperature,
            member=member,
        )
        attempts = 0
        while True:
            attempts += 1
            async with self._slots:
                started.append(time.monotonic())
                self._finished.journal.rollout_started(key, policy_version=policy.version, seed=seed)
                result = await run_trial(create, policy, task, timeout_s=options.trial_timeout_s)
            if (
                isinstance(result, Trajectory)
                or result.kind not in REPEATED_FAILURES
                or attempts >= options.trial_attempts
            ):
                break
            wait_s = back_off(options.retry_wait_s, attempts, seed)
            logger.warning(
                "%s: attempt failed (%s: %s); trying again in %.1f s",
                task.id,
                result.kind,
                result.message,
                wait_s,
            )
            await asyncio.sleep(wait_s)
        if isinstance(result, TrialFailure):
            logger.warning("%s: trial could not be graded (%s: %s)", task.id, result.kind, result.message)
        else:
            result = replace(result, member=member, seed=seed)
            if self._judge is not None and plan.is_training:
                result = await self._judge.judged(result)
        rollout = FinishedRollout(result=result, seed=seed, attempts=attempts)
        self._finished.add(key, rollout)
        return rollout


async def all_results[T](works: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Run the coroutines concurrently and return their results in order.

    The first error cancels the other coroutines. This error is raised, not an exception group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from errors
    return [task.result() for task in tasks]


def back_off(wait_s: float, attempts: int, seed: int) -> float:
    """Return the wait in seconds: `wait_s`, doubled for each attempt after the first, up to LONGEST_WAIT_S,
    plus up to 50 % that depend on the seed."""
    return min(LONGEST_WAIT_S, wait_s * 2 ** min(attempts - 1, 32)) * (1 + (seed % 1000) / 2000)


def trial_seed(seed: int, plan: RolloutPlan, task_id: str, member: int) -> int:
    """Return a 31-bit seed that depends only on the seed of the run and the identity of the trial."""
    step = plan.step if plan.is_training else 0  # the evaluations of all steps have the same seeds
    identity = f"{seed}/{plan.purpose}/{step}/{task_id}/{member}"
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:4], "big") >> 1


def require_some_graded(groups: Sequence[TrajectoryGroup], plan: RolloutPlan) -> None:
    """Raise TooManyFailuresError if no trial of the groups could be graded."""
    if groups and not any(group.trajectories for group in groups):
        raise TooManyFailuresError(all_failed(groups, plan))


def all_failed(groups: Sequence[TrajectoryGroup], plan: RolloutPlan) -> str:
    """Return one line with the most frequent failure and an example of it."""
    failures = [failure for group in groups for failure in group.failures]
    kind, count = Counter(failure.kind for failure in failures).most_common(1)[0]
    example = next(failure.message for failure in failures if failure.kind == kind)
    first_line = (example.splitlines() or [""])[0]
    unit = "step" if plan.is_training else "evaluation"
    log = plan.directory.parents[1] / "logs.log"  # only Harbor trials create `plan.directory`
    return (
        f"none of the {len(failures)} trials of {unit} {plan.step} could be graded; {count} failed by "
        f"{kind}, e.g. {first_line}; "
        f"see {plan.directory if plan.directory.is_dir() else log}"
    )
