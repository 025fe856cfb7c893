"""A run of supervised fine-tuning: read the chats, open the run directory, train, and print the outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial

from src.core.process import in_thread
from src.evaluate.training_events import TrainingEvents
from src.evaluate.training_steps import TrainingSteps
from src.learning.supervised import SupervisedLearner
from src.loop.connection import Connect, Connector, Dependencies, update_scale
from src.loop.outcome import agent_trainer, counted, last_lines
from src.loop.run import recording
from src.policy.backend import base_url, connect
from src.policy.chat import load_chat
from src.records import checkpoints
from src.records.journal import Journal
from src.records.run_directory import RunDirectory, find_run_directory, lock_run_dir, run_path
from src.records.tracking import RunLog, recorded
from src.rollouts.run_events import RunEvents
from src.rollouts.watchdog import watching
from src.sft.config import SftConfig, run_name
from src.sft.dataset import Dataset, load, schedule
from src.sft.learning_rate import recommended_rate, size_of
from src.sft.trainer import HELD_OUT_NLL, require_same_batches, train_batches


@asynccontextmanager
async def open_dependencies(
    config: SftConfig, events: RunEvents, dataset: Dataset | None = None
) -> AsyncGenerator[Dependencies[Dataset]]:
    """Open the Tinker endpoint. `dataset` must not be None, although the type `Connect` allows None."""
    events.say(f"server: {base_url(config)}")
    async with connect(config) as endpoint:
        async with watching(endpoint.check, config) as watchdog:
            backend = await watchdog.answer(endpoint.open_training(config), "opening the training client")
        assert dataset is not None
        scale = update_scale(config, backend.lora_alpha, events)
        yield Dependencies(source=dataset, backend=backend, update_scale=scale)


async def run(
    config: SftConfig,
    events: TrainingEvents,
    *,
    connect: Connect[SftConfig, Dataset] = open_dependencies,
    dataset: Dataset | None = None,
) -> None:
    """Run the training to its end. `dataset` replaces the chats that the options name.

    Raises TrainerError for every error that the user can fix. Cancel the call to stop the run.
    """
    started = time.monotonic()
    if dataset is None:
        template = await asyncio.to_thread(load_chat, config.tokenizer or config.model_name)
        dataset = await asyncio.to_thread(load, config, template)
    name = run_name(config, date=f"{datetime.now():%Y-%m-%d-%H-%M-%S}")
    with lock_run_dir(run_path(config, name=name)):
        directory = await in_thread(
            lambda: find_run_directory(config, name=name)
        )  # may prompt at the terminal
        if directory.resumed:
            require_same_batches(Journal(directory.path), schedule(dataset, config))
        async with Connector(config, events, connect) as connector:
            dependencies = await connector.open(directory, dataset)
            directory.create(config)
            with recording(directory.path, config, events, name=name) as (journal, run_log):
                training = partial(train, config, journal, run_log, events)
                await connector.run_with_reconnect(training, dependencies, directory, journal)
    for line in report(config, directory, wall_s=time.monotonic() - started):
        events.say(line)


async def train(
    config: SftConfig,
    journal: Journal,
    run_log: RunLog,
    events: TrainingEvents,
    dependencies: Dependencies[Dataset],
    directory: RunDirectory,
) -> None:
    """Train every step after the directory's last checkpoint."""
    dataset, backend = dependencies.source, dependencies.backend
    batches, held_out = schedule(dataset, config), [chat.sequence for chat in dataset.held_out]
    rate = config.learning_rate or recommended_rate(*size_of(config.model_name, config.tokenizer))
    events.say(
        f"chats: {len(dataset.train)} to train on ({dataset.num_trained_tokens} trained tokens), "
        f"{len(held_out)} held out; {counted(len(batches), 'step')}, learning rate {rate:.3g}"
    )
    async with watching(backend.check, config) as watchdog:
        steps = TrainingSteps(
            config,
            backend=backend,
            watchdog=watchdog,
            journal=journal,
            run_log=run_log,
            events=events,
            directory=directory,
            num_steps=len(batches),
            has_evaluations=bool(held_out),
        )
        steps.begin()
        learner = SupervisedLearner(
            backend.training_client,
            config,
            highest_rate=rate,
            num_steps=len(batches),
            update_scale=dependencies.update_scale,
        )
        await train_batches(
            batches,
            held_out,
            learner,
            steps,
            batch_size=config.batch_size,
            watchdog=watchdog,
            journal=journal,
            events=events,
        )


def report(config: SftConfig, directory: RunDirectory, *, wall_s: float) -> list[str]:
    """Return the last lines that a process prints. The process took `wall_s` seconds.

    `directory` has the checkpoint from which the process started.
    """
    metrics_file, lines = directory.path / "metrics.jsonl", []
    values = recorded(metrics_file, HELD_OUT_NLL)
    if values:
        before, after = values[min(values)], values[max(values)]
        lines.append(f"held-out NLL: {before:.4f} before, {after:.4f} after, in nats per token")
    checkpoint = checkpoints.last(directory.path)
    if checkpoint is not None:
        lines += [
            f"sampler checkpoint: {checkpoint.sampler_path}",
            f"RL from these weights: {agent_trainer()} train load_checkpoint_path={checkpoint.state_path} "
            f"load_optimizer=false lora_rank={config.lora_rank} ...",
        ]
    steps = max(recorded(metrics_file, "progress/batch"), default=0)
    return last_lines(
        lines,
        steps=steps,
        steps_before=directory.steps_done,
        wall_s=wall_s,
        log_path=directory.path,
        options=config,
    )
