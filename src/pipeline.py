"""Which policy rolls out which tasks when. Synchronous: each batch is played by the policy that the batch before it made."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from src.trajectory import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The tasks of one step. `step` counts from 1 over the whole run; step n turns policy version n - 1 into n."""

    step: int
    epoch: int
    tasks: list[Task]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSettings:
    batch_size: int
    n_epochs: int
    max_steps: int | None
    seed: int


def schedule(tasks: Sequence[Task], settings: ScheduleSettings) -> list[Batch]:
    """Every batch of the run, a pure function of the tasks and the seed, so that a resumed run meets the same ones.

    Epochs never mix within a batch, so that the last batch of an epoch may be smaller.
    """
    batches: list[Batch] = []
    for epoch in range(settings.n_epochs):
        order = epoch_order(tasks, seed=settings.seed, epoch=epoch)
        for start in range(0, len(order), settings.batch_size):
            batches.append(Batch(step=len(batches) + 1, epoch=epoch, tasks=order[start : start + settings.batch_size]))
    return batches[: settings.max_steps]


def epoch_order(tasks: Sequence[Task], *, seed: int, epoch: int) -> list[Task]:
    """A shuffle that depends on the tasks' ids, the seed and the epoch, and on nothing else."""
    order = sorted(tasks, key=lambda task: task.id)
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
