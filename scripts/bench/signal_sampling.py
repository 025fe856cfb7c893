"""Compare Thompson sampling of tasks with uniform sampling on a simulated pool.

    .venv/bin/python -m scripts.bench.signal_sampling [STEPS]

60 % of the tasks are impossible, 20 % are always solved, and 20 % have success rates between 0.2 and 0.8.
STEPS is the number of training steps (default: 200). In the output, `floor` is the option
`exploration_floor`, which only Thompson sampling uses, and a group is informative if its rewards differ.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from src.core.trajectory import StopReason, Task, Trajectory, TrajectoryGroup
from src.learning.curriculum import Curriculum
from src.learning.dynamic_sampling import is_good
from src.learning.options import CurriculumOptions
from src.rollouts.options import ScheduleOptions
from src.rollouts.pipeline import schedule

POOL = ((0.6, (0.0, 0.0)), (0.2, (1.0, 1.0)), (0.2, (0.2, 0.8)))  # share of the tasks, range of success rates


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    informative: float  # share of the groups whose rewards differ
    num_visited: int  # tasks that were rolled out at least once
    longest_wait: int  # largest number of steps that a task waited for its first or next group


def simulated(
    task_sampling: Literal["uniform", "thompson"],
    *,
    num_tasks: int,
    batch_size: int,
    group_size: int,
    num_steps: int,
    floor: float,
    seed: int,
) -> Outcome:
    """Run the trainer's task selection, with random rewards instead of a model."""
    rng = random.Random(seed)
    rates = [rng.uniform(*bounds) for share, bounds in POOL for _ in range(round(share * num_tasks))]
    tasks = [Task(id=f"task-{number:03d}", path=Path()) for number in range(len(rates))]
    settings = CurriculumOptions(task_sampling=task_sampling, exploration_floor=floor, seed=seed)
    uniform = schedule(
        tasks, ScheduleOptions(batch_size=batch_size, n_epochs=num_steps, max_steps=num_steps, seed=seed)
    )
    state, informative, num_groups = Curriculum(), 0, 0
    last, longest = dict.fromkeys((task.id for task in tasks), 0), 0
    visited: set[str] = set()
    for step in range(1, num_steps + 1):
        chosen = uniform[step - 1].tasks
        if task_sampling == "thompson":
            chosen = state.choose(tasks, batch_size, settings, step=step, refill_index=0)
        groups = [group_of(task, rates[tasks.index(task)], group_size, rng) for task in chosen]
        state = state.after(groups)
        informative += sum(is_good(group, 1) for group in groups)
        num_groups += len(groups)
        visited |= {task.id for task in chosen}
        longest = max(longest, *(step - last[task.id] for task in tasks))
        last |= {task.id: step for task in chosen}
    return Outcome(informative=informative / num_groups, num_visited=len(visited), longest_wait=longest)


def group_of(task: Task, rate: float, group_size: int, rng: random.Random) -> TrajectoryGroup:
    rewards = [float(rng.random() < rate) for _ in range(group_size)]
    members = [
        Trajectory(task_id=task.id, turns=[], reward=reward, stop_reason=StopReason.STOP)
        for reward in rewards
    ]
    return TrajectoryGroup(task=task, trajectories=members)


def main(num_steps: int) -> None:
    print("100 tasks, 8 tasks per step, groups of 8")
    cases: tuple[tuple[Literal["uniform", "thompson"], float], ...]
    cases = (("uniform", 0.1), ("thompson", 0.1), ("thompson", 0.25))
    for name, floor in cases:
        outcomes = [
            simulated(
                name, num_tasks=100, batch_size=8, group_size=8, num_steps=num_steps, floor=floor, seed=seed
            )
            for seed in range(10)
        ]
        share = sum(outcome.informative for outcome in outcomes) / len(outcomes)
        visited, wait = (
            min(outcome.num_visited for outcome in outcomes),
            max(outcome.longest_wait for outcome in outcomes),
        )
        print(
            f"{name:8} floor {floor:4.0%}: {share:6.1%} of the groups are informative, "
            f"at least {visited} of 100 tasks were rolled out, longest wait {wait} steps"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
