"""Terminus2RLTrainer: the training loop, and only the loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

from src.cli.console import Display
from src.core.errors import BackendError, StorageError
from src.core.event_loop import LagMeter
from src.core.process import deadline
from src.core.trajectory import TrajectoryGroup
from src.envs.base import TaskSource
from src.evaluate.evaluation import Evaluation, EvaluationSettings, evaluate
from src.learning.examples import Example, examples_of_batch
from src.learning.filters import DropReason, keep_groups, zeroed_metrics
from src.learning.learner import Learner
from src.learning.metrics import group_metrics
from src.learning.preparation import PreparationSettings, prepare, stream_datums, stream_metrics
from src.policy.backend import Backend
from src.policy.sampling_policy import Policy, ReferenceModel
from src.records import checkpoints
from src.records.checkpoints import Checkpoint
from src.records.dumps import dump_evaluation, dump_examples
from src.records.journal import GroupKey
from src.records.rollout_log import record_groups
from src.records.rollout_store import FinishedRollouts
from src.records.tracking import RunLog
from src.rollouts.batch_collector import GroupSettings, StepGroups
from src.rollouts.group_rollout import Rollouts
from src.rollouts.pipeline import Batch
from src.rollouts.watchdog import Watchdog, WatchedPolicy, WatchedReference

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    log_path: Path
    export_path: Path | None  # None: nothing is dumped
    save_every: int
    eval_every: int
    eval_before_train: bool
    stop_timeout_sec: float
    evaluation: EvaluationSettings
    groups: GroupSettings
    preparation: PreparationSettings


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
        self._is_in_doubt = False  # whether an update was sent to the server and its answer did not come
        self._gaps = LagMeter()
        self._groups = StepGroups(
            source=source,
            rollouts=rollouts,
            finished=finished,
            watchdog=watchdog,
            display=display,
            settings=settings.groups,
            steps_done=steps_done,
        )
        self._saved_step = steps_done if steps_done else None  # a resumed run stands on its checkpoint
        self._first_evaluation: Evaluation | None = None

    async def train(self, batches: Sequence[Batch]) -> None:
        """Every batch after `steps_done`. What was learned is saved on the way out, unless the weights or the files are in doubt."""
        try:
            policy = await self._policy()
            reference = await self._reference() if self._settings.preparation.kl.kl_penalty_coef > 0 else None
            if self.steps_done == 0 and self._settings.eval_before_train:
                self._run_log.log(0, await self._evaluate(policy))
                self._journal.evaluated(0)
            elif self.steps_done and not self._journal.is_evaluated(self.steps_done):
                if self._is_evaluation_due(
                    num_batches=len(batches)
                ):  # the run was interrupted in the middle of it
                    self._run_log.amend(self.steps_done, await self._evaluate(policy))
                    self._journal.evaluated(self.steps_done)
                else:  # perhaps it was due then, by other options, and the line waits to be sent
                    self._run_log.amend(self.steps_done, {})
            async with self._gaps, self._groups.played(batches, policy):
                for batch in batches[self.steps_done :]:
                    self._epoch = batch.epoch
                    await self._batch(batch, reference, num_batches=len(batches))
        except (BackendError, StorageError):
            raise
        except BaseException:
            await _uninterrupted(self._save_on_the_way_out(final=self.steps_done == len(batches)))
            raise

    async def _batch(self, batch: Batch, reference: ReferenceModel | None, *, num_batches: int) -> None:
        """One step, its evaluation where one is due, its line in the log, and only then its checkpoint: what a checkpoint stands for is
        on disk already. The line is written even if the evaluation fails, and the journal says `evaluated` once it holds one."""
        settings, last = self._settings, batch.step == num_batches
        started = time.monotonic()
        metrics = {
            "progress/batch": float(batch.step),
            "progress/epoch": float(batch.epoch),
            "progress/done_frac": batch.step / num_batches,
        }
        evaluated = False
        try:
            await self._step(batch, reference, metrics)
            self._display.step(f"step {batch.step}/{num_batches}", metrics)
            policy = await self._policy()
            self._groups.update_ended(policy)
            if self._is_evaluation_due(num_batches=num_batches):
                metrics |= await self._evaluate(policy)
                evaluated = True
        finally:
            if self.steps_done == batch.step:
                is_whole = evaluated or not self._is_evaluation_due(num_batches=num_batches)
                metrics |= {
                    "time/total": time.monotonic() - started,
                    "time/max_event_loop_gap_s": self._gaps.take(),
                }
                self._run_log.log(batch.step, metrics, is_whole=is_whole)
        if evaluated:
            self._journal.evaluated(batch.step)
        if last or _due(batch.step, settings.save_every):
            await _uninterrupted(self._save(final=last))

    async def _step(self, batch: Batch, reference: ReferenceModel | None, metrics: dict[str, float]) -> None:
        """Get the groups of one step and learn from them. What there is to say of it is added to `metrics`."""
        settings = self._settings
        played = time.monotonic()
        gathered = await self._groups.gather(batch, self._streamer(batch))
        kept, examples_P_G, dropped = self._examples(gathered.to_learn)
        self._record(batch, gathered.played, examples_P_G)
        if settings.export_path is not None:
            await asyncio.to_thread(
                dump_examples, settings.export_path, batch.step, gathered.played, self._source.text
            )
        learned = time.monotonic()
        metrics |= group_metrics(gathered.played, group_size=settings.groups.group_size) | gathered.metrics
        metrics |= zeroed_metrics(gathered.played, settings.groups.filters)
        metrics["time/rollouts"] = learned - played
        metrics["throughput/sampled_tokens_per_s"] = metrics.get("tokens/sampled", 0.0) / max(
            1e-9, learned - played
        )
        trained = [
            (group.step, group.task.id)
            for group, examples in zip(kept, examples_P_G, strict=True)
            if examples
        ]
        self._groups.update_begins()
        await _uninterrupted(self._learn(batch, trained, examples_P_G, dropped, reference, metrics))
        metrics["time/update"] = time.monotonic() - learned

    def _streamer(self, batch: Batch) -> Callable[[TrajectoryGroup], None]:
        """What is done with each group as it comes: its gradient sets out at once, or nothing yet."""
        settings, num_groups = self._settings.preparation, len(batch.tasks)

        def stream(group: TrajectoryGroup) -> None:
            for examples in self._examples([group])[1]:
                self._learner.add(
                    stream_datums(examples, settings, version=self.steps_done, num_groups=num_groups)
                )

        return stream if self._settings.groups.pipeline.stream_groups else lambda group: None

    def _examples(
        self, groups: Sequence[TrajectoryGroup]
    ) -> tuple[list[TrajectoryGroup], list[list[Example]], Counter[DropReason]]:
        """The groups that stay, their examples, and why the others go."""
        settings = self._settings
        kept, dropped = keep_groups(groups, settings.groups.filters)
        return (
            kept,
            examples_of_batch(kept, settings.preparation.advantages, settings.groups.filters),
            dropped,
        )

    async def _learn(
        self,
        batch: Batch,
        trained: Sequence[GroupKey],
        examples_P_G: Sequence[Sequence[Example]],
        dropped: Counter[DropReason],
        reference: ReferenceModel | None,
        metrics: dict[str, float],
    ) -> None:
        """The optimizer steps of one batch. Runs to its end once begun, so that `steps_done` and the server's weights agree."""
        self._is_in_doubt = True
        metrics |= await self._watchdog.answer(
            self._update(examples_P_G, dropped, reference), f"training step {batch.step}"
        )
        self._journal.trained(batch.step, groups=trained, state=self._groups.state())
        self.steps_done += 1
        self._is_in_doubt = False

    async def _update(
        self,
        examples_P_G: Sequence[Sequence[Example]],
        dropped: Counter[DropReason],
        reference: ReferenceModel | None,
    ) -> dict[str, float]:
        settings, version = self._settings.preparation, self.steps_done
        if self._settings.groups.pipeline.stream_groups:  # their gradient is on its way
            metrics = stream_metrics(examples_P_G, dropped, settings, version=version)
            return metrics | await self._learner.update(step=version + 1)
        learner = self._learner
        prepared = await prepare(
            examples_P_G, dropped, reference=reference, learner=learner, settings=settings, version=version
        )
        return prepared.metrics | await learner.update(prepared.datums_per_substep, step=version + 1)

    async def _policy(self) -> Policy:
        policy = await self._watchdog.answer(
            self._backend.policy(self.steps_done), "preparing the weights for sampling"
        )
        return WatchedPolicy(policy, self._watchdog)

    async def _reference(self) -> ReferenceModel:
        return WatchedReference(
            await self._watchdog.answer(self._backend.reference_model(), "opening the base model"),
            self._watchdog,
        )

    def _is_evaluation_due(self, *, num_batches: int) -> bool:
        return self.steps_done == num_batches or _due(self.steps_done, self._settings.eval_every)

    async def _evaluate(self, policy: Policy) -> dict[str, float]:
        tasks, settings = self._source.eval, self._settings.evaluation
        if not tasks:
            return {}
        step = self.steps_done
        self._display.begin(
            f"evaluation after step {step}", num_groups=len(tasks), group_size=settings.group_size
        )
        started = time.monotonic()
        directory = self._finished.job_directory("eval", step)
        evaluating = evaluate(
            self._rollouts,
            tasks,
            policy,
            settings,
            step=step,
            directory=directory,
            on_group=self._display.group,
        )
        result = await self._watchdog.guard(evaluating, f"evaluating after step {step}")
        await asyncio.to_thread(self._source.batch_ended, directory)
        record_groups(self._settings.log_path / "rollouts" / f"eval_{step:06d}.jsonl", result.groups, {})
        if (path := self._settings.export_path) is not None:
            await asyncio.to_thread(
                dump_evaluation, path, step, result.groups, result.metrics, self._source.text
            )
        self._display.evaluation(result, self._first_evaluation)
        self._first_evaluation = self._first_evaluation or result.without_tokens()
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

    async def _save_on_the_way_out(self, *, final: bool) -> None:
        """For a failed or interrupted run. Its own failure must not hide the cause, nor may a dead server hold the process."""
        limit_s = self._settings.stop_timeout_sec
        if self._is_in_doubt:
            self._display.say(
                f"no checkpoint is saved: nobody knows whether the server has trained step {self.steps_done + 1}"
            )
            return
        try:
            async with deadline(limit_s, BackendError, f"not saved within stop_timeout_sec={limit_s:g}"):
                await self._backend.check()
                await self._save(final=final)
        except asyncio.CancelledError:
            self._display.say(
                f"no checkpoint was saved after step {self.steps_done}: not saved within stop_timeout_sec={limit_s:g}"
            )
            raise
        except Exception as error:
            self._display.say(
                f"no checkpoint could be saved after step {self.steps_done}: {type(error).__name__} {error}".rstrip()
            )
            logger.debug("saving on the way out failed", exc_info=True)

    def _record(
        self, batch: Batch, groups: Sequence[TrajectoryGroup], examples_P_G: Sequence[Sequence[Example]]
    ) -> None:
        advantages = {
            (example.trajectory.task_id, example.trajectory.trial_name): example.advantage
            for group in examples_P_G
            for example in group
        }
        record_groups(
            self._settings.log_path / "rollouts" / f"step_{batch.step:06d}.jsonl", groups, advantages
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


async def _uninterrupted[T](work: Coroutine[object, object, T]) -> T:
    """Finishes `work` even when cancelled in the middle, and is cancelled afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            await task
        except Exception as error:  # the stop goes on; what the work left behind is in doubt already
            logger.warning("failed while stopping: %s: %s", type(error).__name__, error)
        raise
