"""Terminus2RLTrainer: the training loop, and only the loop."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from src import checkpoints
from src.backend import Backend
from src.checkpoints import Checkpoint
from src.console import Display
from src.dynamic_sampling import DynamicSamplingSettings, sample_groups, sampling_metrics
from src.envs.base import TaskSource
from src.evaluation import Evaluation, EvaluationSettings, evaluate
from src.examples import Example, examples_of_batch
from src.filters import DropReason, FilterSettings, keep_groups
from src.learner import Learner
from src.metrics import group_metrics
from src.pipeline import Batch
from src.policy import Policy
from src.preparation import PreparationSettings, prepare
from src.recorder import record_groups
from src.rollouts import RolloutPlan, Rollouts
from src.tracking import RunLog
from src.trajectory import Task, TrajectoryGroup

logger = logging.getLogger(__name__)

SAVE_ON_THE_WAY_OUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    log_path: Path
    group_size: int
    temperature: float
    save_every: int
    eval_every: int
    evaluation: EvaluationSettings
    filters: FilterSettings
    dynamic_sampling: DynamicSamplingSettings
    preparation: PreparationSettings


class Terminus2RLTrainer:
    """Plays batches, learns from them, evaluates and saves. `steps_done` is always what the weights on the server have seen."""

    def __init__(
        self,
        *,
        backend: Backend,
        learner: Learner,
        source: TaskSource,
        rollouts: Rollouts,
        run_log: RunLog,
        display: Display,
        settings: LoopSettings,
        steps_done: int,
    ) -> None:
        self.steps_done = steps_done
        self._backend = backend
        self._learner = learner
        self._source = source
        self._rollouts = rollouts
        self._run_log = run_log
        self._display = display
        self._settings = settings
        self._epoch = 0
        self._saved_step = steps_done if steps_done else None  # a resumed run stands on its checkpoint
        self._first_evaluation: Evaluation | None = None

    async def train(self, batches: Sequence[Batch]) -> None:
        """Every batch after `steps_done`. However it ends, what was learned by then is saved first."""
        try:
            policy = await self._backend.policy(self.steps_done)
            reference = await self._backend.reference_policy() if self._settings.preparation.kl.kl_penalty_coef > 0 else None
            if self.steps_done == 0:
                self._run_log.log(0, await self._evaluate(policy))
            for batch in batches[self.steps_done :]:
                self._epoch = batch.epoch
                policy = await self._batch(batch, policy, reference, num_batches=len(batches))
        except BaseException:
            await self._save_on_the_way_out()
            raise

    async def _batch(self, batch: Batch, policy: Policy, reference: Policy | None, *, num_batches: int) -> Policy:
        """One step, its evaluation and checkpoint where they are due, and its line in the log even if those fail."""
        settings, last = self._settings, batch.step == num_batches
        started = time.monotonic()
        metrics = {
            "progress/batch": float(batch.step),
            "progress/epoch": float(batch.epoch),
            "progress/done_frac": batch.step / num_batches,
        }
        metrics |= await self._step(batch, policy, reference)
        try:
            self._display.step(f"step {batch.step}/{num_batches}", metrics)
            policy = await self._backend.policy(batch.step)
            if last or _due(batch.step, settings.eval_every):
                metrics |= await self._evaluate(policy)
            if last or _due(batch.step, settings.save_every):
                await _uninterrupted(self._save(final=last))
        finally:
            self._run_log.log(batch.step, metrics | {"time/total": time.monotonic() - started})
        return policy

    async def _step(self, batch: Batch, policy: Policy, reference: Policy | None) -> dict[str, float]:
        """Play one batch and learn from it."""
        settings = self._settings
        played = time.monotonic()
        state = await sample_groups(
            partial(self._play, batch, policy),
            batch.tasks,
            self._source.train,
            settings.dynamic_sampling,
            settings.filters,
            step=batch.step,
        )
        groups = state.played
        kept, dropped = keep_groups(state.kept, settings.filters)
        examples_P_G = examples_of_batch(kept, settings.preparation.advantages, settings.filters)
        self._record(batch, groups, examples_P_G)
        learned = time.monotonic()
        metrics = await _uninterrupted(self._learn(examples_P_G, dropped, reference))
        times = {"time/rollouts": learned - played, "time/update": time.monotonic() - learned}
        metrics |= sampling_metrics(state, settings.dynamic_sampling)
        return group_metrics(groups, group_size=settings.group_size) | metrics | times

    async def _play(self, batch: Batch, policy: Policy, tasks: Sequence[Task], attempt: int) -> list[TrajectoryGroup]:
        """The step's tasks, or those of its nth refill, whose trials have a folder of their own."""
        purpose = f"refill-{attempt}" if attempt else "step"
        plan = RolloutPlan(
            step=batch.step,
            purpose=purpose,
            group_size=self._settings.group_size,
            temperature=self._settings.temperature,
            directory=self._fresh_directory(f"{purpose}_{batch.step:06d}"),
        )
        title = f"step {batch.step}" + (f", refill {attempt}" if attempt else "")
        self._display.begin(title, num_groups=len(tasks), group_size=self._settings.group_size)
        return await self._rollouts.play(tasks, policy, plan, self._display.group)

    async def _learn(
        self, examples_P_G: Sequence[Sequence[Example]], dropped: Counter[DropReason], reference: Policy | None
    ) -> dict[str, float]:
        """The optimizer steps of one batch. Runs to its end once begun, so that `steps_done` and the server's weights agree."""
        metrics = await self._update(examples_P_G, dropped, reference)
        self.steps_done += 1
        return metrics

    async def _update(
        self, examples_P_G: Sequence[Sequence[Example]], dropped: Counter[DropReason], reference: Policy | None
    ) -> dict[str, float]:
        prepared = await prepare(examples_P_G, dropped, reference=reference, learner=self._learner, settings=self._settings.preparation)
        return prepared.metrics | await self._learner.update(prepared.datums_per_substep, step=self.steps_done + 1)

    async def _evaluate(self, policy: Policy) -> dict[str, float]:
        tasks, settings = self._source.eval, self._settings.evaluation
        if not tasks:
            return {}
        step = self.steps_done
        self._display.begin(f"evaluation after step {step}", num_groups=len(tasks), group_size=settings.group_size)
        started = time.monotonic()
        directory = self._fresh_directory(f"eval_{step:06d}")
        result = await evaluate(self._rollouts, tasks, policy, settings, step=step, directory=directory, on_group=self._display.group)
        record_groups(self._settings.log_path / "rollouts" / f"eval_{step:06d}.jsonl", result.groups, {})
        self._display.evaluation(result, self._first_evaluation)
        self._first_evaluation = self._first_evaluation or result
        return result.metrics | {"time/evaluation": time.monotonic() - started}

    async def _save(self, *, final: bool) -> None:
        """A checkpoint of the weights as they are now, unless there is one."""
        if self._saved_step == self.steps_done:
            return
        name = f"{self.steps_done:06d}"
        paths = await self._backend.save(name)
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
        self._saved_step = self.steps_done
        self._display.say(f"checkpoint after step {self.steps_done}: {paths.state_path}")

    async def _save_on_the_way_out(self) -> None:
        """For a failed or interrupted run. Its own failure must not hide the cause, nor may a dead server hold the process."""
        try:
            async with asyncio.timeout(SAVE_ON_THE_WAY_OUT_S):
                await self._save(final=False)
        except Exception as error:
            self._display.say(f"no checkpoint could be saved after step {self.steps_done}: {type(error).__name__} {error}".rstrip())
            logger.debug("saving on the way out failed", exc_info=True)

    def _record(self, batch: Batch, groups: Sequence[TrajectoryGroup], examples_P_G: Sequence[Sequence[Example]]) -> None:
        advantages = {
            (example.trajectory.task_id, example.trajectory.trial_name): example.advantage for group in examples_P_G for example in group
        }
        record_groups(self._settings.log_path / "rollouts" / f"step_{batch.step:06d}.jsonl", groups, advantages)

    def _fresh_directory(self, name: str) -> Path:
        """An empty folder for trials; an interrupted attempt at the same step may have left some."""
        directory = self._settings.log_path / "jobs" / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        return directory


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
