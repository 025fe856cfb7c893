"""Whether held-out tasks are held out: by what is in them, not by what they are called."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from src.core.errors import ConfigError
from src.core.trajectory import Task
from src.records.atomic_io import replace_text
from src.records.reading import Hashes, read_document, same

HASHES_FILE = "train_tasks.json"  # of a run: task id -> content hash
NAMED = 5  # tasks that a message proposes
CONTENT = (
    "environment",
    "tests",
)  # beside the instruction, what makes a task the problem it is; a renamed copy has the same


def content_hash(task: Task) -> str:
    """Of the instruction but for its white space, and of every file of the environment and the verifier, with their paths.

    A task without a folder is told from others by its id.
    """
    digest = hashlib.sha256(" ".join(task.instruction.split()).encode())
    if not task.path.is_dir():
        digest.update(f"\nid {task.id}".encode())
    for folder in CONTENT:
        for path in sorted((task.path / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"\n{path.relative_to(task.path).as_posix()} {content}".encode())
    return digest.hexdigest()


def require_held_out(held_out: Sequence[Task], trained: Mapping[str, str], *, chosen_by: str | None) -> None:
    """ConfigError when the content of a held-out task is among `trained`: id -> content hash. `chosen_by` is the option that chooses by id;
    None: a folder does."""
    ids = {content: task_id for task_id, content in trained.items()}
    same = [(task.id, ids[content]) for task in held_out if (content := content_hash(task)) in ids]
    if same:
        first = f"{same[0][0]} is training task {same[0][1]}" + (
            " under another name" if same[0][0] != same[0][1] else ""
        )
        more = f" (and {len(same) - 1} more)" if len(same) > 1 else ""
        held = [task.id for task in held_out if task.id not in dict(same)]
        unseen = (
            f"; {chosen_by} chooses others, e.g. {chosen_by}={','.join(held[:NAMED])}"
            if held and chosen_by
            else ""
        )
        raise ConfigError(
            f"held-out tasks were trained on: {first}{more}; leave them out of one of the two sets{unseen}"
        )


def content_hashes(tasks: Sequence[Task]) -> dict[str, str]:
    return {task.id: content_hash(task) for task in tasks}


def write_hashes(log_path: Path, trained: Mapping[str, str]) -> None:
    replace_text(log_path / HASHES_FILE, json.dumps(dict(trained), indent=1) + "\n")


def read_hashes(log_path: Path) -> dict[str, str]:
    """What the run in `log_path` trained on. ConfigError where it does not say."""
    if not (log_path / HASHES_FILE).is_file():
        raise ConfigError(
            f"{log_path} holds no {HASHES_FILE}; give train_data=RUN_FOLDER of a run, or a folder of tasks"
        )
    return read_document(log_path / HASHES_FILE, TypeAdapter(Hashes), same)
