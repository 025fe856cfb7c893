"""The loop of supervised fine-tuning: each step is `update -> evaluate -> report -> save`.

As in `src/terminus2_trainer.py`, the journal records a step after the server has updated the weights, and a
checkpoint is saved after the metrics of its step are logged. A resumed run repeats the steps after its last
checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from src.core.errors import BackendError, ConfigError, StorageError
from src.core.shielding import run_to_its_end, to_its_end
from src.evaluate.training_events import TrainingEvents
from src.learning.supervised import SupervisedLearner
from src.policy.backend import Backend
from src.records.journal import Journal
from src.records.tracking import RunLog
from src.rollouts.checkpoint_saver import CheckpointSaver
from src.rollouts.watchdog import Watchdog
from src.sft.config import SftConfig
from src.sft.dataset import Batch, Dataset

HELD_OUT_NLL = "test/nll"


class SupervisedTrainer:
    """Trains on batches, evaluates the weights and saves checkpoints.

    `steps_done` is the number of training steps that produced the weights on the server.
    """

    def __init__(
        self,
        config: SftConfig,
        *,
        backend: Backend,
        watchdog: Watchdog,
        learner: SupervisedLearner,
        dataset: Dataset,
        journal: Journal,
        run_log: RunLog,
        events: TrainingEvents,
        log_path: Path,
        steps_done: int,
    ) -> None:
        self.steps_done = steps_done
        self._config = config
        self._watchdog = watchdog
        self._learner = learner
        self._held_out = [chat.sequence for chat in dataset.held_out]
        self._journal = journal
        self._run_log = run_log
        self._events = events
        self._epoch = 0
        self._is_update_pending = False  # whether an update has begun and has no result yet
        self._saver = CheckpointSaver(
            backend,
            watchdog,
            journal,
            events,
            log_path=log_path,
            steps_done=steps_done,
            stop_timeout_s=config.stop_timeout_s,
        )

    async def train(self, batches: Sequence[Batch]) -> None:
        """Train on every batch after `steps_done`.

        If the run is stopped or fails, a checkpoint is saved. No checkpoint is saved after a BackendError or
        a StorageError, or while an update is pending.
        """
        try:
            await self._evaluate_start(num_steps=len(batches))
            for batch in batches[self.steps_done :]:
                self._epoch = batch.epoch
                await self._step(batch, num_steps=len(batches))
        except (BackendError, StorageError):
            raise
        except BaseException:
            final = self.steps_done == len(batches)
            await run_to_its_end(
                self._saver.save_after_failure(
                    self.steps_done, epoch=self._epoch, final=final, is_update_pending=self._is_update_pending
                )
            )
            raise

    async def _evaluate_start(self, *, num_steps: int) -> None:
        """Evaluate the weights with which this process starts, if this evaluation is due.

        An evaluation in the journal is not repeated, except at step 0: a process that starts from step 0 has
        removed all earlier metrics, so it logs the metrics of step 0 again.
        """
        step = self.steps_done
        if step == 0:
            if self._held_out:
                self._run_log.log(0, await self._evaluate(0))
                self._journal.evaluated(0)
        elif not self._journal.is_evaluated(step):
            if self._is_evaluation_due(num_steps=num_steps):  # an earlier process stopped before evaluating
                self._run_log.amend(step, await self._evaluate(step))
                self._journal.evaluated(step)
            else:
                # An earlier process, with options that made this evaluation due, may have logged the line of
                # this step without sending it to wandb and trackio. `amend` sends it.
                self._run_log.amend(step, {})

    async def _step(self, batch: Batch, *, num_steps: int) -> None:
        started = time.monotonic()
        self._journal.batch_fixed(batch.step, batch.keys)
        update = await to_its_end(self._update(batch))
        metrics = {
            "progress/batch": float(batch.step),
            "progress/epoch": float(batch.epoch),
            "progress/done_frac": batch.step / num_steps,
            **update.value,
        }
        is_due, is_evaluated = self._is_evaluation_due(num_steps=num_steps), False
        try:  # the metrics of the step are logged even if its evaluation fails
            if update.is_stopped:
                raise asyncio.CancelledError
            self._events.step_finished(batch.step, num_steps=num_steps, metrics=metrics)
            if is_due:
                metrics |= await self._evaluate(batch.step)
                is_evaluated = True
        finally:
            metrics["time/total"] = time.monotonic() - started
            self._run_log.log(batch.step, metrics, is_whole=is_evaluated or not is_due)
            if is_evaluated:
                self._journal.evaluated(batch.step)
        if batch.step == num_steps or _is_due(batch.step, self._config.save_every):
            saving = self._saver.save(batch.step, epoch=batch.epoch, final=batch.step == num_steps)
            await run_to_its_end(saving)

    async def _update(self, batch: Batch) -> dict[str, float]:
        """Update the weights.

        The caller must not cancel this method, so that `steps_done` and the weights on the server agree.
        """
        started = time.monotonic()
        self._is_update_pending = True
        sequences = [chat.sequence for chat in batch.chats]
        metrics = await self._watchdog.answer(
            self._learner.update(sequences, step=batch.step), f"training step {batch.step}"
        )
        self._journal.trained(batch.step, groups=batch.keys, state={})
        self.steps_done += 1
        self._is_update_pending = False
        return metrics | {"time/update": time.monotonic() - started}

    async def _evaluate(self, step: int) -> dict[str, float]:
        started = time.monotonic()
        nll = await self._watchdog.answer(
            self._learner.nll(self._held_out, batch_size=self._config.batch_size),
            f"evaluating after step {step}",
        )
        self._events.say(f"held-out NLL after step {step}: {nll:.4f} nats per token")
        return {HELD_OUT_NLL: nll, "time/evaluation": time.monotonic() - started}

    def _is_evaluation_due(self, *, num_steps: int) -> bool:
        step = self.steps_done
        return bool(self._held_out) and (step == num_steps or _is_due(step, self._config.eval_every))


def require_same_batches(journal: Journal, batches: Sequence[Batch]) -> None:
    """Raise ConfigError unless the batches in the journal of earlier processes are equal to `batches`."""
    for batch in batches:
        planned = journal.groups_of(batch.step)
        if planned is not None and planned != batch.keys:
            raise ConfigError(
                f"step {batch.step} of this run has other chats in the journal: data=, tokenizer= or an "
                "option of the schedule has changed; restore it, or give another log_path"
            )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
