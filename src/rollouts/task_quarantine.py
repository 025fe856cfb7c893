"""Count trials that could not be graded, quarantine tasks, and detect that a run has too many failures.

Failures are counted group by group in the order of the batch. Without a pipeline, the result therefore does
not depend on the order in which trials end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from src.core.trajectory import FailureKind, TrajectoryGroup
from src.rollouts.options import FaultOptions

# The failure rate of fewer groups is not checked, because their failures may all come from one task.
MIN_GROUPS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFailures:
    """The number of trials of one group, and the number of failures by cause."""

    trials: int
    causes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultState:
    """The failures up to a step. The journal records this state with every step."""

    # Task id -> number of consecutive groups without a graded trial.
    strikes: Mapping[str, int] = field(default_factory=dict)
    # Task id -> most frequent cause, except `agent`, in the task's last group without a graded trial.
    quarantined: Mapping[str, str] = field(default_factory=dict)
    recent: Sequence[GroupFailures] = ()  # failures of the latest groups, oldest first

    def after(self, groups: Sequence[TrajectoryGroup], options: FaultOptions) -> FaultState:
        """Return the state with the failures of `groups` added.

        A group with a graded trial, or with failures of the kind `agent` alone, sets the `strikes` of its
        task to 0.
        """
        strikes, quarantined = dict(self.strikes), dict(self.quarantined)
        latest_cause: dict[str, str] = {}
        for group in groups:
            causes = Counter(
                failure.kind for failure in group.failures if failure.kind is not FailureKind.AGENT
            )
            if group.trajectories or not causes:
                strikes.pop(group.task.id, None)
                continue
            strikes[group.task.id] = strikes.get(group.task.id, 0) + 1
            latest_cause[group.task.id] = str(causes.most_common(1)[0][0])
        for task, cause in latest_cause.items():
            if options.quarantine_after and strikes.get(task, 0) >= options.quarantine_after:
                quarantined[task] = cause
        recent = [*self.recent, *map(failures_of, groups)]
        return replace(
            self, strikes=strikes, quarantined=quarantined, recent=recent[-max(MIN_GROUPS, len(groups)) :]
        )

    def has_too_many_failures(self, options: FaultOptions) -> bool:
        """Return whether more than `max_failure_rate` of the latest trials could not be graded.

        The result is False for fewer than MIN_GROUPS groups.
        """
        trials = sum(group_failures.trials for group_failures in self.recent)
        num_lost = sum(sum(group_failures.causes.values()) for group_failures in self.recent)
        return len(self.recent) >= MIN_GROUPS and num_lost > options.max_failure_rate * trials


def diagnosis(state: FaultState, groups: Sequence[TrajectoryGroup], options: FaultOptions) -> str:
    """Return why the run stops: the causes by frequency, and an example of the most frequent one."""
    causes: Counter[str] = Counter()
    for group_failures in state.recent:
        causes.update(group_failures.causes)
    commonest = causes.most_common(1)[0][0]
    examples = (
        failure.message for group in groups for failure in group.failures if failure.kind == commonest
    )
    example = (next(examples, "").splitlines() or [""])[0]
    shares = ", ".join(f"{count} by {cause}" for cause, count in causes.most_common())
    return (
        f"{causes.total()} of the last {sum(group_failures.trials for group_failures in state.recent)} "
        "trials could not be graded, more than "
        f"max_failure_rate={options.max_failure_rate:g}: {shares}"
        + (f"; e.g. {example}" if example else "")
        + "; fix the cause and resume"
    )


def failures_of(group: TrajectoryGroup) -> GroupFailures:
    causes = Counter(str(failure.kind) for failure in group.failures)
    return GroupFailures(
        trials=len(group.trajectories) + len(group.failures), causes=dict(sorted(causes.items()))
    )


def from_record(record: Mapping[str, Any]) -> FaultState:
    """Return the state that `asdict` converted to `record`. An empty record is the state before the first
    step."""
    recent = [GroupFailures(**group_failures) for group_failures in record.get("recent", [])]
    return FaultState(
        strikes=record.get("strikes", {}), quarantined=record.get("quarantined", {}), recent=recent
    )
