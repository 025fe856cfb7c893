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
        """Called when a step, a refill or an evaluation begins to collect its groups."""
        ...

    def group_finished(self, group: TrajectoryGroup, *, duration_s: float) -> None:
        """Called when a group has ended or, with the pipeline, when a step takes the group."""
        ...
