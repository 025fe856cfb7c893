"""Which tasks are trained on and which are held out, for every kind of environment."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fnmatch import fnmatchcase

from src.core.errors import ConfigError
from src.core.trajectory import Task


def hold_out(
    tasks: Sequence[Task], *, patterns: Sequence[str], fraction: float, seed: int
) -> tuple[list[Task], list[Task]]:
    """(training, held out). With `patterns` (ids or globs) those are held out, else `fraction` of the tasks, drawn by `seed`.

    ConfigError for a pattern that matches nothing or a split that leaves nothing to train on.
    """
    if patterns:
        for pattern in patterns:
            if not any(fnmatchcase(task.id, pattern) for task in tasks):
                raise ConfigError(f"eval_tasks: {pattern!r} is neither a folder nor the name of a task")
        chosen = {task.id for task in tasks if any(fnmatchcase(task.id, pattern) for pattern in patterns)}
    else:
        count = round(fraction * len(tasks))
        if fraction > 0 and count == 0 and len(tasks) > 1:
            count = 1
        chosen = {task.id for task in random.Random(seed).sample(list(tasks), count)}
    train = [task for task in tasks if task.id not in chosen]
    if not train:
        raise ConfigError(
            f"all {len(tasks)} tasks are held out; nothing is left to train on: lower eval_split or name fewer eval_tasks"
        )
    return train, [task for task in tasks if task.id in chosen]


def require_unique_ids(tasks: Sequence[Task]) -> None:
    """ConfigError where two tasks share an id, which is what groups, journal and metrics know a task by."""
    seen: dict[str, Task] = {}
    for task in tasks:
        if task.id in seen:
            raise ConfigError(
                f"two tasks are called {task.id}: {seen[task.id].path} and {task.path}; rename one"
            )
        seen[task.id] = task
