"""Terminus2RLTrainer: the training loop, and only the loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from src import checkpoints, curriculum
from src.backend import Backend
from src.checkpoints import Checkpoint
from src.console import Display
from src.curriculum import CurriculumSettings, curriculum_metrics
from src.dynamic_sampling import DynamicSamplingSettings, Sampled, refill, sample_groups, sampling_metrics
from src.envs.base import TaskSource
from src.errors import BackendError, ConfigError, RubbleError, StorageError
from src.evaluation import Evaluation, EvaluationSettings, evaluate
from src.examples import Example, examples_of_batch
from src.exports import dump_evaluation, dump_examples
from src.faults import FaultSettings, diagnosis, from_record, to_record
from src.filters import DropReason, FilterSettings, keep_groups
from src.finished import FinishedRollout, FinishedRollouts
from src.journal import GroupKey, Place
from src.learner import Learner
from src.metrics import group_metrics
from src.pipeline import Batch, Pipeline, PipelineSettings, Scheduled
from src.policy import NewestPolicy, Policy
from src.preparation import PreparationSettings, prepare, streamed, streamed_metrics
from src.recorder import record_groups
from src.rollouts import FinishedGroup, RolloutPlan, Rollouts, all_failed, require_some_graded
from src.tracking import RunLog
from src.trajectory import Task, TrajectoryGroup
from src.watchdog import Watchdog, WatchedPolicy

logger = logging.getLogger(__name__)

SAVE_ON_THE_WAY_OUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    log_path: Path
    export_path: Path | None  # None: nothing is dumped
    group_size: int
    temperature: float
    save_every: int
    eval_every: int
    eval_before_train: bool
    evaluation: EvaluationSettings
    filters: FilterSettings
    curriculum: CurriculumSettings
    dynamic_sampling: DynamicSamplingSettings
    pipeline: PipelineSettings
    preparation: PreparationSettings
    faults: FaultSettings


class Terminus2RLTrainer:
    """Plays batches, learns from them, evaluates and saves. `steps_done` is always what the weights on the server have seen."""

    def __init__(
        self,
        *,
        backend: Backend,
        watchdog: Watchdog,
        learner: Learner,
        source: TaskSource,
        rollouts: Rollouts,
        finished: FinishedRollouts,
        run_log: RunLog,
        display: Display,
        settings: LoopSettings,
        steps_done: int,
    ) -> None:
        self.steps_done = steps_done
        self._backend = backend
        self._watchdog = watchdog
        self._learner = learner
        self._source = source
        self._rollouts = rollouts
        self._finished = finished
        self._journal = finished.journal
        self._run_log = run_log
        self._display = display
        self._settings = settings
        self._epoch = 0
        self._faults = from_record(self._journal.state_after(steps_done))
        self._curriculum = curriculum.from_record(self._journal.state_after(steps_done).get("curriculum", {}))
        self._saved_step = steps_done if steps_done else None  # a resumed run stands on its checkpoint
        self._first_evaluation: Evaluation | None = None
        self._newest = NewestPolicy()
        self._ahead: dict[int, tuple[RolloutPlan, Mapping[Place, FinishedRollout]]] = {}  # of the steps whose groups are played ahead

    async def train(self, batches: Sequence[Batch]) -> None:
        """Every batch after `steps_done`. What was learned is saved on the way out, unless the weights or the files are in doubt."""
        try:
            policy = await self._policy()
            reference = await self._reference() if self._settings.preparation.kl.kl_penalty_coef > 0 else None
            if self.steps_done == 0 and self._settings.eval_before_train:
                self._run_log.log(0, await self._evaluate(policy))
            elif self.steps_done and self._is_evaluation_due(num_batches=len(batches)) and not self._journal.is_evaluated(self.steps_done):
                self._run_log.amend(self.steps_done, await self._evaluate(policy))  # the run was interrupted in the middle of it
            self._newest.become(policy)
            async with self._pipeline(batches) as pipeline:
                for batch in batches[self.steps_done :]:
                    self._epoch = batch.epoch
                    policy = await self._batch(batch, policy, reference, pipeline, num_batches=len(batches))
        except (BackendError, StorageError):
            raise
        except BaseException:
            await self._save_on_the_way_out()
            raise

    def _pipeline(self, batches: Sequence[Batch]) -> Pipeline:
        """Every group that no step has taken yet; none where each step plays its own."""
        settings = self._settings.pipeline
        scheduled = (Scheduled(step=batch.step, task=task) for batch in batches for task in batch.tasks)
        left = [group for group in scheduled if settings.is_ahead and not self._journal.is_taken(group.key)]
        return Pipeline(left, self._play_ahead, settings, is_left_out=lambda task: task.id in self._faults.quarantined)

    async def _batch(self, batch: Batch, policy: Policy, reference: Policy | None, pipeline: Pipeline, *, num_batches: int) -> Policy:
        """One step, its evaluation where one is due, its line in the log, and only then its checkpoint: what a checkpoint stands for is
        on disk already. The line is written even if the evaluation fails."""
        settings, last = self._settings, batch.step == num_batches
        started = time.monotonic()
        metrics = {
            "progress/batch": float(batch.step),
            "progress/epoch": float(batch.epoch),
            "progress/done_frac": batch.step / num_batches,
        }
        try:
            await self._step(batch, policy, reference, pipeline, metrics)
            self._display.step(f"step {batch.step}/{num_batches}", metrics)
            policy = await self._policy()
            self._newest.become(policy)
            pipeline.update_ended()
            if self._is_evaluation_due(num_batches=num_batches):
                metrics |= await self._evaluate(policy)
        finally:
            if self.steps_done == batch.step:
                self._run_log.log(batch.step, metrics | {"time/total": time.monotonic() - started})
        if last or _due(batch.step, settings.save_every):
            await _uninterrupted(self._save(final=last))
        return policy

    async def _step(self, batch: Batch, policy: Policy, reference: Policy | None, pipeline: Pipeline, metrics: dict[str, float]) -> None:
        """Get the groups of one step and learn from them. What there is to say of it is added to `metrics`."""
        settings = self._settings
        played = time.monotonic()
        if settings.pipeline.is_ahead:
            groups = to_learn = await self._take(batch, pipeline, metrics)
        else:
            groups, to_learn = await self._sample(batch, policy, metrics)
        kept, examples_P_G, dropped = self._examples(to_learn)
        self._record(batch, groups, examples_P_G)
        if settings.export_path is not None:
            await asyncio.to_thread(dump_examples, settings.export_path, batch.step, groups, self._source.text)
        learned = time.monotonic()
        metrics |= group_metrics(groups, group_size=settings.group_size)
        metrics |= {"tasks/quarantined": float(len(self._faults.quarantined)), "time/rollouts": learned - played}
        metrics["throughput/sampled_tokens_per_s"] = metrics.get("tokens/sampled", 0.0) / max(1e-9, learned - played)
        trained = [(group.step, group.task.id) for group, examples in zip(kept, examples_P_G, strict=True) if examples]
        pipeline.update_begins()
        await _uninterrupted(self._learn(batch, trained, examples_P_G, dropped, reference, metrics))
        metrics["time/update"] = time.monotonic() - learned

    def _examples(self, groups: Sequence[TrajectoryGroup]) -> tuple[list[TrajectoryGroup], list[list[Example]], Counter[DropReason]]:
        """The groups that stay, their examples, and why the others go."""
        settings = self._settings
        kept, dropped = keep_groups(groups, settings.filters)
        return kept, examples_of_batch(kept, settings.preparation.advantages, settings.filters), dropped

    async def _sample(self, batch: Batch, policy: Policy, metrics: dict[str, float]) -> tuple[list[TrajectoryGroup], list[TrajectoryGroup]]:
        """Plays the step's own tasks: all that was played, and what is to be learned from."""
        settings = self._settings
        scheduled = self._chosen(batch)
        tasks = [task for task in scheduled if task.id not in self._faults.quarantined]
        num_retries: list[int] = []
        self._journal.begun(batch.step, [(batch.step, task.id) for task in scheduled])
        play = partial(self._play, batch, policy, num_retries)
        refills = partial(self._refills, batch)
        state = await sample_groups(play, tasks, refills, settings.dynamic_sampling, settings.filters, step=batch.step)
        metrics |= sampling_metrics(state, settings.dynamic_sampling)
        metrics |= curriculum_metrics(self._curriculum, self._source.train, settings.curriculum)
        metrics |= {"trials/retries": float(sum(num_retries)), "groups/quarantined": float(len(scheduled) - len(tasks))}
        return state.played, state.kept

    async def _take(self, batch: Batch, pipeline: Pipeline, metrics: dict[str, float]) -> list[TrajectoryGroup]:
        """As many groups as the batch has tasks, whichever have ended; those the step took before the run was killed, where it was."""
        settings, title = self._settings, f"step {batch.step}"
        self._display.begin(title, num_groups=len(batch.tasks), group_size=settings.group_size)
        metrics |= pipeline.metrics()
        taken: list[FinishedGroup] = []

        def take(finished: FinishedGroup) -> None:
            taken.append(finished)
            self._display.group(finished)
            if settings.pipeline.stream_groups:
                for examples in self._examples([finished.group])[1]:
                    num_groups = len(batch.tasks)
                    self._learner.add(streamed(examples, settings.preparation, version=self.steps_done, num_groups=num_groups))

        before = self._journal.groups_of(batch.step)
        if before is not None:
            replayed = asyncio.gather(*map(self._play_ahead, self._scheduled(before)))
            for finished in await self._watchdog.guard(replayed, f"playing {title}"):
                take(finished)
        else:
            for _ in batch.tasks:
                if (ended := await self._watchdog.guard(pipeline.take(batch.step), f"playing {title}")) is None:
                    break
                take(ended)
        groups = [finished.group for finished in taken]
        for step in sorted({group.step for group in groups}):
            await asyncio.to_thread(self._source.batch_ended, self._ahead[step][0].directory)
        self._journal.begun(batch.step, [(group.step, group.task.id) for group in groups])
        self._reckon(groups, self._plan_ahead(batch.step)[0])
        num_retries = sum(finished.num_retries for finished in taken)
        metrics |= {"trials/retries": float(num_retries), "groups/quarantined": float(len(batch.tasks) - len(groups))}
        return groups

    def _scheduled(self, groups: Sequence[GroupKey]) -> list[Scheduled]:
        tasks = {task.id: task for task in self._source.train}
        if gone := [task for _, task in groups if task not in tasks]:
            raise ConfigError(
                f"this run has learned from {', '.join(gone)}, which tasks_dir holds no more; put them back, or give another log_path"
            )
        return [Scheduled(step=step, task=tasks[task]) for step, task in groups]

    async def _play_ahead(self, scheduled: Scheduled) -> FinishedGroup:
        plan, kept = self._plan_ahead(scheduled.step)
        return await self._rollouts.group(scheduled.task, self._newest, plan, kept)

    def _plan_ahead(self, step: int) -> tuple[RolloutPlan, Mapping[Place, FinishedRollout]]:
        """Made once, since its folder is tidied then, and what is on disk is read."""
        if step not in self._ahead:
            plan = self._plan("step", step)
            self._ahead[step] = plan, self._rollouts.kept(plan)
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
        return self._curriculum.choose(self._playable(), len(batch.tasks), settings, step=batch.step, attempt=0)

    def _refills(self, batch: Batch, state: Sampled, num_wanted: int) -> Sequence[Task]:
        """Uniform refills are as large as the batch (SkyRL). Chosen ones are likely to be good: as many as are missing, of other tasks."""
        settings, tasks = self._settings.curriculum, self._playable()
        place = {"step": batch.step, "attempt": state.num_batches}
        if settings.task_sampling == "uniform":
            return refill(tasks, num_wanted, seed=settings.seed, **place)
        played, num_missing = {group.task.id for group in state.played}, num_wanted - len(state.kept)
        others = [task for task in tasks if task.id not in played]
        return self._curriculum.choose(others if len(others) >= num_missing else tasks, num_missing, settings, **place)

    def _playable(self) -> list[Task]:
        return [task for task in self._source.train if task.id not in self._faults.quarantined]

    async def _play(
        self, batch: Batch, policy: Policy, num_retries: list[int], tasks: Sequence[Task], attempt: int
    ) -> list[TrajectoryGroup]:
        """The groups of the step's tasks, or of its nth refill, whose losses have been reckoned with. Retries go into `num_retries`."""
        settings = self._settings
        purpose = f"refill-{attempt}" if attempt else "step"
        title = f"step {batch.step}" + (f", refill {attempt}" if attempt else "")
        plan = self._plan(purpose, batch.step)
        self._display.begin(title, num_groups=len(tasks), group_size=settings.group_size)

        def on_group(finished: FinishedGroup) -> None:
            num_retries.append(finished.num_retries)
            self._display.group(finished)

        groups = await self._watchdog.guard(self._rollouts.play(tasks, policy, plan, on_group), f"playing {title}")
        await asyncio.to_thread(self._source.batch_ended, plan.directory)
        self._reckon(groups, plan)
        return groups

    def _reckon(self, groups: Sequence[TrajectoryGroup], plan: RolloutPlan) -> None:
        """What the batch's losses say. RubbleError when training on what is left would teach nothing, or the wrong thing."""
        settings, before = self._settings.faults, self._faults
        if len({group.task.id for group in groups}) > 1:  # a single task may be at fault itself, and is quarantined then
            require_some_graded(groups, plan)
        self._faults = before.after(groups, settings)
        self._curriculum = self._curriculum.after(groups)
        if self._faults.is_rubble(settings):
            raise RubbleError(diagnosis(self._faults, groups, settings))
        for task, cause in self._faults.quarantined.items():
            if task not in before.quarantined:
                self._journal.quarantined(plan.step, task, cause)
                num_groups = self._faults.strikes[task]
                self._display.say(f"{task} is left out from now on: {num_groups} groups without a graded trial ({cause})")
        if all(task.id in self._faults.quarantined for task in self._source.train):
            raise RubbleError(f"every training task is quarantined; {all_failed(groups, plan)}")

    async def _learn(
        self,
        batch: Batch,
        trained: Sequence[GroupKey],
        examples_P_G: Sequence[Sequence[Example]],
        dropped: Counter[DropReason],
        reference: Policy | None,
        metrics: dict[str, float],
    ) -> None:
        """The optimizer steps of one batch. Runs to its end once begun, so that `steps_done` and the server's weights agree."""
        metrics |= await self._watchdog.answer(self._update(examples_P_G, dropped, reference), f"training step {batch.step}")
        state = to_record(self._faults) | self._curriculum_record()
        self._journal.trained(batch.step, groups=trained, state=state)
        self.steps_done += 1

    def _curriculum_record(self) -> dict[str, object]:
        is_used = self._settings.curriculum.task_sampling == "signal"
        return {"curriculum": curriculum.to_record(self._curriculum)} if is_used else {}

    async def _update(
        self, examples_P_G: Sequence[Sequence[Example]], dropped: Counter[DropReason], reference: Policy | None
    ) -> dict[str, float]:
        settings, version = self._settings.preparation, self.steps_done
        if self._settings.pipeline.stream_groups:  # their gradient is on its way
            metrics = streamed_metrics(examples_P_G, dropped, settings, version=version)
            return metrics | await self._learner.update(step=version + 1)
        learner = self._learner
        prepared = await prepare(examples_P_G, dropped, reference=reference, learner=learner, settings=settings, version=version)
        return prepared.metrics | await learner.update(prepared.datums_per_substep, step=version + 1)

    async def _policy(self) -> Policy:
        policy = await self._watchdog.answer(self._backend.policy(self.steps_done), "preparing the weights for sampling")
        return WatchedPolicy(policy, self._watchdog)

    async def _reference(self) -> Policy:
        return WatchedPolicy(await self._watchdog.answer(self._backend.reference_policy(), "opening the base model"), self._watchdog)

    def _is_evaluation_due(self, *, num_batches: int) -> bool:
        return self.steps_done == num_batches or _due(self.steps_done, self._settings.eval_every)

    async def _evaluate(self, policy: Policy) -> dict[str, float]:
        tasks, settings = self._source.eval, self._settings.evaluation
        if not tasks:
            return {}
        step = self.steps_done
        self._display.begin(f"evaluation after step {step}", num_groups=len(tasks), group_size=settings.group_size)
        started = time.monotonic()
        directory = self._finished.job_directory("eval", step)
        evaluating = evaluate(self._rollouts, tasks, policy, settings, step=step, directory=directory, on_group=self._display.group)
        result = await self._watchdog.guard(evaluating, f"evaluating after step {step}")
        await asyncio.to_thread(self._source.batch_ended, directory)
        self._journal.evaluated(step)
        record_groups(self._settings.log_path / "rollouts" / f"eval_{step:06d}.jsonl", result.groups, {})
        if (path := self._settings.export_path) is not None:
            await asyncio.to_thread(dump_evaluation, path, step, result.groups, result.metrics, self._source.text)
        self._display.evaluation(result, self._first_evaluation)
        self._first_evaluation = self._first_evaluation or result
        return result.metrics | {"time/evaluation": time.monotonic() - started}

    async def _save(self, *, final: bool) -> None:
        """A checkpoint of the weights as they are now, unless there is one."""
        if self._saved_step == self.steps_done:
            return
        name = f"{self.steps_done:06d}"
        paths = await self._watchdog.answer(self._backend.save(name), f"saving checkpoint {name}")
        checkpoints.append(
            self._settings.log_path,
            Checkpoint(
                name=name,
                batch=self.steps_done,
                epoch=self._epoch,
                final=final,
                state_path=paths.state_path,
                sampler_path=paths.sampler_path,
            ),
        )
        self._journal.checkpointed(self.steps_done, paths.state_path)
        self._saved_step = self.steps_done
        self._display.say(f"checkpoint after step {self.steps_done}: {paths.state_path}")

    async def _save_on_the_way_out(self) -> None:
        """For a failed or interrupted run. Its own failure must not hide the cause, nor may a dead server hold the process."""
        try:
            async with asyncio.timeout(SAVE_ON_THE_WAY_OUT_S):
                await self._backend.check()
                await self._save(final=False)
        except Exception as error:
            self._display.say(f"no checkpoint could be saved after step {self.steps_done}: {type(error).__name__} {error}".rstrip())
            logger.debug("saving on the way out failed", exc_info=True)

    def _record(self, batch: Batch, groups: Sequence[TrajectoryGroup], examples_P_G: Sequence[Sequence[Example]]) -> None:
        advantages = {
            (example.trajectory.task_id, example.trajectory.trial_name): example.advantage for group in examples_P_G for example in group
        }
        record_groups(self._settings.log_path / "rollouts" / f"step_{batch.step:06d}.jsonl", groups, advantages)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


async def _uninterrupted[T](work: Coroutine[object, object, T]) -> T:
    """Finishes `work` even when cancelled in the middle, and is cancelled afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
