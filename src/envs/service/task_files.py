"""Tasks of service domains as rows of a file, in the seeds' format, one JSON object per line or a parquet table:

    {"data_source": "tau_bench/retail", "env_class": "tau_bench", "prompt": [...], "reward_spec": {"ground_truth": [...]},
     "extra_info": {"domain": "retail", "task_id": "7", "instruction": "You are ...", "actions": [...], "outputs": [...]}}

A row with an instruction and actions is a task of its own; one without names a task of the domain. `prompt` is not used: what the agent
reads is the domain's own policy, and its customer's words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from src.core.errors import ConfigError
from src.core.trajectory import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """A task in the row itself."""

    instruction: str  # the customer's
    actions: Sequence[Mapping[str, Any]]  # gold: name and arguments
    facts: Sequence[str]  # what the agent has to tell


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    domain: str
    task: str  # its id in the domain
    definition: Definition | None  # None: the domain knows the task


class KnownTasks(Protocol):
    """What plays a domain, asked for the tasks it has."""

    def official(self, domain: str, split: str | None, /) -> list[Task]:
        """The domain's own; None: of all splits. ConfigError for a split that there is not."""
        ...

    def defined(self, domain: str, definitions: Mapping[str, Definition], /) -> list[Task]:
        """Others, by id, in their order. ConfigError for gold actions that the domain does not have."""
        ...


def tasks_of(rows: Sequence[Row], domains: Mapping[str, KnownTasks], *, path: Path) -> list[Task]:
    """The tasks that rows stand for, in their order. ConfigError for one that its domain does not know."""
    found: dict[tuple[str, str], Task] = {}
    for domain in sorted({row.domain for row in rows}):
        own = [row for row in rows if row.domain == domain]
        if any(row.definition is None for row in own):
            found |= {
                (domain, task.id.removeprefix(f"{domain}/")): task
                for task in domains[domain].official(domain, None)
            }
        definitions = {row.task: row.definition for row in own if row.definition is not None}
        if definitions:
            found |= {
                (domain, name): task
                for name, task in zip(definitions, domains[domain].defined(domain, definitions), strict=True)
            }
    for row in rows:
        if (row.domain, row.task) not in found:
            raise ConfigError(
                f"{path}: {row.domain} has no task {row.task}; give its id, or an instruction and actions"
            )
    return [found[row.domain, row.task] for row in rows]


def read_rows(path: Path) -> list[Row]:
    """The rows of a .jsonl or .parquet file. ConfigError, with the row's number, for one that cannot be read."""
    match path.suffix:
        case ".jsonl":
            records = _from_lines(path)
        case ".parquet":
            records = _from_parquet(path)
        case _:
            raise ConfigError(f"{path} is neither .jsonl nor .parquet; rows come in one of these")
    return [row_of(record, where=f"{path}, row {number}") for number, record in enumerate(records, 1)]


def row_of(record: object, *, where: str) -> Row:
    """The domain is what the row says it is, else the last part of its data source.

    >>> row_of({"data_source": "tau_bench/airline", "extra_info": {"index": 3}}, where="here")
    Row(domain='airline', task='3', definition=None)
    """
    info = record.get("extra_info") if isinstance(record, Mapping) else None
    if not isinstance(record, Mapping) or not isinstance(info, Mapping):
        raise ConfigError(
            f"{where}: has no extra_info; a row is an object with extra_info.domain and extra_info.task_id"
        )
    domain = info.get("domain") or str(record.get("data_source") or "").rpartition("/")[2]
    if not domain:
        raise ConfigError(f"{where}: names no domain; give extra_info.domain or data_source")
    definition = _definition(record, info, where=where)
    task = next((info[name] for name in ("task_id", "index") if info.get(name) is not None), None)
    if task is None and definition is None:
        raise ConfigError(
            f"{where}: names no task; give extra_info.task_id, or extra_info.instruction and extra_info.actions"
        )
    if task is None:
        task = hashlib.sha256(repr(definition).encode()).hexdigest()[:12]
    return Row(domain=str(domain), task=str(task), definition=definition)


def _definition(record: Mapping[str, Any], info: Mapping[str, Any], *, where: str) -> Definition | None:
    spec = record.get("reward_spec")
    truth = spec.get("ground_truth") if isinstance(spec, Mapping) else None
    actions = _listed(info["actions"] if info.get("actions") is not None else truth)
    if not info.get("instruction") or actions is None:
        return None
    try:
        gold = [
            {
                "name": str(action["name"]),
                "arguments": dict(action.get("arguments") or action.get("kwargs") or {}),
            }
            for action in actions
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{where}: its actions are not a list of objects with name and arguments"
        ) from error
    facts = [str(fact) for fact in _listed(info.get("outputs")) or []]
    return Definition(instruction=str(info["instruction"]), actions=gold, facts=facts)


def _listed(value: object) -> list[Any] | None:
    """A list, also where it is written as JSON, as parquet tables like to have it; None for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value if isinstance(value, list) else None


def _from_lines(path: Path) -> list[object]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON lines: {error}") from error


def _from_parquet(path: Path) -> list[object]:
    try:
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]  # optional
    except ImportError as error:
        raise ConfigError(
            f"{path} needs pyarrow; run scripts/setup.sh pyarrow, or give the rows as .jsonl"
        ) from error
    try:
        return [without_nulls(record) for record in pyarrow.parquet.read_table(path).to_pylist()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a parquet table: {error}") from error


def without_nulls(value: object) -> object:
    """A value of a table, whose records all have the fields that any of them has, null where it was not theirs.

    >>> without_nulls([{"name": "cancel", "arguments": {"order": "W1", "items": None}}])
    [{'name': 'cancel', 'arguments': {'order': 'W1'}}]
    """
    if isinstance(value, Mapping):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value
