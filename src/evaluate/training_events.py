"""The interface through which training reports its events. `RunEvents` has the events of rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from src.evaluate.evaluation import Evaluation, TaskRewards
from src.rollouts.run_events import RunEvents


class TrainingEvents(RunEvents, Protocol):
    """Receives the events of a training run on the event loop, in the order in which they happen."""

    def step_finished(self, step: int, *, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Called after the update of step `step` and before the evaluation after this step."""
        ...

    def evaluation_finished(self, evaluation: Evaluation, first: TaskRewards | None) -> None:
        """Called after the held-out tasks have been evaluated.

        `first` has the rewards of the first evaluation of the run; None: `evaluation` is the first.
        """
        ...
