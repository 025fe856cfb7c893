"""How each task is graded: what `environment_kwargs` says, or else what `validate` recorded, or else in a fresh environment."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.records.atomic_io import replace_text

logger = logging.getLogger(__name__)

RECORD_NAME = "grading.json"


class Way(StrEnum):
    FRESH = "fresh"
    IN_PLACE = "in_place"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How one task's trials are graded."""

    way: Way = Way.FRESH
    keep_processes: bool = False  # in place: the verifier needs what the agent left running
    is_recorded: bool = False  # validate saw that the task's verifier works

    @property
    def name(self) -> str:
        return "in place with its processes" if self.keep_processes else self.way.value.replace("_", " ")


@dataclass(frozen=True, kw_only=True, slots=True)
class GradingOption:
    """What `environment_kwargs` says about grading; without `choice` it is each task's record."""

    choice: Choice | None = None

    def of(self, task: Task, environment_type: str) -> Choice:
        return self.choice or recorded_choice(task, environment_type) or Choice()


def take_option(given: Mapping[str, str]) -> tuple[dict[str, str], GradingOption]:
    """`environment_kwargs` without what concerns grading, and that.

    >>> take_option({"memory_mb": "512", "keep_processes": "true"})[1].choice
    Choice(way=<Way.IN_PLACE: 'in_place'>, keep_processes=True)
    """
    rest = dict(given)
    way, keep = rest.pop("grading", "recorded"), rest.pop("keep_processes", "false")
    if way not in ("recorded", *Way):
        raise ConfigError(f"environment_kwargs grading={way} is none of fresh, in_place, recorded")
    if keep.lower() not in ("true", "false"):
        raise ConfigError(f"environment_kwargs keep_processes={keep} is neither true nor false")
    keeps = keep.lower() == "true"
    if keeps and way == Way.FRESH:
        raise ConfigError(
            "environment_kwargs keep_processes=true needs grading=in_place: a fresh environment has no processes of the agent"
        )
    if way == "recorded":
        return rest, GradingOption(choice=Choice(way=Way.IN_PLACE, keep_processes=True) if keeps else None)
    return rest, GradingOption(choice=Choice(way=Way(way), keep_processes=keeps))


def task_checksum(folder: Path) -> str:
    """Of all files of a task folder but a record of grading."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / RECORD_NAME:
            name = path.relative_to(folder).as_posix().encode("utf-8", "surrogateescape")
            content = path.read_bytes()
            digest.update(
                b"%d %s %d %d " % (len(name), name, len(content), path.stat().st_mode & 0o111) + content
            )
    return digest.hexdigest()


def write_records(directory: Path, environment_type: str, choices: Mapping[Task, Choice]) -> Path:
    """Adds what `validate` found to the record of a folder of tasks; its path. Environments of other types keep theirs."""
    path = directory / RECORD_NAME
    records = _records(path)
    for task, choice in choices.items():
        checksum = task_checksum(task.path)
        own = records.get(task.path.name)
        kept = own if isinstance(own, dict) and own.get("checksum") == checksum else {"checksum": checksum}
        found = {"grading": choice.way.value, "keep_processes": choice.keep_processes}
        records[task.path.name] = {**kept, environment_type: found}
    replace_text(path, json.dumps(records, indent=2, sort_keys=True) + "\n")
    return path


def recorded_choice(task: Task, environment_type: str) -> Choice | None:
    """None without a record, or, with a warning, where the task has changed since."""
    for path in (task.path.parent / RECORD_NAME, task.path / RECORD_NAME):
        record = _records(path).get(task.path.name)
        if record is None:
            continue
        if not isinstance(record, dict) or record.get("checksum") != task_checksum(task.path):
            logger.warning(
                "%s: the task has changed since it was recorded in %s; run src.envs.validate again",
                task.id,
                path,
            )
            return None
        if (found := record.get(environment_type)) is None:
            return None
        try:
            return Choice(
                way=Way(found["grading"]), keep_processes=found["keep_processes"] is True, is_recorded=True
            )
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"{path}: {task.path.name}: the record cannot be read; run src.envs.validate again"
            ) from None
    return None


def tell_choices(tasks: Iterable[Task], option: GradingOption, environment_type: str) -> dict[Path, Choice]:
    """The choice for each task's folder, and one line in the log with the counts."""
    choices = {task.path: option.of(task, environment_type) for task in tasks}
    counts = Counter(choice.way for choice in choices.values())
    whence = "records of validate; without one: fresh" if option.choice is None else "environment_kwargs"
    logger.info(
        "grading: %d tasks in a fresh environment, %d in place (%s)",
        counts[Way.FRESH],
        counts[Way.IN_PLACE],
        whence,
    )
    return choices


def _records(path: Path) -> dict[str, Any]:
    return dict(_read_records(path, path.stat().st_mtime_ns)) if path.is_file() else {}


@lru_cache(maxsize=16)
def _read_records(path: Path, _changed_at: int) -> dict[str, Any]:
    """Read once, however many tasks ask."""
    try:
        records = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); remove it and run src.envs.validate again"
        ) from error
    if not isinstance(records, dict):
        raise ConfigError(f"{path} is no record of grading; remove it and run src.envs.validate again")
    return records
