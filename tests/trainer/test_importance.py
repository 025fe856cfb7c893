from typing import Any

import numpy as np
import pytest

from src.learning.datums import scale_advantages, sequences_of
from src.learning.examples import Example
from src.learning.importance import apply_tis, token_factors
from src.learning.options import ImportanceOptions
from tests.fakes.trials import trajectory, turn

OLD, SAMPLED = np.array([-1.0, -2.0, -0.5]), np.array([-2.0, -2.0, -0.1])  # ratios e, 1, exp(-0.4)


def settings(**changes):
    options = dict.fromkeys(
        [
            "tis_cap",
            "tis_sequence_mask_low",
            "tis_sequence_mask_high",
            "tis_token_mask_low",
            "tis_token_mask_high",
        ],
        None,
    )
    values: dict[str, Any] = {"tis": "off", "tis_sequence_mask": "off"} | options | changes
    return ImportanceOptions(**values)


def test_token_ratios_are_capped():
    result = token_factors(OLD, SAMPLED, settings(tis="token"))
    assert result.factors.tolist() == pytest.approx([2.0, 1.0, 0.67032], abs=5e-6)
    assert result.num_capped / 3 == pytest.approx(1 / 3)
    assert token_factors(OLD, SAMPLED, settings(tis="token", tis_cap=3.0)).factors[0] == pytest.approx(
        2.7182818
    )


def test_a_sequence_has_one_ratio():
    # The values are equal up to the precision of float32.
    assert token_factors(OLD, SAMPLED, settings(tis="sequence")).factors.tolist() == pytest.approx(
        [1.8221189] * 3, abs=2e-7
    )
    capped = token_factors(OLD, SAMPLED, settings(tis="sequence", tis_cap=1.5))
    assert capped.factors.tolist() == [1.5] * 3 and capped.num_capped == 1


@pytest.mark.parametrize(
    ("kind", "bounds", "is_masked"),
    [
        ("geometric", {}, True),  # exp(0.2) > 1.01
        ("product", {}, False),  # 0.5 <= 1.822 <= 2
        ("outlier", {"tis_sequence_mask_high": 2.0}, True),  # e > 2
        ("outlier", {}, False),
        ("product", {"tis_sequence_mask_high": 1.5}, True),
    ],
)
def test_a_sequence_out_of_bounds_is_masked_as_a_whole(kind, bounds, is_masked):
    result = token_factors(OLD, SAMPLED, settings(tis_sequence_mask=kind, **bounds))
    assert result.is_masked is is_masked
    assert result.factors.tolist() == [0.0 if is_masked else 1.0] * 3


def test_a_sequence_below_the_lower_bound_is_masked():
    masked = settings(tis_sequence_mask="product", tis_sequence_mask_low=0.6)
    assert token_factors(SAMPLED, OLD, masked).is_masked  # 1 / 1.822 < 0.6


def test_the_token_mask_keeps_ratios_at_its_bounds():
    result = token_factors(OLD, SAMPLED, settings(tis_token_mask_low=0.5, tis_token_mask_high=2.0))
    assert result.factors.tolist() == [0, 1, 1]
    at_bound = token_factors(np.array([np.log(2.0)]), np.array([0.0]), settings(tis_token_mask_high=2.0))
    assert at_bound.factors.tolist() == [1]  # A ratio at the bound is kept.


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("geometric", 0.99, 1.01), ("product", 0.5, 2.0), ("outlier", 1e-4, 100.0)]
)
def test_sequence_bounds_default_to_those_of_skyrl(kind, low, high):
    def is_masked(ratio, **bounds):
        return token_factors(
            np.log([ratio]), np.zeros(1), settings(tis_sequence_mask=kind, **bounds)
        ).is_masked

    assert [is_masked(ratio) for ratio in (0.99 * low, 1.005 * low, 0.995 * high, 1.01 * high)] == [
        True,
        False,
        False,
        True,
    ]
    # A ratio at the bound is kept.
    assert not is_masked(1.0, tis_sequence_mask_low=1.0, tis_sequence_mask_high=1.0)


@pytest.mark.parametrize(
    "option",
    [
        {"tis": "token"},
        {"tis_sequence_mask": "outlier"},
        {"tis_token_mask_low": 0.0},
        {"tis_token_mask_high": 9.0},
    ],
)
def test_each_option_alone_enables_the_correction(option):
    assert settings(**option).is_on and not settings().is_on


def test_the_capped_fraction_counts_masked_tokens():
    original = example(turn([1], [10, 11], logprob=-1.0))
    # The ratios are e and exp(-2).
    _, metrics = apply_tis(
        [[original]], [np.array([9.0, 0.0, -3.0], np.float32)], settings(tis="token", tis_token_mask_low=0.5)
    )
    assert (metrics["tis/capped_fraction"], metrics["tis/masked_tokens"]) == (0.5, 1)


def test_the_sampler_is_compared_with_the_trainer_before_the_correction():
    original = example(turn([1], [10, 11], logprob=-1.0))
    _, metrics = apply_tis(
        [[original]], [np.array([0.0, -1.5, -3.0], np.float32)], settings(tis="token", tis_cap=9.0)
    )
    assert metrics["optim/kl_sample_train_v1"] == pytest.approx((0.5 + 2.0) / 2)
    assert metrics["optim/kl_sample_train_v2"] == pytest.approx((0.125 + 2.0) / 2)
    assert metrics["optim/entropy"] == pytest.approx(1.0)
    assert metrics["policy/rollout_train_logprobs_abs_diff_max"] == pytest.approx(2.0)


def test_ratios_do_not_overflow():
    result = token_factors(np.array([900.0, -900.0]), np.zeros(2), settings(tis="token", tis_cap=1e9))
    assert np.isfinite(result.factors).all() and result.factors[0] == pytest.approx(np.exp(20))


def example(*turns, advantage=1.0):
    return Example(
        trajectory=trajectory(turns=turns),
        advantage=advantage,
        sequences=sequences_of(turns, advantage=advantage),
    )


def test_tis_changes_sampled_tokens_only():
    original = example(
        turn([1], [10, 11], logprob=-1.0), turn([1, 10, 11, 2], [12], logprob=-1.0), advantage=2.0
    )
    old = np.array([9.0, -1.0, -1.0, 9.0, -3.0], dtype=np.float32)
    [[changed]], metrics = apply_tis([[original]], [old], settings(tis="token"))
    [sequence] = changed.sequences
    assert sequence.logprobs.tolist() == [0, -1, -1, 0, -3]
    assert sequence.advantages.tolist() == pytest.approx([0, 2, 2, 0, 2 * np.exp(-2)])
    assert metrics["tis/capped_fraction"] == 0


def test_a_trajectory_in_two_sequences_has_one_product_of_ratios():
    broken = example(turn([1], [10], logprob=-1.0), turn([5], [50], logprob=-1.0))
    unchanged = example(turn([1], [10]), advantage=0.0)
    old_logprobs = [np.array([0.0, -0.5], dtype=np.float32), np.array([0.0, -0.7], dtype=np.float32)]
    [[_, changed]], _ = apply_tis([[unchanged, broken]], old_logprobs, settings(tis="sequence"))
    assert [sequence.advantages[1] for sequence in changed.sequences] == pytest.approx([np.exp(0.8)] * 2)


def test_a_positive_factor_commutes_with_the_loss_reduction():
    original = example(turn([1], [10], logprob=-1.0))
    halved = Example(
        trajectory=original.trajectory,
        advantage=1.0,
        sequences=[scale_advantages(original.sequences[0], 0.5)],
    )
    old = [np.array([0.0, -0.9], dtype=np.float32)]
    [[whole]], _ = apply_tis([[original]], old, settings(tis="token"))
    [[half]], _ = apply_tis([[halved]], old, settings(tis="token"))
    assert half.sequences[0].advantages.tolist() == pytest.approx(
        (whole.sequences[0].advantages / 2).tolist()
    )
