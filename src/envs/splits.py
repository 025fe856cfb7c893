"""The split of tasks into training tasks and held-out tasks, for every kind of environment."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fnmatch import fnmatchcase

from src.core.errors import ConfigError
from src.core.trajectory import Task


def hold_out(
    tasks: Sequence[Task], *, patterns: Sequence[str], fraction: float, seed: int
) -> tuple[list[Task], list[Task]]:
    """Return (training tasks, held-out tasks).

    Tasks whose ids match one of `patterns` (ids or globs) are held out. Without patterns, a random `fraction`
    of the tasks is held out, at least one if there are several tasks and `fraction` is positive.

    Raises ConfigError if there are no tasks, if a pattern matches no task, or if no training task is left.
    """
    if not tasks:
        raise ConfigError("the environment has no tasks; correct the options that select them")
    if patterns:
        matching = _matching(
            tasks,
            patterns,
            "eval_tasks: {!r} matches no task; give ids or globs of tasks or, with env=harbor, a directory",
        )
        held_out_ids = {task.id for task in matching}
    else:
        count = round(fraction * len(tasks))
        if fraction > 0 and count == 0 and len(tasks) > 1:
            count = 1
        held_out_ids = {task.id for task in random.Random(seed).sample(list(tasks), count)}
    train = [task for task in tasks if task.id not in held_out_ids]
    if not train:
        raise ConfigError(
            f"all {len(tasks)} tasks are held out and none is left to train on; "
            "lower eval_split or name fewer eval_tasks"
        )
    return train, [task for task in tasks if task.id in held_out_ids]


def chosen_tasks(tasks: Sequence[Task], patterns: Sequence[str] | None) -> list[Task]:
    """Return the tasks whose ids match a pattern, or all tasks if `patterns` is None.

    Raises ConfigError for a pattern without a match.
    """
    return (
        list(tasks)
        if patterns is None
        else _matching(tasks, patterns, "tasks: {!r} matches no task; give ids or globs of tasks")
    )


def require_unique_ids(tasks: Sequence[Task]) -> None:
    """Raise ConfigError if two tasks share an id. Groups, the journal and the rollout store identify a task
    by its id.
    """
    seen: dict[str, Task] = {}
    for task in tasks:
        if task.id in seen:
            raise ConfigError(
                f"two tasks have the id {task.id}: {seen[task.id].path} and {task.path}; rename one of them"
            )
        seen[task.id] = task


def _matching(tasks: Sequence[Task], patterns: Sequence[str], error: str) -> list[Task]:
    """Return the tasks whose ids equal or match a pattern.

    Raises ConfigError for a pattern without a match. The pattern replaces `{!r}` in the message `error`.
    """

    def matches(task: Task, pattern: str) -> bool:
        return task.id == pattern or fnmatchcase(task.id, pattern)

    for pattern in patterns:
        if not any(matches(task, pattern) for task in tasks):
            raise ConfigError(error.format(pattern))
    return [task for task in tasks if any(matches(task, pattern) for pattern in patterns)]
