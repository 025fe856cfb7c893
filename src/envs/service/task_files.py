"""The tasks that `train_data` and `test_data` of env=tau_bench name: splits of domains such as `retail:test`,
and rows of task files. A task file has one JSON object per line, or is a parquet table with the same columns.

    {"data_source": "tau_bench/retail", "env_class": "tau_bench", "prompt": [...],
     "reward_spec": {"ground_truth": [...]},
     "extra_info": {"domain": "retail", "task_id": "7", "instruction": "You are ...", "actions": [...],
                    "outputs": [...]}}

A row with an instruction and actions defines a new task. The actions of the row are `extra_info.actions`, or
else `reward_spec.ground_truth`. Any other row names a task of the domain.
`prompt` is ignored: the agent reads the domain's policy and the messages of the user simulator.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.envs.data.records import read_records
from src.envs.message_env import MessageEnv


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskDefinition:
    """A task that a row defines."""

    instruction: str  # for the user simulator
    actions: Sequence[Mapping[str, Any]]  # the gold actions (the calls of a solution): name and arguments
    facts: Sequence[str]  # the agent has to communicate each of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    domain: str
    task: str  # the id of the task within the domain
    definition: TaskDefinition | None  # None: the row names a task of the domain


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainProvider:
    """The tasks of one or more domains and their environments."""

    # (domain, split) -> the domain's own tasks of the split, or of all splits if the split is None. The
    # function raises ConfigError for an unknown split.
    official: Callable[[str, str | None], list[Task]]
    # (domain, task id -> definition) -> a task for each definition, in order. The function raises ConfigError
    # for gold actions that the domain does not accept, or if rows cannot define tasks of this domain.
    defined: Callable[[str, Mapping[str, TaskDefinition]], list[Task]]
    make: Callable[[Task, int], MessageEnv]  # makes the environment of a trial from its task and a seed
    close: Callable[[], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectedTasks:
    """The tasks that one value of `train_data` or `test_data` names."""

    domains: Collection[str]
    tasks: Callable[[Mapping[str, DomainProvider]], list[Task]]  # maps the providers of domains to the tasks


def read_selection(text: str, domains: Collection[str], *, may_be_named: bool = False) -> SelectedTasks:
    """Parse `[NAME=]FILE` or `[NAME=]DOMAIN:SPLIT`, where DOMAIN is one of `domains`.

    `NAME=` is allowed only with `may_be_named`. It replaces the domain of the tasks in metrics. Raises
    ConfigError for a file that cannot be read or that has an invalid row.
    """
    name, _, place = text.partition("=") if may_be_named and "=" in text else ("", "", text)

    def named(tasks: Sequence[Task]) -> list[Task]:
        return [replace(task, domain=name or task.domain) for task in tasks]

    domain, _, split = place.partition(":")
    if domain in domains and split:
        return SelectedTasks(
            domains={domain}, tasks=lambda providers: named(providers[domain].official(domain, split))
        )
    path = Path(place).expanduser()
    rows = read_rows(path)
    return SelectedTasks(
        domains={row.domain for row in rows},
        tasks=lambda providers: named(tasks_of(rows, providers, path=path)),
    )


def tasks_of(rows: Sequence[Row], providers: Mapping[str, DomainProvider], *, path: Path) -> list[Task]:
    """Return the task of each row, in order. `providers` maps domains to providers.

    Raises ConfigError for a row that names a task which its domain does not have.
    """
    tasks: dict[tuple[str, str], Task] = {}
    for domain in sorted({row.domain for row in rows}):
        provider, domain_rows = providers[domain], [row for row in rows if row.domain == domain]
        if any(row.definition is None for row in domain_rows):
            official = provider.official(domain, None)
            tasks |= {(domain, task.id.removeprefix(f"{domain}/")): task for task in official}
        definitions = {row.task: row.definition for row in domain_rows if row.definition is not None}
        if definitions:
            defined = provider.defined(domain, definitions)
            tasks |= {(domain, name): task for name, task in zip(definitions, defined, strict=True)}
    for row in rows:
        if (row.domain, row.task) not in tasks:
            raise ConfigError(
                f"{path}: {row.domain} has no task {row.task}; give the id of a task, or an "
                "instruction and actions"
            )
    return [tasks[row.domain, row.task] for row in rows]


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a .jsonl or .parquet file. Raises ConfigError with the line of an invalid row."""
    return [row_of(record.values, where=record.where) for record in read_records(path)]


def row_of(record: Mapping[str, Any], *, where: str) -> Row:
    """Parse one record. The domain is `extra_info.domain`, or else the last part of `data_source`. The id of
    the task is `extra_info.task_id`, or else `extra_info.index`, or else a hash of the definition.

    >>> row_of({"data_source": "tau_bench/airline", "extra_info": {"index": 3}}, where="here")
    Row(domain='airline', task='3', definition=None)
    """
    info = record.get("extra_info")
    if not isinstance(info, Mapping):
        raise ConfigError(
            f"{where}: the row has no extra_info; a row must be an object with extra_info.domain and "
            "extra_info.task_id"
        )
    domain = info.get("domain") or str(record.get("data_source") or "").rpartition("/")[2]
    if not domain:
        raise ConfigError(f"{where}: the row names no domain; give extra_info.domain or data_source")
    definition = _definition(record, info, where=where)
    task = next((info[name] for name in ("task_id", "index") if info.get(name) is not None), None)
    if task is None and definition is None:
        raise ConfigError(
            f"{where}: the row names no task; give extra_info.task_id, or extra_info.instruction and "
            "extra_info.actions"
        )
    if task is None:
        task = hashlib.sha256(repr(definition).encode()).hexdigest()[:12]
    return Row(domain=str(domain), task=str(task), definition=definition)


def _definition(record: Mapping[str, Any], info: Mapping[str, Any], *, where: str) -> TaskDefinition | None:
    spec = record.get("reward_spec")
    truth = spec.get("ground_truth") if isinstance(spec, Mapping) else None
    actions = _as_list(info["actions"] if info.get("actions") is not None else truth)
    if not info.get("instruction") or (actions is None and info.get("actions") is None):
        return None
    try:
        if actions is None:
            raise TypeError("not a list")
        gold = [
            {
                "name": str(action["name"]),
                "arguments": dict(action.get("arguments") or action.get("kwargs") or {}),
            }
            for action in actions
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{where}: the actions are not a list of objects with name and arguments; correct them"
        ) from error
    outputs = info.get("outputs")
    facts = [] if outputs is None else _as_list(outputs)
    if facts is None:
        raise ConfigError(f"{where}: outputs is not a list; correct it")
    return TaskDefinition(
        instruction=str(info["instruction"]), actions=gold, facts=[str(fact) for fact in facts]
    )


def _as_list(value: object) -> list[Any] | None:
    """Return `value` if it is a list. If `value` is a list as JSON text, which is usual in parquet tables,
    return the parsed list. Return None for any other value."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value if isinstance(value, list) else None


def require_disjoint(tasks: Sequence[Task], held_out: Sequence[Task]) -> None:
    """Raise ConfigError if a task id occurs in both lists."""
    training_ids = {task.id for task in tasks}
    if shared_ids := [task.id for task in held_out if task.id in training_ids]:
        more = f" (and {len(shared_ids) - 1} more)" if len(shared_ids) > 1 else ""
        raise ConfigError(
            f"held-out tasks are also training tasks: {shared_ids[0]}{more}; remove them from train_data or "
            "test_data"
        )
