"""The table of environments. `env=NAME` selects a built-in environment, or one that an installed package
registers as an entry point of the group `agent_trainer.environments`. `env=module:factory` selects a function
of the user.

A factory takes the options of the run and the chat format, and returns a task source. docs/environments.md
explains how to add an environment.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from inspect import iscoroutinefunction
from typing import cast

from src.core.errors import ConfigError, boundary
from src.envs.base import TaskSource
from src.envs.options import EnvironmentOptions
from src.envs.user_code import load_function
from src.policy.chat import Chat

Factory = Callable[[EnvironmentOptions, Chat], TaskSource]

ENTRY_POINTS = "agent_trainer.environments"
BUILT_IN = {  # A module is imported when its environment is used, because importing Harbor takes seconds.
    "harbor": "src.envs.harbor.environment:open_harbor",
    "tau_bench": "src.envs.service.tau_bench:open_tau_bench",
    "fleet": "src.envs.fleet.environment:open_fleet",
    "openenv": "src.envs.openenv_client:open_openenv",
    "data": "src.envs.data.environment:open_data",
}
# Functions that check the options and files of an environment.
CHECKS = {
    "data": "src.envs.data.environment:check_data",
    "tau_bench": "src.envs.service.tau_bench:check_tau_bench",
}


def open_task_source(config: EnvironmentOptions, chat: Chat) -> TaskSource:
    """Return the task source of `config.env`.

    Raises ConfigError if the environment is unknown, or if its factory raises an exception that is not a
    TrainerError or returns another object than a task source. A TrainerError of the factory is not converted.
    """
    factory = find_factory(config.env)
    with boundary(ConfigError, f"env={config.env}"):
        source = cast("object", factory(config, chat))
    if not isinstance(source, TaskSource):
        raise ConfigError(
            f"env={config.env} returned {type(source).__name__}, which is not a task source; "
            "return episodes(...) of src.envs.episodes"
        )
    return source


def known_environments() -> dict[str, str]:
    """Map each environment's name to `module:factory`. A package cannot replace a built-in environment."""
    return {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)} | BUILT_IN


def check_environment(config: EnvironmentOptions) -> None:
    """Raise ConfigError for an unknown environment and, if CHECKS has a check of this environment, for
    options and task files that the environment cannot use.

    The check needs no server, so a run reports these errors before it connects to a server or starts one.
    """
    find_factory(config.env)
    if (check := CHECKS.get(config.env)) is not None:
        with boundary(ConfigError, f"env={config.env}"):
            load_function(check, option="env")(config)


def find_factory(name: str) -> Factory:
    """Return the factory of the environment `name`.

    Raises ConfigError if `name` is neither a known environment nor `module:factory`, or if the factory cannot
    be imported or is an async function.
    """
    environments = known_environments()
    place = environments.get(name, name)
    module_name, colon, factory_name = place.partition(":")
    if not (colon and module_name and factory_name) or module_name.startswith("."):
        raise ConfigError(
            f"env={name} is none of {', '.join(sorted(environments))}; "
            "choose one, or give your own as env=module:factory"
        )
    factory = load_function(place, option="env", value=name)
    if iscoroutinefunction(factory):
        raise ConfigError(
            f"env={name}: {factory_name} of {module_name} is an async function; "
            f"write def {factory_name}(config, chat)"
        )
    return factory
