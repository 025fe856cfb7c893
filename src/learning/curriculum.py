"""Signal-aware sampling: which tasks a step plays, by what they have to teach. A group teaches where some of its trials succeed, not all.

Each task has a Beta posterior of its pass rate, from Beta(1, 1) on. A step draws a rate for every task from its posterior and takes the
tasks whose draws lie nearest to one half (Thompson sampling): what is uncertain is tried, what is known to be impossible or solved is left
alone. An exploration floor takes a share of every batch from the tasks played longest ago, so that every task comes round.

The policy moves while the posterior learns, so old evidence fades: each new group of a task scales what is known of it by `DECAY`, as if
the last 1 / (1 - MEMORY) groups were remembered. A posterior that never faded would not notice that an impossible task became possible.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from src.core.trajectory import Task, TrajectoryGroup
from src.learning.metrics import SOLVED
from src.learning.options import CurriculumSettings

DECAY = 0.75  # the last four groups


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskPosterior:
    """What is known of one task. Counts of trials, faded."""

    solved: float = 0.0
    failed: float = 0.0
    last_played: int = -1  # number of the group of the run; -1: never

    @property
    def mean(self) -> float:
        return (self.solved + 1) / (self.solved + self.failed + 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Curriculum:
    """What the groups so far say. Part of every checkpoint."""

    evidence: Mapping[str, TaskPosterior] = field(default_factory=dict)  # by task
    num_groups: int = 0

    def after(self, groups: Sequence[TrajectoryGroup]) -> Curriculum:
        """The state once `groups` were played. Trials without a grade say nothing, but their task had its turn."""
        evidence, count = dict(self.evidence), self.num_groups
        for group in groups:
            before = evidence.get(group.task.id, TaskPosterior())
            solved = sum(reward >= SOLVED for reward in group.rewards)
            memory = DECAY if group.rewards else 1.0
            evidence[group.task.id] = TaskPosterior(
                solved=memory * before.solved + solved,
                failed=memory * before.failed + len(group.rewards) - solved,
                last_played=count,
            )
            count += 1
        return replace(self, evidence=evidence, num_groups=count)

    def choose(
        self, tasks: Sequence[Task], count: int, settings: CurriculumSettings, *, step: int, attempt: int
    ) -> list[Task]:
        """`count` different tasks for a step, or for its nth refill; a pure function of the state, the seed and the place."""
        rng = random.Random(f"{settings.seed}/curriculum/{step}/{attempt}")
        order = sorted(tasks, key=lambda task: task.id)
        rng.shuffle(order)  # between equals, chance decides
        share = settings.exploration_floor * min(count, len(order))
        num_explored = int(share) + (rng.random() < share - int(share))
        waiting = sorted(order, key=lambda task: self.of(task).last_played)
        explored, rest = waiting[:num_explored], waiting[num_explored:]
        distance = {
            task.id: abs(rng.betavariate(self.of(task).solved + 1, self.of(task).failed + 1) - 0.5)
            for task in rest
        }
        return [*explored, *sorted(rest, key=lambda task: distance[task.id])[: max(0, count - num_explored)]]

    def of(self, task: Task) -> TaskPosterior:
        return self.evidence.get(task.id, TaskPosterior())


def curriculum_metrics(
    state: Curriculum, tasks: Sequence[Task], settings: CurriculumSettings
) -> dict[str, float]:
    """How the pool looks: tasks never played, and those whose rate is thought below 0.1, above 0.9, or between."""
    if settings.task_sampling == "uniform":
        return {}
    means = [state.of(task).mean for task in tasks if state.of(task).last_played >= 0]
    return {
        "curriculum/tasks_unplayed": float(len(tasks) - len(means)),
        "curriculum/tasks_hard": float(sum(mean < 0.1 for mean in means)),
        "curriculum/tasks_mid": float(sum(0.1 <= mean <= 0.9 for mean in means)),
        "curriculum/tasks_easy": float(sum(mean > 0.9 for mean in means)),
    }


def to_record(state: Curriculum, *, since: int) -> dict[str, object]:
    """What has changed since `since` groups had been played: a pool of thousands is not written down after every step."""
    changed = {task: item for task, item in state.evidence.items() if item.last_played >= since}
    evidence = {task: [item.solved, item.failed, item.last_played] for task, item in changed.items()}
    return {"evidence": evidence, "num_groups": state.num_groups}


def from_records(records: Iterable[Mapping[str, Any]]) -> Curriculum:
    """The inverse, of the records of all steps in order; without any it is a run's beginning. An empty one says nothing."""
    evidence: dict[str, TaskPosterior] = {}
    num_groups = 0
    for record in records:
        evidence |= {
            task: TaskPosterior(solved=a, failed=b, last_played=last)
            for task, (a, b, last) in record.get("evidence", {}).items()
        }
        num_groups = record.get("num_groups", num_groups)
    return Curriculum(evidence=evidence, num_groups=num_groups)
