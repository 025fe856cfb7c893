"""Write the tasks of the quick start to datasets/quickstart.

    python -m scripts.quickstart.make_tasks [DIRECTORY]

The Harbor task directories are the same in every run. Training tasks use the pool of words from which the
demonstrations of the supervised warm start are made. Held-out tasks use words that occur nowhere else, and
some held-out task types have no training task.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from scripts.quickstart.arguments import directory_and_options
from scripts.quickstart.task_types import TRAINING, UNSEEN, Instance, make_instance
from scripts.quickstart.words import Pool

ROOT = Path(__file__).resolve().parents[2] / "datasets" / "quickstart"
TRAIN_COUNTS = {task_type: 2 for task_type in TRAINING} | {"collect": 4, "pipe": 6, "pair": 8}
HELD_OUT_COUNTS = {
    task_type: 1
    for task_type in ("write", "append", "copy", "move", "mode", "count", "search", "pipe", "pair")
}
HELD_OUT_COUNTS |= {task_type: 2 for task_type in UNSEEN} | {"count-matches": 3}

TASK_TOML = """schema_version = "1.1"

[task]
name = "quickstart/{name}"
description = "{instruction}"

[metadata]
family = "{task_type}"
split = "{split}"

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0

[environment]
network_mode = "no-network"
cpus = 1
memory_mb = 512
"""
TEST_SH = """#!/bin/bash
# Grades what is on disk, not how it got there.
cd /app || exit 1
if {checks}; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""


def instances(split: Pool, *, scale: int = 1) -> dict[str, Instance]:
    """Return the tasks of one split, by task name. `scale` multiplies the usual number of tasks per type."""
    # Training tasks are numbered from 1 and held-out tasks from 51, because their names are task ids and
    # must be unique.
    counts, offset = (TRAIN_COUNTS, 0) if split is Pool.TRAIN else (HELD_OUT_COUNTS, 50)
    return {
        f"{task_type}-{number:02d}": make_instance(task_type, seed=f"task-{number}", pool=split)
        for task_type, count in counts.items()
        for number in range(offset + 1, offset + scale * count + 1)
    }


def write_training_tasks(directory: Path, scale: int) -> None:
    """Write the training tasks to `directory`, `scale` times as many as the repository contains. With a scale
    of at most 6, no training task has the name of a held-out task."""
    for name, instance in instances(Pool.TRAIN, scale=scale).items():
        write_task(directory / name, instance, split=Pool.TRAIN)


def write_task(directory: Path, instance: Instance, *, split: Pool) -> None:
    """Write one Harbor task directory."""
    text = {
        "task.toml": TASK_TOML.format(
            name=directory.name, instruction=instance.instruction, task_type=instance.task_type, split=split
        ),
        "instruction.md": instance.instruction + "\n",
        "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n"
        + ("COPY files/ /app/\n" if instance.files else ""),
        "solution/solve.sh": f"#!/bin/bash\ncd /app\n{instance.command}\n",
        "tests/test.sh": TEST_SH.format(checks=" &&\n  ".join(instance.checks)),
    } | {f"environment/files/{path}": content for path, content in instance.files.items()}
    for path, content in text.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(content)
        (directory / path).chmod(0o755 if path in ("solution/solve.sh", "tests/test.sh") else 0o644)


def main() -> None:
    root, _ = directory_and_options(__doc__, ROOT)
    for split, directory in ((Pool.TRAIN, "train"), (Pool.HELD_OUT, "heldout")):
        shutil.rmtree(root / directory, ignore_errors=True)
        for name, instance in instances(split).items():
            write_task(root / directory / name, instance, split=split)


if __name__ == "__main__":
    main()
