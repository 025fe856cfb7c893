"""Tests advantages and token weights on the reference cases G, R, X and RP of docs/skyrl-semantics.md."""

import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import get_args

import chz
import pytest

from scripts.docs import advantages as advantages_page
from src.config import TrainerConfig
from src.core.errors import ConfigError
from src.learning.advantages import ADVANTAGE_ESTIMATORS, Estimator, group_advantages, token_weights, whiten

WITHOUT_PROMPTS = ["token_mean", "sequence_mean", "seq_mean_token_sum_norm"]


def advantages(rewards, estimator: Estimator = "grpo", singleton="raw"):
    return group_advantages(rewards, estimator=estimator, singleton=singleton)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        pytest.param([1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999], id="G1"),
        pytest.param([1, 1, 0, 0], [0.8660239, 0.8660239, -0.8660239, -0.8660239], id="G2"),
        pytest.param([0.3, 0.3, 0.3], [0, 0, 0], id="G3"),
        pytest.param([1, 1, 1, 0], [0.499999, 0.499999, 0.499999, -1.499997], id="G6"),
        pytest.param([1, 0], [0.7071058, -0.7071058], id="G7"),
        pytest.param([0.6667, 0.66670001], [0, 0], id="G8"),
    ],
)
def test_grpo_divides_by_the_sample_deviation(rewards, expected):
    assert advantages(rewards) == pytest.approx(expected, abs=5e-7)


def test_g4_without_std_rewards_are_only_centred():
    assert advantages([1, 0, 0, 0], "dr_grpo") == [0.75, -0.25, -0.25, -0.25]
    assert advantages([6, 3], "dr_grpo") == [1.5, -1.5]


@pytest.mark.parametrize(("reward", "raw", "raw_without_std"), [(1.0, 0.999999, 1.0), (0.7, 0.6999993, 0.7)])
def test_g5_a_singleton_is_zero_unless_raw_is_set(reward, raw, raw_without_std):
    assert advantages([reward], singleton="zero") == [0.0]
    assert advantages([reward]) == pytest.approx([raw], abs=5e-8)
    assert advantages([reward], "dr_grpo") == [raw_without_std]


def test_r1_rloo_subtracts_the_mean_of_the_other_rewards():
    assert advantages([1, 0, 0, 0], "rloo") == pytest.approx(
        [1, -0.3333333, -0.3333333, -0.3333333], abs=5e-8
    )
    assert advantages([1], "rloo") == [0.0]
    assert advantages([6, 3], "rloo") == [3, -3]
    rewards = [0.2, 0.9, 0.4]
    baselines = [statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i in range(3)]
    assert advantages(rewards, "rloo") == pytest.approx(
        [reward - baseline for reward, baseline in zip(rewards, baselines, strict=True)]
    )


def test_maxrl_divides_by_the_mean():
    assert advantages([6, 3], "maxrl") == pytest.approx([1.5 / 4.500001, -1.5 / 4.500001])
    assert advantages([9, 12], "maxrl") == pytest.approx([-1.5 / 10.500001, 1.5 / 10.500001])


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ConfigError, match="rewards of at least 0, but a trial has the reward -1;"):
        advantages([-1, -0.5], "maxrl")


def test_a_factor_that_is_not_finite_names_the_estimator(monkeypatch: pytest.MonkeyPatch):
    broken = replace(ADVANTAGE_ESTIMATORS["grpo"], scale=lambda rewards: float("nan"))
    monkeypatch.setitem(ADVANTAGE_ESTIMATORS, "grpo", broken)
    with pytest.raises(
        ConfigError, match="advantage_estimator=grpo gives the factor nan for the rewards 1, 0;"
    ):
        advantages([1, 0])
    assert advantages([1, 1]) == [0, 0]


def test_x1_groups_are_not_normalised_over_the_batch():
    over_the_batch = [2.4494897, -0.8164966, -0.8164966, -0.8164966, 0, 0, 0, 0]
    ours = advantages([1, 0, 0, 0]) + advantages([1, 1, 1, 1])
    assert ours == pytest.approx([1.499997, -0.499999, -0.499999, -0.499999, 0, 0, 0, 0], abs=5e-7)
    assert ours != pytest.approx(over_the_batch, abs=0.1)


def test_x2_a_failed_trial_does_not_change_the_grouping():
    by_position = [-0.5557189, -0.5557189, -0.5557189, 1.6671568, 0.7409586, 0.7409586, -1.4819171]
    ours = advantages([0, 0, 0]) + advantages([1, 1, 1, 0])
    assert ours[:3] == [0, 0, 0]
    assert ours != pytest.approx(by_position, abs=0.1)


def test_rp_reinforce_plus_plus_whitens_over_the_batchs_tokens():
    assert advantages([1, 0], "reinforce++") == [1, 0]
    assert whiten([1, 0], [3, 3]) == pytest.approx([0.9128709, -0.9128709], abs=5e-8)
    # Every token is one sample, so longer sequences have more weight.
    tokens = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.5]
    mean, deviation = statistics.fmean(tokens), statistics.stdev(tokens)
    assert whiten([1, 0, 0.5], [2, 4, 1]) == pytest.approx(
        [(value - mean) / deviation for value in (1, 0, 0.5)], abs=1e-6
    )
    assert whiten([1], [1]) == [0.0] and whiten([], []) == [] and whiten([1, 1], [2, 2]) == [0, 0]


@pytest.mark.parametrize(
    ("reduction", "weights", "weight_if_second_masked"),
    [
        ("token_mean", [0.125, 0.125], 0.5),
        ("sequence_mean", [0.25, 0.0833333], 0.25),
        ("seq_mean_token_sum_norm", [0.05, 0.05], 0.05),
        ("prompt_mean", [0.125, 0.125], 0.5),
    ],
)
def test_token_weights_of_two_sequences_for_each_reduction(reduction, weights, weight_if_second_masked):
    options = {"reduction": reduction, "max_sequence_length": 10, "prompts_S": ["a", "a"]}
    assert token_weights([2, 6], **options) == pytest.approx(weights, abs=5e-8)
    assert token_weights([2, 0], **options)[0] == pytest.approx(weight_if_second_masked)


@pytest.mark.parametrize(
    ("reduction", "values", "prompts", "max_length", "loss"),
    [
        ("token_mean", [[1, 2], [4, 5, 6]], "ab", 3, 3.6),
        ("sequence_mean", [[1, 2], [3]], "ab", 2, 2.25),
        ("seq_mean_token_sum_norm", [[2, 3], [9]], "ab", 10, 0.7),
        ("prompt_mean", [[1, 2], [3], [4], [8]], "aabb", 9, 4.0),
    ],
)
def test_the_weighted_sum_equals_skyrls_reduced_loss(reduction, values, prompts, max_length, loss):
    weights = token_weights(
        list(map(len, values)), reduction=reduction, max_sequence_length=max_length, prompts_S=list(prompts)
    )
    assert sum(weight * sum(tokens) for weight, tokens in zip(weights, values, strict=True)) == pytest.approx(
        loss
    )


def test_prompt_mean_gives_every_prompt_the_same_weight():
    rng = random.Random(0)
    lengths = [rng.randint(1, 50) for _ in range(12)]
    prompts = ["abc"[i % 3] for i in range(12)]
    weights = token_weights(lengths, reduction="prompt_mean", max_sequence_length=10, prompts_S=prompts)
    for prompt in "abc":
        total = sum(
            weight * length
            for weight, length, name in zip(weights, lengths, prompts, strict=True)
            if name == prompt
        )
        assert total == pytest.approx(1 / 3)


@pytest.mark.parametrize("reduction", [*WITHOUT_PROMPTS, "prompt_mean"])
def test_a_batch_without_tokens_has_finite_weights(reduction):
    weights = token_weights([0, 0], reduction=reduction, max_sequence_length=10, prompts_S=["a", "b"])
    assert all(0 < weight <= 1 for weight in weights)
    assert token_weights([], reduction=reduction, max_sequence_length=10, prompts_S=[]) == []


def test_every_estimator_has_an_entry():
    assert set(ADVANTAGE_ESTIMATORS) == set(get_args(Estimator))


def test_options_of_estimators_exist():
    options = {option for estimator in ADVANTAGE_ESTIMATORS.values() for option in estimator.options}
    assert options <= set(chz.chz_fields(TrainerConfig))


def test_the_page_of_estimators_is_current():
    page = Path(__file__).resolve().parents[2] / "docs" / "advantages.md"
    assert page.read_text() == advantages_page.page(), "run python -m scripts.docs advantages"
