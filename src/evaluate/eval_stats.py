"""Statistics of graded trials: pass@k, pass^k, confidence intervals and paired comparisons.

The statistical unit is the task. Trials of one task are correlated, so intervals that treat them as
independent would be too narrow. Each task therefore contributes one number to every mean and variance.

The suffix _P of a name marks a sequence with one element per task; P is the number of tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import comb
from statistics import NormalDist, fmean, stdev, variance

import numpy as np

LEVEL = 0.95  # confidence level of the intervals
MAX_SUMS = 2**20
"""The maximum number of grid steps between 0 and the largest sum of differences in the sign-flip test."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """The graded trials of one task."""

    solved: int
    graded: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over tasks with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    num_tasks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The success rates of two policies on the tasks with graded trials of both, and their difference."""

    first: float
    second: float
    difference: Estimate  # second - first
    p_value: float  # two-sided, from the exact sign-flip test
    num_better: int  # tasks at which the second policy has a higher success rate than the first
    num_worse: int


def pass_at_k(tally: Tally, k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of `k` trials solves the task.

    Source: arXiv 2107.03374.

    >>> pass_at_k(Tally(solved=1, graded=4), 2)
    0.5
    """
    assert 1 <= k <= tally.graded
    return 1 - comb(tally.graded - tally.solved, k) / comb(tally.graded, k)


def pass_hat_k(tally: Tally, k: int) -> float:
    """Return pass^k, an unbiased estimate of the probability that all of `k` trials solve the task.

    Source: arXiv 2406.12045.

    >>> pass_hat_k(Tally(solved=3, graded=4), 2)
    0.5
    """
    assert 1 <= k <= tally.graded
    return comb(tally.solved, k) / comb(tally.graded, k)


def pass_rates(tallies: Sequence[Tally], *, group_size: int) -> dict[str, Estimate]:
    """Return `pass_at_<k>` and `pass_hat_<k>` for each k up to `group_size` that is 1, 2, 3, 4, another power
    of two or `group_size`.

    Tasks with fewer than k graded trials are left out, and `num_tasks` does not count them. If no task is
    left, the result has no rates for this k.
    """
    powers = {2**power for power in range(group_size.bit_length())}
    sizes = sorted(k for k in {1, 2, 3, 4, group_size} | powers if k <= group_size)
    rates: dict[str, Estimate] = {}
    for k in sizes:
        if kept := [tally for tally in tallies if tally.graded >= k]:
            num_trials = sum(tally.graded for tally in kept)
            for name, rate in (("pass_at", pass_at_k), ("pass_hat", pass_hat_k)):
                rates[f"{name}_{k}"] = mean_rate([rate(tally, k) for tally in kept], num_trials=num_trials)
    return rates


def mean_rate(rates_P: Sequence[float], *, num_trials: int) -> Estimate:
    """Return the mean of the rates, one per task, with Wilson's interval for the effective number of trials.

    The effective number (Korn and Graubard 1998; Dean and Pagano 2015) is the number of independent trials
    whose mean would have the same variance as this mean. The variance of this mean is estimated from the
    spread of the rates over tasks. The effective number is limited to the range from the number of tasks
    minus 1 to `num_trials`, and equals the number of tasks if the rates are equal. With one task, the
    interval is [0, 1]. `scripts/bench/interval_coverage.py` compares the coverage with that of the bootstrap
    over tasks, whose coverage is below 95 % if tasks are few or rates are close to 0 or 1.
    """
    num_tasks, mean = len(rates_P), fmean(rates_P)
    if num_tasks == 1:  # one task gives no information about others
        return Estimate(value=mean, low=0.0, high=1.0, num_tasks=1)
    spread, variance_of_mean = mean * (1 - mean), variance(rates_P) / num_tasks
    size = num_tasks
    if variance_of_mean > 0:
        size = min(num_trials, max(num_tasks - 1, spread / variance_of_mean))
    quantile = NormalDist().inv_cdf((1 + LEVEL) / 2)
    ratio = quantile**2 / size
    centre = (mean + ratio / 2) / (1 + ratio)
    half_width = quantile / (1 + ratio) * math.sqrt(spread / size + ratio / (4 * size))
    return Estimate(
        value=mean, low=max(0.0, centre - half_width), high=min(1.0, centre + half_width), num_tasks=num_tasks
    )


def compare_paired(first_P: Sequence[Tally], second_P: Sequence[Tally]) -> Comparison:
    """Compare two policies on the same tasks, in the same order. A task is left out unless both policies have
    a graded trial of it.

    The interval of the difference of the success rates is Student's t interval over tasks, or the whole range
    from -1 to 1 if there is only one task. The p-value is that of the exact sign-flip test, whose null
    hypothesis is that the success rates do not differ.
    """
    pairs = [(a, b) for a, b in zip(first_P, second_P, strict=True) if a.graded and b.graded]
    assert pairs, "no task was graded under both policies"
    exact = [Fraction(b.solved, b.graded) - Fraction(a.solved, a.graded) for a, b in pairs]
    values = [float(difference) for difference in exact]
    difference = mean_difference(values)
    return Comparison(
        first=fmean(a.solved / a.graded for a, _ in pairs),
        second=fmean(b.solved / b.graded for _, b in pairs),
        difference=replace(difference, low=max(-1.0, difference.low), high=min(1.0, difference.high)),
        p_value=sign_flip_p_value(exact),
        num_better=sum(value > 0 for value in values),
        num_worse=sum(value < 0 for value in values),
    )


def mean_difference(differences_P: Sequence[float]) -> Estimate:
    """Return the mean of the differences of tasks, with Student's t interval over tasks. The interval of one
    task is infinite."""
    # The import takes a second, and training runs do not need scipy.
    from scipy.stats import t

    mean, num_tasks, half_width = fmean(differences_P), len(differences_P), math.inf
    if num_tasks > 1:
        quantile = float(t.ppf((1 + LEVEL) / 2, num_tasks - 1))
        half_width = quantile * stdev(differences_P) / math.sqrt(num_tasks)
    return Estimate(value=mean, low=mean - half_width, high=mean + half_width, num_tasks=num_tasks)


def sign_flip_p_value(differences_P: Sequence[Fraction]) -> float:
    """Return the two-sided p-value of the sign-flip (permutation) test, over all 2^P sign patterns.

    The distribution of the sum is computed by convolution, without random sampling, for any number of tasks.
    With 14 tasks or more, `scipy.stats.permutation_test` by default draws random sign patterns instead.

    Each sum is a multiple of 1 / (common denominator of the differences). If more than `MAX_SUMS` such
    multiples lie between 0 and the largest sum, the differences are rounded to a grid of `MAX_SUMS` steps. To
    allow for the rounding, the test then also counts the sums whose absolute value is smaller than that of
    the observed sum by at most the largest possible rounding error. The result is therefore equal to the
    exact p-value or slightly above it, never below it.

    >>> sign_flip_p_value([Fraction(1), Fraction(1), Fraction(1)])
    0.25
    """
    scale = Fraction(math.lcm(*(difference.denominator for difference in differences_P)))
    largest_sum = sum(map(abs, differences_P))
    is_exact = largest_sum * scale <= MAX_SUMS
    if not is_exact:
        scale = MAX_SUMS / largest_sum
    steps = [round(abs(difference) * scale) for difference in differences_P]
    slack = 0 if is_exact else len(steps) / 2
    total = sum(steps)
    probabilities = np.zeros(2 * total + 1)  # of each sum from -total to total
    probabilities[total] = 1.0
    for step in steps:
        if step:
            probabilities = (np.roll(probabilities, step) + np.roll(probabilities, -step)) / 2
    observed = float(abs(sum(differences_P)) * scale) - slack
    sums = np.abs(np.arange(-total, total + 1))
    return min(1.0, float(probabilities[sums >= observed].sum()))
