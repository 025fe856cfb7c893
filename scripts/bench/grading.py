"""Measure the cost of grading in a fresh sandbox.

    .venv/bin/python -m scripts.bench.grading datasets/quickstart/train [TRIALS]

Each trial runs the solution of a task. Trials are graded alternately in place, which means in the sandbox in
which the solution ran, and in a fresh sandbox of the task. The script prints two medians over the trials of
each method: the wall time of a trial, and the CPU time that this process and its children use for a trial.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from src.envs.harbor.environment import import_harbor, new_run_label, trial_environment
from src.envs.harbor.grading_method import GradingMethod, GradingMode

METHODS = (GradingMethod(mode=GradingMode.IN_PLACE), GradingMethod(mode=GradingMode.FRESH))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The wall time and CPU time of one trial in seconds."""

    wall_s: float
    cpu_s: float


def cpu_time_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


async def run_trial(
    task_dir: Path, method: GradingMethod, environment: dict[str, object], directory: Path
) -> Cost:
    """Run one trial with the task's own solution and grade it with `method`."""
    from harbor.models.trial.config import (
        AgentConfig,
        EnvironmentConfig,
        TaskConfig,
        TrialConfig,
        VerifierConfig,
    )
    from harbor.trial.trial import Trial

    from src.envs.harbor.grading import graded

    config = TrialConfig(
        task=TaskConfig(path=task_dir),
        trials_dir=directory,
        agent=AgentConfig(name="oracle"),
        environment=EnvironmentConfig.model_validate(environment),
        verifier=VerifierConfig(import_path="src.envs.harbor.verifier:TrainingVerifier"),
    )
    started, cpu_before = time.perf_counter(), cpu_time_s()
    trial = await Trial.create(config)
    async with graded(trial, method):
        result = await trial.run()
    cost = Cost(wall_s=time.perf_counter() - started, cpu_s=cpu_time_s() - cpu_before)
    assert result.verifier_result is not None and result.verifier_result.rewards == {"reward": 1.0}, task_dir
    return cost


async def measure(directories: list[Path], num_trials: int) -> None:
    import_harbor()
    environment = trial_environment("sandbox", {}, run_label=new_run_label())
    costs: dict[GradingMode, list[Cost]] = {method.mode: [] for method in METHODS}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(-1, num_trials):
            for method in METHODS:
                cost = await run_trial(
                    directories[number % len(directories)], method, environment, Path(scratch)
                )
                if number >= 0:  # the first trial of each method is a warm-up
                    costs[method.mode].append(cost)
    medians = {
        mode: Cost(
            wall_s=statistics.median(cost.wall_s for cost in trials),
            cpu_s=statistics.median(cost.cpu_s for cost in trials),
        )
        for mode, trials in costs.items()
    }
    for mode, median in medians.items():
        print(f"{mode}: median of {num_trials} trials: {median.wall_s:.3f} s wall, {median.cpu_s:.3f} s CPU")
    wall_s = medians[GradingMode.FRESH].wall_s - medians[GradingMode.IN_PLACE].wall_s
    cpu_s = medians[GradingMode.FRESH].cpu_s - medians[GradingMode.IN_PLACE].cpu_s
    print(f"cost of a fresh sandbox per trial: {wall_s:+.3f} s wall, {cpu_s:+.3f} s CPU")


if __name__ == "__main__":
    directories = sorted(path.parent for path in Path(sys.argv[1]).glob("*/task.toml"))
    asyncio.run(measure(directories, int(sys.argv[2]) if len(sys.argv) > 2 else 20))
