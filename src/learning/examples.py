"""Groups -> training examples -> the datums of each optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from src.core.trajectory import Trajectory, TrajectoryGroup
from src.learning.advantages import group_advantages, token_weights, whitened
from src.learning.datums import TokenSequence, scaled, sequences_of, step_sequences_of, with_advantage
from src.learning.filters import is_trainable
from src.learning.options import AdvantageSettings, FilterSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One trajectory with its advantage, or one of its steps. Without sequences it trains nothing, and still counts as one of its batch."""

    trajectory: Trajectory
    advantage: float
    sequences: list[TokenSequence]
    num_too_long: int = 0  # sequences over max_sequence_length, left out

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_sampled for sequence in self.sequences)


def examples_of_batch(
    groups: Sequence[TrajectoryGroup], settings: AdvantageSettings, filters: FilterSettings
) -> list[list[Example]]:
    """The examples of each group. Only reinforce++ compares groups with one another."""
    examples_P_G = [examples_of(group, settings, filters) for group in groups]
    return whitened_examples(examples_P_G) if settings.estimator == "reinforce++" else examples_P_G


def examples_of(
    group: TrajectoryGroup, settings: AdvantageSettings, filters: FilterSettings
) -> list[Example]:
    """The group's examples, compared with one another: one per trajectory, or one per turn where trajectories are trained step by step.

    A group's advantages are those of whole trajectories either way, so each step has its trajectory's.
    """
    advantages_G = group_advantages(
        group.rewards, estimator=settings.estimator, singleton=settings.singleton_advantage
    )
    return [
        example
        for trajectory, advantage in zip(group.trajectories, advantages_G, strict=True)
        for example in _examples(trajectory, advantage, settings, filters)
    ]


def _examples(
    trajectory: Trajectory, advantage: float, settings: AdvantageSettings, filters: FilterSettings
) -> list[Example]:
    if settings.step_wise_trajectories:
        parts = [[sequence] for sequence in step_sequences_of(trajectory.turns, advantage=advantage)] or [[]]
    else:
        parts = [sequences_of(trajectory.turns, advantage=advantage)]
    limit = settings.length_limits.max_sequence_length
    is_trained = is_trainable(trajectory, filters)
    return [
        Example(
            trajectory=trajectory,
            advantage=advantage,
            sequences=[sequence for sequence in part if is_trained and len(sequence.tokens) <= limit],
            num_too_long=sum(len(sequence.tokens) > limit for sequence in part),
        )
        for part in parts
    ]


def whitened_examples(examples_P_G: Sequence[Sequence[Example]]) -> list[list[Example]]:
    """The examples with reinforce++'s advantages, for which every example's advantage so far is its return."""
    flat = [example for group in examples_P_G for example in group]
    values = whitened([example.advantage for example in flat], [example.num_tokens for example in flat])
    changed = iter(
        replace(
            example,
            advantage=value,
            sequences=[with_advantage(sequence, value) for sequence in example.sequences],
        )
        for example, value in zip(flat, values, strict=True)
    )
    return [[next(changed) for _ in group] for group in examples_P_G]


def substeps(examples_P_G: Sequence[Sequence[Example]], num_substeps: int) -> list[list[Example]]:
    """Shares of near-equal size, one per optimizer step: of whole groups, or of trajectories where there are fewer groups than steps.

    >>> [len(share) for share in substeps([["a", "b"], ["c", "d"], ["e", "f"]], 2)]
    [4, 2]
    """
    whole: list[Sequence[Example]] = list(examples_P_G)
    units = whole if len(whole) >= num_substeps else [[example] for group in whole for example in group]
    num_shares = min(num_substeps, len(units))
    bounds = [-(-len(units) * i // num_shares) for i in range(num_shares + 1)] if num_shares else [0]
    return [[example for unit in units[start:end] for example in unit] for start, end in pairwise(bounds)]


def weighted(share: Sequence[Example], settings: AdvantageSettings) -> list[Example]:
    """The share with its loss reduction worked into the advantages, since the server sums."""
    weights = token_weights(
        [example.num_tokens for example in share],
        prompts_S=[example.trajectory.task_id for example in share],
        reduction=settings.loss_reduction,
        max_sequence_length=settings.length_limits.max_sequence_length,
    )
    return [
        replace(example, sequences=[scaled(sequence, weight) for sequence in example.sequences])
        for example, weight in zip(share, weights, strict=True)
    ]
