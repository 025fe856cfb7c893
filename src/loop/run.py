"""A training run: check the options and tasks, create the run directory, train, and print the outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import chz

from src.config import TrainerConfig, run_name, tasks_name
from src.core.errors import BackendError, ConfigError, NothingTrainedError, StorageError, TooManyFailuresError
from src.core.length_limits import LengthOptions
from src.core.log_setup import logging_to_file
from src.core.process import in_thread
from src.envs.base import TaskSource, close_quietly
from src.evaluate.contamination import (
    TaskHashes,
    changed_tasks,
    require_held_out,
    task_hashes,
    write_contents,
    write_hashes,
)
from src.evaluate.probe import capabilities
from src.evaluate.training_events import TrainingEvents
from src.evaluate.training_steps import TrainingSteps
from src.learning.learner import Learner
from src.learning.options import DynamicSamplingOptions, FilterOptions, LearnerOptions, PreparationOptions
from src.loop import outcome
from src.loop.connection import Connect, Connector, Dependencies, open_dependencies
from src.loop.outcome import counted
from src.loop.run_result import RunResult, read_result
from src.policy.openai_client import open_endpoint
from src.records.dumps import check_export_path
from src.records.journal import Journal, RunState
from src.records.options import TrackingOptions
from src.records.rollout_store import FinishedRollouts, discard_rollouts
from src.records.run_directory import RunDirectory, find_run_directory, lock_run_dir, run_path
from src.records.tracking import RunLog, open_run_log
from src.records.uploads import check_upload_url
from src.rollouts.group_rollout import Rollouts
from src.rollouts.judge import Judge
from src.rollouts.pipeline import schedule
from src.rollouts.run_events import RunEvents
from src.rollouts.watchdog import watching
from src.terminus2_trainer import Terminus2RLTrainer

logger = logging.getLogger(__name__)

# Learning rates below this value are usual for full fine-tuning and hardly change a LoRA adapter.
SMALLEST_LORA_RATE = 1e-6
# If one of these options changes, recorded trials of an unfinished step or evaluation are not used.
TRIAL_OPTIONS = {
    *("temperature", "use_native_tool_calling", "environment_kwargs", "train_subagents"),
    *("judge_model", "taxonomy_feedback", "taxonomy_alpha", "taxonomy_formula"),
}
# If one of these options changes, recorded trials of an unfinished evaluation are not used.
EVAL_OPTIONS = {"eval_temperature", "eval_top_p"}


async def run(
    config: TrainerConfig,
    events: TrainingEvents,
    *,
    connect: Connect[TrainerConfig, TaskSource] = open_dependencies,
) -> RunResult:
    """Run the training to its end.

    Raises TrainerError for every error that the user can fix. Cancel the call to stop the run.
    """
    started = time.monotonic()
    if config.learning_rate < SMALLEST_LORA_RATE:
        events.say(
            f"learning_rate={config.learning_rate:g} is usual for full fine-tuning; use a rate that is at "
            "least ten times as large for a LoRA adapter"
        )
    if config.capabilities is not None:
        capabilities.require(capabilities.read(config.capabilities), config)
    if config.upload_url is not None:
        await asyncio.to_thread(check_upload_url, config.upload_url)
    if config.export_path is not None:
        await asyncio.to_thread(check_export_path, config.export_path)
    name = run_name(config, date=f"{datetime.now():%Y-%m-%d-%H-%M-%S}")
    async with AsyncExitStack() as stack, Connector(config, events, connect) as connector:
        stack.enter_context(lock_run_dir(run_path(config, name=name)))
        directory = await in_thread(
            lambda: find_run_directory(config, name=name)
        )  # may prompt at the terminal
        dependencies = await connector.open(directory)
        source = dependencies.source
        stack.push_async_callback(close_quietly, source)
        trained, held_out = await checked_tasks(config, source)
        hashes = {task.task_id: task.content for task in trained}
        contents = {task.task_id: task.trial_content for task in (*trained, *held_out)}
        if directory.resumed:
            tasks = changed_tasks(directory.path, contents)
            discard_lost_rollouts(config, directory, events, tasks=tasks, is_trained=hashes.__contains__)
        directory.create(config)
        write_hashes(directory.path, hashes)
        write_contents(directory.path, contents)
        with recording(directory.path, config, events, name=name, is_judged=config.taxonomy_feedback) as (
            journal,
            run_log,
        ):
            training = partial(train, config, journal, run_log, events)
            await connector.run_with_reconnect(training, dependencies, directory, journal)
            outcome.require_trained(directory.path, group_size=config.group_size)
    for line in outcome.report(
        directory.path,
        wall_s=time.monotonic() - started,
        steps_before=directory.steps_done,
        group_size=config.group_size,
        options=config,
    ):
        events.say(line)
    return read_result(directory.path)


def discard_lost_rollouts(
    config: TrainerConfig,
    directory: RunDirectory,
    events: RunEvents,
    *,
    tasks: Sequence[str],
    is_trained: Callable[[str], bool],
) -> None:
    """Discard the rollouts that the resumed run, with its changed options and changed `tasks`, must not use.

    These are the rollouts of lost weights (weights after the last checkpoint, which the training will not
    reach again), and the rollouts of unfinished steps and evaluations that were run with the former settings.
    """
    names = {"lora_alpha", "stream_groups"}
    if config.lr_schedule != "constant":
        names |= {"max_steps", "n_epochs"}
    for options in (LearnerOptions, PreparationOptions, FilterOptions, DynamicSamplingOptions):
        names |= chz.chz_fields(options).keys()
    # The other length options limit future turns only.
    names -= chz.chz_fields(LengthOptions).keys() - {"max_sequence_length"}
    changed = directory.changed_options(config) & (names | TRIAL_OPTIONS | EVAL_OPTIONS)
    after = directory.steps_done
    if not changed and not tasks:
        return
    journal = Journal(directory.path)
    gives_other_weights = bool(changed - EVAL_OPTIONS) or any(map(is_trained, tasks))
    if gives_other_weights:
        journal.discarded(after=after)  # before `discard_rollouts`, so that a kill between them is harmless

    def is_discarded(purpose: str, record: Mapping[str, Any]) -> bool:
        versions = (turn["policy_version"] for turn in record["result"].get("turns", ()))
        return (
            bool(changed & TRIAL_OPTIONS)
            or (purpose == "eval" and bool(changed & EVAL_OPTIONS))
            or record["task"] in tasks
            or (gives_other_weights and any(version > after for version in versions))
        )

    # The metrics of step 0 are always logged again if the run is resumed from there.
    evals_from = after + 1 if after and journal.is_evaluated(after) else after
    num_discarded = discard_rollouts(directory.path, is_discarded, after=after, evals_from=evals_from)
    causes = sorted(changed)
    if tasks:
        others = f" (and {len(tasks) - 1} more)" if len(tasks) > 1 else ""
        causes.append(f"the content of {tasks[0]}{others}")
    if num_discarded or tasks:
        rollouts = counted(num_discarded, "rollout")
        events.say(f"{', '.join(causes)} changed: {rollouts} after step {after} will be run again")


async def checked_tasks(
    config: TrainerConfig, source: TaskSource
) -> tuple[list[TaskHashes], list[TaskHashes]]:
    """Return the hashes of the training tasks and of the held-out tasks.

    Raises ConfigError if there is no training task, or if a training task is also held out.
    """
    if not source.train:
        raise ConfigError(
            f"{tasks_name(config)} has no training tasks; give them in data (env=data) or in train_data "
            "(env=tau_bench, env=fleet or your own environment)"
        )
    trained = await asyncio.to_thread(task_hashes, source.train)
    held_out = await asyncio.to_thread(task_hashes, source.eval)
    chosen_by = None if holds_out_a_directory(config.eval_tasks or ()) else "eval_tasks"
    require_held_out(held_out, {task.task_id: task.content for task in trained}, chosen_by=chosen_by)
    return trained, held_out


async def train(
    config: TrainerConfig,
    journal: Journal,
    run_log: RunLog,
    events: TrainingEvents,
    dependencies: Dependencies[TaskSource],
    directory: RunDirectory,
) -> None:
    """Train every step after the directory's last checkpoint."""
    source, backend = dependencies.source, dependencies.backend
    batches = schedule(source.train, config)
    events.say(
        f"tasks: {len(source.train)} to train on, {len(source.eval)} held out; "
        f"{counted(len(batches), 'step')}; loss_fn={config.loss_fn}"
    )
    finished = FinishedRollouts(directory.path, journal)
    learner = Learner(
        backend.training_client, config, num_steps=len(batches), update_scale=dependencies.update_scale
    )
    async with open_judge(config) as judge, watching(backend.check, config) as watchdog:
        steps = TrainingSteps(
            config,
            backend=backend,
            watchdog=watchdog,
            journal=journal,
            run_log=run_log,
            events=events,
            directory=directory,
            num_steps=len(batches),
        )
        steps.begin()
        await watchdog.answer(learner.require_loss(), f"checking loss_fn={config.loss_fn}")
        trainer = Terminus2RLTrainer(
            config,
            backend=backend,
            watchdog=watchdog,
            learner=learner,
            source=source,
            rollouts=Rollouts(source, config, finished, judge),
            finished=finished,
            steps=steps,
            events=events,
            log_path=directory.path,
        )
        await trainer.train(batches)


def holds_out_a_directory(eval_tasks: Sequence[str]) -> bool:
    return any(Path(name).expanduser().is_dir() for name in eval_tasks)


@asynccontextmanager
async def open_judge(config: TrainerConfig) -> AsyncGenerator[Judge | None]:
    """Open the judge of training trials. Yields None without `taxonomy_feedback`."""
    if not config.taxonomy_feedback:
        yield None
        return
    assert config.judge_base_url is not None and config.judge_model is not None
    endpoint = open_endpoint(config.judge_base_url, config.judge_model)
    try:
        yield Judge(endpoint, config)
    finally:
        await endpoint.close()


@contextmanager
def recording(
    log_path: Path, settings: TrackingOptions, events: RunEvents, *, name: str, is_judged: bool = False
) -> Generator[tuple[Journal, RunLog]]:
    """Open the log file, the journal and the metrics of a run. `is_judged` is that of `open_run_log`.

    When the block ends, record the end state and the error in the journal. If the block is cancelled, show
    the command that continues the run.
    """
    config = chz.asdict(settings)
    with logging_to_file(log_path / "logs.log"):
        journal = Journal(log_path)
        try:
            with open_run_log(log_path, settings, name=name, config=config, is_judged=is_judged) as run_log:
                yield journal, run_log
        except BaseException as error:
            with suppress(StorageError):  # a full disk may have caused `error`
                journal.ended(end_state(error), str(error))
            if isinstance(error, asyncio.CancelledError):
                events.say(f"continue: {outcome.resume_command(log_path)}")
            raise
        journal.ended(RunState.DONE)


def end_state(error: BaseException) -> RunState:
    match error:
        case asyncio.CancelledError():
            return RunState.INTERRUPTED
        case BackendError():
            return RunState.SERVER_LOST
        case StorageError():
            return RunState.STORAGE
        case TooManyFailuresError():
            return RunState.TOO_MANY_FAILURES
        case NothingTrainedError():
            return RunState.NOTHING_TRAINED
        case _:
            return RunState.FAILED
