import pytest

from src.examples import AdvantageSettings, examples_of, substeps, weighted
from src.filters import FilterSettings
from src.kl_penalty import penalised
from src.limits import LengthLimits
from src.trajectory import StopReason, TrajectoryGroup
from tests.fakes.trials import task, trajectory, turn

FILTERS = FilterSettings(
    remove_constant_reward_groups=False, min_group_size=1, failed_trial_reward=None, apply_overlong_filtering="stop_reason"
)


def settings(**changes):
    options = {
        "estimator": "dr_grpo",
        "singleton_advantage": "zero",
        "loss_reduction": "token_mean",
        "length_limits": LengthLimits(max_input_length=5, max_generate_length=5, max_sequence_length=10, context_limit=10),
        "num_substeps": 1,
    }
    return AdvantageSettings(**(options | changes))


def two_and_six(*, second=StopReason.STOP):
    """A=+1 on two tokens and A=-1 on six."""
    members = [
        trajectory(reward=2, turns=[turn([1], [10, 11])]),
        trajectory(reward=0, turns=[turn([1], [12, 13, 14]), turn([2], [15, 16, 17])], stop=second),
    ]
    return TrajectoryGroup(task=task("a"), trajectories=members)


def token_advantages(example):
    return [value for sequence in example.sequences for value in sequence.advantages[sequence.sampled].tolist()]


@pytest.mark.parametrize(
    ("reduction", "first", "second", "total"),
    [("token_mean", 0.125, -0.125, -0.5), ("sequence_mean", 0.25, -0.5 / 6, 0.0), ("seq_mean_token_sum_norm", 0.05, -0.05, -0.2)],
)
def test_the_reduction_is_in_the_advantages(reduction, first, second, total):
    examples = weighted(examples_of(two_and_six(), settings(), FILTERS), settings(loss_reduction=reduction))
    assert token_advantages(examples[0]) == pytest.approx([first] * 2)
    assert token_advantages(examples[1]) == pytest.approx([second] * 6)
    assert sum(map(sum, map(token_advantages, examples))) == pytest.approx(total, abs=1e-6)


@pytest.mark.parametrize(("reduction", "first"), [("token_mean", 0.5), ("sequence_mean", 0.25), ("seq_mean_token_sum_norm", 0.05)])
def test_a_masked_trajectory_still_counts_in_the_group_and_the_batch(reduction, first):
    examples = weighted(examples_of(two_and_six(second=StopReason.LENGTH), settings(), FILTERS), settings(loss_reduction=reduction))
    assert [example.advantage for example in examples] == [1, -1]
    assert token_advantages(examples[0]) == pytest.approx([first] * 2)
    assert examples[1].sequences == []


def test_substeps_are_shares_of_whole_groups():
    assert substeps([["a", "b"], ["c"], ["d"], ["e"]], 2) == [["a", "b", "c"], ["d", "e"]]
    assert substeps([["a"], ["b"], ["c"]], 2) == [["a", "b"], ["c"]]


def test_fewer_groups_than_substeps_are_split_by_trajectory():
    assert substeps([["a", "b", "c", "d"]], 2) == [["a", "b"], ["c", "d"]]
    assert substeps([["a"]], 4) == [["a"]]
    assert substeps([], 4) == []


class Reference:
    """Says -1 of every token."""

    async def logprobs(self, token_ids):
        return [-1.0] * (len(token_ids) - 1)


async def test_the_kl_penalty_pulls_towards_the_reference_and_keeps_the_sum():
    members = [trajectory(reward=1, turns=[turn([1], [10], logprob=-0.5)]), trajectory(reward=1, turns=[turn([1], [11], logprob=-1.5)])]
    examples = examples_of(TrajectoryGroup(task=task("a"), trajectories=members), settings(), FILTERS)
    result = await penalised(examples, Reference(), coefficient=0.1, estimator="k1")
    assert result.mean_kl == pytest.approx(0.0)
    assert token_advantages(result.examples[0]) == pytest.approx([-0.05])  # likelier than in the reference: pushed down
    assert token_advantages(result.examples[1]) == pytest.approx([0.05])
