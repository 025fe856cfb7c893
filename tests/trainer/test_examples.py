from collections import Counter
from typing import Any, cast

import numpy as np
import pytest

from src.core.trajectory import StopReason, TrajectoryGroup
from src.learning.examples import apply_loss_reduction, examples_of, examples_of_batch, split_substeps
from src.learning.kl_penalty import apply_kl_penalty, apply_teacher, kl_estimates
from src.learning.options import AdvantageOptions, FilterOptions, PreparationOptions
from src.learning.penalty_options import DistillationOptions, KlOptions
from src.learning.preparation import prepare
from tests.fakes.trials import task, trajectory, turn

FILTERS = FilterOptions(
    remove_constant_reward_groups=False,
    min_group_size=1,
    failed_trial_reward=None,
    apply_overlong_filtering="stop_reason",
)


def settings(**changes):
    options = {"advantage_estimator": "dr_grpo", "max_input_length": 5, "max_tokens": 5, "context_limit": 10}
    return AdvantageOptions(**(options | changes))


def split(names_P_G: list[list[str]], num_substeps: int) -> Any:
    """Split groups of names, which stand for examples."""
    return split_substeps(cast(Any, names_P_G), num_substeps)


def two_and_six(*, second_stop=StopReason.STOP):
    """Return a group of two trajectories with 2 and 6 sampled tokens.

    Their rewards are 2 and 0, so their advantages are 1 and -1.
    """
    members = [
        trajectory(reward=2, turns=[turn([1], [10, 11])]),
        trajectory(reward=0, turns=[turn([1], [12, 13, 14]), turn([2], [15, 16, 17])], stop=second_stop),
    ]
    return TrajectoryGroup(task=task("a"), trajectories=members)


def token_advantages(example):
    return [
        value for sequence in example.sequences for value in sequence.advantages[sequence.sampled].tolist()
    ]


@pytest.mark.parametrize(
    ("reduction", "first", "second", "total"),
    [
        ("token_mean", 0.125, -0.125, -0.5),
        ("sequence_mean", 0.25, -0.0833333, 0.0),
        ("seq_mean_token_sum_norm", 0.05, -0.05, -0.2),
        ("prompt_mean", 0.125, -0.125, -0.5),
    ],
)
def test_the_loss_reduction_scales_the_advantages(reduction, first, second, total):
    examples = apply_loss_reduction(
        examples_of(two_and_six(), settings(), FILTERS), settings(loss_reduction=reduction)
    )
    assert token_advantages(examples[0]) == pytest.approx([first] * 2)
    assert token_advantages(examples[1]) == pytest.approx([second] * 6)
    assert sum(map(sum, map(token_advantages, examples))) == pytest.approx(total, abs=1e-6)


@pytest.mark.parametrize(
    ("reduction", "first", "total"),
    [("token_mean", 0.5, 1.0), ("sequence_mean", 0.25, 0.5), ("seq_mean_token_sum_norm", 0.05, 0.1)],
)
def test_a_masked_trajectory_counts_in_group_and_batch(reduction, first, total):
    examples = apply_loss_reduction(
        examples_of(two_and_six(second_stop=StopReason.LENGTH), settings(), FILTERS),
        settings(loss_reduction=reduction),
    )
    assert [example.advantage for example in examples] == [1, -1]
    assert token_advantages(examples[0]) == pytest.approx([first] * 2)
    assert sum(token_advantages(examples[0])) == pytest.approx(total)
    assert examples[1].sequences == []


@pytest.mark.parametrize(("num_tokens", "num_trained"), [(10, 10), (11, 0)])
@pytest.mark.seed_behaviour(142)
def test_l13_to_l15_an_overlong_sequence_trains_nothing(num_tokens, num_trained):
    # SkyRL's fork `fleet` trains the part of such a sequence within the limit. Here, no token is trained.
    long = trajectory(reward=1, turns=[turn([1] * (num_tokens - 3), [2, 3, 4])])
    short = trajectory(reward=0, turns=[turn([1], [2])])
    examples = examples_of(TrajectoryGroup(task=task("a"), trajectories=[long, short]), settings(), FILTERS)
    assert [example.num_too_long for example in examples] == [int(not num_trained), 0]
    assert len(examples[0].sequences) == bool(num_trained)
    # The reward still changes the baseline of the group.
    assert [example.advantage for example in examples] == [0.5, -0.5]
    assert (
        len(
            apply_loss_reduction(examples, settings(loss_reduction="sequence_mean"))[1]
            .sequences[0]
            .advantages
        )
        == 2
    )
    assert token_advantages(apply_loss_reduction(examples, settings(loss_reduction="sequence_mean"))[1]) == [
        -0.25
    ]


def test_l15_an_overlong_prompt_is_counted_and_not_cut():
    long = trajectory(reward=1, turns=[turn([1] * 12, [2])])
    [example] = examples_of(TrajectoryGroup(task=task("a"), trajectories=[long]), settings(), FILTERS)
    assert example.sequences == [] and example.num_too_long == 1


def test_s7_every_turn_has_the_advantage_of_its_trajectory():
    # SkyRL's samples also contain the observation after the turn, with mask 0, which has no effect.
    turns = [turn([1] * 3, [2, 3]), turn([1, 1, 1, 2, 3, 4], [5])]
    members = [trajectory(reward=1, turns=turns), trajectory(reward=0, turns=[turn([1], [2])])]
    group = TrajectoryGroup(task=task("a"), trajectories=members)
    examples = examples_of(group, settings(step_wise_trajectories=True), FILTERS)
    assert [len(example.sequences[0].tokens) for example in examples] == [5, 7, 2]
    assert [example.advantage for example in examples] == [0.5, 0.5, -0.5]
    assert [example.num_tokens for example in examples] == [2, 1, 1]
    [whole, _] = examples_of(group, settings(), FILTERS)
    assert whole.num_tokens == 3 and len(whole.sequences) == 1


def test_reinforce_plus_plus_normalises_over_the_batch():
    groups = [
        TrajectoryGroup(task=task("a"), trajectories=[trajectory("a", 1, [turn([1], [2, 3, 4])])]),
        TrajectoryGroup(task=task("b"), trajectories=[trajectory("b", 0, [turn([1], [2, 3, 4])])]),
    ]
    [[first], [second]] = examples_of_batch(groups, settings(advantage_estimator="reinforce++"), FILTERS)
    assert token_advantages(first) == pytest.approx([0.9128709] * 3)
    assert token_advantages(second) == pytest.approx([-0.9128709] * 3)
    assert (first.advantage, second.advantage) == pytest.approx((0.9128709, -0.9128709))


@pytest.mark.seed_behaviour(78)
def test_substeps_are_shares_of_whole_groups():
    assert split([["a", "b"], ["c"], ["d"], ["e"]], 2) == [["a", "b", "c"], ["d", "e"]]
    assert split([["a"], ["b"], ["c"]], 2) == [["a", "b"], ["c"]]


def test_fewer_groups_than_substeps_are_split_by_trajectory():
    assert split([["a", "b", "c", "d"]], 2) == [["a", "b"], ["c", "d"]]
    assert split([["a"]], 4) == [["a"]]
    assert split([], 4) == []


class Reference:
    """Returns the logprob -1 for every token."""

    async def logprobs(self, token_ids):
        return [-1.0] * (len(token_ids) - 1)


async def test_the_kl_penalty_keeps_the_sum_of_advantages():
    members = [
        trajectory(reward=1, turns=[turn([1], [10], logprob=-0.5)]),
        trajectory(reward=1, turns=[turn([1], [11], logprob=-1.5)]),
    ]
    examples = examples_of(TrajectoryGroup(task=task("a"), trajectories=members), settings(), FILTERS)
    result = await apply_kl_penalty(examples, Reference(), KlOptions(kl_penalty_coef=0.1, kl_estimator="k1"))
    assert result.mean_kl == pytest.approx(0.0)
    # The token is more likely than in the reference, so its advantage is lowered.
    assert token_advantages(result.examples[0]) == pytest.approx([-0.05])
    assert token_advantages(result.examples[1]) == pytest.approx([0.05])


async def test_a_teacher_adds_a_logprob_difference_to_each_advantage():
    members = [
        trajectory(reward=1, turns=[turn([1], [10, 11], logprob=-0.5)]),
        trajectory(reward=0, turns=[turn([1], [12], logprob=-2.0)]),
    ]
    examples = examples_of(TrajectoryGroup(task=task("a"), trajectories=members), settings(), FILTERS)
    before = [example.advantage for example in examples]
    result = await apply_teacher(
        examples, Reference(), DistillationOptions(teacher="t", teacher_coef=0.2, reward_coef=0.5)
    )
    assert token_advantages(result.examples[0]) == pytest.approx([before[0] / 2 - 0.1] * 2)
    assert token_advantages(result.examples[1]) == pytest.approx([before[1] / 2 + 0.2])
    assert result.examples[0].sequences[0].advantages[0] == 0
    assert result.mean_kl == pytest.approx((0.5 + 0.5 - 1) / 3)


async def test_the_measured_kl_is_a_mean_over_the_tokens_of_all_substeps():
    lengths_and_logprobs = ((3, -0.5), (1, -1.5))
    groups = [
        TrajectoryGroup(
            task=task(f"a{length}"),
            trajectories=[trajectory(reward=1, turns=[turn([1], [10] * length, logprob=logprob)])],
        )
        for length, logprob in lengths_and_logprobs
    ]
    options = PreparationOptions(num_substeps=2, kl_penalty_coef=0.1, max_tokens=5, context_limit=10)
    examples_P_G = examples_of_batch(groups, options, FILTERS)
    prepared = await prepare(
        examples_P_G, Counter(), reference=Reference(), learner=cast(Any, None), options=options
    )
    assert prepared.metrics["optim/kl_policy_base"] == pytest.approx((3 * 0.5 - 0.5) / 4)


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.1065307)])
@pytest.mark.seed_behaviour(72)
async def test_kl_estimates_of_a_logprob_difference_of_half_a_nat(estimator, value):
    assert float(kl_estimates(np.array(-1 - -1.5), estimator=estimator)) == pytest.approx(value, abs=5e-8)
    members = [
        trajectory(reward=1, turns=[turn([1], [10], logprob=-0.5)]),
        trajectory(reward=1, turns=[turn([1], [11], logprob=-1.0)]),
    ]
    examples = examples_of(TrajectoryGroup(task=task("a"), trajectories=members), settings(), FILTERS)
    # The differences are 0.5 and 0.
    result = await apply_kl_penalty(
        examples, Reference(), KlOptions(kl_penalty_coef=1.0, kl_estimator=estimator)
    )
    assert token_advantages(result.examples[0]) == pytest.approx([-value / 2])
    assert token_advantages(result.examples[1]) == pytest.approx([value / 2])
    assert result.mean_kl == pytest.approx(0.25)
