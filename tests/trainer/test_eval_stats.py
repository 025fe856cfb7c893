from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest

from scripts.bench.interval_coverage import POOLS, coverage
from src.evaluate.eval_stats import (
    Tally,
    compare_paired,
    mean_rate,
    pass_at_k,
    pass_hat_k,
    pass_rates,
    sign_flip_p_value,
)


@pytest.mark.parametrize("graded", range(1, 9))
def test_pass_rates_agree_with_enumeration(graded):
    for solved in range(graded + 1):
        outcomes = [1] * solved + [0] * (graded - solved)
        for k in range(1, graded + 1):
            choices = list(combinations(outcomes, k))
            tally = Tally(solved=solved, graded=graded)
            assert pass_at_k(tally, k) == pytest.approx(np.mean([max(choice) for choice in choices]))
            assert pass_hat_k(tally, k) == pytest.approx(np.mean([min(choice) for choice in choices]))


def test_pass_at_k_and_pass_hat_k_are_unbiased():
    rate, graded, k = 0.3, 5, 3
    expected = {"at": 0.0, "hat": 0.0}
    for outcomes in product([0, 1], repeat=graded):
        chance = float(np.prod([rate if outcome else 1 - rate for outcome in outcomes]))
        tally = Tally(solved=sum(outcomes), graded=graded)
        expected["at"] += chance * pass_at_k(tally, k)
        expected["hat"] += chance * pass_hat_k(tally, k)
    assert expected["at"] == pytest.approx(1 - 0.7**3)
    assert expected["hat"] == pytest.approx(0.3**3)


@pytest.mark.parametrize("pool", ["uniform", "hard", "bimodal", "similar"])
@pytest.mark.parametrize("size", [(20, 8), (40, 4), (100, 4)])
def test_intervals_of_pass_at_1_cover_93_to_97_percent(pool, size):
    assert 0.93 <= coverage(POOLS[pool], size, "pass_at_1", repeats=1500, seed=1) <= 0.97


@pytest.mark.parametrize("kind", ["pass_at_n", "pass_hat_n"])
@pytest.mark.parametrize("pool", ["uniform", "bimodal"])
def test_intervals_of_other_rates_cover_93_to_97_percent(pool, kind):
    assert 0.93 <= coverage(POOLS[pool], (100, 4), kind, repeats=1500, seed=1) <= 0.97


def test_intervals_treat_trials_of_one_task_as_dependent():
    alike = mean_rate([1.0] * 5 + [0.0] * 5, num_trials=80)
    spread = mean_rate([0.5] * 10, num_trials=80)
    assert alike.high - alike.low > 0.5
    assert 0.15 < spread.high - spread.low < 0.6


def test_the_effective_number_is_at_most_the_number_of_trials():
    estimate = mean_rate([0.5, 0.52], num_trials=100)
    # The variance of the mean of these rates equals that of a mean over 2,499 independent trials. Only 100
    # trials were run, so the interval is the Wilson interval for 100 trials.
    assert (estimate.low, estimate.high) == (
        pytest.approx(0.41348, abs=1e-5),
        pytest.approx(0.60578, abs=1e-5),
    )


def test_an_interval_has_a_width_if_every_trial_was_solved():
    estimate = mean_rate([1.0] * 20, num_trials=80)
    assert estimate.value == 1 and estimate.high == pytest.approx(1) and 0.8 < estimate.low < 0.9
    assert (mean_rate([0.5], num_trials=4).low, mean_rate([0.5], num_trials=4).high) == (0, 1)


def test_tasks_with_too_few_graded_trials_are_left_out():
    rates = pass_rates(
        [Tally(solved=2, graded=4), Tally(solved=1, graded=1), Tally(solved=0, graded=0)], group_size=4
    )
    assert list(rates) == [f"{name}_{k}" for k in (1, 2, 3, 4) for name in ("pass_at", "pass_hat")]
    assert rates["pass_hat_1"] == rates["pass_at_1"]
    assert (rates["pass_at_1"].value, rates["pass_at_1"].num_tasks) == (0.75, 2)
    assert (rates["pass_at_4"].value, rates["pass_at_4"].num_tasks) == (1.0, 1)
    assert pass_rates([Tally(solved=0, graded=0)], group_size=4) == {}


def test_k_is_1_to_4_each_power_of_two_and_the_group_size():
    assert list(pass_rates([Tally(solved=2, graded=10)], group_size=10))[::2] == [
        f"pass_at_{k}" for k in (1, 2, 3, 4, 8, 10)
    ]
    assert list(pass_rates([Tally(solved=1, graded=1)], group_size=1)) == ["pass_at_1", "pass_hat_1"]


def test_the_sign_flip_test_agrees_with_enumeration():
    values = [Fraction(1, 4), Fraction(-1, 2), Fraction(3, 4), Fraction(1, 3), Fraction(0)]
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, values, strict=True)))
        for signs in product([1, -1], repeat=5)
    ]
    assert sign_flip_p_value(values) == pytest.approx(np.mean([total >= abs(sum(values)) for total in sums]))
    assert sign_flip_p_value([Fraction(0)] * 3) == 1.0


@pytest.mark.parametrize("primes", [(1009, 1013, 1033), (1009, 1013, 1061), (1009, 1019, 1021)])
def test_a_rounded_sign_flip_test_is_an_upper_bound(primes):
    """The exact p-value of these differences is 0.25.

    `sign_flip_p_value` rounds the differences to a grid, on which their sum is smaller than the exact sum.
    It must count this sum nevertheless.
    """
    assert sign_flip_p_value([Fraction(1, prime) for prime in primes]) == 0.25


def test_the_interval_of_a_difference_is_a_students_t_interval():
    before, after = [Tally(solved=0, graded=10)] * 3, [Tally(solved=count, graded=10) for count in (1, 2, 3)]
    difference = compare_paired(before, after).difference
    assert (difference.low, difference.high) == (
        pytest.approx(0.2 - 4.3027 * 0.1 / 3**0.5, abs=1e-4),
        pytest.approx(0.4484, abs=1e-4),
    )


def test_one_task_gives_no_information_about_the_difference():
    difference = compare_paired([Tally(solved=0, graded=4)], [Tally(solved=4, graded=4)]).difference
    assert (difference.value, difference.low, difference.high) == (1.0, -1.0, 1.0)


def test_a_comparison_is_paired_by_task():
    before = [Tally(solved=count, graded=4) for count in (0, 1, 2, 3, 0, 1, 2, 3)]
    after = [Tally(solved=count + 1, graded=4) for count in (0, 1, 2, 3, 0, 1, 2, 3)]
    comparison = compare_paired(before, after)
    assert (comparison.first, comparison.second) == (0.375, 0.625)
    assert (comparison.difference.value, comparison.difference.low, comparison.difference.high) == (
        0.25,
        0.25,
        0.25,
    )
    assert comparison.p_value == pytest.approx(2 / 2**8)
    assert (comparison.num_better, comparison.num_worse) == (8, 0)
    assert (
        compare_paired([*before, Tally(solved=0, graded=0)], [*after, Tally(solved=4, graded=4)])
        == comparison
    )


def test_paired_comparisons_are_calibrated():
    rng = np.random.default_rng(3)
    covered = rejected = 0
    for _ in range(600):
        chances = rng.beta(1, 1, size=20)
        first, second = (
            [Tally(solved=int(count), graded=4) for count in rng.binomial(4, chances)] for _ in range(2)
        )
        comparison = compare_paired(first, second)
        covered += comparison.difference.low <= 0 <= comparison.difference.high
        rejected += comparison.p_value < 0.05
    assert 0.93 <= covered / 600 <= 0.97
    assert rejected / 600 <= 0.06
