"""The events of a run that somebody may want to show: a terminal (src/cli/console.py) or a live page."""

from __future__ import annotations

from typing import Protocol

from src.core.trajectory import TrajectoryGroup


class RunEvents(Protocol):
    """Receives the events of rollouts, on the event loop and in their order."""

    def say(self, text: str) -> None:
        """Something that a person who follows the run should know, as one line."""
        ...

    def batch_started(self, title: str, *, num_groups: int, group_size: int) -> None:
        """Groups of a step, of a refill or of an evaluation are rolled out from here on."""
        ...

    def group_finished(self, group: TrajectoryGroup, *, duration_s: float) -> None:
        """All trials of one group have ended."""
        ...
