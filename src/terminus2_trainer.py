"""The training loop. Programs of users refer to `Terminus2RLTrainer`, so this name must not change.

Each step is `collect -> prepare -> update -> report`. Collect: the groups of the batch are rolled out,
filtered and given advantages. Prepare: the datums of these groups are made. Update: the weights are updated.
Report: the held-out tasks are evaluated if an evaluation is due, and the metrics are logged. If a checkpoint
is due, it is saved last, so that the metrics of its step are always logged.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from src.config import TrainerConfig
from src.core.event_loop import LagMeter
from src.core.shielding import to_its_end
from src.core.trajectory import TrajectoryGroup
from src.core.wait_notice import MAY_COMPILE, WaitNotice
from src.envs.base import TaskSource
from src.evaluate.evaluation import TaskRewards, evaluate
from src.evaluate.training_events import TrainingEvents
from src.evaluate.training_steps import TrainingSteps
from src.learning.examples import Example, examples_of_batch
from src.learning.filters import DropReason, keep_groups, zeroed_metrics
from src.learning.learner import Learner
from src.learning.metrics import group_metrics
from src.learning.preparation import prepare, stream_datums, stream_metrics
from src.policy.backend import Backend
from src.policy.sampling_policy import Policy, ReferenceModel
from src.records.dumps import dump, dump_evaluation, dump_examples
from src.records.journal import GroupKey
from src.records.rollout_log import record_groups
from src.records.rollout_store import FinishedRollouts, graded_rewards
from src.rollouts.batch_collector import BatchCollector
from src.rollouts.group_rollout import RolloutPlan, Rollouts
from src.rollouts.pipeline import Batch
from src.rollouts.watchdog import Watchdog, WatchedPolicy, WatchedReference

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """The groups and examples of one step."""

    batch: Batch
    groups: Sequence[TrajectoryGroup]  # those that passed the filters
    examples_P_G: Sequence[Sequence[Example]]  # for each of these P groups, its G examples
    dropped: Counter[DropReason]  # the number of groups that the filters dropped, by reason
    metrics: dict[str, float]

    @property
    def trained(self) -> list[GroupKey]:
        """The keys of the groups with at least one example."""
        pairs = zip(self.groups, self.examples_P_G, strict=True)
        return [(group.step, group.task.id) for group, examples in pairs if examples]


class Terminus2RLTrainer:
    """Trains on batches and evaluates the weights. `steps` records the steps and saves checkpoints."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        backend: Backend,
        watchdog: Watchdog,
        learner: Learner,
        source: TaskSource,
        rollouts: Rollouts,
        finished: FinishedRollouts,
        steps: TrainingSteps,
        events: TrainingEvents,
        log_path: Path,
    ) -> None:
        self._steps = steps
        self._config = config
        self._backend = backend
        self._watchdog = watchdog
        self._learner = learner
        self._source = source
        self._rollouts = rollouts
        self._finished = finished
        self._journal = finished.journal
        self._events = events
        self._wait_notice = WaitNotice(events.say)
        self._log_path = log_path
        self._is_first_update = True  # whether the next update is the first of this trainer
        self._gaps = LagMeter()
        self._collector = BatchCollector(
            config,
            source=source,
            rollouts=rollouts,
            finished=finished,
            watchdog=watchdog,
            events=events,
            steps_done=steps.done,
        )
        self._first_evaluation: TaskRewards | None = None
        # Models with fixed weights that score the sampled tokens. `train` opens them.
        self._reference: ReferenceModel | None = None  # for the KL penalty; None without a penalty
        self._teacher: ReferenceModel | None = None  # for distillation; None without a teacher

    async def train(self, batches: Sequence[Batch]) -> None:
        """Train on every batch after the steps that are done. If the run is stopped or fails, a checkpoint is
        saved (`saving_after_failure`)."""
        progress = self._journal.progress
        self._wait_notice.start(
            "the first trials", explanation=MAY_COMPILE, is_over=lambda: self._journal.progress > progress
        )
        try:
            async with self._steps.saving_after_failure():
                policy = await self._policy()
                if self._config.kl_penalty_coef > 0:
                    self._reference = await self._scorer(None)
                if self._config.teacher is not None:
                    self._teacher = await self._scorer(self._config.teacher)
                await self._read_first_evaluation()
                await self._steps.evaluate_start(
                    lambda: self._evaluate(policy), is_initial_due=self._config.eval_before_train
                )
                async with self._gaps, self._collector.running(batches, policy):
                    for batch in batches[self._steps.done :]:
                        self._steps.epoch = batch.epoch
                        await self._step(batch, num_steps=len(batches))
        finally:
            self._wait_notice.stop()

    async def _read_first_evaluation(self) -> None:
        """Read the rewards of the first evaluation that an earlier process of the run has recorded."""
        step = self._steps.done
        if step > 0 and (first := self._journal.first_evaluation(until=step)) is not None:
            rewards = await asyncio.to_thread(graded_rewards, self._log_path, "eval", first)
            self._first_evaluation = TaskRewards(step=first, rewards=rewards) if rewards else None

    async def _step(self, batch: Batch, *, num_steps: int) -> None:
        started = time.monotonic()
        collected = await self._collect(batch)
        update = await to_its_end(self._update(collected))
        with self._steps.logged(collected.metrics | update.value, started=started) as line:
            try:
                if update.is_stopped:
                    raise asyncio.CancelledError
                self._events.step_finished(batch.step, num_steps=num_steps, metrics=line.metrics)
                syncing = time.monotonic()
                policy = await self._policy()
                line.metrics["time/sync_weights"] = time.monotonic() - syncing
                self._collector.update_ended(policy)
                if self._steps.is_evaluation_due:
                    line.metrics |= await self._evaluate(policy)
                    line.is_evaluated = True
            finally:
                line.metrics["time/max_event_loop_gap_s"] = self._gaps.take()
        await self._steps.save_if_due()

    async def _collect(self, batch: Batch) -> Collected:
        """Roll out the groups of one step, and give them advantages."""
        config, started = self._config, time.monotonic()
        collected = await self._collector.collect(batch, self._stream_of(batch))
        kept, examples_P_G, dropped = self._examples(collected.to_learn)
        self._record(batch, collected.rolled_out, examples_P_G)
        await self._dump(
            "training_examples",
            lambda path: dump_examples(path, batch.step, collected.rolled_out, self._source.text),
        )
        seconds = time.monotonic() - started
        metrics = group_metrics(collected.rolled_out, group_size=config.group_size) | collected.metrics
        metrics |= zeroed_metrics(collected.rolled_out, config) | {"time/rollouts": seconds}
        sampled = metrics.get("tokens/sampled", 0.0)
        metrics["throughput/sampled_tokens_per_s"] = sampled / max(1e-9, seconds)
        return Collected(
            batch=batch, groups=kept, examples_P_G=examples_P_G, dropped=dropped, metrics=metrics
        )

    def _stream_of(self, batch: Batch) -> Callable[[TrajectoryGroup], None]:
        """Return a function to call with each group that the step uses. With `stream_groups`, the function
        starts the computation of the group's gradient. Otherwise it does nothing.
        """
        if not self._config.stream_groups:
            return lambda group: None

        def stream(group: TrajectoryGroup) -> None:
            _, examples_P_G, _ = self._examples([group])
            for examples in examples_P_G:
                datums = stream_datums(
                    examples, self._config, version=self._steps.done, num_groups=len(batch.tasks)
                )
                self._learner.add(datums)

        return stream

    def _examples(
        self, groups: Sequence[TrajectoryGroup]
    ) -> tuple[list[TrajectoryGroup], list[list[Example]], Counter[DropReason]]:
        """Return the groups that pass the filters, their examples, and the number of dropped groups.

        The dropped groups are counted by reason.
        """
        kept, dropped = keep_groups(groups, self._config)
        return kept, examples_of_batch(kept, self._config, self._config), dropped

    async def _update(self, collected: Collected) -> dict[str, float]:
        """Prepare the datums of a step and update the weights. Return the metrics of both."""
        self._collector.update_begins()
        if self._is_first_update:
            self._wait_notice.start("the first update", explanation=MAY_COMPILE)
        else:
            self._wait_notice.start(f"the update of step {collected.batch.step}")
        try:
            metrics = await self._steps.update(
                self._prepare_and_update(collected), groups=collected.trained, state=self._collector.state
            )
        finally:
            self._wait_notice.stop()
        self._is_first_update = False
        return metrics

    async def _prepare_and_update(self, collected: Collected) -> dict[str, float]:
        config, version = self._config, self._steps.done
        examples_P_G, dropped = collected.examples_P_G, collected.dropped
        if config.stream_groups:  # `_stream_of` has sent the datums to the server
            metrics = stream_metrics(examples_P_G, dropped, config, version=version)
            return metrics | await self._learner.update(step=version + 1)
        prepared = await prepare(
            examples_P_G,
            dropped,
            reference=self._reference,
            teacher=self._teacher,
            learner=self._learner,
            options=config,
            version=version,
        )
        update = await self._learner.update(prepared.datums_per_substep, step=version + 1)
        # With `tis` (truncated importance sampling) or one of its masks, the datums have the trainer's
        # logprobs in place of the sampler's. `prepare` then computes the difference between sampler and
        # trainer, and the metrics of `prepare` replace those in `update`.
        return update | prepared.metrics

    async def _policy(self) -> Policy:
        policy = await self._watchdog.answer(
            self._backend.policy(self._steps.done), "preparing the weights for sampling"
        )
        return WatchedPolicy(policy, self._watchdog)

    async def _scorer(self, name: str | None) -> ReferenceModel:
        opening = self._watchdog.answer(
            self._backend.reference_model(name), f"opening {name or 'the base model'}"
        )
        return WatchedReference(await opening, self._watchdog)

    async def _evaluate(self, policy: Policy) -> dict[str, float]:
        """Evaluate `policy` on the held-out tasks and return the metrics; {} if there are no such tasks."""
        tasks, config, step = self._source.eval, self._config, self._steps.done
        if not tasks:
            return {}
        started = time.monotonic()
        plan = RolloutPlan(
            step=step,
            purpose="eval",
            group_size=config.eval_group_size or config.group_size,
            temperature=config.temperature if config.eval_temperature is None else config.eval_temperature,
            directory=self._finished.job_directory("eval", step),
        )
        evaluating = evaluate(
            self._rollouts,
            tasks,
            policy,
            plan,
            top_p=config.eval_top_p,
            title=f"evaluation after step {step}",
            events=self._events,
        )
        evaluation = await self._watchdog.guard(evaluating, f"evaluating after step {step}")
        await asyncio.to_thread(self._source.batch_ended, plan.directory)
        record_groups(self._log_path / "rollouts" / f"eval_{step:06d}.jsonl", evaluation.groups, {})
        await self._dump(
            f"global_step_{step}",
            lambda path: dump_evaluation(
                path, step, evaluation.groups, evaluation.metrics, self._source.text, env_class=config.env
            ),
        )
        self._events.evaluation_finished(evaluation, self._first_evaluation)
        self._first_evaluation = self._first_evaluation or evaluation.task_rewards
        return evaluation.metrics | {"time/evaluation": time.monotonic() - started}

    async def _dump(self, name: str, write: Callable[[Path], Sequence[Path]]) -> None:
        """Write a dump, unless dumps are off. With `upload_url`, upload it to the directory `name` of the
        run."""
        directory, url = self._config.dump_directory(self._log_path), self._config.upload_url
        if directory is not None:
            upload_to = None if url is None else f"{url.rstrip('/')}/{self._log_path.name}/{name}"
            await dump(lambda: write(directory), upload_to=upload_to, say=self._events.say)

    def _record(
        self, batch: Batch, groups: Sequence[TrajectoryGroup], examples_P_G: Sequence[Sequence[Example]]
    ) -> None:
        advantages = {
            (example.trajectory.task_id, example.trajectory.trial_name): example.advantage
            for examples in examples_P_G
            for example in examples
            if example.sequences
        }
        record_groups(self._log_path / "rollouts" / f"step_{batch.step:06d}.jsonl", groups, advantages)
