import pytest

from src.advantages import group_advantages, token_weights


def grpo(rewards, *, std=True, singleton="raw"):
    return group_advantages(rewards, normalize_by_std=std, singleton=singleton)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1, 1, 0, 0], [0.8660239, 0.8660239, -0.8660239, -0.8660239]),
        ([1, 1, 1, 0], [0.499999, 0.499999, 0.499999, -1.499997]),
        ([1, 0], [0.7071058, -0.7071058]),
        ([0.3, 0.3, 0.3], [0, 0, 0]),
        ([0.6667, 0.66670001], [0, 0]),  # equal but for rounding
    ],
)
def test_grpo_divides_by_the_sample_deviation(rewards, expected):
    assert grpo(rewards) == pytest.approx(expected, abs=1e-6)


def test_without_std_rewards_are_only_centred():
    assert grpo([1, 0, 0, 0], std=False) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize(("reward", "raw", "raw_without_std"), [(1.0, 0.999999, 1.0), (0.7, 0.6999993, 0.7)])
def test_a_singleton_is_zero_unless_raw_is_asked_for(reward, raw, raw_without_std):
    assert grpo([reward], singleton="zero") == [0.0]
    assert grpo([reward]) == pytest.approx([raw], abs=1e-7)
    assert grpo([reward], std=False) == [raw_without_std]


@pytest.mark.parametrize(
    ("reduction", "whole", "second_masked"),
    [
        ("token_mean", [0.125, 0.125], 0.5),
        ("sequence_mean", [0.25, 0.5 / 6], 0.25),
        ("seq_mean_token_sum_norm", [0.05, 0.05], 0.05),
    ],
)
def test_weights_of_two_and_six_tokens(reduction, whole, second_masked):
    assert token_weights([2, 6], reduction=reduction, max_sequence_length=10) == pytest.approx(whole)
    assert token_weights([2, 0], reduction=reduction, max_sequence_length=10)[0] == pytest.approx(second_masked)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm"])
def test_a_batch_without_a_token_divides_by_nothing(reduction):
    weights = token_weights([0, 0], reduction=reduction, max_sequence_length=10)
    assert all(0 < weight <= 1 for weight in weights)
    assert token_weights([], reduction=reduction, max_sequence_length=10) == []
