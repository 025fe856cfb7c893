"""What graded trials say of a policy: pass@k, pass^k, intervals that cover, and the paired comparison of two policies. Pure functions.

The unit is the task. Its trials are alike, so an interval that took them one by one would be too narrow; what is averaged, and what
varies, is one number per task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb
from statistics import NormalDist, fmean, stdev, variance

import numpy as np

LEVEL = 0.95
MAX_SUMS = 2**20  # of the sign-flip test, on either side of 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """The graded trials of one task."""

    solved: int
    graded: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over tasks with its 95 % interval."""

    value: float
    low: float
    high: float
    num_tasks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """How much more the second policy solves than the first, on the tasks that both have graded trials of."""

    first: float
    second: float
    difference: Estimate
    p_value: float  # two-sided, of the exact sign-flip test
    num_better: int
    num_worse: int


def pass_at_k(tally: Tally, k: int) -> float:
    """The chance that at least one of `k` trials solves the task, unbiased (arXiv 2107.03374).

    >>> pass_at_k(Tally(solved=1, graded=4), 2)
    0.5
    """
    assert 1 <= k <= tally.graded
    return 1 - comb(tally.graded - tally.solved, k) / comb(tally.graded, k)


def pass_hat_k(tally: Tally, k: int) -> float:
    """pass^k: the chance that all of `k` trials solve the task, unbiased (arXiv 2406.12045).

    >>> pass_hat_k(Tally(solved=3, graded=4), 2)
    0.5
    """
    assert 1 <= k <= tally.graded
    return comb(tally.solved, k) / comb(tally.graded, k)


def pass_rates(tallies: Sequence[Tally], *, group_size: int) -> dict[str, Estimate]:
    """`pass_at_<k>` and `pass_hat_<k>` for 1 to 4, every power of two up to `group_size`, and itself.

    A task with fewer than k graded trials says nothing about k of them: it is left out, and `num_tasks` shows it.
    """
    powers = {2**power for power in range(group_size.bit_length())}
    sizes = sorted(k for k in {1, 2, 3, 4, group_size} | powers if k <= group_size)
    wanted = [
        (f"{name}_{k}", rate, k)
        for k in sizes
        for name, rate in (("pass_at", pass_at_k), ("pass_hat", pass_hat_k))
    ]
    found: dict[str, Estimate] = {}
    for name, rate, k in wanted:
        values = [rate(tally, k) for tally in tallies if tally.graded >= k]
        if values:
            found[name] = mean_rate(
                values, num_trials=sum(tally.graded for tally in tallies if tally.graded >= k)
            )
    return found


def mean_rate(rates_P: Sequence[float], *, num_trials: int) -> Estimate:
    """The mean of one rate per task, with Wilson's interval at the effective number of trials (Korn and Graubard; Dean and Pagano 2015).

    The effective number is that of independent trials whose mean would vary as much as this one does from task to task, never more than
    there were. Where nothing varies it is the number of tasks. `scripts/bench/interval_coverage.py` measures what it covers, beside the
    bootstrap over tasks, which falls short of 95 % where tasks are few or rates near 0 or 1.
    """
    num_tasks, mean = len(rates_P), fmean(rates_P)
    if num_tasks == 1:  # one task says nothing about others
        return Estimate(value=mean, low=0.0, high=1.0, num_tasks=1)
    between = variance(rates_P) / num_tasks
    spread = mean * (1 - mean)
    size = min(num_trials, max(num_tasks - 1, spread / between)) if between > 0 else num_tasks
    quantile = NormalDist().inv_cdf((1 + LEVEL) / 2)
    ratio = quantile**2 / size
    centre = (mean + ratio / 2) / (1 + ratio)
    half = quantile / (1 + ratio) * math.sqrt(spread / size + ratio / (4 * size))
    return Estimate(
        value=mean, low=max(0.0, centre - half), high=min(1.0, centre + half), num_tasks=num_tasks
    )


def compared(first_P: Sequence[Tally], second_P: Sequence[Tally]) -> Comparison:
    """The same tasks under two policies, in the same order: the mean difference of their success rates with Student's interval over tasks,
    and the exact sign-flip test of no difference."""
    pairs = [(a, b) for a, b in zip(first_P, second_P, strict=True) if a.graded and b.graded]
    assert pairs, "no task was graded under both policies"
    exact = [Fraction(b.solved, b.graded) - Fraction(a.solved, a.graded) for a, b in pairs]
    values = [float(difference) for difference in exact]
    mean, num_tasks = fmean(values), len(pairs)
    half = (
        1.0
        if num_tasks == 1
        else student_quantile((1 + LEVEL) / 2, num_tasks - 1) * stdev(values) / math.sqrt(num_tasks)
    )
    return Comparison(
        first=fmean(a.solved / a.graded for a, _ in pairs),
        second=fmean(b.solved / b.graded for _, b in pairs),
        difference=Estimate(
            value=mean, low=max(-1.0, mean - half), high=min(1.0, mean + half), num_tasks=num_tasks
        ),
        p_value=sign_flip_p_value(exact),
        num_better=sum(value > 0 for value in values),
        num_worse=sum(value < 0 for value in values),
    )


def sign_flip_p_value(differences_P: Sequence[Fraction]) -> float:
    """How often a sum as far from 0 comes of flipping each task's sign at random: exact, over all 2^P flips.

    Where numbers of trials differ so much that their common denominator has more than `MAX_SUMS` sums, differences are rounded to a grid of
    that many, and what rounding leaves open counts as being as far: the value is an upper bound then, by a hair.

    >>> sign_flip_p_value([Fraction(1), Fraction(1), Fraction(1)])
    0.25
    """
    scale = Fraction(math.lcm(*(difference.denominator for difference in differences_P)))
    whole = sum(map(abs, differences_P))
    is_exact = whole * scale <= MAX_SUMS
    if not is_exact:
        scale = MAX_SUMS / whole
    steps = [round(abs(difference) * scale) for difference in differences_P]
    slack = 0 if is_exact else len(steps) / 2
    total = sum(steps)
    chances = np.zeros(2 * total + 1)  # of each sum, from -total on
    chances[total] = 1.0
    for step in steps:
        if step:
            chances = (np.roll(chances, step) + np.roll(chances, -step)) / 2
    seen = float(abs(sum(differences_P)) * scale) - slack
    sums = np.abs(np.arange(-total, total + 1))
    return min(1.0, float(chances[sums >= seen].sum()))


def student_quantile(probability: float, degrees: int) -> float:
    """Student's t: in closed form for 1 and 2 degrees of freedom, then by its expansion around the normal quantile, within 1 % at 3 and
    0.3 % from 4 on.

    >>> [round(student_quantile(0.975, degrees), 2) for degrees in (1, 2, 4, 30)]
    [12.71, 4.3, 2.77, 2.04]
    """
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        return (2 * probability - 1) * math.sqrt(1 / (2 * probability * (1 - probability)))
    z = NormalDist().inv_cdf(probability)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
