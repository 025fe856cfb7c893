"""Load Harbor task directories and check them before a run starts.

A task directory contains task.toml, instruction.md, tests/test.sh and, unless task.toml names an image,
environment/Dockerfile or environment/docker-compose.yaml. solution/solve.sh is optional. tests/test.sh is not
required if a separate verifier environment has an image of its own, which then contains the tests.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harbor.environments.factory import EnvironmentFactory
from harbor.models.task.config import NetworkMode, TaskConfig, TaskOS
from harbor.models.task.paths import TaskPaths
from harbor.models.task.task import Task as HarborTask
from harbor.models.task.verifier_mode import resolve_verifier_environment_definition
from harbor.models.trial.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths
from harbor.utils.env import get_required_host_vars
from pydantic import ValidationError

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.envs.base import DEFAULT_DEADLINE_S
from src.envs.harbor.task_keys import ignored_keys
from src.envs.options import HarborOptions, require_task_directory
from src.envs.sandbox.dockerfile import USE_DOCKER, USE_SANDBOX, is_installed
from src.envs.sandbox.environment import ROOT_USERS
from src.envs.sandbox.network import why_no_network
from src.envs.sandbox.shell_commands import apt_packages, commands, needs_network
from src.envs.sandbox.task_requirements import (
    NetworkAccess,
    image_warning,
    network_access,
    read_build_plan,
)

# A check of one task. It raises ConfigError if the environment cannot run the task. It returns warnings if
# the task can run, but probably not as its author intended.
Check = Callable[[Path, TaskConfig], list[str]]
USE_HARBOR = "run the task with `harbor run`"
OLD_FORMAT = "task.yaml"  # the file of a task of Terminal-Bench 1
SANDBOX_ARGUMENTS = ("run_label", "network")
"""The arguments of `SandboxEnvironment` besides those of Harbor's environments."""
NOT_FOR_SANDBOX = {  # fields of Harbor's EnvironmentConfig that the sandbox cannot honour
    *("override_gpus", "override_tpu", "extra_allowed_hosts"),
    *("cpu_enforcement_policy", "memory_enforcement_policy"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedTasks:
    """The tasks of a directory, in the order of their names, and one line for each warning about them."""

    tasks: list[Task]
    configs: dict[Path, TaskConfig]  # directory of a task -> its task.toml
    warnings: list[str]


def load_tasks(directory: Path, *, check: Check) -> LoadedTasks:
    """Load and check the tasks of a directory. A directory with a task.toml is one task.

    Subdirectories whose names begin with a dot or an underscore are skipped. Raises ConfigError with one line
    for each reason why a task cannot be run.
    """
    directory = require_task_directory(directory)
    if any((directory / name).is_file() for name in ("task.toml", OLD_FORMAT)):
        task_dirs = [directory]
    else:
        task_dirs = sorted(
            path for path in directory.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))
        )
    if not task_dirs:
        raise ConfigError(f"{directory} contains no task directories; give a directory of task directories")
    tasks: list[Task] = []
    configs: dict[Path, TaskConfig] = {}
    refused: dict[str, list[Path]] = {}  # reason -> task directories
    warnings: dict[str, list[str]] = {}  # warning -> task ids
    for task_dir in task_dirs:
        try:
            task, task_warnings = load_task(task_dir, check=check)
            tasks.append(Task(id=task_dir.name, path=task_dir, instruction=task.instruction))
            configs[task_dir] = task.config
            for warning in task_warnings:
                warnings.setdefault(warning, []).append(task_dir.name)
        except ConfigError as error:
            refused.setdefault(str(error).removeprefix(str(task_dir)), []).append(task_dir)
    if refused:
        lines = [
            f"{first}{reason}" + (f" (and {len(others)} more)" if others else "")
            for reason, (first, *others) in refused.items()
        ]
        if (count := len(task_dirs) - len(tasks)) > 1:
            lines.append(f"{count} of {len(task_dirs)} task directories cannot be run; fix or remove them")
        raise ConfigError("\n".join(lines))
    lines = [
        f"{warning} ({len(names)} of {len(tasks)} tasks: {_listed(names)})"
        for warning, names in warnings.items()
    ]
    return LoadedTasks(tasks=tasks, configs=configs, warnings=lines)


def load_task(directory: Path, *, check: Check) -> tuple[HarborTask, list[str]]:
    """Return a task and the warnings about it. Raises ConfigError if the task is invalid or refused."""
    if not (directory / "task.toml").is_file():
        if (directory / OLD_FORMAT).is_file():
            raise ConfigError(
                f"{directory}: a task in the format of Terminal-Bench 1; convert it with "
                "`.venv/bin/harbor task migrate --input DIRECTORY --output NEW_DIRECTORY`"
            )
        raise ConfigError(f"{directory}: no task.toml; is this a Harbor task directory?")
    values = _supported_settings(directory)
    if (directory / "trajectory.json").is_file():
        raise ConfigError(
            f"{directory}/trajectory.json: Terminus-2 cannot begin with an earlier trajectory; "
            f"{USE_HARBOR} and an agent that can"
        )
    if not (directory / "instruction.md").is_file():
        raise ConfigError(f"{directory}: no instruction.md; is this a Harbor task directory?")
    try:
        task = HarborTask(directory)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{directory}/task.toml: {where + ': ' if where else ''}{first['msg']}") from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, FileNotFoundError) and not (directory / "tests" / "test.sh").is_file():
            reason = "no tests/test.sh; a task without a verifier cannot be graded"
        raise ConfigError(f"{directory}: {reason}") from error
    if not task.instruction.strip():
        raise ConfigError(f"{directory}: instruction.md is empty")
    _require_host_variables(directory, task.config)
    _refuse_windows_shebang(directory)
    return task, [*ignored_keys(values, task.config), *check(directory, task.config)]


def _supported_settings(directory: Path) -> dict[str, object]:
    """Return the content of task.toml. Refuse tasks with [[steps]], Windows tasks, and MCP servers with HTTP
    headers, which Terminus-2 does not forward. `load_task` calls this function before it checks for missing
    files, because tasks with [[steps]] and Windows tasks have other files."""
    try:
        config = tomllib.loads((directory / "task.toml").read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{directory}/task.toml: {error}") from error
    if config.get("steps"):
        raise ConfigError(
            f"{directory}: a task with [[steps]] cannot be trained on; "
            f"make each step a task of its own, or {USE_HARBOR}"
        )
    environment = config.get("environment")
    if not isinstance(environment, dict):
        return config
    if str(environment.get("os")).lower() == TaskOS.WINDOWS.value:
        raise ConfigError(
            f"{directory}: [environment].os = windows, but trials run on Linux only; "
            f"{USE_HARBOR} on a Windows host"
        )
    servers = environment.get("mcp_servers")
    for server in servers if isinstance(servers, list) else ():
        if isinstance(server, dict) and server.get("headers"):
            raise ConfigError(
                f"{directory}/task.toml: the MCP server {server.get('name')!r} has headers, which Terminus-2 "
                f"does not send; remove them, or {USE_HARBOR} and an agent that sends them"
            )
    return config


def _require_host_variables(directory: Path, config: TaskConfig) -> None:
    """Raise ConfigError if `${NAME}` in a section for environment variables has no value on this machine."""
    sections = {"environment.env": config.environment.env, "verifier.env": config.verifier.env}
    if config.verifier.environment is not None:
        sections["verifier.environment.env"] = config.verifier.environment.env
    for section, variables in sections.items():
        for name, default in get_required_host_vars(variables):
            if default is None and name not in os.environ:
                raise ConfigError(
                    f"{directory}/task.toml: [{section}] needs the environment variable {name}, which is not "
                    "set; export it before the run"
                )


def _refuse_windows_shebang(directory: Path) -> None:
    """Raise ConfigError if the first line of tests/test.sh names an interpreter whose name ends in a carriage
    return. No such interpreter exists, so the verifier would write no reward. tests/Dockerfile can convert
    the file."""
    script = directory / "tests" / "test.sh"
    if (directory / "tests" / "Dockerfile").is_file() or not script.is_file():
        return
    if re.match(rb"#![^\n]*\r\n", script.read_bytes()):
        raise ConfigError(
            f"{script}: the lines end as on Windows, so Linux cannot run the file; convert it, for example "
            "with `sed -i 's/\\r$//'`"
        )


def check_for(environment_type: str, options: Mapping[str, object]) -> Check:
    """Return the check for environments of a type. `options` are fields of Harbor's EnvironmentConfig.

    Raises ConfigError if the type is sandbox and `environment_kwargs` has a name that the sandbox does not
    have. For all other types, Harbor checks these names when `check_for_containers` creates an environment.
    """
    kwargs = options.get("kwargs")
    unknown = kwargs.keys() - set(SANDBOX_ARGUMENTS) if isinstance(kwargs, Mapping) else set[str]()
    unknown |= options.keys() & NOT_FOR_SANDBOX
    if environment_type == "sandbox" and unknown:
        raise ConfigError(
            f"environment_kwargs: environment_type=sandbox has no option {min(unknown)}; its options are "
            "network, memory_mb, storage_mb, grading and keep_processes"
        )
    return partial(
        check_for_sandbox if environment_type == "sandbox" else check_for_containers, options=options
    )


def check_for_sandbox(directory: Path, config: TaskConfig, *, options: Mapping[str, object]) -> list[str]:
    """Raise ConfigError if the sandbox cannot run the task. Return warnings if the task or its verifier runs
    without the network that it probably needs, or without the programs of its image."""
    environment = config.environment
    if environment.gpus or environment.tpu is not None:
        raise ConfigError(f"{directory}: the sandbox has no GPU or TPU; {USE_DOCKER}")
    for section, user in (("agent", config.agent.user), ("verifier", config.verifier.user)):
        if user not in ROOT_USERS:
            raise ConfigError(
                f"{directory}: [{section}] user = {user!r}, but the sandbox has only root; {USE_DOCKER}"
            )
    modes = (environment.network_mode, config.agent.network_mode, config.verifier.network_mode)
    if NetworkMode.ALLOWLIST in modes:
        raise ConfigError(
            f"{directory}: the sandbox has a public network or none, but no allow list; {USE_DOCKER}"
        )
    for section, mode in (("agent", config.agent.network_mode), ("verifier", config.verifier.network_mode)):
        if mode not in (None, environment.network_mode):
            raise ConfigError(
                f"{directory}: the sandbox cannot change its network for the {section} phase; {USE_DOCKER}"
            )
    plans = [read_build_plan(directory / "environment", environment)]
    verifier_environment = environment
    if definition := resolve_verifier_environment_definition(config, TaskPaths(directory)):
        if definition.bundled_tests and definition.config.docker_image is not None:
            raise ConfigError(
                f"{directory}: the tests are in the image {definition.config.docker_image} of the verifier, "
                f"which the sandbox cannot run; {USE_DOCKER}"
            )
        plans.append(read_build_plan(definition.directory, definition.config))
        verifier_environment = definition.config
    kwargs = options.get("kwargs")
    has_network_option = isinstance(kwargs, Mapping) and kwargs.get("network") is True
    networks = [
        network_access(config, has_network_option=has_network_option)
        for config in (environment, verifier_environment)
    ]
    if NetworkAccess.REFUSED in networks:
        raise ConfigError(
            f"{directory}: the task or network=true requires a public network, which a sandbox on this "
            f"machine cannot have: {why_no_network()}; {USE_DOCKER}"
        )
    warnings = sorted({warning for plan in plans if (warning := image_warning(plan))})
    if networks[1] is not NetworkAccess.PUBLIC and (needed := verifier_needs(directory, is_installed)):
        dockerfile = "environment/Dockerfile" if definition is None else "tests/Dockerfile"
        warnings.append(
            f"tests/test.sh needs the internet for `{needed}` and has no network, so these tasks probably "
            f"get the reward 0; add commands to {dockerfile} that install what tests/test.sh downloads, or "
            'set network_mode = "public" in task.toml'
        )
    elif NetworkAccess.LACKING in networks:
        warnings.append(
            f"Harbor's default network is public, but these tasks run without one: {why_no_network()}"
        )
    return warnings


def verifier_needs(directory: Path, has_package: Callable[[str], bool]) -> str | None:
    """Return the first command of tests/test.sh that needs the internet, or None.

    The returned text is the result of `needs_network`, or `apt-get install` with the packages for which
    `has_package` is false.
    """
    try:
        script = (directory / "tests" / "test.sh").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for words in commands(script):
        if network_command := needs_network(words):
            return network_command
        if missing := [package for package in apt_packages(words) if not has_package(package.split("=")[0])]:
            return f"apt-get install {' '.join(missing)}"
    return None


def check_for_containers(directory: Path, config: TaskConfig, *, options: Mapping[str, object]) -> list[str]:
    """Raise ConfigError if the task has no image, no Dockerfile and no docker-compose.yaml, or if Harbor's
    environment refuses the task. Return a warning if the verifier needs the internet and has no network."""
    environment = directory / "environment"
    if config.environment.docker_image is None and not any(
        (environment / name).is_file() for name in ("Dockerfile", "docker-compose.yaml")
    ):
        raise ConfigError(f"{environment}: no Dockerfile and no [environment].docker_image; add one of them")
    try:
        EnvironmentFactory.create_environment_from_config(
            config=EnvironmentConfig.model_validate(dict(options)),
            environment_dir=environment,
            environment_name=directory.name,
            session_id=f"{directory.name[:32].rstrip('_-')}__check",  # begins as in Harbor's trials
            trial_paths=TrialPaths(trial_dir=directory / "never-made"),
            task_env_config=config.environment.model_copy(deep=True),
            network_policy=config.environment.resolve_baseline(),
        )
    except (ValueError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        reason = reason.replace("EnvironmentType.DOCKER environment", "Docker on this machine")
        raise ConfigError(f"{directory}: {reason}; {USE_SANDBOX}") from error
    mode = config.verifier.network_mode or config.environment.network_mode
    # The packages of the image are unknown.
    if mode == NetworkMode.NO_NETWORK and (needed := verifier_needs(directory, lambda package: False)):
        return [
            f"tests/test.sh needs the internet for `{needed}`, but task.toml sets no-network, "
            "so these tasks may get the reward 0"
        ]
    return []


def early_deadline(
    tasks: Sequence[Task], configs: Mapping[Path, TaskConfig], options: HarborOptions
) -> str | None:
    """Return one line about tasks whose trials can reach their deadline before the time limit of their
    verifier, or None. An agent that stops the verifier can then cause an infrastructure failure."""
    deadline_s = options.trial_timeout_s or DEFAULT_DEADLINE_S
    limits_s = {
        task.id: (configs[task.path].agent.timeout_sec or 0.0) * options.agent_timeout_multiplier
        + configs[task.path].verifier.timeout_sec * options.verifier_timeout_multiplier
        for task in tasks
    }
    if not (names := [name for name, limit_s in limits_s.items() if limit_s >= deadline_s]):
        return None
    return (
        f"trial_timeout_s={deadline_s:g} does not exceed the time limits of agent and verifier together, so "
        "an agent that stops the verifier can cause a failure instead of a reward of 0; set it above "
        f"{max(limits_s.values()):g} ({len(names)} of {len(tasks)} tasks: {_listed(names)})"
    )


def _listed(names: list[str], limit: int = 10) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
