"""What each step learns from: its own tasks, played now, or the groups that end first of those played ahead; and what their losses say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from src.cli.console import Display
from src.core.errors import ConfigError, TooManyFailuresError
from src.core.trajectory import Task, TrajectoryGroup
from src.envs.base import TaskSource
from src.learning import curriculum
from src.learning.curriculum import CurriculumSettings, curriculum_metrics
from src.learning.dynamic_sampling import (
    DynamicSamplingSettings,
    SamplingState,
    refill,
    sample_groups,
    sampling_metrics,
)
from src.learning.filters import FilterSettings, apply_reward_rules
from src.policy.sampling_policy import NewestPolicy, Policy
from src.records.journal import GroupKey, RolloutKey
from src.records.rollout_store import FinishedRollout, FinishedRollouts
from src.rollouts.group_rollout import RolloutPlan, Rollouts, TimedGroup, all_failed, require_some_graded
from src.rollouts.pipeline import Batch, Pipeline, PipelineSettings, Scheduled
from src.rollouts.task_quarantine import FaultSettings, diagnosis, from_record, to_record
from src.rollouts.watchdog import Watchdog

OnGroup = Callable[[TrajectoryGroup], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    group_size: int
    temperature: float
    filters: FilterSettings
    curriculum: CurriculumSettings
    dynamic_sampling: DynamicSamplingSettings
    pipeline: PipelineSettings
    faults: FaultSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """The groups of one step: all that were played for it, and those it may learn from."""

    played: list[TrajectoryGroup]
    to_learn: list[TrajectoryGroup]
    metrics: dict[str, float]


class StepGroups:
    """Hands each step its groups. Knows which tasks are at fault, and which have something to teach, after `steps_done` steps."""

    def __init__(
        self,
        *,
        source: TaskSource,
        rollouts: Rollouts,
        finished: FinishedRollouts,
        watchdog: Watchdog,
        display: Display,
        settings: GroupSettings,
        steps_done: int,
    ) -> None:
        self._source = source
        self._rollouts = rollouts
        self._finished = finished
        self._journal = finished.journal
        self._watchdog = watchdog
        self._display = display
        self._settings = settings
        states = self._journal.states_until(steps_done)
        self._faults = from_record(states[-1] if states else {})
        self._curriculum = curriculum.from_records(state.get("curriculum", {}) for state in states)
        self._num_groups_before = 0  # of the run, when the step began
        self._policy = NewestPolicy()
        self._ahead: dict[
            int, tuple[RolloutPlan, dict[RolloutKey, FinishedRollout]]
        ] = {}  # by step; what is on disk and was not taken up yet
        self._pipeline = self._pipeline_of([])

    @asynccontextmanager
    async def played(self, batches: Sequence[Batch], policy: Policy) -> AsyncIterator[None]:
        """While the run trains: groups are played by `policy` and its successors, and none any more when the block ends."""
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
        """What the steps to come need to know of the one gone by."""
        if self._settings.curriculum.task_sampling == "uniform":
            return to_record(self._faults)
        return to_record(self._faults) | {
            "curriculum": curriculum.to_record(self._curriculum, since=self._num_groups_before)
        }

    async def gather(self, batch: Batch, on_group: OnGroup) -> StepBatch:
        """The groups of one step. Where they are played ahead, `on_group` hears of each as it comes."""
        self._num_groups_before = self._curriculum.num_groups
        gathered = await (
            self._take(batch, on_group) if self._settings.pipeline.is_ahead else self._sample(batch)
        )
        gathered.metrics["tasks/quarantined"] = float(len(self._faults.quarantined))
        return gathered

    def _pipeline_of(self, batches: Sequence[Batch]) -> Pipeline:
        """Every group that no step has taken yet; none where each step plays its own."""
        settings = self._settings.pipeline
        scheduled = (Scheduled(step=batch.step, task=task) for batch in batches for task in batch.tasks)
        left = [group for group in scheduled if settings.is_ahead and not self._journal.is_taken(group.key)]
        return Pipeline(
            left, self._play_ahead, settings, is_left_out=lambda task: task.id in self._faults.quarantined
        )

    async def _sample(self, batch: Batch) -> StepBatch:
        """Plays the step's own tasks."""
        settings = self._settings
        scheduled = self._chosen(batch)
        tasks = [task for task in scheduled if task.id not in self._faults.quarantined]
        num_retries: list[int] = []
        self._journal.batch_fixed(batch.step, [(batch.step, task.id) for task in scheduled])
        play = partial(self._play, batch, num_retries)
        refills = partial(self._refills, batch)
        state = await sample_groups(
            play, tasks, refills, settings.dynamic_sampling, settings.filters, step=batch.step
        )
        metrics = sampling_metrics(state, settings.dynamic_sampling)
        metrics |= curriculum_metrics(self._curriculum, self._source.train, settings.curriculum)
        metrics |= {
            "trials/retries": float(sum(num_retries)),
            "groups/quarantined": float(len(scheduled) - len(tasks)),
        }
        return StepBatch(played=state.played, to_learn=state.kept, metrics=metrics)

    async def _take(self, batch: Batch, on_group: OnGroup) -> StepBatch:
        """As many groups as the batch has tasks, whichever have ended; those the step took before the run was killed, where it was."""
        settings, title = self._settings, f"step {batch.step}"
        self._display.begin(title, num_groups=len(batch.tasks), group_size=settings.group_size)
        metrics = self._pipeline.metrics()
        taken: list[TimedGroup] = []
        to_learn: list[TrajectoryGroup] = []

        def take(finished: TimedGroup) -> None:
            taken.append(finished)
            self._display.group(finished)
            [group] = apply_reward_rules([finished.group], settings.filters)
            to_learn.append(group)
            on_group(group)

        before = self._journal.groups_of(batch.step)
        if before is not None:
            replayed = asyncio.gather(*map(self._play_ahead, self._scheduled(before)))
            for finished in await self._watchdog.guard(replayed, f"playing {title}"):
                take(finished)
        else:
            for _ in batch.tasks:
                if (
                    ended := await self._watchdog.guard(self._pipeline.take(batch.step), f"playing {title}")
                ) is None:
                    break
                take(ended)
        groups = [finished.group for finished in taken]
        for step in sorted({group.step for group in groups}):
            await asyncio.to_thread(self._source.batch_ended, self._ahead[step][0].directory)
        self._journal.batch_fixed(batch.step, [(group.step, group.task.id) for group in groups])
        self._reckon(groups, self._plan_ahead(batch.step)[0])
        num_retries = sum(finished.num_retries for finished in taken)
        metrics |= {
            "trials/retries": float(num_retries),
            "groups/quarantined": float(len(batch.tasks) - len(groups)),
        }
        return StepBatch(played=groups, to_learn=to_learn, metrics=metrics)

    def _scheduled(self, groups: Sequence[GroupKey]) -> list[Scheduled]:
        tasks = {task.id: task for task in self._source.train}
        if gone := [task for _, task in groups if task not in tasks]:
            raise ConfigError(
                f"this run has learned from {', '.join(gone)}, which tasks_dir holds no more; put them back, or give another log_path"
            )
        return [Scheduled(step=step, task=tasks[task]) for step, task in groups]

    async def _play_ahead(self, scheduled: Scheduled) -> TimedGroup:
        plan, kept = self._plan_ahead(scheduled.step)
        own = {
            place: kept.pop(place) for place in [*kept] if place.task == scheduled.task.id
        }  # a run of many steps keeps none of them
        return await self._rollouts.group(scheduled.task, self._policy, plan, own)

    def _plan_ahead(self, step: int) -> tuple[RolloutPlan, dict[RolloutKey, FinishedRollout]]:
        """Made once, since its folder is tidied then, and what is on disk is read."""
        if step not in self._ahead:
            plan = self._plan("step", step)
            self._ahead[step] = plan, dict(self._rollouts.kept(plan))
        return self._ahead[step]

    def _plan(self, purpose: str, step: int) -> RolloutPlan:
        settings = self._settings
        return RolloutPlan(
            step=step,
            purpose=purpose,
            group_size=settings.group_size,
            temperature=settings.temperature,
            directory=self._finished.job_directory(purpose, step),
        )

    def _chosen(self, batch: Batch) -> Sequence[Task]:
        """The step's tasks: as scheduled, or as many of those that promise most to learn from."""
        settings = self._settings.curriculum
        if settings.task_sampling == "uniform":
            return batch.tasks
        return self._curriculum.choose(
            self._playable(), len(batch.tasks), settings, step=batch.step, attempt=0
        )

    def _refills(self, batch: Batch, state: SamplingState, num_wanted: int) -> Sequence[Task]:
        """Uniform refills are as large as the batch (SkyRL). Chosen ones are likely to be good: as many as are missing, of other tasks."""
        settings, tasks = self._settings.curriculum, self._playable()
        place = {"step": batch.step, "attempt": state.num_batches}
        if settings.task_sampling == "uniform":
            return refill(tasks, num_wanted, seed=settings.seed, **place)
        played, num_missing = {group.task.id for group in state.played}, num_wanted - len(state.kept)
        others = [task for task in tasks if task.id not in played]
        return self._curriculum.choose(
            others if len(others) >= num_missing else tasks, num_missing, settings, **place
        )

    def _playable(self) -> list[Task]:
        return [task for task in self._source.train if task.id not in self._faults.quarantined]

    async def _play(
        self, batch: Batch, num_retries: list[int], tasks: Sequence[Task], attempt: int
    ) -> list[TrajectoryGroup]:
        """The groups of the step's tasks, or of its nth refill, whose losses have been reckoned with. Retries go into `num_retries`."""
        settings = self._settings
        purpose = f"refill-{attempt}" if attempt else "step"
        title = f"step {batch.step}" + (f", refill {attempt}" if attempt else "")
        plan = self._plan(purpose, batch.step)
        self._display.begin(title, num_groups=len(tasks), group_size=settings.group_size)

        def on_group(finished: TimedGroup) -> None:
            num_retries.append(finished.num_retries)
            self._display.group(finished)

        groups = await self._watchdog.guard(
            self._rollouts.play(tasks, self._policy, plan, on_group), f"playing {title}"
        )
        await asyncio.to_thread(self._source.batch_ended, plan.directory)
        self._reckon(groups, plan)
        return groups

    def _reckon(self, groups: Sequence[TrajectoryGroup], plan: RolloutPlan) -> None:
        """What the batch's losses say. RubbleError when training on what is left would teach nothing, or the wrong thing."""
        settings, before = self._settings.faults, self._faults
        if (
            len({group.task.id for group in groups}) > 1
        ):  # a single task may be at fault itself, and is quarantined then
            require_some_graded(groups, plan)
        self._faults = before.after(groups, settings)
        self._curriculum = self._curriculum.after(groups)
        if self._faults.is_rubble(settings):
            raise TooManyFailuresError(diagnosis(self._faults, groups, settings))
        for task, cause in self._faults.quarantined.items():
            if task not in before.quarantined:
                self._journal.quarantined(plan.step, task, cause)
                num_groups = self._faults.strikes[task]
                self._display.say(
                    f"{task} is left out from now on: {num_groups} groups without a graded trial ({cause})"
                )
        if all(task.id in self._faults.quarantined for task in self._source.train):
            raise TooManyFailuresError(f"every training task is quarantined; {all_failed(groups, plan)}")
