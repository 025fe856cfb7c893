"""The interface through which rollouts report their events, for example to src/cli/console.py."""

from __future__ import annotations

from typing import Protocol

from src.core.trajectory import TrajectoryGroup


class RunEvents(Protocol):
    """Receives the events of rollouts on the event loop, in the order in which they happen."""

    def say(self, text: str) -> None:
        """Show one line of text to the user."""
        ...

    def batch_started(self, title: str, *, num_groups: int, group_size: int) -> None:
        """Called when the rollouts of a step, an evaluation or a further batch of dynamic sampling start."""
        ...

    def group_finished(self, group: TrajectoryGroup, *, duration_s: float) -> None:
        """Called when all trials of one group have ended."""
        ...
