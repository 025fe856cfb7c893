"""The one seam between training and environments: a task source hands out single-use trials."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from src.core.trajectory import Task, Trajectory, TrialFailure
from src.policy.sampling_policy import Policy

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0


class Trial(Protocol):
    """One attempt at one task, used once."""

    async def run(self, policy: Policy) -> Trajectory | TrialFailure:
        """Play the task with `policy` and grade it. Never raises but for cancellation; cancelling frees the sandbox."""
        ...


@runtime_checkable
class Expiring(Protocol):
    """A trial that can tell whose fault it is that it ran past its deadline."""

    def expired(self) -> Trajectory | None:
        """After a cancelled `run`: what the agent did, with the reward 0, where it used up most of the time itself; else None."""
        ...


@runtime_checkable
class TaskSource(Protocol):
    """The tasks of a run, split into training and held-out ones."""

    train: Sequence[Task]
    eval: Sequence[Task]

    def trial(self, task: Task, *, directory: Path, seed: int, temperature: float, member: int = 0) -> Trial:
        """A fresh trial of `task` whose files go below `directory`; `seed` makes its sampling reproducible.

        `member` is its number in its group: what an environment draws by it and by the task is the same in every step.
        """
        ...

    async def floor(self, task: Task) -> float | None:
        """What an agent that does nothing earns at `task`; None where nobody can say. May fail as a trial fails, by raising."""
        ...

    def batch_ended(self, directory: Path) -> None:
        """Every trial below `directory` has ended; time to sum them up for a reader. Blocking."""
        ...

    async def close(self) -> None:
        """The run is over; what its trials shared can go."""
        ...

    def text(self, token_ids: Sequence[int], clean: bool) -> str:
        """What the model's tokens say, for dumps; `clean` leaves special tokens out."""
        ...


async def close_quietly(source: TaskSource) -> None:
    """Close the source. An error or a timeout is logged and not raised, so that it does not hide how the run went."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await source.close()
    except Exception as error:
        logger.warning("the environment did not close: %s: %s", type(error).__name__, error)
