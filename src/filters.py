"""Which trajectories a batch learns from; every drop is counted by its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from src.trajectory import StopReason, Trajectory, TrajectoryGroup

# Endings that a limit forced; closing the terminal is the agent's own act.
OVERLONG = frozenset({StopReason.LENGTH, StopReason.CONTEXT_LENGTH, StopReason.MAX_TURNS, StopReason.AGENT_TIMEOUT})


class DropReason(StrEnum):
    UNGRADED = "ungraded"  # no trial of the group could be graded
    TOO_SMALL = "too_small"  # fewer graded trials than min_group_size
    CONSTANT_REWARD = "constant_reward"


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterSettings:
    remove_constant_reward_groups: bool
    min_group_size: int
    failed_trial_reward: float | None
    apply_overlong_filtering: str  # "off" | "stop_reason"


def keep_groups(groups: Sequence[TrajectoryGroup], settings: FilterSettings) -> tuple[list[TrajectoryGroup], Counter[DropReason]]:
    """The groups to learn from, failures rewarded first where the settings ask for it."""
    kept: list[TrajectoryGroup] = []
    dropped: Counter[DropReason] = Counter()
    for group in groups:
        if settings.failed_trial_reward is not None:
            group = with_failures_rewarded(group, settings.failed_trial_reward)
        reason = drop_reason(group, settings)
        if reason is None:
            kept.append(group)
        else:
            dropped[reason] += 1
    return kept, dropped


def drop_reason(group: TrajectoryGroup, settings: FilterSettings) -> DropReason | None:
    """None: the group stays."""
    if not group.trajectories:
        return DropReason.UNGRADED
    if len(group.trajectories) < settings.min_group_size:
        return DropReason.TOO_SMALL
    if settings.remove_constant_reward_groups and len(set(group.rewards)) == 1:
        return DropReason.CONSTANT_REWARD
    return None


def with_failures_rewarded(group: TrajectoryGroup, reward: float) -> TrajectoryGroup:
    """Failures become trajectories without turns, which move the group's baseline and train no token."""
    stand_ins = [
        Trajectory(task_id=failure.task_id, turns=[], reward=reward, stop_reason=StopReason.FAILED, trial_name=failure.trial_name)
        for failure in group.failures
    ]
    return replace(group, trajectories=[*group.trajectories, *stand_ins], failures=[])


def trains(trajectory: Trajectory, settings: FilterSettings) -> bool:
    """Whether its tokens are trained. A masked trajectory still counts in its group's mean and in every metric."""
    return settings.apply_overlong_filtering == "off" or trajectory.stop_reason not in OVERLONG
