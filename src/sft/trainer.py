"""The loop of supervised fine-tuning: each step is `update -> evaluate -> report -> save`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from src.core.errors import ConfigError
from src.core.shielding import to_its_end
from src.evaluate.training_events import TrainingEvents
from src.evaluate.training_steps import TrainingSteps
from src.learning.supervised import SupervisedLearner
from src.records.journal import Journal
from src.rollouts.watchdog import Watchdog
from src.sft.config import SftConfig
from src.sft.dataset import Batch, Dataset

HELD_OUT_NLL = "test/nll"


class SupervisedTrainer:
    """Trains on batches and evaluates the weights. `steps` records the steps and saves checkpoints."""

    def __init__(
        self,
        config: SftConfig,
        *,
        watchdog: Watchdog,
        learner: SupervisedLearner,
        dataset: Dataset,
        journal: Journal,
        steps: TrainingSteps,
        events: TrainingEvents,
    ) -> None:
        self._config = config
        self._watchdog = watchdog
        self._learner = learner
        self._held_out = [chat.sequence for chat in dataset.held_out]
        self._journal = journal
        self._steps = steps
        self._events = events

    async def train(self, batches: Sequence[Batch]) -> None:
        """Train on every batch after the steps that are done. If the run is stopped or fails, a checkpoint is
        saved (`saving_after_failure`)."""
        async with self._steps.saving_after_failure():
            await self._steps.evaluate_start(self._evaluate, is_initial_due=bool(self._held_out))
            for batch in batches[self._steps.done :]:
                self._steps.epoch = batch.epoch
                await self._step(batch, num_steps=len(batches))

    async def _step(self, batch: Batch, *, num_steps: int) -> None:
        started = time.monotonic()
        self._journal.batch_fixed(batch.step, batch.keys)
        updating = self._learner.update([chat.sequence for chat in batch.chats], step=batch.step)
        update = await to_its_end(self._steps.update(updating, groups=batch.keys, state=dict))
        with self._steps.logged(update.value, started=started) as line:
            if update.is_stopped:
                raise asyncio.CancelledError
            self._events.step_finished(batch.step, num_steps=num_steps, metrics=line.metrics)
            if self._steps.is_evaluation_due:
                line.metrics |= await self._evaluate()
                line.is_evaluated = True
        await self._steps.save_if_due()

    async def _evaluate(self) -> dict[str, float]:
        step, started = self._steps.done, time.monotonic()
        nll = await self._watchdog.answer(
            self._learner.nll(self._held_out, batch_size=self._config.batch_size),
            f"evaluating after step {step}",
        )
        self._events.say(f"held-out NLL after step {step}: {nll:.4f} nats per token")
        return {HELD_OUT_NLL: nll, "time/evaluation": time.monotonic() - started}


def require_same_batches(journal: Journal, batches: Sequence[Batch]) -> None:
    """Raise ConfigError unless the batches in the journal of earlier processes are equal to `batches`."""
    for batch in batches:
        planned = journal.groups_of(batch.step)
        if planned is not None and planned != batch.keys:
            raise ConfigError(
                f"step {batch.step} of this run has other chats in the journal: data=, tokenizer= or an "
                "option of the schedule has changed; restore it, or give another log_path"
            )
