"""Harbor task folders as a task source: which tasks there are, where their trials run, and a fresh trial of each.

Harbor takes seconds to import, so this module imports it only when a `HarborTasks` is made, and only after telling it to be quiet.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.envs.base import Trial
from src.envs.cleanup import clean
from src.envs.harbor.grading_choice import take_option, tell_choices
from src.envs.harbor.trial_folder import JobsQuota
from src.envs.options import EnvironmentSettings, HarborSettings
from src.envs.sandbox.bubblewrap import why_no_sandbox
from src.envs.sandbox.docker import ADDRESS_POOLS, why_no_engine
from src.envs.sandbox.run_directory import run_directory
from src.envs.splits import hold_out, require_unique_ids
from src.policy.chat import Chat

logger = logging.getLogger(__name__)


def new_run_label() -> str:
    """A label for everything a run leaves outside its own folder: sandbox directories, containers, networks."""
    return f"run-{os.getpid()}-{secrets.token_hex(4)}"


def open_harbor(config: EnvironmentSettings, chat: Chat) -> HarborTasks:
    """env=harbor. ConfigError for a folder that holds no valid tasks."""
    return HarborTasks(config, chat)


class HarborTasks:
    """The tasks of a folder, checked, split and ready to be tried. Implements `TaskSource`."""

    def __init__(self, settings: HarborSettings, chat: Chat) -> None:
        """Raises ConfigError, one line per broken folder, before anything is started."""
        assert settings.tasks_dir is not None
        eval_tasks = settings.eval_tasks or ()
        load_harbor()
        from src.envs.harbor import task_folders

        self.settings = settings
        self.run_label = new_run_label()
        self.environment_type = resolve_environment_type(settings.environment_type)
        self._chat = chat
        self._quota = JobsQuota(limit=int(settings.jobs_quota_gb * 2**30))
        given, option = take_option(settings.environment_options)
        self._environment = trial_environment(
            self.environment_type, given, run_label=self.run_label, n_parallel=settings.n_parallel_envs
        )
        check = task_folders.check_for(self.environment_type, self._environment)
        tasks = task_folders.load_tasks(Path(settings.tasks_dir).expanduser(), check=check)
        folders = [Path(name).expanduser() for name in eval_tasks if Path(name).expanduser().is_dir()]
        patterns = [name for name in eval_tasks if not Path(name).expanduser().is_dir()]
        fraction = 0.0 if eval_tasks else settings.eval_split
        train, held_out = hold_out(tasks, patterns=patterns, fraction=fraction, seed=settings.seed)
        taken = {task.id for task in tasks}
        for folder in folders:
            found = task_folders.load_tasks(folder, check=check)
            held_out += [
                replace(task, id=f"{folder.name}/{task.id}") if task.id in taken else task for task in found
            ]
        outside = {task.path for task in held_out}  # a folder of held-out tasks may lie within tasks_dir
        self.train: Sequence[Task] = [task for task in train if task.path not in outside]
        self.eval: Sequence[Task] = held_out
        require_unique_ids([*self.train, *self.eval])
        if not self.train:
            raise ConfigError("all tasks are held out; nothing is left to train on: name fewer eval_tasks")
        self._refuse_long_tasks()
        self._grading = tell_choices([*self.train, *self.eval], option, self.environment_type)
        for line in clean().failed:
            logger.warning("a dead run's %s", line)

    def _refuse_long_tasks(self) -> None:
        from src.envs.harbor.agent import opening_prompt

        limit = self.settings.length_limits.context_limit
        for task in (*self.train, *self.eval):
            tokens = len(self._chat.render([{"role": "user", "content": opening_prompt(task.instruction)}]))
            if tokens >= limit:
                raise ConfigError(
                    f"{task.path}: the first prompt has {tokens} tokens or more, so context_limit={limit} leaves no answer; raise it"
                )

    def trial(self, task: Task, *, directory: Path, seed: int, temperature: float, member: int = 0) -> Trial:
        """A fresh trial of `task`; its files become `directory/<trial name>/`, which `harbor view` can open."""
        from src.envs.harbor.trial import HarborTrial

        return HarborTrial(
            task=task,
            settings=self.settings,
            chat=self._chat,
            environment=self._environment,
            quota=self._quota,
            grading=self._grading[task.path],
            directory=directory,
            seed=seed,
            temperature=temperature,
        )

    async def close(self) -> None:
        """Trials share nothing."""

    async def floor(self, task: Task) -> float | None:
        """A terminal that nobody touches solves no task worth the name."""
        return None

    def batch_ended(self, directory: Path) -> None:
        """Makes `directory` a Harbor job with totals."""
        from src.envs.harbor.job import write_job

        write_job(directory, n_parallel_envs=self.settings.n_parallel_envs)

    def text(self, token_ids: Sequence[int], clean: bool) -> str:
        return self._chat.tokenizer.decode(
            list(token_ids), skip_special_tokens=clean, clean_up_tokenization_spaces=False
        )


@cache
def load_harbor() -> None:
    """Import Harbor without downloads, telemetry or chatter, all of it at once: later it would stall the trials that run already."""
    os.environ.setdefault(
        "LITELLM_LOCAL_MODEL_COST_MAP", "True"
    )  # otherwise litellm fetches a price list at import
    os.environ.setdefault("HARBOR_TELEMETRY", "0")
    import src.envs.harbor.agent
    import src.envs.harbor.trial  # noqa: F401

    quiet = logging.getLogger("harbor")
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False  # every trial has its own trial.log
    logging.getLogger("LiteLLM").setLevel(logging.ERROR)


def resolve_environment_type(name: str) -> str:
    """`auto` becomes docker where an engine answers, else sandbox. ConfigError when the machine lacks what was asked for."""
    load_harbor()
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.environment_type import EnvironmentType

    if name == "auto":
        name = "sandbox" if why_no_engine() else "docker"
    if name == "sandbox":
        if reason := why_no_sandbox():
            raise ConfigError(
                f"environment_type=sandbox: {reason}; mend that, or use environment_type=docker"
            )
    elif name == "docker":
        if reason := why_no_engine():
            raise ConfigError(
                f"environment_type=docker: {reason}; start Docker, or use environment_type=sandbox"
            )
    else:
        known = sorted(kind.value for kind in EnvironmentType)
        if name not in known:
            raise ConfigError(f"environment_type={name} is none of auto, sandbox, {', '.join(known)}")
        try:
            EnvironmentFactory.run_preflight(EnvironmentType(name))
        except (SystemExit, Exception) as error:
            raise ConfigError(f"environment_type={name}: {' '.join(str(error).split())}") from error
    return name


def trial_environment(
    environment_type: str, given: Mapping[str, str], *, run_label: str, n_parallel: int
) -> dict[str, object]:
    """The fields of Harbor's EnvironmentConfig for every trial of a run. Opens the run's directory where trials need one."""
    options = environment_options(given)
    kwargs = options["kwargs"]
    assert isinstance(kwargs, dict)
    match environment_type:
        case "sandbox":
            run_directory(run_label)
            options["import_path"] = "src.envs.sandbox.environment:SandboxEnvironment"
            kwargs["run_label"] = run_label
        case "docker":
            run_directory(run_label)
            options["import_path"] = "src.envs.sandbox.containers:ContainerEnvironment"
            kwargs["run_label"] = run_label
            if n_parallel > ADDRESS_POOLS:
                logger.warning(
                    "n_parallel_envs=%d: Docker's default address pools hold about %d trials at once; "
                    "widen default-address-pools in daemon.json",
                    n_parallel,
                    ADDRESS_POOLS,
                )
        case cloud:
            options["type"] = cloud
    # With the default, /tmp, an agent's `rm -rf /tmp/*` ends its own terminal. Every user may write to /var/tmp, unlike /run.
    options["env"] = {"TMUX_TMPDIR": "/var/tmp"}
    return options


def environment_options(pairs: Mapping[str, str]) -> dict[str, object]:
    """`environment_kwargs` as fields of Harbor's EnvironmentConfig; what it does not know goes to the environment class itself.

    >>> environment_options({"override_cpus": "2", "memory_mb": "512", "network": "true"})
    {'kwargs': {'network': True}, 'override_cpus': 2, 'override_memory_mb': 512}
    """
    kwargs: dict[str, object] = {}
    options: dict[str, object] = {"kwargs": kwargs}
    for key, text in pairs.items():
        short = key.removeprefix("override_")
        if short in ("cpus", "memory_mb", "storage_mb", "gpus"):
            try:
                options[f"override_{short}"] = int(text)
            except ValueError:
                raise ConfigError(f"environment_kwargs {key} needs a whole number, not {text!r}") from None
        elif key in ("force_build", "delete"):
            options[key] = _plain(text) is True
        elif key in ("cpu_enforcement_policy", "memory_enforcement_policy"):
            options[key] = text
        else:
            kwargs[key] = _plain(text)
    return options


def _plain(text: str) -> str | int | float | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
