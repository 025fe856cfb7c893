"""Training examples of a batch, and their division into optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from src.core.trajectory import Trajectory, TrajectoryGroup
from src.learning.advantages import ADVANTAGE_ESTIMATORS, group_advantages, token_weights, whiten
from src.learning.datums import (
    TokenSequence,
    scale_advantages,
    sequences_of,
    step_sequences_of,
    with_advantage,
)
from src.learning.filters import is_trainable
from src.learning.options import AdvantageOptions, FilterOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One trajectory with its advantage, or one turn of it if `step_wise_trajectories` is set.

    An example without sequences trains no token and still counts in its batch.
    """

    trajectory: Trajectory
    advantage: float
    sequences: list[TokenSequence]
    num_too_long: int = 0  # sequences longer than max_sequence_length, which are left out

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_sampled for sequence in self.sequences)


def examples_of_batch(
    groups: Sequence[TrajectoryGroup], options: AdvantageOptions, filters: FilterOptions
) -> list[list[Example]]:
    """Return the examples of each group.

    Estimators with `is_whitened` normalise the advantages over all groups of the batch.
    """
    examples_P_G = [examples_of(group, options, filters) for group in groups]
    is_whitened = ADVANTAGE_ESTIMATORS[options.estimator].is_whitened
    return whiten_examples(examples_P_G) if is_whitened else examples_P_G


def examples_of(group: TrajectoryGroup, options: AdvantageOptions, filters: FilterOptions) -> list[Example]:
    """Return the examples of a group: one per trajectory, or one per turn with `step_wise_trajectories`.

    Advantages are those of whole trajectories; each turn has the advantage of its trajectory.
    """
    advantages_G = group_advantages(
        group.rewards, estimator=options.estimator, singleton=options.singleton_advantage
    )
    return [
        example
        for trajectory, advantage in zip(group.trajectories, advantages_G, strict=True)
        for example in _examples(trajectory, advantage, options, filters)
    ]


def _examples(
    trajectory: Trajectory, advantage: float, options: AdvantageOptions, filters: FilterOptions
) -> list[Example]:
    if options.step_wise_trajectories:
        parts = [[sequence] for sequence in step_sequences_of(trajectory.turns, advantage=advantage)] or [[]]
    else:
        parts = [sequences_of(trajectory.turns, advantage=advantage)]
    limit = options.length_limits.max_sequence_length
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


def whiten_examples(examples_P_G: Sequence[Sequence[Example]]) -> list[list[Example]]:
    """Replace the advantages of the examples and of their sampled tokens by whitened advantages. Call this
    function before `apply_loss_reduction`. In the other order, it would overwrite the loss-reduction weights.
    """
    flat = [example for group in examples_P_G for example in group]
    values = whiten([example.advantage for example in flat], [example.num_tokens for example in flat])
    whitened = iter(
        replace(
            example,
            advantage=value,
            sequences=[with_advantage(sequence, value) for sequence in example.sequences],
        )
        for example, value in zip(flat, values, strict=True)
    )
    return [[next(whitened) for _ in group] for group in examples_P_G]


def all_sequences(examples: Iterable[Example]) -> list[TokenSequence]:
    return [sequence for example in examples for sequence in example.sequences]


def with_advantages(examples: Iterable[Example], advantages_D: Iterable[np.ndarray]) -> list[Example]:
    """Replace the advantages of `all_sequences(examples)`, in order."""
    advantages = iter(advantages_D)
    return [
        replace(
            example,
            sequences=[replace(sequence, advantages=next(advantages)) for sequence in example.sequences],
        )
        for example in examples
    ]


def split_substeps(examples_P_G: Sequence[Sequence[Example]], num_substeps: int) -> list[list[Example]]:
    """Divide a batch into at most `num_substeps` parts, one per optimizer step.

    A part consists of whole groups, or of single examples if there are fewer groups than steps. The numbers
    of groups or examples in the parts differ by at most one.

    >>> [len(examples) for examples in split_substeps([["a", "b"], ["c", "d"], ["e", "f"]], 2)]
    [4, 2]
    """
    groups: list[Sequence[Example]] = list(examples_P_G)
    if len(groups) < num_substeps:
        groups = [[example] for group in groups for example in group]
    num_parts = min(num_substeps, len(groups))
    bounds = [-(-len(groups) * i // num_parts) for i in range(num_parts + 1)] if num_parts else [0]
    return [[example for group in groups[start:end] for example in group] for start, end in pairwise(bounds)]


def apply_loss_reduction(examples: Sequence[Example], options: AdvantageOptions) -> list[Example]:
    """Multiply the advantages by the loss-reduction weights, since the server sums the loss over tokens."""
    weights = token_weights(
        [example.num_tokens for example in examples],
        prompts_S=[example.trajectory.task_id for example in examples],
        reduction=options.loss_reduction,
        max_sequence_length=options.length_limits.max_sequence_length,
    )
    return [
        replace(example, sequences=[scale_advantages(sequence, weight) for sequence in example.sequences])
        for example, weight in zip(examples, weights, strict=True)
    ]
