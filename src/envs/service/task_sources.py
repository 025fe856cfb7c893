"""The tasks that `train_data` and `test_data` of env=tau_bench name: rows of files, and splits of domains
such as `retail:test`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.envs.service.task_files import DomainProvider, Row, read_rows, tasks_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSource:
    """The rows of a file."""

    path: Path
    rows: Sequence[Row]
    name: str  # the domain name in metrics; if empty, each task keeps its own domain

    @property
    def domains(self) -> set[str]:
        return {row.domain for row in self.rows}

    def tasks(self, providers: Mapping[str, DomainProvider]) -> list[Task]:
        return named(tasks_of(self.rows, providers, path=self.path), self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSource:
    """An official split of a domain."""

    domain: str
    split: str
    name: str  # as in RowSource

    @property
    def domains(self) -> set[str]:
        return {self.domain}

    def tasks(self, providers: Mapping[str, DomainProvider]) -> list[Task]:
        return named(providers[self.domain].official(self.domain, self.split), self.name)


def read_source(
    text: str, domains: Collection[str], *, may_be_named: bool = False
) -> RowSource | SplitSource:
    """Parse `[NAME=]FILE` or `[NAME=]DOMAIN:SPLIT`, where DOMAIN is one of `domains`. `NAME=` is allowed only
    with `may_be_named`.

    Raises ConfigError for a file that cannot be read or that has an invalid row.

    >>> read_source("shop=retail:test", ["retail"], may_be_named=True)
    SplitSource(domain='retail', split='test', name='shop')
    """
    name, _, place = text.partition("=") if may_be_named and "=" in text else ("", "", text)
    domain, _, split = place.partition(":")
    if domain in domains and split:
        return SplitSource(domain=domain, split=split, name=name)
    path = Path(place).expanduser()
    return RowSource(path=path, rows=read_rows(path), name=name)


def named(tasks: Sequence[Task], name: str) -> list[Task]:
    """Return the tasks with the domain `name`. If `name` is empty, each task keeps its own domain."""
    return [replace(task, domain=name or task.domain) for task in tasks]


def require_disjoint(tasks: Sequence[Task], held_out: Sequence[Task]) -> None:
    """Raise ConfigError if a task id occurs in both lists."""
    training_ids = {task.id for task in tasks}
    if shared_ids := [task.id for task in held_out if task.id in training_ids]:
        more = f" (and {len(shared_ids) - 1} more)" if len(shared_ids) > 1 else ""
        raise ConfigError(
            f"held-out tasks are also training tasks: {shared_ids[0]}{more}; remove them from train_data or "
            "test_data"
        )
