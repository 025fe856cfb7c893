"""The loop of supervised fine-tuning: each step is `update -> evaluate -> report -> save`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from src.core.errors import ConfigError
from src.core.shielding import to_its_end
from src.evaluate.training_events import TrainingEvents
from src.evaluate.training_steps import TrainingSteps
from src.learning.supervised import SupervisedLearner, SupervisedSequence
from src.records.journal import Journal
from src.rollouts.watchdog import Watchdog
from src.sft.dataset import Batch

HELD_OUT_NLL = "test/nll"


async def train_batches(
    batches: Sequence[Batch],
    held_out: Sequence[SupervisedSequence],
    learner: SupervisedLearner,
    steps: TrainingSteps,
    *,
    batch_size: int,
    watchdog: Watchdog,
    journal: Journal,
    events: TrainingEvents,
) -> None:
    """Train on every batch after the steps that are done, and evaluate the weights on the `held_out` chats.

    If the run is stopped or fails, a checkpoint is saved (`saving_after_failure`).
    """

    async def evaluate() -> dict[str, float]:
        started = time.monotonic()
        nll = await watchdog.answer(
            learner.nll(held_out, batch_size=batch_size), f"evaluating after step {steps.done}"
        )
        events.say(f"held-out NLL after step {steps.done}: {nll:.4f} nats per token")
        return {HELD_OUT_NLL: nll, "time/evaluation": time.monotonic() - started}

    async with steps.saving_after_failure():
        await steps.evaluate_start(evaluate, is_initial_due=bool(held_out))
        for batch in batches[steps.done :]:
            steps.epoch, started = batch.epoch, time.monotonic()
            journal.batch_fixed(batch.step, batch.keys)
            updating = learner.update([chat.sequence for chat in batch.chats], step=batch.step)
            update = await to_its_end(steps.update(updating, groups=batch.keys, state=dict))
            with steps.logged(update.value, started=started) as line:
                if update.is_stopped:
                    raise asyncio.CancelledError
                events.step_finished(batch.step, num_steps=len(batches), metrics=line.metrics)
                if steps.is_evaluation_due:
                    line.metrics |= await evaluate()
                    line.is_evaluated = True
            await steps.save_if_due()


def require_same_batches(journal: Journal, batches: Sequence[Batch]) -> None:
    """Raise ConfigError unless the batches in the journal of earlier processes are equal to `batches`."""
    for batch in batches:
        planned = journal.groups_of(batch.step)
        if planned is not None and planned != batch.keys:
            raise ConfigError(
                f"step {batch.step} of this run has other chats in the journal: data=, tokenizer= or an "
                "option of the schedule has changed; restore it, or give another log_path"
            )
