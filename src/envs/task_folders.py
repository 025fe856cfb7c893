"""Harbor task folders: find them, and check them before any work.

<task>/task.toml  instruction.md  environment/Dockerfile  tests/test.sh  [solution/solve.sh]
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from harbor.environments.factory import EnvironmentFactory
from harbor.models.task.config import NetworkMode, TaskConfig, TaskOS
from harbor.models.task.paths import TaskPaths
from harbor.models.task.task import Task as HarborTask
from harbor.models.task.verifier_mode import resolve_verifier_environment_definition
from harbor.models.trial.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths
from pydantic import ValidationError

from src.envs.dockerfile import USE_DOCKER
from src.envs.sandbox import ROOT_USERS, read_recipe
from src.errors import ConfigError
from src.trajectory import Task

Check = Callable[[Path, TaskConfig], None]  # raises ConfigError for a task that the environment cannot run


def load_tasks(directory: Path, *, check: Check) -> list[Task]:
    """All tasks of a folder, by name. ConfigError with one line per reason why some cannot be played."""
    directory = directory.expanduser().resolve()
    if not directory.is_dir():
        raise ConfigError(f"tasks_dir {directory} is not a folder; give a folder of task folders")
    if (directory / "task.toml").is_file():
        folders = [directory]
    else:
        folders = sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith((".", "_")))
    if not folders:
        raise ConfigError(f"tasks_dir {directory} holds no task folders")
    tasks: list[Task] = []
    refused: dict[str, list[Path]] = {}  # by reason
    for folder in folders:
        try:
            tasks.append(load_task(folder, check=check))
        except ConfigError as error:
            refused.setdefault(str(error).removeprefix(str(folder)), []).append(folder)
    if refused:
        lines = [f"{first}{reason}" + (f" (and {len(others)} more)" if others else "") for reason, (first, *others) in refused.items()]
        if (count := len(folders) - len(tasks)) > 1:
            lines.append(f"{count} of {len(folders)} task folders cannot be played; mend or remove them")
        raise ConfigError("\n".join(lines))
    return tasks


def load_task(folder: Path, *, check: Check) -> Task:
    """One task; ConfigError in one line when it is not whole, or when `check` refuses it."""
    for name in ("task.toml", "instruction.md"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: no {name}; is this a Harbor task folder?")
    if not (folder / "tests" / "test.sh").is_file():
        raise ConfigError(f"{folder}: no tests/test.sh; a task without a verifier cannot be graded")
    try:
        task = HarborTask(folder)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{folder}/task.toml: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{folder}/task.toml: {where + ': ' if where else ''}{first['msg']}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{folder}: {' '.join(str(error).split())}") from error
    if task.has_steps:
        raise ConfigError(f"{folder}: tasks with [[steps]] are not supported; use single-step tasks")
    if not task.instruction.strip():
        raise ConfigError(f"{folder}: instruction.md is empty")
    check(folder, task.config)
    return Task(id=folder.name, path=folder, instruction=task.instruction)


def check_for(environment_type: str, options: Mapping[str, object]) -> Check:
    """What a task must meet to run in environments of that type, made with those options."""
    return check_for_sandbox if environment_type == "sandbox" else partial(check_for_containers, options=options)


def check_for_sandbox(folder: Path, config: TaskConfig) -> None:
    """ConfigError when the sandbox cannot run this task as it is meant."""
    environment = config.environment
    if environment.os != TaskOS.LINUX:
        raise ConfigError(f"{folder}: the sandbox runs Linux only, not {environment.os.value}; {USE_DOCKER}")
    if environment.gpus or environment.tpu is not None:
        raise ConfigError(f"{folder}: the sandbox has no GPU or TPU; {USE_DOCKER}")
    for section, user in (("agent", config.agent.user), ("verifier", config.verifier.user)):
        if user not in ROOT_USERS:
            raise ConfigError(f"{folder}: [{section}] user = {user!r}, but the sandbox has only root; {USE_DOCKER}")
    modes = (environment.network_mode, config.agent.network_mode, config.verifier.network_mode)
    if NetworkMode.ALLOWLIST in modes:
        raise ConfigError(f"{folder}: the sandbox's network is off or public, it has no allow list; {USE_DOCKER}")
    for section, mode in (("agent", config.agent.network_mode), ("verifier", config.verifier.network_mode)):
        if mode not in (None, environment.network_mode):
            raise ConfigError(f"{folder}: the sandbox cannot change its network for the {section} phase; {USE_DOCKER}")
    read_recipe(folder / "environment", environment)
    if definition := resolve_verifier_environment_definition(config, TaskPaths(folder)):
        read_recipe(definition.directory, definition.config)


def check_for_containers(folder: Path, config: TaskConfig, *, options: Mapping[str, object]) -> None:
    """ConfigError when Harbor's own environment refuses this task: nothing to build from, a network or a device it cannot provide."""
    environment = folder / "environment"
    if config.environment.docker_image is None and not any(
        (environment / name).is_file() for name in ("Dockerfile", "docker-compose.yaml")
    ):
        raise ConfigError(f"{environment}: no Dockerfile and no [environment].docker_image; add one of them")
    try:
        EnvironmentFactory.create_environment_from_config(
            config=EnvironmentConfig.model_validate(dict(options)),
            environment_dir=environment,
            environment_name=folder.name,
            session_id="check",
            trial_paths=TrialPaths(trial_dir=folder / "never-made"),
            task_env_config=config.environment.model_copy(deep=True),
            network_policy=config.environment.resolve_baseline(),
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"{folder}: {' '.join(str(error).split())}; environment_type=sandbox may do") from error
