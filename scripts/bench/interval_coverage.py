"""Measure the coverage of the 95 % intervals of `mean_rate` (`src/evaluate/eval_stats.py`) on simulated
tasks, and compare it with the coverage of the percentile bootstrap over tasks.

    .venv/bin/python -m scripts.bench.interval_coverage [REPEATS]

REPEATS (default 2000) is the number of simulated evaluations; the bootstrap uses a quarter of them. The
success rate of each task is drawn from a Beta distribution, and the trials of a task are drawn with its
success rate. pass@n is the probability that at least one of n trials solves the task, and pass^n the
probability that all n trials solve it. The true value is the mean of pass@1, pass@n or pass^n over the Beta
distribution.
"""

from __future__ import annotations

import sys

import numpy as np

from src.evaluate.eval_stats import Tally, mean_rate, pass_at_k, pass_hat_k

POOLS = {  # Beta parameters of the tasks' success rates
    "uniform": (1.0, 1.0),
    "hard": (0.7, 2.0),
    "bimodal": (0.4, 0.4),
    "similar": (20.0, 20.0),
}
SIZES = ((10, 4), (20, 1), (20, 8), (40, 4), (100, 4))  # (number of tasks, trials per task)


def rates(
    rng: np.random.Generator, pool: tuple[float, float], size: tuple[int, int], kind: str
) -> list[float]:
    """Simulate one evaluation. Return the estimate for each task, for example of pass@1 if `kind` is
    `pass_at_1`."""
    solved = rng.binomial(size[1], rng.beta(*pool, size=size[0]))
    tallies = [Tally(solved=int(count), graded=size[1]) for count in solved]
    match kind:
        case "pass_at_1":
            return [pass_at_k(tally, 1) for tally in tallies]
        case "pass_at_n":
            return [pass_at_k(tally, size[1]) for tally in tallies]
        case _:
            return [pass_hat_k(tally, size[1]) for tally in tallies]


def truth(pool: tuple[float, float], trials: int, kind: str) -> float:
    """Return the true value of pass@1, pass@n or pass^n, from the moments of the Beta distribution."""
    a, b = pool
    k = 1 if kind == "pass_at_1" else trials
    all_fail = float(np.prod([(b + i) / (a + b + i) for i in range(k)]))
    return float(np.prod([(a + i) / (a + b + i) for i in range(k)])) if kind == "pass_hat_n" else 1 - all_fail


def coverage(
    pool: tuple[float, float], size: tuple[int, int], kind: str, *, repeats: int, seed: int
) -> float:
    """Return the share of `repeats` evaluations whose interval contains the true value."""
    rng = np.random.default_rng(seed)
    true = truth(pool, size[1], kind)
    estimates = (
        mean_rate(rates(rng, pool, size, kind), num_trials=size[0] * size[1]) for _ in range(repeats)
    )
    return sum(estimate.low <= true <= estimate.high for estimate in estimates) / repeats


def bootstrap_coverage(
    pool: tuple[float, float], size: tuple[int, int], kind: str, *, repeats: int, seed: int
) -> float:
    """Return the coverage of the percentile bootstrap, which draws 500 samples of tasks per evaluation."""
    rng = np.random.default_rng(seed)
    true, hits = truth(pool, size[1], kind), 0
    for _ in range(repeats):
        values = np.array(rates(rng, pool, size, kind))
        means = values[rng.integers(0, len(values), (500, len(values)))].mean(axis=1)
        low, high = np.quantile(means, (0.025, 0.975))
        hits += low <= true <= high
    return hits / repeats


def main(repeats: int) -> None:
    print(f"{'pool':8} {'tasks':>5} {'trials':>6} {'rate':11} {'Wilson':>7} {'bootstrap':>9}")
    for name, pool in POOLS.items():
        for size in SIZES:
            for kind in ("pass_at_1", "pass_at_n", "pass_hat_n") if size[1] > 1 else ("pass_at_1",):
                wilson = coverage(pool, size, kind, repeats=repeats, seed=0)
                bootstrap = bootstrap_coverage(pool, size, kind, repeats=max(1, repeats // 4), seed=0)
                print(f"{name:8} {size[0]:5} {size[1]:6} {kind:11} {wilson:7.1%} {bootstrap:9.1%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
