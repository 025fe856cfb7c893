"""The grading method of each task.

The settings `grading` and `keep_processes` of `environment_kwargs` select the method of all tasks. Without
them, the record that `src.envs.validate` wrote selects the method of a task. A task without a record is
graded in a fresh environment. A task for which `can_be_fresh` is false is always graded in place.
"""

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
from typing import TYPE_CHECKING, Any

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.records.atomic_io import replace_text

if TYPE_CHECKING:
    from harbor.models.task.config import TaskConfig

logger = logging.getLogger(__name__)

RECORD_NAME = "grading.json"
RUN_VALIDATE_AGAIN = "run src.envs.validate again"


class GradingMode(StrEnum):
    """The environment in which a verifier runs."""

    FRESH = "fresh"  # a new environment of the task with the files of the agent, without its processes
    IN_PLACE = "in_place"  # the agent's environment


@dataclass(frozen=True, kw_only=True, slots=True)
class GradingMethod:
    """How the trials of one task are graded."""

    mode: GradingMode = GradingMode.FRESH
    keep_processes: bool = False  # in place only: the verifier needs processes that the agent started
    is_recorded: bool = False  # `validate` observed that the verifier of the task works

    @property
    def name(self) -> str:
        return (
            "in place with the agent's processes"
            if self.keep_processes
            else self.mode.value.replace("_", " ")
        )


def parse_grading_option(
    environment_kwargs: Mapping[str, str],
) -> tuple[dict[str, str], GradingMethod | None]:
    """Split `environment_kwargs` into the options of the environment and the grading method of all tasks
    (None: the record of each task is used).

    Raises ConfigError if `grading` or `keep_processes` is invalid, or if they contradict each other.

    >>> parse_grading_option({"memory_mb": "512", "keep_processes": "true"})[1]
    GradingMethod(mode=<GradingMode.IN_PLACE: 'in_place'>, keep_processes=True, is_recorded=False)
    """
    options = dict(environment_kwargs)
    mode, keep = options.pop("grading", "recorded"), options.pop("keep_processes", "false")
    if mode not in ("recorded", *GradingMode):
        raise ConfigError(f"environment_kwargs grading={mode} is none of fresh, in_place, recorded")
    if keep.lower() not in ("true", "false"):
        raise ConfigError(f"environment_kwargs keep_processes={keep} is neither true nor false")
    keep_processes = keep.lower() == "true"
    if keep_processes and mode == GradingMode.FRESH:
        raise ConfigError(
            "environment_kwargs keep_processes=true needs grading=in_place: "
            "a fresh environment has no processes of the agent"
        )
    if mode == "recorded" and not keep_processes:
        return options, None
    mode = GradingMode.IN_PLACE if keep_processes else GradingMode(mode)
    return options, GradingMethod(mode=mode, keep_processes=keep_processes)


def task_checksum(directory: Path) -> str:
    """Return a SHA-256 of the names, contents and executable bits of a task's files except grading.json."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path != directory / RECORD_NAME:
            name = path.relative_to(directory).as_posix().encode("utf-8", "surrogateescape")
            content = path.read_bytes()
            executable = path.stat().st_mode & 0o111
            digest.update(b"%d %s %d %d " % (len(name), name, len(content), executable) + content)
    return digest.hexdigest()


def write_records(directory: Path, environment_type: str, methods: Mapping[Task, GradingMethod]) -> Path:
    """Write the methods of tasks for one environment type to grading.json in `directory`. Return its path."""
    path = directory / RECORD_NAME
    records = _records(path)
    for task, method in methods.items():
        checksum = task_checksum(task.path)
        record = records.get(task.path.name)
        if not isinstance(record, dict) or record.get("checksum") != checksum:
            record = {"checksum": checksum}
        entry = {"grading": method.mode.value, "keep_processes": method.keep_processes}
        records[task.path.name] = {**record, environment_type: entry}
    text = json.dumps(records, indent=2, sort_keys=True) + "\n"
    replace_text(path, text, advice="make the directory writable, or validate and train on a copy of it")
    return path


def recorded_method(task: Task, environment_type: str) -> GradingMethod | None:
    """Return the recorded grading method of a task.

    Returns None if there is no record for this environment type. Returns None and logs a warning if the task
    has changed after `validate` recorded it. Raises ConfigError if the record cannot be read.
    """
    for path in (task.path.parent / RECORD_NAME, task.path / RECORD_NAME):
        record = _records(path).get(task.path.name)
        if record is None:
            continue
        if not isinstance(record, dict) or record.get("checksum") != task_checksum(task.path):
            logger.warning(
                "%s: the task has changed since it was recorded in %s; %s", task.id, path, RUN_VALIDATE_AGAIN
            )
            return None
        if (entry := record.get(environment_type)) is None:
            return None
        try:
            mode, keep_processes = GradingMode(entry["grading"]), entry["keep_processes"] is True
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"{path}: {task.path.name}: the record cannot be read; {RUN_VALIDATE_AGAIN}"
            ) from None
        return GradingMethod(mode=mode, keep_processes=keep_processes, is_recorded=True)
    return None


def can_be_fresh(environment_dir: Path, environment_type: str) -> bool:
    """Return whether a task can be graded in a fresh environment.

    This is impossible in the environments of cloud providers, and on Docker if the task has its own
    docker-compose.yaml.
    """
    if environment_type == "docker":
        return not (environment_dir / "docker-compose.yaml").is_file()
    return environment_type == "sandbox"


def grading_methods(
    tasks: Iterable[Task],
    configs: Mapping[Path, TaskConfig],
    *,
    selected: GradingMethod | None,
    environment_type: str,
) -> dict[Path, GradingMethod]:
    """Return a map from the task's directory to its grading method: `selected`, or else the recorded one.
    Log how many tasks use each mode, and how many have a separate verifier environment. `configs` maps the
    task's directory to its task.toml."""
    from harbor.models.task.verifier_mode import VerifierEnvironmentMode, resolve_task_verifier_mode

    methods = {
        task.path: selected or recorded_method(task, environment_type) or GradingMethod() for task in tasks
    }
    counts = Counter(
        method.mode if can_be_fresh(path / "environment", environment_type) else GradingMode.IN_PLACE
        for path, method in methods.items()
        if resolve_task_verifier_mode(configs[path]) is not VerifierEnvironmentMode.SEPARATE
    )
    num_separate = len(methods) - counts.total()
    source = (
        "environment_kwargs" if selected else "records of src.envs.validate; tasks without a record: fresh"
    )
    logger.info(
        "grading: %d tasks in a fresh environment, %d in place%s (%s)",
        counts[GradingMode.FRESH],
        counts[GradingMode.IN_PLACE],
        f", {num_separate} in a separate verifier environment" if num_separate else "",
        source,
    )
    return methods


def _records(path: Path) -> dict[str, Any]:
    return dict(_read_records(path, path.stat().st_mtime_ns)) if path.is_file() else {}


@lru_cache(maxsize=16)
def _read_records(path: Path, _modified_ns: int) -> dict[str, Any]:
    """Read a record file. The cache avoids one read per task. A new `_modified_ns` causes a new read."""
    try:
        records = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); remove it and {RUN_VALIDATE_AGAIN}") from error
    if not isinstance(records, dict):
        raise ConfigError(f"{path} is not a record of grading; remove it and {RUN_VALIDATE_AGAIN}")
    return records
