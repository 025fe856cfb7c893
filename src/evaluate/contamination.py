"""Check that held-out tasks are not training tasks.

A task is identified by its content and, only if it has no directory, also by its id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.envs.data.rows import Question
from src.records.atomic_io import replace_text
from src.records.reading import Hashes, read_document

HASHES_FILE = "train_tasks.json"  # in a run directory: training task id -> content hash
# The file in the directory of a run or evaluation that maps task ids to `TaskHashes.trial_content`.
CONTENTS_FILE = "task_contents.json"
NUM_PROPOSED = 5  # maximum number of tasks that an error message proposes
CONTENT_DIRECTORIES = ("environment", "tests")  # the instruction and these directories define a task


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskHashes:
    """Two SHA-256 hashes of a task."""

    task_id: str
    content: str  # `content_hash`, which identifies the task
    # The hash of everything that can change the trials: `content`, task.toml, and the row with its answer.
    trial_content: str


def task_hashes(tasks: Sequence[Task]) -> list[TaskHashes]:
    return [_hash(task) for task in tasks]


def _hash(task: Task) -> TaskHashes:
    content, settings = content_hash(task), task.path / "task.toml"
    row = json.dumps(task.row, skipkeys=True, default=_row_value)
    parts = (content, settings.read_text(encoding="utf-8") if settings.is_file() else "", row)
    trial_content = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return TaskHashes(task_id=task.id, content=content, trial_content=trial_content)


def _row_value(value: object) -> object:
    """Return a JSON value in place of a value that has no JSON form. For a question of env=data, this is its
    row and its reference answer. For any other object, it is only the name of the type, because the text of
    an object may contain its memory address.
    """
    if isinstance(value, Question):
        return [value.record.values, value.reference]
    return type(value).__name__


def content_hash(task: Task) -> str:
    """Return the SHA-256 of the instruction, with normalized white space, and of the task's files.

    The files are those of the environment and the verifier. The hash covers their paths and their contents. A
    task without a directory is identified by its instruction and its id.
    """
    digest = hashlib.sha256(" ".join(task.instruction.split()).encode())
    if not task.path.is_dir():
        digest.update(f"\nid {task.id}".encode())
    for directory in CONTENT_DIRECTORIES:
        for path in sorted((task.path / directory).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"\n{path.relative_to(task.path).as_posix()} {content}".encode())
    return digest.hexdigest()


def require_held_out(
    held_out: Sequence[TaskHashes], trained: Mapping[str, str], *, chosen_by: str | None
) -> None:
    """Raise ConfigError if the content of a held-out task is among `trained` (task id -> content hash).

    `chosen_by` is the option that selects held-out tasks by id; None if a directory selects them.
    """
    ids = {content: task_id for task_id, content in trained.items()}
    overlap = [(task.task_id, ids[task.content]) for task in held_out if task.content in ids]
    if overlap:
        first = f"{overlap[0][0]} is training task {overlap[0][1]}" + (
            " under another name" if overlap[0][0] != overlap[0][1] else ""
        )
        more = f" (and {len(overlap) - 1} more)" if len(overlap) > 1 else ""
        unseen_ids = [task.task_id for task in held_out if task.task_id not in dict(overlap)]
        advice = (
            f"; for example, choose other tasks with {chosen_by}={','.join(unseen_ids[:NUM_PROPOSED])}"
            if unseen_ids and chosen_by
            else ""
        )
        raise ConfigError(
            f"held-out tasks are also training tasks: {first}{more}; leave them out of one of the "
            f"two sets{advice}"
        )


def write_hashes(log_path: Path, trained: Mapping[str, str]) -> None:
    replace_text(log_path / HASHES_FILE, json.dumps(dict(trained), indent=1) + "\n")


def require_same_content(log_path: Path, contents: Mapping[str, str]) -> None:
    """Raise ConfigError if a task had another content when the evaluation in `log_path` was started, because
    its finished trials would be counted for the new content. `contents` maps task ids to
    `TaskHashes.trial_content`.
    """
    if changed := changed_tasks(log_path, contents):
        raise ConfigError(
            f"the content of {changed[0]} has changed since the evaluation in {log_path} was started, or "
            "another version of this program started it; give another log_path"
        )


def changed_tasks(log_path: Path, contents: Mapping[str, str]) -> list[str]:
    """Return the ids of the tasks whose hash in `contents` differs from the hash in CONTENTS_FILE."""
    saved = read_contents(log_path)
    return [task_id for task_id, content in contents.items() if saved.get(task_id, content) != content]


def write_contents(log_path: Path, contents: Mapping[str, str]) -> None:
    """Write the hashes `contents` to CONTENTS_FILE, and keep the hashes of other tasks in the file."""
    text = json.dumps({**read_contents(log_path), **contents}, indent=1) + "\n"
    replace_text(log_path / CONTENTS_FILE, text)


def read_contents(log_path: Path) -> dict[str, str]:
    path = log_path / CONTENTS_FILE
    return read_document(path, TypeAdapter(Hashes)) if path.is_file() else {}


def read_hashes(log_path: Path) -> dict[str, str]:
    """Read the content hashes of the tasks that the run in `log_path` trains on.

    Raises ConfigError if the file of hashes does not exist or is damaged.
    """
    if not (log_path / HASHES_FILE).is_file():
        raise ConfigError(
            f"{log_path} has no {HASHES_FILE}; set train_data to another run directory or to a directory "
            "of tasks"
        )
    return read_document(log_path / HASHES_FILE, TypeAdapter(Hashes))
