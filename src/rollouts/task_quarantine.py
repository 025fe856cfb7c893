"""What lost trials add up to: tasks to leave out, and the point from which on a run would train on rubble. Pure bookkeeping.

A lost trial is never a reward. What it says about its task or the machine is reckoned here, group by group in the order of the batch, so
that the outcome does not depend on which trial ended first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from src.core.trajectory import FailureKind, TrajectoryGroup
from src.rollouts.options import FaultSettings

FEWEST_GROUPS = 4  # a rate over fewer groups may be one task's fault


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """The trials of one group and what they were lost to; the counts of `causes` are no more than `trials`."""

    trials: int
    causes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultState:
    """What the steps so far say. Part of every checkpoint."""

    strikes: Mapping[str, int] = field(
        default_factory=dict
    )  # by task: groups in a row without one graded trial
    quarantined: Mapping[str, str] = field(default_factory=dict)  # task -> its commonest cause
    recent: Sequence[Lost] = ()  # the latest groups, oldest first

    def after(self, groups: Sequence[TrajectoryGroup], settings: FaultSettings) -> FaultState:
        """The state once `groups` have been reckoned with."""
        strikes, quarantined = dict(self.strikes), dict(self.quarantined)
        for group in groups:
            causes = Counter(
                failure.kind for failure in group.failures if failure.kind is not FailureKind.AGENT
            )
            if group.trajectories or not causes:
                strikes.pop(group.task.id, None)
                continue
            strikes[group.task.id] = strikes.get(group.task.id, 0) + 1
            if settings.quarantine_after and strikes[group.task.id] >= settings.quarantine_after:
                quarantined[group.task.id] = str(causes.most_common(1)[0][0])
        recent = [*self.recent, *map(lost_in, groups)]
        return replace(
            self, strikes=strikes, quarantined=quarantined, recent=recent[-max(FEWEST_GROUPS, len(groups)) :]
        )

    def has_too_many_failures(self, settings: FaultSettings) -> bool:
        """Whether more of the latest trials were lost than the run may bear."""
        trials = sum(lost.trials for lost in self.recent)
        num_lost = sum(sum(lost.causes.values()) for lost in self.recent)
        return len(self.recent) >= FEWEST_GROUPS and num_lost > settings.max_failure_rate * trials


def diagnosis(state: FaultState, groups: Sequence[TrajectoryGroup], settings: FaultSettings) -> str:
    """Why a run stops before it trains on what is left: the causes by how often, and an example of the commonest."""
    causes: Counter[str] = Counter()
    for lost in state.recent:
        causes.update(lost.causes)
    commonest = causes.most_common(1)[0][0]
    examples = (
        failure.message for group in groups for failure in group.failures if failure.kind == commonest
    )
    example = (next(examples, "").splitlines() or [""])[0]
    shares = ", ".join(f"{count} by {cause}" for cause, count in causes.most_common())
    return (
        f"{causes.total()} of the last {sum(lost.trials for lost in state.recent)} trials could not be graded, more than "
        f"max_failure_rate={settings.max_failure_rate:g}: {shares}"
        + (f"; e.g. {example}" if example else "")
        + "; mend that and resume"
    )


def lost_in(group: TrajectoryGroup) -> Lost:
    causes = Counter(str(failure.kind) for failure in group.failures)
    return Lost(trials=len(group.trajectories) + len(group.failures), causes=dict(sorted(causes.items())))


def to_record(state: FaultState) -> dict[str, object]:
    recent = [{"trials": lost.trials, "causes": dict(lost.causes)} for lost in state.recent]
    return {"strikes": dict(state.strikes), "quarantined": dict(state.quarantined), "recent": recent}


def from_record(record: Mapping[str, Any]) -> FaultState:
    """The inverse; an empty record is a run's beginning."""
    recent = [Lost(trials=lost["trials"], causes=lost["causes"]) for lost in record.get("recent", [])]
    return FaultState(
        strikes=record.get("strikes", {}), quarantined=record.get("quarantined", {}), recent=recent
    )
