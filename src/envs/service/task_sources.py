"""Where a run's tasks come from when its options say so: rows of files, and splits of domains, `retail:test`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.envs.service.task_files import KnownTasks, Row, read_rows, tasks_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSource:
    """A file."""

    path: Path
    rows: Sequence[Row]
    name: str  # whose metrics its tasks belong to; empty: each task's own domain's

    @property
    def domains(self) -> set[str]:
        return {row.domain for row in self.rows}

    def tasks(self, kinds: Mapping[str, KnownTasks]) -> list[Task]:
        return named(tasks_of(self.rows, kinds, path=self.path), self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSource:
    """A split that a domain comes with."""

    domain: str
    split: str
    name: str

    @property
    def domains(self) -> set[str]:
        return {self.domain}

    def tasks(self, kinds: Mapping[str, KnownTasks]) -> list[Task]:
        return named(kinds[self.domain].official(self.domain, self.split), self.name)


def read_source(text: str, known: Collection[str], *, may_be_named: bool = False) -> RowSource | SplitSource:
    """`[NAME=]FILE` or, of a `known` domain, `[NAME=]DOMAIN:SPLIT`. ConfigError for a file that cannot be read.

    >>> read_source("shop=retail:test", ["retail"], may_be_named=True)
    SplitSource(domain='retail', split='test', name='shop')
    """
    name, _, place = text.partition("=") if may_be_named and "=" in text else ("", "", text)
    domain, _, split = place.partition(":")
    if domain in known and split:
        return SplitSource(domain=domain, split=split, name=name)
    path = Path(place).expanduser()
    return RowSource(path=path, rows=read_rows(path), name=name)


def named(tasks: Sequence[Task], name: str) -> list[Task]:
    return [replace(task, domain=name or task.domain) for task in tasks]


def require_disjoint(tasks: Sequence[Task], held_out: Sequence[Task]) -> None:
    """ConfigError where a task, by its domain and its id there, is in both."""
    trained = {task.id for task in tasks}
    if both := [task.id for task in held_out if task.id in trained]:
        more = f" (and {len(both) - 1} more)" if len(both) > 1 else ""
        raise ConfigError(
            f"held-out tasks are trained on: {both[0]}{more}; leave them out of train_data or of test_data"
        )
