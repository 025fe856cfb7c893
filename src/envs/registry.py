"""Environments by name: `env=harbor`, `env=tau_bench`, one that an installed package registers, or your own as `module:factory`.

A factory takes the run's options and its chat format and returns a task source (docs/environments.md has a worked example). Packages
register theirs as an entry point of the group `agent_trainer.environments`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from inspect import iscoroutinefunction

from src.core.errors import ConfigError, boundary
from src.envs.base import TaskSource
from src.envs.options import EnvironmentSettings
from src.policy.chat import Chat

Factory = Callable[[EnvironmentSettings, Chat], TaskSource]

ENTRY_POINTS = "agent_trainer.environments"
BUILT_IN = {  # imported when asked for: Harbor takes seconds
    "harbor": "src.envs.harbor.environment:open_harbor",
    "tau_bench": "src.envs.service.tau_bench:open_tau_bench",
    "openenv": "src.envs.openenv_client:open_openenv",
}


def open_task_source(config: EnvironmentSettings, chat: Chat) -> TaskSource:
    """The tasks of the run's environment. ConfigError for an unknown one, or for options it does not take."""
    factory = find(config.env)
    with boundary(ConfigError, f"env={config.env}"):
        source = factory(config, chat)
    if not isinstance(source, TaskSource):
        raise ConfigError(
            f"env={config.env} returned {type(source).__name__}, which is no task source; return episodes(...)"
        )
    return source


def known() -> dict[str, str]:
    """Name -> module:factory. No package can take the place of a built-in one."""
    return {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)} | BUILT_IN


def find(name: str) -> Factory:
    """ConfigError that lists what there is."""
    names = known()
    place = names.get(name, name)
    module_name, colon, factory_name = place.partition(":")
    if not (colon and module_name and factory_name) or module_name.startswith("."):
        raise ConfigError(
            f"env={name} is none of {', '.join(sorted(names))}; choose one, or give your own as env=module:factory"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"env={name}: cannot import {module_name} ({error}); is it installed, or on PYTHONPATH?"
        ) from error
    except Exception as error:  # whatever a module of the user's own does when it is imported
        raise ConfigError(
            f"env={name}: cannot import {module_name} ({type(error).__name__}: {error}); mend it"
        ) from error
    factory: Factory | None = vars(module).get(factory_name)
    if factory is None:
        raise ConfigError(f"env={name}: {module_name} has no function {factory_name}")
    if not callable(factory) or iscoroutinefunction(factory):
        raise ConfigError(
            f"env={name}: {factory_name} of {module_name} is no plain function; write def {factory_name}(config, chat)"
        )
    return factory
