"""Collect the batch of each step.

By default, a step rolls out the groups of its own tasks and waits for all of them. With `max_staleness` or
`stream_groups`, it takes groups from the pipeline (`src/rollouts/pipeline.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial

from src.core.errors import ConfigError, TooManyFailuresError
from src.core.trajectory import Task, TrajectoryGroup
from src.envs.base import TaskSource
from src.learning import curriculum
from src.learning.curriculum import curriculum_metrics
from src.learning.dynamic_sampling import SamplingState, refill, sample_groups, sampling_metrics
from src.learning.filters import apply_reward_rules
from src.policy.sampling_policy import NewestPolicy, Policy
from src.records.journal import GroupKey, RolloutKey
from src.records.rollout_store import FinishedRollout, FinishedRollouts
from src.rollouts.group_rollout import (
    RolloutPlan,
    Rollouts,
    TimedGroup,
    all_failed,
    all_results,
    require_some_graded,
)
from src.rollouts.options import GroupOptions
from src.rollouts.pipeline import Batch, Pipeline, Scheduled
from src.rollouts.run_events import RunEvents
from src.rollouts.task_quarantine import diagnosis, from_record
from src.rollouts.watchdog import Watchdog

OnGroup = Callable[[TrajectoryGroup], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """The groups of one step."""

    rolled_out: list[TrajectoryGroup]  # all groups of the step, with their original rewards
    to_learn: list[TrajectoryGroup]  # groups that may be trained on, after `apply_reward_rules`
    metrics: dict[str, float]


class BatchCollector:
    """Collects the batch of each step.

    It also keeps the state of failures and of the curriculum. A resumed run restores the state after step
    `steps_done` from the journal.
    """

    def __init__(
        self,
        options: GroupOptions,
        *,
        source: TaskSource,
        rollouts: Rollouts,
        finished: FinishedRollouts,
        watchdog: Watchdog,
        events: RunEvents,
        steps_done: int,
    ) -> None:
        self._options = options
        self._source = source
        self._rollouts = rollouts
        self._finished = finished
        self._journal = finished.journal
        self._watchdog = watchdog
        self._events = events
        states = self._journal.states_until(steps_done)
        self._faults = from_record(states[-1] if states else {})
        self._curriculum = curriculum.from_records(state.get("curriculum", {}) for state in states)
        self._num_groups_before = 0  # number of groups that the run had rolled out before the current step
        self._policy = NewestPolicy()
        # Step -> (the plan of the step, its rollouts on disk that no group has used yet).
        self._ahead: dict[int, tuple[RolloutPlan, dict[RolloutKey, FinishedRollout]]] = {}
        self._pipeline = self._pipeline_of([])

    @asynccontextmanager
    async def running(self, batches: Sequence[Batch], policy: Policy) -> AsyncGenerator[None]:
        """Run the pipeline while the block runs.

        Turns are sampled with `policy` until `update_ended` sets a newer policy.
        """
        self._policy.set(policy)
        self._pipeline = self._pipeline_of(batches)
        async with self._pipeline:
            yield

    def update_begins(self) -> None:
        self._pipeline.update_begins()

    def update_ended(self, policy: Policy) -> None:
        self._policy.set(policy)
        self._pipeline.update_ended()

    def state(self) -> dict[str, object]:
        """Return the state after the last step, for the journal. A resumed run reads it."""
        state: dict[str, object] = asdict(self._faults)
        if self._options.task_sampling != "uniform":
            state["curriculum"] = curriculum.to_record(self._curriculum, since=self._num_groups_before)
        return state

    async def collect(self, batch: Batch, on_group: OnGroup) -> StepBatch:
        """Return the groups of one step.

        With `uses_pipeline`, `on_group` is called for each group of the step, after the reward rules have
        been applied to the group. Otherwise `on_group` is not called.
        """
        self._num_groups_before = self._curriculum.num_groups
        if self._options.uses_pipeline:
            collected = await self._take(batch, on_group)
        else:
            collected = await self._sample(batch)
        collected.metrics["tasks/quarantined"] = float(len(self._faults.quarantined))
        return collected

    def _pipeline_of(self, batches: Sequence[Batch]) -> Pipeline:
        """Return a pipeline with every group that no step has taken. Without `uses_pipeline` it is empty."""
        options = self._options
        scheduled = (Scheduled(step=batch.step, task=task) for batch in batches for task in batch.tasks)
        ahead = [
            group for group in scheduled if options.uses_pipeline and not self._journal.is_taken(group.key)
        ]
        return Pipeline(ahead, self._roll_out_ahead, options, is_left_out=self._is_quarantined)

    async def _sample(self, batch: Batch) -> StepBatch:
        """Roll out the step's own tasks and, with dynamic sampling, further batches of tasks (refills)."""
        options = self._options
        scheduled = self._tasks_of(batch)
        tasks = [task for task in scheduled if not self._is_quarantined(task)]
        self._journal.batch_fixed(batch.step, [(batch.step, task.id) for task in scheduled])
        rolled_out: list[TimedGroup] = []

        async def roll_out(tasks: Sequence[Task], refill_index: int) -> list[TrajectoryGroup]:
            timed_groups = await self._roll_out(batch, tasks, refill_index)
            rolled_out.extend(timed_groups)
            return [timed.group for timed in timed_groups]

        refills = partial(self._refills, batch)
        sampled = await sample_groups(roll_out, tasks, refills, options, options, step=batch.step)
        metrics = sampling_metrics(sampled, options)
        metrics |= curriculum_metrics(self._curriculum, self._source.train, options)
        metrics |= {
            "trials/retries": float(sum(timed.num_retries for timed in rolled_out)),
            "groups/quarantined": float(len(scheduled) - len(tasks)),
        }
        return StepBatch(rolled_out=sampled.rolled_out, to_learn=sampled.kept, metrics=metrics)

    async def _take(self, batch: Batch, on_group: OnGroup) -> StepBatch:
        """Take as many groups as the batch has tasks, in the order in which the groups end, or fewer if tasks
        are quarantined and the pipeline therefore has no more groups for the step.

        If an earlier process has recorded the groups of this step in the journal, take the same groups.
        """
        title = f"step {batch.step}"
        self._events.batch_started(title, num_groups=len(batch.tasks), group_size=self._options.group_size)
        metrics = self._pipeline.metrics()
        taken: list[TimedGroup] = []
        to_learn: list[TrajectoryGroup] = []

        def take(timed: TimedGroup) -> None:
            taken.append(timed)
            self._events.group_finished(timed.group, duration_s=timed.duration_s)
            [group] = apply_reward_rules([timed.group], self._options)
            to_learn.append(group)
            on_group(group)

        recorded = self._journal.groups_of(batch.step)
        if recorded is not None:
            replayed = all_results(map(self._roll_out_ahead, self._scheduled(recorded)))
            for timed in await self._watchdog.guard(replayed, f"rolling out {title}"):
                take(timed)
        else:
            for _ in batch.tasks:
                taking = self._pipeline.take(batch.step)
                if (timed := await self._watchdog.guard(taking, f"rolling out {title}")) is None:
                    break
                take(timed)
        groups = [timed.group for timed in taken]
        for step in sorted({group.step for group in groups}):
            await asyncio.to_thread(self._source.batch_ended, self._ahead[step][0].directory)
        self._journal.batch_fixed(batch.step, [(group.step, group.task.id) for group in groups])
        self._update_faults(groups, self._plan_ahead(batch.step)[0])
        metrics |= {
            "trials/retries": float(sum(timed.num_retries for timed in taken)),
            "groups/quarantined": float(len(batch.tasks) - len(groups)),
        }
        return StepBatch(rolled_out=groups, to_learn=to_learn, metrics=metrics)

    def _scheduled(self, groups: Sequence[GroupKey]) -> list[Scheduled]:
        """Return the groups with their tasks. Raises ConfigError if the environment lacks a task."""
        tasks = {task.id: task for task in self._source.train}
        if missing := [task for _, task in groups if task not in tasks]:
            raise ConfigError(
                f"the journal of this run has the tasks {', '.join(missing)}, which the environment does "
                "not have; restore these tasks, or give another log_path"
            )
        return [Scheduled(step=step, task=tasks[task]) for step, task in groups]

    async def _roll_out_ahead(self, scheduled: Scheduled) -> TimedGroup:
        plan, on_disk = self._plan_ahead(scheduled.step)
        # Remove the rollouts from `on_disk`, so that a long run does not keep those of all steps in memory.
        rollouts = {key: on_disk.pop(key) for key in [*on_disk] if key.task == scheduled.task.id}
        return await self._rollouts.group(scheduled.task, self._policy, plan, rollouts)

    def _plan_ahead(self, step: int) -> tuple[RolloutPlan, dict[RolloutKey, FinishedRollout]]:
        """Return the plan of a step and its rollouts on disk.

        The plan of each step is made only once, because `_plan` removes the files of trials that are not
        finished, and trials of the step may be running at a later call.
        """
        if step not in self._ahead:
            plan = self._plan("step", step)
            self._ahead[step] = plan, dict(self._finished.load("step", step))
        return self._ahead[step]

    def _plan(self, purpose: str, step: int) -> RolloutPlan:
        return RolloutPlan(
            step=step,
            purpose=purpose,
            group_size=self._options.group_size,
            temperature=self._options.temperature,
            directory=self._finished.job_directory(purpose, step),
        )

    def _tasks_of(self, batch: Batch) -> Sequence[Task]:
        """Return the step's tasks: those of the schedule, or the same number chosen by the curriculum."""
        if self._options.task_sampling == "uniform":
            return batch.tasks
        return self._curriculum.choose(
            self._available_tasks(), len(batch.tasks), self._options, step=batch.step, refill_index=0
        )

    def _refills(self, batch: Batch, state: SamplingState, num_needed: int) -> Sequence[Task]:
        """Return the tasks of the next refill.

        With uniform task sampling, a refill is as large as the batch, as in SkyRL. Otherwise the curriculum
        chooses one task for each missing group. If enough tasks remain, it chooses only tasks that this step
        has not rolled out.
        """
        options, tasks = self._options, self._available_tasks()
        position = {"step": batch.step, "refill_index": state.num_batches}
        if options.task_sampling == "uniform":
            return refill(tasks, num_needed, seed=options.seed, **position)
        rolled_out, num_missing = {group.task.id for group in state.rolled_out}, num_needed - len(state.kept)
        others = [task for task in tasks if task.id not in rolled_out]
        candidates = others if len(others) >= num_missing else tasks
        return self._curriculum.choose(candidates, num_missing, options, **position)

    def _available_tasks(self) -> list[Task]:
        return [task for task in self._source.train if not self._is_quarantined(task)]

    def _is_quarantined(self, task: Task) -> bool:
        return task.id in self._faults.quarantined

    async def _roll_out(self, batch: Batch, tasks: Sequence[Task], refill_index: int) -> list[TimedGroup]:
        """Roll out the step's own tasks (`refill_index` 0) or a refill, and count the failures."""
        plan = self._plan(f"refill-{refill_index}" if refill_index else "step", batch.step)
        title = f"step {batch.step}" + (f", refill {refill_index}" if refill_index else "")
        self._events.batch_started(title, num_groups=len(tasks), group_size=plan.group_size)
        running = self._rollouts.groups(
            tasks,
            self._policy,
            plan,
            lambda timed: self._events.group_finished(timed.group, duration_s=timed.duration_s),
        )
        timed_groups = await self._watchdog.guard(running, f"rolling out {title}")
        await asyncio.to_thread(self._source.batch_ended, plan.directory)
        self._update_faults([timed.group for timed in timed_groups], plan)
        return timed_groups

    def _update_faults(self, groups: Sequence[TrajectoryGroup], plan: RolloutPlan) -> None:
        """Count the failures of the groups, quarantine tasks and update the curriculum.

        Raises TooManyFailuresError in these cases:

        - The groups belong to several tasks, and none of their trials was graded.
        - Too many of the latest trials could not be graded.
        - Every training task is quarantined.
        """
        options, before = self._options, self._faults
        if len({group.task.id for group in groups}) > 1:  # one task's failures may be the task's fault
            require_some_graded(groups, plan)
        self._faults = before.after(groups, options)
        self._curriculum = self._curriculum.after(groups)
        if self._faults.has_too_many_failures(options):
            raise TooManyFailuresError(diagnosis(self._faults, groups, options))
        for task, cause in self._faults.quarantined.items():
            if task not in before.quarantined:
                self._journal.quarantined(plan.step, task, cause)
                num_groups = self._faults.strikes[task]
                self._events.say(
                    f"{task} is quarantined: {num_groups} groups without a graded trial ({cause})"
                )
        if all(self._is_quarantined(task) for task in self._source.train):
            is_graded = not groups or any(group.trajectories for group in groups)
            reason = "resume the run with other tasks" if is_graded else all_failed(groups, plan)
            raise TooManyFailuresError(f"every training task is quarantined; {reason}")
