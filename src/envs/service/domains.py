"""Service domains of your own, in addition to the built-in domains. The tasks of a service domain
(env=tau_bench) are conversations in which the agent serves a simulated user with the tools of the domain.

A function that returns a `ServiceDomain` defines a domain. `environment_kwargs=domain=module:function` names
the function, or an installed package registers it as an entry point of the group
`agent_trainer.service_domains`. docs/environments.md describes an example.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from src.core.errors import ConfigError, boundary
from src.core.trajectory import Task
from src.envs.service.service_env import ServiceEpisode
from src.envs.service.task_files import TaskDefinition
from src.envs.service.toy_retail import (
    Database,
    Tool,
    ToolError,
    ToyRetailEpisode,
    after_gold,
    scripted,
)
from src.envs.service.user_simulator import ModelUserSimulator, UserModel
from src.envs.user_code import load_function

ENTRY_POINTS = "agent_trainer.service_domains"
TRAIN, TEST = "train", "test"  # the splits that domain=NAME trains on and holds out
USER_INSTRUCTIONS = (  # for the model of a user simulator
    "You talk to a service agent. {}\n"
    "Say one short thing at a time and only what is asked or needed. Once you have what you want, or the "
    "agent says that it is not possible, answer ###STOP### and nothing else."
)


async def release_nothing() -> None:
    """Close a domain whose episodes share no resources."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainContext:
    """The argument of the function that opens a domain."""

    # The environment_kwargs that env=tau_bench has not read. The function removes the options that it reads.
    options: dict[str, str]
    user_model: UserModel | None  # the model of the user simulators; None: user simulators follow scripts


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceDomain:
    """The tasks of a domain and its episodes."""

    name: str  # the domain's name in the rows of task files and in metrics
    splits: Mapping[str, Sequence[Task]]  # split -> its tasks; `test` and further splits are optional
    episode: Callable[[Task, int], ServiceEpisode]  # makes the episode of a trial from its task and a seed
    # (task id, definition) -> the task that a row of a task file defines. The function raises ConfigError for
    # gold actions (the calls of a solution) that cannot be executed. None: rows can only name existing tasks
    # of the domain.
    defined: Callable[[str, TaskDefinition], Task] | None = None
    close: Callable[[], Awaitable[None]] = release_nothing


DomainFactory = Callable[[DomainContext], ServiceDomain]


def registered_domains() -> dict[str, str]:
    """Map the name of each registered domain to `module:function`."""
    return {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}


def open_domain(name: str, context: DomainContext) -> ServiceDomain:
    """Open the domain `module:function`, or a registered one.

    Raises ConfigError if the function cannot be imported, raises an exception that is not a TrainerError, or
    returns another object than a ServiceDomain. A TrainerError of the function is not converted.
    """
    place = registered_domains().get(name, name)
    factory: DomainFactory = load_function(place, option="environment_kwargs domain", value=name)
    with boundary(ConfigError, f"domain={name}"):
        domain = cast("object", factory(context))
    if not isinstance(domain, ServiceDomain):
        raise ConfigError(f"domain={name} returned {type(domain).__name__}; return a ServiceDomain")
    # Rows and tasks refer to their domain by `ServiceDomain.name`.
    if ":" not in name and domain.name != name:
        raise ConfigError(
            f"domain={name} returned a domain with the name {domain.name}; rename the entry point to "
            f"{domain.name}, or give environment_kwargs=domain={place}"
        )
    return domain


def tool_domain(
    *,
    name: str,
    database: Database,
    policy: str,
    tools: Sequence[Tool],
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    context: DomainContext,
    user_instructions: str = USER_INSTRUCTIONS,
    id_prefix: str | None = None,
) -> ServiceDomain:
    """Return a domain with tools over a JSON database, with the grading of toy_retail.

    Rows have the keys of toy_retail's tasks.json: id, split, instruction, scripts, actions and communicate.
    Rows whose split is neither `train` nor `test` are ignored. `path` is the file that defines the domain.
    `user_instructions` is the prompt of the user simulator's model, in which the instruction of the task
    replaces `{}`. The id of each task begins with `id_prefix`. If `id_prefix` is None, the id begins with the
    name of the domain and a slash.
    Raises ConfigError if a gold action fails.
    """
    by_name = {tool.name: tool for tool in tools}
    prefix = f"{name}/" if id_prefix is None else id_prefix

    def task_of(row: Mapping[str, Any], *, where: object) -> Task:
        try:
            after_gold(database, row, by_name)
        except (ToolError, KeyError, TypeError) as error:
            raise ConfigError(f"{where}: {row['id']}: a gold action fails: {error}; correct it") from error
        has_writes = any(by_name[action["name"]].writes for action in row["actions"])
        return Task(
            id=f"{prefix}{row['id']}",
            path=path,
            instruction=row["instruction"],
            domain=name,
            row=row,
            has_writes=has_writes,
        )

    def defined(task_id: str, definition: TaskDefinition) -> Task:
        return task_of(
            {
                "id": task_id,
                "instruction": definition.instruction,
                "scripts": [[definition.instruction]],
                "actions": definition.actions,
                "communicate": definition.facts,
            },
            where=name,
        )

    def episode(task: Task, seed: int) -> ServiceEpisode:
        if context.user_model is None:
            user = scripted(task.row, seed)
        else:
            instructions = user_instructions.format(task.instruction)
            user = ModelUserSimulator(context.user_model, instructions, seed=seed)
        return ToyRetailEpisode(task.row, database=database, policy=policy, user=user, tools=by_name)

    splits = {
        split: [task_of(row, where=path) for row in rows if row["split"] == split] for split in (TRAIN, TEST)
    }
    return ServiceDomain(name=name, splits=splits, episode=episode, defined=defined)
