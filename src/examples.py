"""Groups -> training examples -> the datums of each optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from src.advantages import group_advantages, token_weights
from src.datums import TokenSequence, scaled, sequences_of
from src.filters import FilterSettings, trains
from src.trajectory import Trajectory, TrajectoryGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageSettings:
    normalize_advantages_by_std: bool
    singleton_advantage: str  # "zero" | "raw"
    loss_reduction: str
    context_limit: int
    num_substeps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One trajectory with its advantage. Without sequences it trains nothing, and still counts as one of its batch."""

    trajectory: Trajectory
    advantage: float
    sequences: list[TokenSequence]

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_sampled for sequence in self.sequences)


def examples_of(group: TrajectoryGroup, settings: AdvantageSettings, filters: FilterSettings) -> list[Example]:
    """The group's examples, compared with one another."""
    advantages_G = group_advantages(
        group.rewards, normalize_by_std=settings.normalize_advantages_by_std, singleton=settings.singleton_advantage
    )
    return [
        Example(
            trajectory=trajectory,
            advantage=advantage,
            sequences=sequences_of(trajectory.turns, advantage=advantage) if trains(trajectory, filters) else [],
        )
        for trajectory, advantage in zip(group.trajectories, advantages_G, strict=True)
    ]


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
        [example.num_tokens for example in share], reduction=settings.loss_reduction, max_sequence_length=settings.context_limit
    )
    return [
        replace(example, sequences=[scaled(sequence, weight) for sequence in example.sequences])
        for example, weight in zip(share, weights, strict=True)
    ]
