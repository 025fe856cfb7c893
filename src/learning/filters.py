"""Reward rules, group filters and trajectory masks. Dropped groups are counted by reason."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from src.core.trajectory import StopReason, Trajectory, TrajectoryGroup
from src.learning.advantages import EPSILON
from src.learning.options import FilterOptions

logger = logging.getLogger(__name__)

# The stop reasons that SkyRL calls non-stop: a limit ended the trajectory, or the trial failed.
# SESSION_CLOSED is missing: if the agent closes the terminal, it ends the trajectory by its own action.
OVERLONG = frozenset(
    {
        StopReason.LENGTH,
        StopReason.CONTEXT_LENGTH,
        StopReason.MAX_TURNS,
        StopReason.AGENT_TIMEOUT,
        StopReason.TIMEOUT,
        StopReason.FAILED,
    }
)


class DropReason(StrEnum):
    """Why a group is not trained."""

    UNGRADED = "ungraded"  # no trial of the group could be graded
    TOO_SMALL = "too_small"  # fewer graded trials than min_group_size
    CONSTANT_REWARD = "constant_reward"


def keep_groups(
    groups: Sequence[TrajectoryGroup], options: FilterOptions
) -> tuple[list[TrajectoryGroup], Counter[DropReason]]:
    """Return the groups to train on, and the number of dropped groups by reason.

    The caller has applied the reward rules to `groups` already (`apply_reward_rules`).
    """
    reasons = [drop_reason(group, options) for group in groups]
    kept = [group for group, reason in zip(groups, reasons, strict=True) if reason is None]
    return kept, Counter(reason for reason in reasons if reason is not None)


def apply_reward_rules(groups: Sequence[TrajectoryGroup], options: FilterOptions) -> list[TrajectoryGroup]:
    """Return the groups with the rewards that training uses.

    The rules are, in this order: add the judge's bonus; give failures a reward (`failed_trial_reward`); set
    the reward to 0 for trajectories that a limit ended (`zero_reward_on_non_stop`); set the reward to 0 for
    trajectories with a long answer (`zero_reward_on_length_threshold`).
    """
    groups = [
        with_bonus_in_reward(group) if any(member.bonus for member in group.trajectories) else group
        for group in groups
    ]
    if options.failed_trial_reward is not None:
        groups = [with_failures_rewarded(group, options.failed_trial_reward) for group in groups]
    if options.zero_reward_on_non_stop:
        groups = [
            _zeroed(group, [member.stop_reason in OVERLONG for member in group.trajectories])
            for group in groups
        ]
    if options.zero_reward_on_length_threshold:
        limit = options.max_assistant_response_tokens
        too_long = [[_has_long_answer(member, limit) for member in group.trajectories] for group in groups]
        if num_zeroed := sum(map(sum, too_long)):
            total = sum(map(len, too_long))
            message = (
                "Length filtering (individual response): Set %d/%d responses to zero reward (>%d tokens)"
            )
            logger.info(message, num_zeroed, total, limit)
        groups = [_zeroed(group, flags) for group, flags in zip(groups, too_long, strict=True)]
    return list(groups)


def zeroed_metrics(groups: Sequence[TrajectoryGroup], options: FilterOptions) -> dict[str, float]:
    """Return the number of rewards that each `zero_reward_on_*` rule sets to 0. A reward counts only if it is
    above 0 after the judge's bonus is added.

    `groups` have the rewards before the reward rules.
    """
    rewarded = [
        member for group in groups for member in group.trajectories if member.reward + member.bonus > 0
    ]
    remaining = [  # the rewards that `zero_reward_on_non_stop` does not set to 0
        member
        for member in rewarded
        if not (options.zero_reward_on_non_stop and member.stop_reason in OVERLONG)
    ]
    limit = options.max_assistant_response_tokens
    too_long = [
        member
        for member in remaining
        if options.zero_reward_on_length_threshold and _has_long_answer(member, limit)
    ]
    return {
        "reward/zeroed_by_non_stop": float(len(rewarded) - len(remaining)),
        "reward/zeroed_by_length": float(len(too_long)),
    }


def drop_reason(group: TrajectoryGroup, options: FilterOptions) -> DropReason | None:
    """Return why a group is dropped, or None if the group is kept. As in SkyRL, a group of one trajectory is
    never dropped for a constant reward."""
    if not group.trajectories:
        return DropReason.UNGRADED
    if len(group.trajectories) < options.min_group_size:
        return DropReason.TOO_SMALL
    if options.remove_constant_reward_groups and len(group.trajectories) > 1 and is_constant(group.rewards):
        return DropReason.CONSTANT_REWARD
    return None


def is_constant(rewards: Sequence[float]) -> bool:
    """Return whether rewards are equal up to rounding.

    >>> is_constant([0.6667, 0.66670001])
    True
    """
    return max(rewards) - min(rewards) <= EPSILON


def with_bonus_in_reward(group: TrajectoryGroup) -> TrajectoryGroup:
    members = [
        replace(member, reward=member.reward + member.bonus, bonus=0.0) for member in group.trajectories
    ]
    return replace(group, trajectories=members)


def with_failures_rewarded(group: TrajectoryGroup, reward: float) -> TrajectoryGroup:
    """Turn failures into trajectories without turns, which change the group's baseline and train no token."""
    trajectories = [
        Trajectory(
            task_id=failure.task_id,
            turns=[],
            reward=reward,
            stop_reason=StopReason.FAILED,
            trial_name=failure.trial_name,
        )
        for failure in group.failures
    ]
    return replace(group, trajectories=[*group.trajectories, *trajectories], failures=[])


def is_trainable(trajectory: Trajectory, options: FilterOptions) -> bool:
    """Return whether the tokens of a trajectory are trained.

    If they are not, the trajectory still counts in the mean reward of its group and in metrics.
    """
    match options.apply_overlong_filtering:
        case "stop_reason":
            return trajectory.stop_reason not in OVERLONG
        case "eos":  # a completion has the stop reason STOP only if it ends with a stop token
            return bool(trajectory.turns) and trajectory.turns[-1].stop_reason == StopReason.STOP
        case _:
            return True


def _has_long_answer(trajectory: Trajectory, limit: int) -> bool:
    """Return whether an answer has more than `limit` sampled tokens. The token that ended the answer does not
    count."""
    longest = max(
        (len(turn.completion_ids) - (turn.stop_reason == StopReason.STOP) for turn in trajectory.turns),
        default=0,
    )
    logger.debug("%s: the longest answer has %d tokens, %d are allowed", trajectory.task_id, longest, limit)
    return longest > limit


def _zeroed(group: TrajectoryGroup, flags: Sequence[bool]) -> TrajectoryGroup:
    members = [
        replace(member, reward=0.0) if flag else member
        for member, flag in zip(group.trajectories, flags, strict=True)
    ]
    return replace(group, trajectories=members)
