"""Task selection by Thompson sampling. It prefers tasks with a success rate near one half.

Each task has a Beta posterior of its success rate, with the prior Beta(1, 1). A share of every batch,
`exploration_floor`, goes to the tasks rolled out longest ago, so that every task is rolled out again at some
time. For the rest of the batch, a step draws a rate for each remaining task from the posterior of the task
and selects the tasks whose draws are closest to one half. The draws for a task with few trials vary widely,
so such tasks are tried. The draws for a task that is known to be impossible or solved are far from one half,
so such tasks are avoided.

The policy changes during training, so old evidence decays. Each new graded group of a task multiplies the
earlier counts of the task by `DECAY`, so about the last 1 / (1 - DECAY) groups count. Without decay, an
impossible task that became possible would not be noticed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from src.core.trajectory import Task, TrajectoryGroup
from src.learning.options import CurriculumOptions
from src.learning.rollout_groups import SOLVED

DECAY = 0.75  # about the last four groups count


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskPosterior:
    """The decayed counts of solved and failed trials of one task."""

    solved: float = 0.0
    failed: float = 0.0
    # Index of the task's last group among all groups of the run; -1: the task was never rolled out.
    last_rolled_out: int = -1

    @property
    def mean(self) -> float:
        return (self.solved + 1) / (self.solved + self.failed + 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Curriculum:
    """The posteriors of all tasks.

    With `task_sampling=thompson`, the journal records their changes with every trained step.
    """

    evidence: Mapping[str, TaskPosterior] = field(default_factory=dict)  # task id -> posterior
    num_groups: int = 0  # number of groups that were rolled out in the run so far

    def after(self, groups: Sequence[TrajectoryGroup]) -> Curriculum:
        """Return the state after `groups`.

        Ungraded trials are no evidence, but their tasks count as rolled out.
        """
        evidence, count = dict(self.evidence), self.num_groups
        for group in groups:
            before = evidence.get(group.task.id, TaskPosterior())
            solved = sum(reward >= SOLVED for reward in group.rewards)
            decay = DECAY if group.rewards else 1.0
            evidence[group.task.id] = TaskPosterior(
                solved=decay * before.solved + solved,
                failed=decay * before.failed + len(group.rewards) - solved,
                last_rolled_out=count,
            )
            count += 1
        return replace(self, evidence=evidence, num_groups=count)

    def choose(
        self, tasks: Sequence[Task], count: int, options: CurriculumOptions, *, step: int, refill_index: int
    ) -> list[Task]:
        """Return at most `count` different tasks. State, seed, step and `refill_index` determine the choice.

        `refill_index` is 0 for the first tasks of a step, and 1 or more for a refill of dynamic sampling.
        """
        rng = random.Random(f"{options.seed}/curriculum/{step}/{refill_index}")
        order = sorted(tasks, key=lambda task: task.id)
        rng.shuffle(order)  # so that ties are broken at random
        share = options.exploration_floor * min(count, len(order))
        num_explored = int(share) + (rng.random() < share - int(share))
        waiting = sorted(order, key=lambda task: self.posterior(task).last_rolled_out)
        explored, rest = waiting[:num_explored], waiting[num_explored:]
        distance = {
            task.id: abs(
                rng.betavariate(self.posterior(task).solved + 1, self.posterior(task).failed + 1) - 0.5
            )
            for task in rest
        }
        return [*explored, *sorted(rest, key=lambda task: distance[task.id])[: max(0, count - num_explored)]]

    def posterior(self, task: Task) -> TaskPosterior:
        return self.evidence.get(task.id, TaskPosterior())


def curriculum_metrics(
    state: Curriculum, tasks: Sequence[Task], options: CurriculumOptions
) -> dict[str, float]:
    """Return the number of tasks without a trial, and of tasks with a low, medium or high posterior mean.

    Returns {} with `task_sampling=uniform`.
    """
    if options.task_sampling == "uniform":
        return {}
    means = [state.posterior(task).mean for task in tasks if state.posterior(task).last_rolled_out >= 0]
    return {
        "curriculum/tasks_unplayed": float(len(tasks) - len(means)),
        "curriculum/tasks_hard": float(sum(mean < 0.1 for mean in means)),
        "curriculum/tasks_mid": float(sum(0.1 <= mean <= 0.9 for mean in means)),
        "curriculum/tasks_easy": float(sum(mean > 0.9 for mean in means)),
    }


def to_record(state: Curriculum, *, since: int) -> dict[str, object]:
    """Return the posteriors that changed after the first `since` groups. Each step writes only these."""
    changed = {task: item for task, item in state.evidence.items() if item.last_rolled_out >= since}
    evidence = {task: [item.solved, item.failed, item.last_rolled_out] for task, item in changed.items()}
    return {"evidence": evidence, "num_groups": state.num_groups}


def from_records(records: Iterable[Mapping[str, Any]]) -> Curriculum:
    """Return the state from the records of all steps in order. Without records it is the initial state."""
    evidence: dict[str, TaskPosterior] = {}
    num_groups = 0
    for record in records:
        evidence |= {
            task: TaskPosterior(solved=solved, failed=failed, last_rolled_out=last_rolled_out)
            for task, (solved, failed, last_rolled_out) in record.get("evidence", {}).items()
        }
        num_groups = record.get("num_groups", num_groups)
    return Curriculum(evidence=evidence, num_groups=num_groups)
