"""Wires one run together: check everything, then create the run's folder, then train."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import datetime
from pathlib import Path

import chz

from src.backend import Backend, BackendSettings, address, connect
from src.chat import Chat, load_chat
from src.config import TrainerConfig, loss_settings, pairs, run_name
from src.console import Display, outcome
from src.dynamic_sampling import DynamicSamplingSettings
from src.envs.base import TaskSource
from src.errors import ConfigError
from src.evaluation import EvaluationSettings
from src.examples import AdvantageSettings
from src.filters import FilterSettings
from src.importance import ImportanceSettings
from src.kl_penalty import KlSettings
from src.learner import Learner, LearnerSettings
from src.pipeline import ScheduleSettings, schedule
from src.preparation import PreparationSettings
from src.rollouts import Rollouts, RolloutSettings
from src.run_folder import RunFolder, find_run_folder
from src.terminus2_trainer import LoopSettings, Terminus2RLTrainer
from src.tracking import open_run_log, recorded

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What the outside world contributes to a run."""

    source: TaskSource
    backend: Backend


Open = Callable[[TrainerConfig, BackendSettings, Display], AbstractAsyncContextManager[Parts]]


@asynccontextmanager
async def open_parts(config: TrainerConfig, settings: BackendSettings, display: Display) -> AsyncIterator[Parts]:
    """The real ones: a Tinker endpoint and a folder of Harbor tasks."""
    display.say(f"server: {address(settings)}")
    async with connect(settings) as endpoint:
        chat = await asyncio.to_thread(load_chat, config.tokenizer or config.model_name)
        display.say(f"model: {config.model_name}, LoRA rank {config.lora_rank}, context {config.context_limit}")
        source = await asyncio.to_thread(open_task_source, config, chat)
        yield Parts(source=source, backend=await endpoint.open_training())


def open_task_source(config: TrainerConfig, chat: Chat) -> TaskSource:
    """ConfigError for a folder that holds no valid tasks."""
    from src.envs.harbor import HarborSettings, HarborTasks  # seconds to import

    settings = HarborSettings(
        model_name=config.model_name,
        environment_type=config.environment_type,
        environment_kwargs=pairs(config.environment_kwargs, option="environment_kwargs"),
        max_turns=config.max_turns,
        max_tokens=config.length_limits.max_generate_length,
        context_limit=config.context_limit,
        max_input_length=config.max_input_length,
        train_subagents=config.train_subagents,
        max_length_stops=config.max_length_stops,
        enable_summarize=config.enable_summarize,
        proactive_summarization_threshold=config.proactive_summarization_threshold,
        trial_timeout_s=config.trial_timeout_sec,
        n_parallel_envs=config.n_parallel_envs,
    )
    tasks_dir = Path(config.tasks_dir).expanduser()
    return HarborTasks(settings, chat, tasks_dir, eval_tasks=config.eval_tasks or (), eval_split=config.eval_split, seed=config.seed)


async def run(config: TrainerConfig, display: Display, *, open_parts: Open = open_parts) -> None:
    """The whole run. Raises a TrainerError for whatever the user can mend, and is cancelled to stop it."""
    started = time.monotonic()
    name = run_name(config, date=f"{datetime.now():%Y-%m-%d-%H-%M-%S}")
    folder = find_run_folder(config, name=name)
    settings = narrow(config, BackendSettings)
    if folder.checkpoint is not None:
        settings = dataclasses.replace(settings, load_checkpoint_path=folder.checkpoint.state_path)
    async with open_parts(config, settings, display) as parts:
        if not parts.source.train:
            raise ConfigError(f"tasks_dir {config.tasks_dir} leaves no task to train on; lower eval_split or shorten eval_tasks")
        folder.create(config)
        with logging_to_file(folder.path / "logs.log"):
            await train(config, parts, folder, display, name=name)
    metrics_file = folder.path / "metrics.jsonl"
    success = recorded(metrics_file, "test/env/all/success")
    steps = max(recorded(metrics_file, "progress/batch"), default=0)
    after = success[max(success)] if success else None
    for line in outcome(success.get(0), after, steps=steps, wall_s=time.monotonic() - started, log_path=folder.path):
        display.say(line)


async def train(config: TrainerConfig, parts: Parts, folder: RunFolder, display: Display, *, name: str) -> None:
    """Every step that the folder's last checkpoint has not done yet."""
    batches = schedule(parts.source.train, narrow(config, ScheduleSettings))
    steps_done = folder.checkpoint.batch if folder.checkpoint else 0
    display.say(f"tasks: {len(parts.source.train)} to train on, {len(parts.source.eval)} held out; {len(batches)} steps")
    if folder.checkpoint is not None:
        display.say(f"resuming after step {steps_done}: {folder.checkpoint.state_path}")
    display.say(f"files: {folder.path}")
    repeat_from = steps_done + 1 if steps_done else 0
    with open_run_log(folder.path, project=config.wandb_project, name=name, config=chz.asdict(config), repeat_from=repeat_from) as run_log:
        trainer = Terminus2RLTrainer(
            backend=parts.backend,
            learner=Learner(parts.backend.training_client, learner_settings(config, num_steps=len(batches))),
            source=parts.source,
            rollouts=Rollouts(parts.source, narrow(config, RolloutSettings)),
            run_log=run_log,
            display=display,
            settings=loop_settings(config, folder.path),
            steps_done=steps_done,
        )
        await trainer.train(batches)


def narrow[View](config: TrainerConfig, view: type[View]) -> View:
    """A component's view of the config: the dataclass's fields, by name."""
    assert dataclasses.is_dataclass(view)
    return view(**{field.name: getattr(config, field.name) for field in dataclasses.fields(view)})


def learner_settings(config: TrainerConfig, *, num_steps: int) -> LearnerSettings:
    return LearnerSettings(
        loss_fn=config.loss_fn,
        loss_fn_config=loss_settings(config.loss_fn_config, loss_fn=config.loss_fn),
        learning_rate=config.learning_rate,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        weight_decay=config.weight_decay,
        grad_clip_norm=config.grad_clip_norm,
        lr_schedule=config.lr_schedule,
        lr_warmup_steps=config.lr_warmup_steps,
        num_steps=num_steps,
    )


def loop_settings(config: TrainerConfig, log_path: Path) -> LoopSettings:
    """Derived defaults live here: evaluation follows training unless told otherwise."""
    return LoopSettings(
        log_path=log_path,
        group_size=config.group_size,
        temperature=config.temperature,
        save_every=config.save_every,
        eval_every=config.eval_every,
        evaluation=EvaluationSettings(
            group_size=config.eval_group_size or config.group_size,
            temperature=config.temperature if config.eval_temperature is None else config.eval_temperature,
        ),
        filters=narrow(config, FilterSettings),
        dynamic_sampling=narrow(config, DynamicSamplingSettings),
        preparation=PreparationSettings(
            advantages=narrow(config, AdvantageSettings), kl=narrow(config, KlSettings), importance=narrow(config, ImportanceSettings)
        ),
    )


@contextmanager
def logging_to_file(path: Path) -> Iterator[None]:
    """Everything at INFO goes to logs.log; the terminal belongs to the display."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
