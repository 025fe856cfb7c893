"""Run an evaluation: connect, run the tasks with the rollout code of training, write the results and
compare.

The directory of an evaluation has results.json, rollouts/, dumped_evals/ and, with env=harbor, jobs/ for
`harbor view`. With `compare_with`, it also has comparison.json and, if the other policy is evaluated too, the
directory compared/ of that evaluation. An interrupted evaluation is resumed if it is started again with the
same directory and options; the options in MAY_DIFFER may differ.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import chz

from src.config import tasks_name
from src.core.errors import ConfigError
from src.core.log_setup import logging_to_file
from src.core.trajectory import Task
from src.core.wait_notice import MAY_COMPILE, WaitNotice
from src.envs.base import TaskSource, close_quietly
from src.envs.options import EnvironmentOptions
from src.envs.registry import check_environment, open_task_source
from src.envs.splits import chosen_tasks
from src.evaluate.config import RESULTS_FILE, CompareConfig, EvaluateConfig, is_finished
from src.evaluate.contamination import (
    HASHES_FILE,
    content_hash,
    read_hashes,
    require_held_out,
    require_same_content,
    task_hashes,
    write_contents,
)
from src.evaluate.evaluation import evaluate
from src.evaluate.results import (
    compare,
    read_results,
    report,
    require_enough,
    results_of,
    write_json,
)
from src.policy.backend import connect
from src.policy.chat import load_chat
from src.policy.openai_client import EndpointPolicy, connect_endpoint, endpoint_chat
from src.policy.sampling_policy import Policy
from src.records.checkpoints import sampler_path
from src.records.dumps import dump, dump_evaluation
from src.records.journal import Journal
from src.records.private_directory import make_private, resolved
from src.records.rollout_log import record_groups
from src.records.rollout_store import FinishedRollouts
from src.records.run_directory import CONFIG_FILE, EVALUATED, has_files, lock_run_dir, read_config
from src.rollouts.group_rollout import RolloutPlan, Rollouts
from src.rollouts.run_events import RunEvents
from src.rollouts.watchdog import Watchdog, WatchedPolicy, watching


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyAndTasks:
    """The policy that is evaluated and the source of the tasks."""

    policy: Policy
    source: TaskSource
    watchdog: Watchdog | None = None  # stops the evaluation if health checks fail; None: no health checks


# `environment_of` takes these options from the config of a run. Together with the other options of the
# environment, they determine which tasks the run holds out.
SPLIT_OPTIONS = ("train_data", "eval_split", "eval_tasks", "seed")
# Options that may differ in a resumed evaluation. A saved file may contain `results`, which is not an option.
MAY_DIFFER = {
    *("results", "log_path", "logs_dir", "compare_with", "n_parallel_envs", "train_data", "checkpoint"),
    *("skyrl_tx_url", "tau2_home"),
}
OpenPolicyAndTasks = Callable[[EvaluateConfig, str | None], AbstractAsyncContextManager[PolicyAndTasks]]


@asynccontextmanager
async def open_policy_and_tasks(
    config: EvaluateConfig, checkpoint: str | None
) -> AsyncGenerator[PolicyAndTasks]:
    """Connect to the Tinker or OpenAI-compatible endpoint and load the tasks of the environment."""
    environment = environment_of(config)
    await asyncio.to_thread(check_environment, environment)
    if config.base_url is not None:
        connecting = connect_endpoint(
            config.base_url, config.model_name, heartbeat_timeout_s=config.heartbeat_timeout_s
        )
        async with connecting as endpoint, watching(_unchecked, config) as watchdog:
            checking = endpoint.check(
                temperature=config.temperature,
                top_p=config.top_p,
                seed=config.seed,
                max_tokens=config.length_limits.max_generate_length,
            )
            await watchdog.answer(checking, f"checking {config.model_name}")
            source = await asyncio.to_thread(open_task_source, environment, endpoint_chat())
            yield PolicyAndTasks(policy=WatchedPolicy(EndpointPolicy(endpoint), watchdog), source=source)
        return
    async with connect(config) as endpoint, watching(endpoint.check, config) as watchdog:
        policy = WatchedPolicy(
            await watchdog.answer(endpoint.open_policy(checkpoint), "opening the policy"), watchdog
        )
        name = config.tokenizer or config.model_name
        chat = await asyncio.to_thread(load_chat, name, enable_thinking=config.enable_thinking)
        source = await asyncio.to_thread(open_task_source, environment, chat)
        yield PolicyAndTasks(policy=policy, source=source, watchdog=watchdog)


async def run(
    config: EvaluateConfig,
    events: RunEvents,
    *,
    open_policy_and_tasks: OpenPolicyAndTasks = open_policy_and_tasks,
) -> None:
    """Run the evaluation that `config` describes, and the comparison if one is configured."""
    directory = evaluation_directory(config)
    second = None if config.compare_with is None else finished_or_policy(config.compare_with)
    second_path = None  # the checkpoint to compare with; None: the base model, or a finished evaluation
    if isinstance(second, str) and second != "base":
        second_path = sampler_path(second)  # may raise ConfigError, so it is called before any trial is run
    first = await run_one(
        config,
        sampler_path(config.checkpoint),
        directory,
        events,
        open_policy_and_tasks=open_policy_and_tasks,
    )
    if second is None:
        return
    if isinstance(second, str):
        second = await run_one(
            config, second_path, directory / "compared", events, open_policy_and_tasks=open_policy_and_tasks
        )
    compare(second, first, events.say, write_to=directory / "comparison.json")


async def compare_finished(config: CompareConfig, events: RunEvents) -> None:
    """Compare the results of two finished evaluations. The difference is `results` minus `compare_with`."""
    results = read_results(Path(config.results))
    compare(read_results(Path(config.compare_with)), results, events.say)


async def run_one(
    config: EvaluateConfig,
    checkpoint: str | None,
    directory: Path,
    events: RunEvents,
    *,
    open_policy_and_tasks: OpenPolicyAndTasks,
) -> Mapping[str, Any]:
    """Run one evaluation, write its directory and return the content of results.json.

    Graded trials in the directory are not repeated. Ungraded trials are repeated.
    `checkpoint` is the path of a sampler checkpoint; None: the base model, or the model at `base_url`.
    """
    name = checkpoint or (
        f"{config.model_name} at {config.base_url}" if config.base_url else config.model_name
    )
    async with open_policy_and_tasks(config, checkpoint) as opened, AsyncExitStack() as stack:
        stack.push_async_callback(close_quietly, opened.source)
        tasks = chosen_tasks(evaluated_tasks(opened.source, config), config.tasks)
        hashes = await asyncio.to_thread(task_hashes, tasks)
        if (trained := training_hashes(config)) is not None:
            require_held_out(hashes, trained, chosen_by="tasks")
        stack.enter_context(lock_run_dir(directory))
        prepare_directory(directory, name, config)
        contents = {task.task_id: task.trial_content for task in hashes}
        require_same_content(directory, contents)
        write_contents(directory, contents)
        events.say(f"evaluating {name}, files: {directory}")
        with logging_to_file(directory / "logs.log"):
            journal = Journal(directory)
            finished = FinishedRollouts(directory, journal)
            rollouts = Rollouts(opened.source, config, finished)
            notice, progress = WaitNotice(events.say), journal.progress
            stack.callback(notice.stop)
            notice.start(
                "the first trials",
                explanation=None if config.base_url else MAY_COMPILE,
                is_over=lambda: journal.progress > progress,
            )
            jobs = finished.job_directory("eval", 0)
            plan = RolloutPlan(
                step=0,
                purpose="eval",
                group_size=config.n_samples,
                temperature=config.temperature,
                directory=jobs,
            )
            evaluating = evaluate(
                rollouts,
                tasks,
                opened.policy,
                plan,
                top_p=config.top_p,
                title="evaluation",
                events=events,
            )
            result = await (
                opened.watchdog.guard(evaluating, "evaluating") if opened.watchdog else evaluating
            )
            await asyncio.to_thread(opened.source.batch_ended, jobs)
            record_groups(directory / "rollouts" / "eval_000000.jsonl", result.groups, {})
            await dump(
                lambda: dump_evaluation(
                    directory, 0, result.groups, result.metrics, opened.source.text, env_class=config.env
                ),
                upload_to=None,
                say=events.say,
            )
    results = await asyncio.to_thread(results_of, name, config, result)
    write_json(directory / RESULTS_FILE, results)
    report(result, events.say)
    require_enough(result, config, directory)
    return results


def environment_of(config: EvaluateConfig) -> EnvironmentOptions:
    """Return the options of the environment. With `held_out_of`, the tasks are split as in the run that it
    names.
    """
    if config.held_out_of is None:
        return config.environment
    saved = read_config(Path(config.held_out_of).expanduser())
    split = {name: saved[name] for name in SPLIT_OPTIONS if name in saved}
    return chz.replace(config.environment, **split)


def evaluated_tasks(source: TaskSource, config: EvaluateConfig) -> list[Task]:
    """Return all tasks or, with `held_out_of`, the held-out tasks of the run that it names.

    Raises ConfigError if this run holds out no tasks.
    """
    if config.held_out_of is None:
        return [*source.train, *source.eval]
    if not source.eval:
        raise ConfigError(
            f"{config.held_out_of} holds out no tasks; add held_out_of=none and the options of other tasks, "
            "such as tasks_dir=, data= or env="
        )
    return list(source.eval)


async def _unchecked() -> None:
    """Do nothing: OpenAI's API has no cheap route for health checks, so only the timeout of each request
    applies."""


def finished_or_policy(text: str) -> str | Mapping[str, Any]:
    """Return the results of the finished evaluation at the path `text`, or `text` if it names a policy."""
    path = Path(text).expanduser()
    return read_results(path) if is_finished(path) else text


def training_hashes(config: EvaluateConfig) -> Mapping[str, str] | None:
    """Return the content hashes of training tasks, which must not be evaluated; None if they are unknown."""
    if config.train_data is None:
        if not config.checkpoint:
            return None
        directory = Path(config.checkpoint).expanduser()
        return read_hashes(directory) if (directory / HASHES_FILE).is_file() else None
    path = Path(config.train_data).expanduser()
    if (path / HASHES_FILE).is_file() or not path.is_dir() or (path / CONFIG_FILE).is_file():
        return read_hashes(path)
    from src.envs.harbor.task_directories import load_tasks  # imports Harbor

    tasks = load_tasks(path, check=lambda directory, config: []).tasks
    return {task.id: content_hash(task) for task in tasks}


def evaluation_directory(config: EvaluateConfig) -> Path:
    """Return `log_path`, or a new directory in `logs_dir`."""
    if config.log_path:
        return resolved(Path(config.log_path))
    model = str(config.checkpoint or config.model_name).replace("tinker://", "").replace("/", "-").strip("-")
    tasks = tasks_name(config)
    return resolved(Path(config.logs_dir) / f"eval-{tasks}-{model}-{datetime.now():%Y-%m-%d-%H-%M-%S}")


def prepare_directory(directory: Path, name: str, config: EvaluateConfig) -> None:
    """Create the directory, or accept the directory of the same evaluation. Raises ConfigError for the
    directory of another evaluation, and for a directory that has files but no evaluation."""
    options = {EVALUATED: name, **chz.asdict(config)}
    identity = {name: value for name, value in options.items() if name not in MAY_DIFFER}
    identity = json.loads(json.dumps(identity))
    if (directory / CONFIG_FILE).is_file():
        saved = {name: value for name, value in read_config(directory).items() if name not in MAY_DIFFER}
        if identity | saved != identity:  # an option that the saved file does not contain is not compared
            raise ConfigError(f"log_path {directory} belongs to another evaluation; give another log_path")
    elif has_files(directory):
        raise ConfigError(f"log_path {directory} is not empty and has no evaluation; give another log_path")
    make_private(directory)
    write_json(directory / CONFIG_FILE, identity)
