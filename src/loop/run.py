"""Wires one run together: check everything, then create the run's folder, then train."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from datetime import datetime
from pathlib import Path

import chz

from src.cli.console import Display, Success, outcome, signals
from src.config import TrainerConfig, loss_settings, run_name, subconfig, tasks_name
from src.core.errors import BackendError, ConfigError, ServerLost, StorageError, TooManyFailuresError
from src.core.process import in_thread
from src.envs.base import TaskSource
from src.envs.registry import find_factory, open_task_source
from src.evaluate.contamination import content_hashes, require_held_out, write_hashes
from src.evaluate.evaluation import EvaluationSettings
from src.learning.curriculum import CurriculumSettings
from src.learning.dynamic_sampling import DynamicSamplingSettings
from src.learning.examples import AdvantageSettings
from src.learning.filters import FilterSettings
from src.learning.importance import ImportanceSettings
from src.learning.kl_penalty import KlSettings
from src.learning.learner import Learner, LearnerSettings
from src.learning.preparation import PreparationSettings
from src.loop import capabilities
from src.policy.backend import Backend, BackendSettings, base_url, connect
from src.policy.chat import load_chat
from src.policy.openai_client import open_endpoint
from src.records.journal import Journal, RunState
from src.records.log_file import logging_to_file
from src.records.rollout_store import FinishedRollouts
from src.records.run_folder import RunFolder, find_run_folder, lock_run_dir, run_path
from src.records.tracking import RunLog, TrackingSettings, open_run_log, recorded, recorded_variances
from src.rollouts.batch_collector import GroupSettings
from src.rollouts.closing import closed
from src.rollouts.group_rollout import Rollouts, RolloutSettings
from src.rollouts.judge import Judge, JudgeSettings
from src.rollouts.pipeline import PipelineSettings, ScheduleSettings, schedule
from src.rollouts.task_quarantine import FaultSettings
from src.rollouts.watchdog import WatchdogSettings, watching
from src.terminus2_trainer import LoopSettings, Terminus2RLTrainer

logger = logging.getLogger(__name__)

RECONNECT_PERIOD_S = 2.0
SMALLEST_LORA_RATE = (
    1e-6  # what the seeds' presets of full fine-tuning have, and less; an adapter hardly moves at it
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dependencies:
    """What the outside world contributes to a run."""

    source: TaskSource
    backend: Backend


Open = Callable[
    [TrainerConfig, BackendSettings, Display, TaskSource | None], AbstractAsyncContextManager[Dependencies]
]


@asynccontextmanager
async def open_parts(
    config: TrainerConfig, settings: BackendSettings, display: Display, source: TaskSource | None = None
) -> AsyncIterator[Dependencies]:
    """The real ones: a Tinker endpoint and the tasks of an environment, or the `source` of an earlier connection."""
    await asyncio.to_thread(find_factory, config.env)  # a name that is wrong needs no server to be found out
    display.say(f"server: {base_url(settings)}")
    async with connect(settings) as endpoint:
        if source is None:
            chat = await asyncio.to_thread(load_chat, config.tokenizer or config.model_name)
            display.say(
                f"model: {config.model_name}, LoRA rank {config.lora_rank}, context {config.context_limit}"
            )
            source = await asyncio.to_thread(open_task_source, config, chat)
        async with watching(endpoint.check, subconfig(config, WatchdogSettings)) as watchdog:
            backend = await watchdog.answer(endpoint.open_training(), "opening the training client")
        yield Dependencies(source=source, backend=backend)


async def run(config: TrainerConfig, display: Display, *, open_parts: Open = open_parts) -> None:
    """The whole run. Raises a TrainerError for whatever the user can mend, and is cancelled to stop it."""
    started = time.monotonic()
    if config.learning_rate < SMALLEST_LORA_RATE:
        display.say(
            f"learning_rate={config.learning_rate:g} is one for full fine-tuning; an adapter wants ten times that or more"
        )
    if config.capabilities is not None:
        capabilities.require(capabilities.read(config.capabilities), config)
    name = run_name(config, date=f"{datetime.now():%Y-%m-%d-%H-%M-%S}")
    async with AsyncExitStack() as source_open, AsyncExitStack() as stack:
        source_open.enter_context(lock_run_dir(run_path(config, name=name)))
        folder = await in_thread(lambda: find_run_folder(config, name=name))  # it may ask at the terminal
        parts = await stack.enter_async_context(
            open_parts(config, backend_settings(config, folder), display, None)
        )
        source_open.push_async_callback(closed, parts.source)
        if not parts.source.train:
            raise ConfigError(
                f"{tasks_name(config)} leaves no task to train on; lower eval_split or shorten eval_tasks"
            )
        trained = await asyncio.to_thread(content_hashes, parts.source.train)
        chosen_by = None if holds_out_folders(config) else "eval_tasks"
        await asyncio.to_thread(require_held_out, parts.source.eval, trained, chosen_by=chosen_by)
        folder.create(config)
        write_hashes(folder.path, trained)
        with (
            logging_to_file(folder.path / "logs.log"),
            journalled(folder.path) as journal,
            open_run_log(
                folder.path, subconfig(config, TrackingSettings), name=name, config=chz.asdict(config)
            ) as run_log,
        ):
            await survive(
                config, parts, stack.pop_all(), folder, journal, run_log, display, open_parts=open_parts
            )
    metrics_file = folder.path / "metrics.jsonl"
    steps = max(recorded(metrics_file, "progress/batch"), default=0)
    learnt_from = signals(recorded_variances(metrics_file))
    for line in outcome(
        success_of(metrics_file),
        learnt_from,
        steps=steps,
        wall_s=time.monotonic() - started,
        log_path=folder.path,
    ):
        display.say(line)


def holds_out_folders(config: TrainerConfig) -> bool:
    return any(Path(name).expanduser().is_dir() for name in config.eval_tasks or ())


def success_of(metrics_file: Path) -> Success:
    rates, floors = (
        recorded(metrics_file, "test/env/all/success"),
        recorded(metrics_file, "test/noop_success"),
    )
    last = rates[max(rates)] if rates else None
    is_partial = not recorded(metrics_file, "test/pass_at_1")  # its rates carry the part's name
    earned = recorded(metrics_file, "test/env/all/reward/total")
    is_earned_in_part = any(
        not math.isclose(reward, rates.get(step, reward), abs_tol=1e-9) for step, reward in earned.items()
    )
    rewards = (earned[0], earned[max(earned)]) if 0 in earned and is_earned_in_part else None
    return Success(
        before=rates.get(0),
        after=last,
        floor=floors[max(floors)] if floors else None,
        is_partial=is_partial,
        rewards=rewards,
    )


async def survive(
    config: TrainerConfig,
    parts: Dependencies,
    connection: AsyncExitStack,
    folder: RunFolder,
    journal: Journal,
    run_log: RunLog,
    display: Display,
    *,
    open_parts: Open,
) -> None:
    """Trains to the end, over as many servers as it takes: after each loss from the last checkpoint, replaying what is on disk.

    A server that is lost again before one more trial was graded or one more step trained is not coming back to its senses.
    """
    progress = -1
    while True:
        try:
            async with connection:
                await train(config, parts, folder, journal, run_log, display)
            return
        except BackendError as error:
            if config.reconnect_timeout_sec == 0:
                raise ServerLost(f"{error}; start it again and resume the run") from error
            if journal.progress <= progress:
                raise
            progress = journal.progress
            display.say(f"server lost: {error}")
        connection, parts = await reconnected(config, parts.source, folder, display, open_parts=open_parts)
        folder = folder.at_last_checkpoint()


async def reconnected(
    config: TrainerConfig, source: TaskSource, folder: RunFolder, display: Display, *, open_parts: Open
) -> tuple[AsyncExitStack, Dependencies]:
    """A connection to the server that is back, with the weights of the last checkpoint. ServerLost when it stays away."""
    display.say(f"waiting up to {config.reconnect_timeout_sec:g} s for it to come back")
    settings = backend_settings(config, folder.at_last_checkpoint())
    deadline = time.monotonic() + config.reconnect_timeout_sec
    while True:
        async with AsyncExitStack() as stack:
            try:
                parts = await stack.enter_async_context(open_parts(config, settings, display, source))
                return stack.pop_all(), parts
            except BackendError as error:
                if time.monotonic() > deadline:
                    raise ServerLost(
                        f"{error}; it stayed away for reconnect_timeout_sec={config.reconnect_timeout_sec:g}; start it again and resume"
                    ) from error
        await asyncio.sleep(min(RECONNECT_PERIOD_S, config.reconnect_timeout_sec / 4))


async def train(
    config: TrainerConfig,
    parts: Dependencies,
    folder: RunFolder,
    journal: Journal,
    run_log: RunLog,
    display: Display,
) -> None:
    """Every step that the folder's last checkpoint has not done yet."""
    batches = schedule(parts.source.train, subconfig(config, ScheduleSettings))
    steps_done = folder.checkpoint.batch if folder.checkpoint else 0
    display.say(
        f"tasks: {len(parts.source.train)} to train on, {len(parts.source.eval)} held out; {len(batches)} steps"
    )
    if folder.checkpoint is not None:
        display.say(f"resuming after step {steps_done}: {folder.checkpoint.state_path}")
    display.say(f"files: {folder.path}")
    run_log.forget_from(steps_done + 1 if steps_done else 0)
    journal.started(resumed_from=steps_done)
    finished = FinishedRollouts(folder.path, journal)
    async with (
        judging(config) as judge,
        watching(parts.backend.check, subconfig(config, WatchdogSettings)) as watchdog,
    ):
        trainer = Terminus2RLTrainer(
            backend=parts.backend,
            watchdog=watchdog,
            learner=Learner(parts.backend.training_client, learner_settings(config, num_steps=len(batches))),
            source=parts.source,
            rollouts=Rollouts(parts.source, subconfig(config, RolloutSettings), finished, judge),
            finished=finished,
            run_log=run_log,
            display=display,
            settings=loop_settings(config, folder.path),
            steps_done=steps_done,
        )
        await trainer.train(batches)


@asynccontextmanager
async def judging(config: TrainerConfig) -> AsyncIterator[Judge | None]:
    """The judge of training episodes, where the run has one."""
    if not config.taxonomy_feedback:
        yield None
        return
    assert config.judge_base_url is not None and config.judge_model is not None
    endpoint = open_endpoint(config.judge_base_url, config.judge_model)
    try:
        yield Judge(endpoint, subconfig(config, JudgeSettings))
    finally:
        await endpoint.close()


def backend_settings(config: TrainerConfig, folder: RunFolder) -> BackendSettings:
    """The endpoint, and where the weights come from: the run's own last checkpoint where it has one."""
    if folder.checkpoint is None:
        return subconfig(config, BackendSettings)
    return subconfig(config, BackendSettings, load_checkpoint_path=folder.checkpoint.state_path)


@contextmanager
def journalled(log_path: Path) -> Iterator[Journal]:
    """The run's journal, which hears how the process ends."""
    journal = Journal(log_path)
    try:
        yield journal
    except BaseException as error:
        with suppress(StorageError):  # the disk may be what ended it
            journal.ended(end_state(error), str(error))
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
        case _:
            return RunState.FAILED


def learner_settings(config: TrainerConfig, *, num_steps: int) -> LearnerSettings:
    clip_bounds = loss_settings(config.loss_fn_config, loss_fn=config.loss_fn)
    return subconfig(config, LearnerSettings, loss_fn_config=clip_bounds, num_steps=num_steps)


def loop_settings(config: TrainerConfig, log_path: Path) -> LoopSettings:
    """Derived defaults live here: evaluation follows training unless told otherwise."""
    return subconfig(
        config,
        LoopSettings,
        log_path=log_path,
        export_path=(Path(config.export_path).expanduser() if config.export_path else log_path)
        if config.dump_eval_results
        else None,
        evaluation=EvaluationSettings(
            group_size=config.eval_group_size or config.group_size,
            temperature=config.temperature if config.eval_temperature is None else config.eval_temperature,
        ),
        groups=subconfig(
            config,
            GroupSettings,
            filters=subconfig(config, FilterSettings),
            curriculum=subconfig(config, CurriculumSettings),
            dynamic_sampling=subconfig(config, DynamicSamplingSettings),
            pipeline=subconfig(config, PipelineSettings),
            faults=subconfig(config, FaultSettings),
        ),
        preparation=PreparationSettings(
            advantages=subconfig(config, AdvantageSettings),
            kl=subconfig(config, KlSettings),
            importance=subconfig(config, ImportanceSettings),
            max_staleness=config.max_staleness,
        ),
    )
